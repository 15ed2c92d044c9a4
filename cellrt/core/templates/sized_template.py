"""Templates, which requests share whose graphs differ in their lengths alone, and templates with lengths.

Each word of a template is a constant plus multiples of the lengths (``sums.py``). If one would not be, the graphs are
compiled one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.pointers import OpenTemplate
from cellrt.core.state.record_layout import chain_length, loop_limit
from cellrt.core.state.settings import Limits
from cellrt.core.state.tables import CellType, Node, PortInfo, Subgraph, Value
from cellrt.core.templates.lay_out_records import most_refs
from cellrt.core.templates.lengths import MOST_WORDS, Lengths, key_of, shorten
from cellrt.core.templates.program import read_only, read_program
from cellrt.core.templates.template import (
    ARRAYS,
    FITS,
    ITEM_BYTES,
    MOST_REFS,
    NUM_EXTERNALS,
    NUM_STEPS,
    PATCHES,
    Compiled,
    compile_draft,
    compile_program,
    has_room,
    made_of,
    open_memory,
)
from cellrt.core.templates.uses import Ints
from cellrt.native.jit import short_allocating, short_entry
from cellrt.native.row_types import Rows

NO_PATCHES = np.zeros((0, 2), np.int32)
NO_LENGTHS = np.zeros(0, np.int32)
NUM_STATES = 3 * list(ARRAYS).index("states") + 1
"""The position of this number in the words of a template."""


class Room(NamedTuple):
    """The room of an empty engine.

    Attributes:
        limits: most nodes, values, links and subgraphs of a request, inputs of a node, and places of a request.
        kind_rows: ``[kinds, 2]`` rows of each kind at a worker and at the host.
    """

    limits: NDArray[np.int64]
    kind_rows: NDArray[np.int64]

    @classmethod
    def of(cls, limits: Limits, most_refs: int, kind_rows: Sequence[tuple[int, int]]) -> Room:
        """Return the room of an engine with these limits."""
        most = limits.max_nodes, limits.max_values, limits.max_links, limits.max_subgraphs, most_refs, limits.max_places
        return cls(np.array(most, np.int64), np.array(kind_rows, np.int64).reshape(-1, 2))


class Template:
    """A compiled cell graph without its lengths: rows for the tables, with ids relative to the request.

    Requests share it. Admission sets the lengths of the next request in its memory, so only the thread that admits may
    use that memory.

    Attributes:
        at: the address of its arrays, for compiled code.
        address: the same as a number.
        num_states: rows that a request keeps in a session.
        numbers: as of ``Compiled``.
    """

    def __init__(self, made: Compiled) -> None:
        self._memory, self._words, self._patches, self.numbers = made
        self.num_states = int(made.words[NUM_STATES])
        if len(made.patches):
            made.words[PATCHES : PATCHES + 3] = made.patches.ctypes.data, *made.patches.shape
        self.address = int(made.words.ctypes.data)
        self.at: Any = open_memory(*made[:3]) if numba.config.DISABLE_JIT else made.words

    @property
    def num_bytes(self) -> int:
        """The bytes of its memory."""
        return self._memory.nbytes + self._words.nbytes + self._patches.nbytes

    def num_externals(self, lengths: NDArray[np.int32]) -> int:
        """Return how many rows come with requests of these lengths ``[requests, lengths]``, in all."""
        return int(len(lengths) * self.numbers[0, 0] + lengths.sum(0, np.int64) @ self.numbers[0, 1:])

    def arrays(self, lengths: Lengths) -> OpenTemplate:
        """Return a copy of the rows, with these lengths."""
        memory = self._memory.copy()
        memory.view(np.int32)[self._patches[:, 0]] = self._patches[:, 1] + self._patches[:, 2:] @ lengths
        return open_memory(memory, self._words, self._patches)


class SizedTemplate:
    """A template and the lengths of a request's chains, loops and tensors. Immutable, shared by requests.

    Attributes:
        template, lengths: the arguments.
        num_results, num_externals: result rows; rows that come with the request.
        num_places: rows of its results and sequences.
        num_steps: nodes and steps, a loop counted as its step limit.
        num_states: as of the template.
        most_refs: most inputs of a node or step, a ragged one counted as its rows.
        fits: whether an empty engine has room for it.
    """

    __slots__ = (
        "_chains",
        "fits",
        "lengths",
        "most_refs",
        "num_externals",
        "num_places",
        "num_results",
        "num_states",
        "num_steps",
        "template",
    )

    def __init__(self, template: Template, lengths: Lengths, fits: bool, most_refs: int) -> None:
        self.template, self.lengths, self.fits, self.most_refs = template, lengths, fits, most_refs
        numbers = template.numbers
        self.num_externals, self.num_results, self.num_places, self.num_steps = (
            numbers[:, 0] if not lengths.size else numbers[:, 0] + numbers[:, 1:] @ lengths
        ).tolist()
        self.num_states = template.num_states
        self._chains: tuple[tuple[int, int], ...] | None = None

    @property
    def chains(self) -> tuple[tuple[int, int], ...]:
        """The cell types that it has, each with the steps of its longest chain; 1 if it has none."""
        if self._chains is None:
            arrays, longest = self.arrays, dict[int, int]()
            for subgraph in arrays.subgraphs:
                cell_type = int(subgraph["cell_type"])
                longest[cell_type] = max(longest.get(cell_type, 1), chain_length(arrays.links, subgraph))
            self._chains = tuple(longest.items())
        return self._chains

    @property
    def num_bytes(self) -> int:
        """The bytes of memory that it does not share."""
        return self.lengths.nbytes if self.lengths.size else self.template.num_bytes

    @property
    def arrays(self) -> OpenTemplate:
        """The rows; a copy."""
        return self.template.arrays(self.lengths)

    def num_pages(self, kind: int | None = None) -> int:
        """Return the pages, of a kind or of all, that a request without a session may need."""
        return sum(-(-rows // size) for its, size, rows, _ in self.arrays.pages.tolist() if kind in (None, its))

    def loop_limits(self) -> list[int]:
        """Return the most steps of each loop, in order of subgraphs.

        A loop of several cells counts at the one that says stop.
        """
        arrays = self.arrays
        limits = (loop_limit(arrays.links, subgraph) for subgraph in arrays.subgraphs)
        return [limit for limit in limits if limit > 0]


def addresses_of(templates: Sequence[SizedTemplate]) -> Any:
    """Return the addresses of templates, for compiled code: ``Template.at`` of all."""
    each = [template.template.at for template in templates]
    return each if numba.config.DISABLE_JIT else np.array(each)


class KnownTemplates:
    """The known templates, by the words that their programs share, and the keys that have none.

    All are forgotten when they take more than so many bytes. Any thread may call it: a lost race costs one more
    compilation.
    """

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._by_key: dict[bytes, Template | None] = {}

    def __contains__(self, key: bytes) -> bool:
        """Return whether it is known which template a key has, or that it has none."""
        return key in self._by_key

    def get(self, key: bytes) -> Template | None:
        """Return the template of a key, if it is known and has one."""
        return self._by_key.get(key)

    def add(self, key: bytes, template: Template | None) -> Template | None:
        """Add a template, or the fact that there is none; return what is known from now on."""
        size = len(key) + (template.num_bytes if template is not None else 0)
        self._num_bytes += size
        if self._num_bytes > self._max_bytes:
            self._by_key, self._num_bytes = {}, size
        return self._by_key.setdefault(key, template)


@short_entry
def _measure(
    nodes: Rows[Node],
    values: Rows[Value],
    links: Ints,
    subgraphs: Rows[Subgraph],
    lists: Ints,
    states: Ints,
    needs: Ints,
    pages: Ints,
    places: int,
    types: Rows[CellType],
    most: int,
    limits: NDArray[np.int64],
    kind_rows: NDArray[np.int64],
) -> tuple[bool, int]:
    """Return whether an empty engine has room, and the most inputs of a node or step; ``most``: of a node."""
    most = max(most, most_refs(types, subgraphs, links))
    fits = has_room(nodes, values, links, subgraphs, lists, states, needs, pages, places, most, limits, kind_rows)
    return fits, most


def compile_template(
    program: NDArray[np.int32],
    types: Rows[CellType],
    ports: Rows[PortInfo],
    room: Room,
    known: KnownTemplates,
) -> SizedTemplate:
    """Find the template of a program among those that are known, or compile it.

    Args:
        program: words of ``program.py``.
        types, ports: of the tables.
        room: of an empty engine.
        known: templates by the words that their programs share; a new one is added.

    Raise RequestTooLargeError if one value has more than MAX_READERS readers.
    """
    program = read_only(program)
    key, lengths, made = _find_lengths_or_compile(program, types, ports, room)
    if lengths.size:
        name = key.tobytes()
        template = known.get(name)
        if template is None and name not in known:
            sized = compile_program(program, types, ports, *room, is_sized=True)
            template = known.add(name, Template(sized) if sized.numbers.size else None)  # or another thread's
        if template is not None:
            return _with_lengths(template, lengths, types, room)
    if made is None:
        made = compile_program(program, types, ports, *room)
    fits, most = bool(made.words[FITS]), int(made.words[MOST_REFS])
    return SizedTemplate(Template(made), lengths[:0], fits, most)


def _find_lengths_or_compile(
    program: NDArray[np.int32], types: Rows[CellType], ports: Rows[PortInfo], room: Room
) -> tuple[NDArray[np.int32], Lengths, Compiled | None]:
    """Return the key and lengths of a program with lengths.

    A short program without lengths is compiled, and the result returned.
    """
    if program.size > MOST_WORDS:
        return NO_LENGTHS, NO_LENGTHS, None
    key, lengths, memory, words = _compile_briefly(program, types, ports, len(room.kind_rows), *room, ITEM_BYTES)
    if lengths.size:
        return key, lengths, None
    return key, lengths, made_of(memory, words, NO_PATCHES, words[NUM_EXTERNALS : NUM_STEPS + 1, None])


@short_allocating
def _compile_briefly(
    program: NDArray[np.int32],
    types: Rows[CellType],
    ports: Rows[PortInfo],
    num_kinds: int,
    limits: NDArray[np.int64],
    kind_rows: NDArray[np.int64],
    item_bytes: NDArray[np.int64],
) -> tuple[NDArray[np.int32], Lengths, NDArray[np.uint8], NDArray[np.int64]]:
    """Return the key and lengths of a program with lengths, or compile it.

    This is one call, as each costs microseconds: most graphs that were not seen before are trees, which have no
    lengths.
    """
    draft = read_program(program, types, ports)
    lengths = shorten(draft)
    if lengths.size > 0:
        return key_of(draft), lengths, np.zeros(0, np.uint8), np.zeros(0, np.int64)
    memory, words = compile_draft(draft, num_kinds, limits, kind_rows, item_bytes)
    return lengths, lengths, memory, words


def _with_lengths(template: Template, lengths: Lengths, types: Rows[CellType], room: Room) -> SizedTemplate:
    made = SizedTemplate(template, lengths, False, 0)
    rows = made.arrays
    parts = rows.nodes, rows.values, rows.links, rows.subgraphs, rows.lists, rows.states, rows.needs, rows.pages
    most = int(rows.nodes["num_refs"].max(initial=0))
    made.fits, made.most_refs = _measure(*parts, made.num_places, types, most, *room)
    return made
