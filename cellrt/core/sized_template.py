"""Templates: what requests have in common whose graphs differ in their lengths alone, and one of them with its lengths.

What of a template depends on lengths is found by compiling it with several: each word is a sum of a constant and of
multiples of the lengths. Where it is not, the graphs are compiled one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

from cellrt.core.jit import OpenTemplate, short_allocating, short_entry
from cellrt.core.lay_out_records import most_refs
from cellrt.core.lengths import MOST_WORDS, Lengths, find_lengths, with_lengths
from cellrt.core.program import read_only
from cellrt.core.record_layout import chain_length, loop_limit
from cellrt.core.settings import Limits
from cellrt.core.template import (
    ARRAYS,
    FITS,
    ITEM_BYTES,
    MOST_REFS,
    NUM_EXTERNALS,
    NUM_STEPS,
    PATCHES,
    Compiled,
    compile_program,
    compile_rows,
    has_room,
    made_of,
    open_memory,
)

NO_PATCHES = np.zeros((0, 2), np.int32)
NO_LENGTHS = np.zeros(0, np.int32)
NUM_STATES = 3 * list(ARRAYS).index("states") + 1
"""Where it is in the words of a template."""
SHORT, MIDDLE, LONG = 2, np.array([5, 6, 7, 8], np.int32), 24
ANY = np.array([24, 2, 9, 31], np.int32)
"""Lengths with which a template is compiled, to see what depends on them: any from two on would do."""


class Room(NamedTuple):
    """What an empty engine has room for.

    Attributes:
        limits: most nodes, values, links and subgraphs of a request, inputs of a node, and places of a request.
        kind_rows: ``[kinds, 2]`` rows of each kind at a worker and at the host.
    """

    limits: NDArray[np.int64]
    kind_rows: NDArray[np.int64]

    @classmethod
    def of(cls, limits: Limits, most_refs: int, kind_rows: Sequence[tuple[int, int]]) -> Room:
        """That of an engine with these limits."""
        most = limits.max_nodes, limits.max_values, limits.max_links, limits.max_subgraphs, most_refs, limits.max_places
        return cls(np.array(most, np.int64), np.array(kind_rows, np.int64).reshape(-1, 2))


class Template:
    """A compiled cell graph without its lengths: rows for the tables, with ids relative to the request.

    Shared by requests. Admission sets the lengths of the next request in its memory, so that belongs to whoever admits.

    Attributes:
        at: the address of its arrays, for compiled code.
        num_states: rows that a request keeps in a session.
        numbers: ``[numbers, 1 + lengths]``: of each from NUM_EXTERNALS to NUM_STEPS the constant, and what it is
            multiplied with of each length.
    """

    def __init__(self, made: Compiled, patches: NDArray[np.int32], numbers: NDArray[np.int64]) -> None:
        self._memory, self._words, self._patches = made.memory, made.words, patches
        self.numbers = numbers
        self.num_states = int(made.words[NUM_STATES])
        if len(patches):
            made.words[PATCHES : PATCHES + 3] = patches.ctypes.data, *patches.shape
        self.at: Any = open_memory(*made, patches) if numba.config.DISABLE_JIT else made.words

    @property
    def num_bytes(self) -> int:
        """Memory of the rows."""
        return self._memory.nbytes + self._words.nbytes + self._patches.nbytes

    def num_externals(self, lengths: NDArray[np.int32]) -> int:
        """Rows that come, in all, with requests of these lengths ``[requests, lengths]``."""
        return int(len(lengths) * self.numbers[0, 0] + lengths.sum(0, np.int64) @ self.numbers[0, 1:])

    def arrays(self, lengths: Lengths) -> OpenTemplate:
        """A copy of the rows, with these lengths."""
        memory = self._memory.copy()
        memory.view(np.int32)[self._patches[:, 0]] = self._patches[:, 1] + self._patches[:, 2:] @ lengths
        return open_memory(memory, self._words, self._patches)


class SizedTemplate:
    """A template and the lengths of a request's chains, loops and tensors. Immutable, shared by requests.

    Attributes:
        template, lengths: as they are called.
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
        """Each cell type that is in it, with the steps of its longest chain; 1 if it has none."""
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
        return self.lengths.nbytes if self.lengths.size else self.template.num_bytes

    @property
    def arrays(self) -> OpenTemplate:
        """The rows; a copy."""
        return self.template.arrays(self.lengths)

    def loop_limits(self) -> list[int]:
        """The most steps of each loop, in order of their subgraphs; of several cells at the one that says stop."""
        arrays = self.arrays
        limits = (loop_limit(arrays.links, subgraph) for subgraph in arrays.subgraphs)
        return [limit for limit in limits if limit > 0]


def addresses_of(templates: Sequence[SizedTemplate]) -> Any:
    """Where each of these templates is, for compiled code: ``Template.at`` of all."""
    each = [template.template.at for template in templates]
    return each if numba.config.DISABLE_JIT else np.array(each)


class KnownTemplates:
    """Templates by what their programs have in common, and which have none; all are forgotten when they take more than
    so many bytes.

    Any thread may ask and add: a lost race costs one more compilation.
    """

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._by_key: dict[bytes, Template | None] = {}

    def __contains__(self, key: bytes) -> bool:
        """Whether it is known which template a key has, or that it has none."""
        return key in self._by_key

    def get(self, key: bytes) -> Template | None:
        """The template of a key, if it is known and has one."""
        return self._by_key.get(key)

    def add(self, key: bytes, template: Template | None) -> Template | None:
        """Takes in a template, or that there is none; returns what is known from now on."""
        size = len(key) + (template.num_bytes if template is not None else 0)
        self._num_bytes += size
        if self._num_bytes > self._max_bytes:
            self._by_key, self._num_bytes = {}, size
        return self._by_key.setdefault(key, template)


