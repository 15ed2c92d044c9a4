"""The cause of a cell's failure: a client that sent a token outside the vocabulary, or an unknown cause.

A cell sees rows of many requests, and its error does not name a request. After such a failure the request is unfolded
once more, and its inputs of that cell are checked; a request that does not fail costs nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from cellrt.definition.cell import Cell
from cellrt.definition.lookup import Refused, read_refused
from cellrt.errors import CellError, CellrtError, RequestError
from cellrt.graph.graph import Graph
from cellrt.serve.described import Described

OUTSIDE = "raised IndexError"


def explained(described: Described, request: Any, error: CellrtError) -> CellrtError:
    """Return the error for a client: RequestError if the request has an index outside a cell's vocabulary; else the
    error.

    ``request``: as the unfolder takes it.
    """
    if not isinstance(error, CellError) or OUTSIDE not in str(error):
        return error
    said = str(error).removeprefix(f"model {described.name!r}: ")
    refused = read_refused(said)
    if refused is not None:
        watching = _Watching(described, said, refused)
        with suppress(CellrtError):  # it was recorded before: what there is to see, was seen
            described.binding.unfolder.record_in(watching, request)
        if watching.found:
            return RequestError(f"model {described.name!r}: {watching.found}")
    return CellError(f"model {described.name!r}: an index is outside of what the cell looks it up in: {said}")


class _Watching(Graph):
    """A graph that checks whether a request gives a cell the index that the cell's error names.

    Attributes:
        found: the fault of the request; empty if it does not give that index.
    """

    def __init__(self, described: Described, error: str, refused: Refused) -> None:
        super().__init__(described.binding)
        self._error, self._refused = error, refused
        self.found = ""

    def call(self, cell: Cell, /, **inputs: Any) -> Any:
        self._look(cell, inputs)
        return super().call(cell, **inputs)

    def chain(self, cell: Cell, /, **inputs: Any) -> Any:
        self._look(cell, inputs)
        return super().chain(cell, **inputs)

    def loop(self, cell: Any, /, **inputs: Any) -> Any:
        if isinstance(cell, Cell):
            self._look(cell, inputs)
        return super().loop(cell, **inputs)

    def tree(self, parents: Any, *, leaf: Cell, inner: Cell, **inputs: Any) -> Any:
        self._look(leaf, inputs.get("leaf_inputs") or {})
        self._look(inner, inputs.get("inner_inputs") or {})
        return super().tree(parents, leaf=leaf, inner=inner, **inputs)

    def dag(self, cell: Cell, /, offsets: Any, sources: Any, inputs: Mapping[str, Any] | None = None) -> Any:
        self._look(cell, inputs or {})
        return super().dag(cell, offsets, sources, inputs)

    def _look(self, cell: Cell, inputs: Mapping[str, Any]) -> None:
        if self._error.startswith(f"cell {cell.name!r} "):
            given = _numbers(inputs.get(self._refused.input))
            if self._refused.token in given:
                self.found = f"cell {cell.name!r}, {self._refused}"


def _numbers(source: Any) -> Iterator[int]:
    """Yield the integers that a request gives; outputs of other cells have none."""
    if isinstance(source, torch.Tensor | np.ndarray):
        yield from (int(value) for value in source.reshape(-1).tolist())
    elif isinstance(source, int | np.integer):
        yield int(source)
    elif isinstance(source, list | tuple):
        for value in source:
            yield from _numbers(value)
