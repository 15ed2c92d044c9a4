"""The engine's numbers and limits that a graph needs while it is being recorded."""

from __future__ import annotations

from typing import Any, Protocol

from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.errors import RequestError


class Binding(Protocol):
    """Numbers of what the graph names."""

    max_nodes: int

    def cell_type(self, cell: Cell) -> int:
        """Id of a cell's type. Raise RequestError if the model does not have the cell."""

    def kind(self, spec: RowSpec) -> int:
        """Id of a row kind."""

    def constant_row(self, kind: int, content: bytes) -> int:
        """Permanent row of a constant of that kind with those bits, or -1 if it has none and travels with requests."""


class _Ended:
    """A placeholder that replaces a graph's engine once the graph is complete; using it raises RequestError."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise RequestError("the graph was used after its unfolder returned; each request has a graph of its own")


ENDED: Any = _Ended()
