"""The states that a graph takes from its session and leaves there."""

from __future__ import annotations

from array import array

from cellrt.core.state.tables import MAX_STATES
from cellrt.core.templates.program import OP_KEEP, OP_STATE
from cellrt.errors import RequestError
from cellrt.graph.results import StateLayout


class SessionStates:
    """The states that a graph reads from its session and those it will keep there. Their values name them."""

    def __init__(self, program: array[int]) -> None:
        self._program = program
        self._layouts: dict[int, StateLayout] = {}
        self._starts: dict[int, int] = {}
        self._kept: dict[int, tuple[int, int, int]] = {}
        self._pages: list[StateLayout] = []

    def take_pages(self, layout: StateLayout) -> None:
        """Note a growing state that the session keeps."""
        self._pages.append(layout)
        self._check_count(layout)

    def _check_count(self, layout: StateLayout) -> None:
        if len(self._layouts) + len(self._pages) > MAX_STATES:
            raise RequestError(f"state {layout.name!r}: a session has at most {MAX_STATES} states")

    def take(self, state: int, layout: StateLayout, start: int) -> None:
        """Record that value ``state`` is the session's; in a new session what value ``start`` is, or zeros for -1."""
        start = self._starts.get(start, start)  # all states of a session are new together
        self._program.extend((OP_STATE, layout.kind, start))
        self._layouts[state], self._starts[state] = layout, start
        self._check_count(layout)

    def is_open(self, value: int) -> bool:
        """Return whether the value is a state that is not kept yet."""
        return value in self._layouts and value not in self._kept

    def keep(self, state: int, base: int, stride: int, count: int) -> None:
        """Note what a state is after each step, as KEEP has it."""
        self._kept[state] = base, stride, count

    def end(self) -> tuple[StateLayout, ...]:
        """Record what is kept; return the states in the order in which they were taken, those that grow at the end.

        Raise RequestError if one is not kept, or like another one: a session has a row of its own for each.
        """
        kept_as: dict[int, str] = {}
        for state, layout in self._layouts.items():
            if state not in self._kept:
                raise RequestError(f"graph.state: {layout.name!r} is never kept: see graph.keep")
            base, stride, count = self._kept[state]
            after = base + max(0, count - 1) * stride
            if after in kept_as:
                raise RequestError(f"state {layout.name!r}: its output is kept as state {kept_as[after]!r} already")
            kept_as[after] = layout.name
            self._program.extend((OP_KEEP, state, base, stride, count))
        return (*self._layouts.values(), *self._pages)
