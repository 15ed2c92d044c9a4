"""Search for arrays of a request that have a row for each step of a chain, or each node or source of a tree or dag.

The lengths of such arrays depend on each other, so that none can be tried longer by itself. They are recognized by
their memory: views of them count, copies do not.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.lib.array_utils import byte_bounds

from cellrt.definition.cell import Cell
from cellrt.graph.binding import Binding
from cellrt.graph.graph import Graph
from cellrt.graph.recorder import Source
from cellrt.graph.symbols import Chain, Dag, Tree


class SizedGraph(Graph):
    """A graph of one request that records which arrays it was given row by row."""

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding)
        self._sized: list[Any] = []

    def is_sized(self, part: object) -> bool:
        """Return whether a part of the request is one of those arrays, or shares memory with one."""
        own = _bounds(part)
        if own is None:
            return False
        return any(part is other or _overlap(own, _bounds(other)) for other in self._sized)

    def chain(
        self, cell: Cell, /, *, reverse: bool = False, keep: bool | Collection[str] = False, **inputs: Source
    ) -> Chain:
        """Add a chain, and record its arrays."""
        made = super().chain(cell, reverse=reverse, keep=keep, **inputs)
        self._note(cell, inputs)
        return made

    def tree(
        self,
        parents: Sequence[int] | np.ndarray,
        *,
        leaf: Cell,
        inner: Cell,
        leaf_inputs: Mapping[str, Source] | None = None,
        inner_inputs: Mapping[str, Source] | None = None,
    ) -> Tree:
        """Add a tree, and record its arrays."""
        made = super().tree(parents, leaf=leaf, inner=inner, leaf_inputs=leaf_inputs, inner_inputs=inner_inputs)
        self._note(leaf, leaf_inputs or {}, (parents,))
        self._note(inner, inner_inputs or {})
        return made

    def dag(
        self,
        cell: Cell,
        /,
        offsets: Sequence[int] | np.ndarray | torch.Tensor,
        sources: Sequence[int] | np.ndarray | torch.Tensor,
        inputs: Mapping[str, Source] | None = None,
    ) -> Dag:
        """Add a dag, and record its arrays."""
        made = super().dag(cell, offsets, sources, inputs)
        self._note(cell, inputs or {}, (offsets, sources))
        return made

    def _note(self, cell: Cell, inputs: Mapping[str, object], others: Iterable[object] = ()) -> None:
        """Record ``others`` and the inputs that have a row for each node, but not those of one row for all."""
        self._sized += others
        for name, given in inputs.items():
            if isinstance(given, np.ndarray | torch.Tensor) and given.ndim == len(cell.inputs[name].shape) + 1:
                self._sized.append(given)


def _bounds(part: object) -> tuple[int, int] | None:
    """Return where an array's memory begins and ends; None for other objects."""
    if isinstance(part, torch.Tensor):
        begin = part.data_ptr()
        return begin, begin + part.numel() * part.element_size()
    return byte_bounds(part) if isinstance(part, np.ndarray) else None


def _overlap(one: tuple[int, int], other: tuple[int, int] | None) -> bool:
    return other is not None and max(one[0], other[0]) < min(one[1], other[1])
