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
from cellrt.core.templates.node_graphs import HAS_SETS, compile_nodes
from cellrt.core.templates.node_sets import written_out
from cellrt.core.templates.program import read_only, read_program
from cellrt.core.templates.template import (
    ARRAYS,
    FITS,
    NUM_EXTERNALS,
    NUM_WORDS,
    OWN_ADDRESS,
    PATCHES,
    compile_draft,
    compile_program,
    has_room,
    open_words,
    refuse_readers,
)
from cellrt.core.templates.uses import Ints
from cellrt.native.jit import short_allocating, short_entry
from cellrt.native.row_types import Rows

NO_PATCHES = np.zeros((0, 2), np.int32)
NO_LENGTHS = np.zeros(0, np.int32)
NO_SUMS = np.zeros((0, 1), np.int64)
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
        address: the address of its words, for compiled code.
        sums: the ``numbers`` of what was compiled.
    """

    __slots__ = ("__weakref__", "_patches", "_words", "address", "sums")

    def __init__(self, words: NDArray[np.int64], patches: NDArray[np.int32], sums: NDArray[np.int64]) -> None:
        self._words, self._patches, self.sums, self.address = words, patches, sums, words.item(OWN_ADDRESS)
        words[PATCHES : PATCHES + 3] = patches.ctypes.data, *patches.shape

    @property
    def at(self) -> Any:
        """The words that an ``entry`` takes for it."""
        return open_words(self._words, self._patches) if numba.config.DISABLE_JIT else self._words[:NUM_WORDS]

    @property
    def num_states(self) -> int:
        """Rows that a request keeps in a session."""
        return self._words.item(NUM_STATES)

    @property
    def num_bytes(self) -> int:
        """Memory of the rows."""
        return self._words.nbytes + self._patches.nbytes

    def count_externals(self, lengths: NDArray[np.int32]) -> int:
        """Return how many rows come, in all, with requests of these lengths ``[requests, lengths]``."""
        return int(len(lengths) * self.sums[0, 0] + lengths.sum(0, np.int64) @ self.sums[0, 1:])

    def open(self, lengths: Lengths) -> OpenTemplate:
        """Return a copy of the rows, with these lengths."""
        made = open_words(self._words.copy(), self._patches)
        if lengths.size:
            made.memory[self._patches[:, 0]] = self._patches[:, 1] + self._patches[:, 2:] @ lengths
        return made


class SizedTemplate(Template):
    """A template and the lengths of a request's chains, loops and tensors. Immutable, shared by requests.

    Attributes:
        lengths: as they are called; of a graph without any, as most trees are, it is its own template.
        num_results, num_externals: result rows; rows that come with the request.
        num_places: rows of its results and sequences.
        num_steps: nodes and steps, a loop counted as its step limit.
        most_refs: most inputs of a node or step, a ragged one counted as its rows.
        fits: whether an empty engine has room for it.
    """

    __slots__ = (
        "_chains",
        "_shared",
        "fits",
        "lengths",
        "most_refs",
        "num_externals",
        "num_places",
        "num_results",
        "num_steps",
    )

    def __init__(self, words: NDArray[np.int64]) -> None:
        self._words, self._patches, self.sums = words, NO_PATCHES, NO_SUMS
        self._shared: Template | None = None
        self._chains: tuple[tuple[int, int], ...] | None = None
        self.lengths, self.address = NO_LENGTHS, words.item(OWN_ADDRESS)
        numbers = words[NUM_EXTERNALS : FITS + 1].tolist()
        self.num_externals, self.num_results, self.num_places, self.num_steps, self.most_refs, fits = numbers
        self.fits = fits > 0
        if self.num_steps < 0:
            refuse_readers()

    @classmethod
    def of(cls, template: Template, lengths: Lengths) -> SizedTemplate:
        """Return a template with lengths of its own; it is not known if it fits."""
        made = cls.__new__(cls)
        made._words, made._patches, made.sums = template._words, template._patches, template.sums
        made.address, made.lengths, made._shared, made._chains = template.address, lengths, template, None
        made.fits, made.most_refs = False, 0
        numbers = (template.sums[:, 0] + template.sums[:, 1:] @ lengths).tolist()
        made.num_externals, made.num_results, made.num_places, made.num_steps = numbers
        return made

    @property
    def template(self) -> Template:
        """The template that it shares with others of other lengths."""
        return self if self._shared is None else self._shared

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
        """Memory of what it does not share."""
        return self.lengths.nbytes if self.lengths.size else self._words.nbytes

    @property
    def arrays(self) -> OpenTemplate:
        """The rows; a copy."""
        return self.open(self.lengths)

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

    All are forgotten when they take more than this many bytes. Any thread may call it: a lost race costs one more
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
        types, ports: those of the tables.
        room: the room of an empty engine.
        known: templates by the words that their programs share; a new one is added.

    Raise RequestTooLargeError if one value has more than MAX_READERS readers.
    """
    program = read_only(program)
    words = compile_nodes(program, types, ports, room.limits, room.kind_rows)
    if words.size > HAS_SETS:
        return SizedTemplate(words)
    if words.size == HAS_SETS:
        program = read_only(written_out(program, types, 0))
    if program.size > MOST_WORDS:
        return SizedTemplate(compile_program(program, types, ports, *room).words)
    key, lengths, words = _compile_briefly(program, types, ports, len(room.kind_rows), *room)
    if not lengths.size:
        return SizedTemplate(words)
    name = key.tobytes()
    template = known.get(name)
    if template is None and name not in known:
        sized = compile_program(program, types, ports, *room, is_sized=True)
        template = known.add(name, Template(*sized) if sized.numbers.size else None)  # or another thread's
    if template is not None:
        return _with_lengths(template, lengths, types, room)
    return SizedTemplate(compile_program(program, types, ports, *room).words)


@short_allocating
def _compile_briefly(
    program: NDArray[np.int32],
    types: Rows[CellType],
    ports: Rows[PortInfo],
    num_kinds: int,
    limits: NDArray[np.int64],
    kind_rows: NDArray[np.int64],
) -> tuple[NDArray[np.int32], Lengths, NDArray[np.int64]]:
    """Return the key and lengths of a program that has lengths; of one that has none what it is compiled to: in one
    call, as each costs microseconds."""
    draft = read_program(program, types, ports)
    lengths = shorten(draft)
    if lengths.size > 0:
        return key_of(draft), lengths, np.zeros(0, np.int64)
    return lengths, lengths, compile_draft(draft, num_kinds, limits, kind_rows)


def _with_lengths(template: Template, lengths: Lengths, types: Rows[CellType], room: Room) -> SizedTemplate:
    made = SizedTemplate.of(template, lengths)
    rows = made.arrays
    parts = rows.nodes, rows.values, rows.links, rows.subgraphs, rows.lists, rows.states, rows.needs, rows.pages
    most = int(rows.nodes["num_refs"].max(initial=0))
    made.fits, made.most_refs = _measure(*parts, made.num_places, types, most, *room)
    return made