@short_entry
def _measure(nodes, values, links, subgraphs, lists, states, needs, pages, places, types, most, limits, kind_rows):
    """Whether an empty engine has room, and the most inputs of a node or step; ``most``: of a node."""
    most = max(most, most_refs(types, subgraphs, links))
    fits = has_room(nodes, values, links, subgraphs, lists, states, needs, pages, places, most, limits, kind_rows)
    return fits, most


def compile_template(
    program: NDArray[np.int32],
    types: NDArray[np.void],
    ports: NDArray[np.void],
    room: Room,
    known: KnownTemplates,
) -> SizedTemplate:
    """Finds the template of a program among those that are known, or compiles it.

    Args:
        program: words of ``program.py``.
        types, ports: of the tables.
        room: of an empty engine.
        known: templates by what their programs have in common; a new one is added.

    Raises RequestTooLargeError if one value has more than MAX_READERS readers.
    """
    program = read_only(program)
    key, lengths, made = _find_lengths_or_compile(program, types, ports, room)
    if lengths.size:
        template = known.get(key.tobytes())
        if template is None and key.tobytes() not in known:
            template = _find_template(program, lengths, types, ports, room)
            template = known.add(key.tobytes(), template)  # another thread may have been first
        if template is not None:
            return _with_lengths(template, lengths, types, room)
    if made is None:
        made = compile_program(program, types, ports, *room)
    numbers = made.words[NUM_EXTERNALS : NUM_STEPS + 1, None]
    fits, most = bool(made.words[FITS]), int(made.words[MOST_REFS])
    return SizedTemplate(Template(made, NO_PATCHES, numbers), lengths[:0], fits, most)


def _find_lengths_or_compile(
    program: NDArray[np.int32], types: NDArray[np.void], ports: NDArray[np.void], room: Room
) -> tuple[NDArray[np.int32], Lengths, Compiled | None]:
    """The key and lengths of a program that has lengths; of one that has none and is short what it is compiled to."""
    if program.size > MOST_WORDS:
        return NO_LENGTHS, NO_LENGTHS, None
    if numba.config.DISABLE_JIT:
        return *find_lengths(program, types), None
    key, lengths, memory, words = _compile_briefly(program, types, ports, len(room.kind_rows), *room, ITEM_BYTES)
    return key, lengths, None if lengths.size else made_of(memory, words)


@short_allocating
def _compile_briefly(program, types, ports, num_kinds, limits, kind_rows, item_bytes):
    """One call, as each costs microseconds: most graphs that were not seen before are trees, which have no lengths."""
    key, lengths = find_lengths(program, types)
    if lengths.size > 0:
        return key, lengths, np.zeros(0, np.uint8), np.zeros(0, np.int64)
    memory, words = compile_rows(program, types, ports, num_kinds, limits, kind_rows, item_bytes)
    return key, lengths, memory, words


def _with_lengths(template: Template, lengths: Lengths, types: NDArray[np.void], room: Room) -> SizedTemplate:
    made = SizedTemplate(template, lengths, False, 0)
    rows = made.arrays
    parts = rows.nodes, rows.values, rows.links, rows.subgraphs, rows.lists, rows.states, rows.needs, rows.pages
    most = int(rows.nodes["num_refs"].max(initial=0))
    made.fits, made.most_refs = _measure(*parts, made.num_places, types, most, *room)
    return made


def _find_template(
    program: NDArray[np.int32], lengths: Lengths, types: NDArray[np.void], ports: NDArray[np.void], room: Room
) -> Template | None:
    """The template of programs that differ in their lengths from this one; None if more depends on them than sums."""

    def compiled_with(others: Lengths) -> Compiled:
        return compile_program(with_lengths(program, types, lengths, others), types, ports, *room)

    middle = MIDDLE[: lengths.size]
    made = compiled_with(middle)
    words = _words(made)
    coefficients = np.zeros((words.size, lengths.size), np.int64)
    for k in range(lengths.size):
        ends: list[NDArray[np.int64]] = []
        for length in (SHORT, LONG):
            others = middle.copy()
            others[k] = length
            ends.append(_words(compiled_with(others)))
            if ends[-1].size != words.size:
                return None
        coefficients[:, k] = (ends[1] - ends[0]) // (LONG - SHORT)
        for length, end in zip((SHORT, LONG), ends):
            if (end + coefficients[:, k] * (middle[k] - length) != words).any():
                return None
    constants = words - coefficients @ middle
    if lengths.size > 1:  # one alone is seen by now
        others = ANY[: lengths.size]
        seen = _words(compiled_with(others))
        if seen.size != words.size or (constants + coefficients @ others != seen).any():
            return None
    sums = np.column_stack((constants, coefficients))
    first = words.size - made.memory.size // 4
    at = np.flatnonzero(coefficients[first:].any(1))
    patches = np.column_stack((at, sums[first:][at])).astype(np.int32)
    return Template(made, np.ascontiguousarray(patches), sums[len(ARRAYS) : first])


def _words(made: Compiled) -> NDArray[np.int64]:
    """What may depend on lengths: how long each array is, numbers, and all of the memory."""
    counts, numbers = made.words[1 : 3 * len(ARRAYS) : 3], made.words[NUM_EXTERNALS : NUM_STEPS + 1]
    return np.concatenate((counts, numbers, made.memory.view(np.int32)))
