"""The recording of one unfolded request, and the layout of its results among its result rows."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from numpy.typing import NDArray

from cellrt.core.templates.program import OP_RESULT, OP_RESULT_LAST, OP_RESULT_STEPS, OP_RESULTS
from cellrt.graph.symbols import LoopSteps, Output, Steps

RESULTS = (Output, Steps, LoopSteps)
"""The types of a named result, beside a list of outputs."""


class ResultLayout(NamedTuple):
    """The rows of one named result among all result rows of a request.

    ``positions`` are the rows in order. ``is_loop``: only the rows of the steps that were taken are there.
    ``is_single``: one row without a step dimension; of a loop the last that is there.
    """

    name: str
    kind: int
    positions: Sequence[int]
    is_loop: bool
    is_single: bool


@lru_cache(maxsize=256)
def only_result(name: str, kind: int) -> tuple[ResultLayout, ...]:
    """Return the layout of one output that is all of a request's results."""
    return (ResultLayout(name, kind, (0,), False, True),)


class StateLayout(NamedTuple):
    """One row that a session keeps: ``name`` is "cell.output", ``cell`` begins as the cell's identity.

    With a ``page_size`` any number of rows, in pages of this many (``RowSpec.page_dim``); ``name`` is "cell.input".
    """

    name: str
    kind: int
    cell: str
    page_size: int = 0
    page_dim: int = 0


class Recorded(NamedTuple):
    """The recording of one request: its program, inputs from outside, results and kept states."""

    program: bytes
    """The int32 words of ``core/templates/program.py``."""
    externals: list[tuple[int, NDArray[Any]]]
    """(kind, rows ``[n, *shape]`` as ``arena.as_bits``) of the request's own tensors, in order of their values."""
    results: tuple[ResultLayout, ...]
    states: tuple[StateLayout, ...] = ()
    """The states that a session keeps after the request."""


class Placement:
    """Gives each value that is a result its rows, once, and records the operations that say so."""

    def __init__(self, program: array[int], loop_limits: Mapping[int, int]) -> None:
        self._program, self._loop_limits = program, loop_limits
        self._end = 0
        self._steps: dict[int, range] = {}
        self._values: dict[int, tuple[int]] = {}
        self._chains: dict[tuple[int, int, int], range] = {}

    def of_steps(self, value: int) -> range:
        """Return rows of a loop's output at every step."""
        if value not in self._steps:
            limit = self._loop_limits[value]
            self._program.extend([OP_RESULT_STEPS, value, limit])
            self._steps[value] = self._take(limit)
        return self._steps[value]

    def of_value(self, value: int) -> Sequence[int]:
        """Return the row of one output; of a loop whose every step is a result: those rows."""
        if value in self._steps:
            return self._steps[value]
        known = self._values.get(value)
        if known is None:
            for (base, stride, count), rows in self._chains.items():
                step, rest = divmod(value - base, stride)
                if rest == 0 and 0 <= step < count:
                    known = (rows[step],)
        if known is None:
            is_loop = value in self._loop_limits
            self._program.extend((OP_RESULT_LAST, value) if is_loop else (OP_RESULT, value, 1, 1))
            known = (self._end,)
            self._end += 1
        self._values[value] = known
        return known

    def of_chain(self, steps: Steps) -> Sequence[int]:
        """Return rows of an output of each node of a chain."""
        key = (steps._base, steps._stride, len(steps))
        if key in self._chains:
            return self._chains[key]
        values = range(key[0], key[0] + key[1] * key[2], key[1])
        is_known = any([value in values for value in self._values])
        if is_known or any(_meet(values, range(*one)) for one in self._ranges()):
            return tuple(self.of_value(output.value)[0] for output in steps)  # what is a result already has its place
        self._program.extend([OP_RESULT, *key])
        self._chains[key] = self._take(len(steps))
        return self._chains[key]

    def of_listed(self, values: Sequence[int]) -> Sequence[int]:
        """Return rows of outputs of nodes, none of which is there twice."""
        known = self._values
        if any([value in range(*one) for one in self._ranges() for value in values]):
            return tuple([self.of_value(value)[0] for value in values])
        new = [value for value in values if value not in known] if known else values
        if new:
            self._program.fromlist([OP_RESULTS, len(new), *new])
        rows = self._take(len(new))
        known.update(zip(new, zip(rows)))
        return rows if len(new) == len(values) else tuple([known[value][0] for value in values])

    def _ranges(self) -> Iterator[tuple[int, int, int]]:
        return ((base, base + stride * count, stride) for base, stride, count in self._chains)

    def _take(self, count: int) -> range:
        self._end += count
        return range(self._end - count, self._end)


def _meet(one: range, other: range) -> bool:
    """Return whether values of two chains' outputs may be the same."""
    if max(min(one[0], one[-1]), min(other[0], other[-1])) > min(max(one[0], one[-1]), max(other[0], other[-1])):
        return False
    return abs(one.step) != abs(other.step) or (one.start - other.start) % one.step == 0
