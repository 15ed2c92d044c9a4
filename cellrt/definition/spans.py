"""The tensors that tell a cell which rows belong to one node: spans, and states that grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cellrt.definition.bits import as_bits


class Spans(NamedTuple):
    """The nodes to which the rows of a batch belong, and the steps of their chain or loop.

    Attributes:
        offsets: ``[nodes + 1]`` int32; node n has rows ``offsets[n]:offsets[n + 1]`` of the batch, at least one.
        positions: ``[rows]`` int32: each row's step, 0 for the first of its chain or loop.
        is_read: ``[rows]`` bool: whether anybody reads an output of the row; of others a cell may return anything.
    """

    offsets: torch.Tensor
    positions: torch.Tensor
    is_read: torch.Tensor

    @property
    def nodes(self) -> torch.Tensor:
        """The node of each row ``[rows]`` int32."""
        return nodes_of(self.offsets)

    def take(self, nodes: Sequence[int]) -> Spans:
        """Return the spans of some nodes."""
        offsets, rows = taken_rows(self.offsets, nodes)
        return Spans(offsets, self.positions[rows], self.is_read[rows])

    def copied(self) -> Spans:
        """Return a copy in memory of its own."""
        return Spans(*(value.clone() for value in self))


class PagedRows(NamedTuple):
    """A state that grows by a row at a time, as the cell sees it: rows of each node, in pages wherever there is room.

    Row r of node n is ``pages[tables[n, r // page_size], r % page_size]``. A cell writes to no row but those at the
    ``positions`` of its own rows, and there only if it appends (see ``append``); the runtime may run a task twice.

    Attributes:
        pages: ``[any, page_size, *shape]``: the pages of all nodes, and of others. With a ``page_dim`` (``grows``) the
            rows of a page are that dimension of it.
        tables: ``[nodes, most pages of one]`` int32, filled up with 0.
        lengths: ``[nodes]`` int32: rows of each node, those that this task appends among them.
        offsets: ``[nodes + 1]`` int32; node n has rows ``offsets[n]:offsets[n + 1]`` of the batch, at least one.
        nodes: ``[rows]`` int32: the node of each row of the batch.
        positions: ``[rows]`` int32: the row of the state that each row of the batch appends; zeros if it appends none.
        is_read: ``[rows]`` bool: whether anybody reads an output of the row; of others a cell may return anything.
        page_dim: that of the cell's input.
    """

    pages: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor
    nodes: torch.Tensor
    positions: torch.Tensor
    is_read: torch.Tensor
    page_dim: int = 0

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return self.pages.shape[1 + self.page_dim]

    @property
    def by_row(self) -> torch.Tensor:
        """The pages with their rows first: a view ``[any, page_size, *shape]``."""
        return self.pages.movedim(1 + self.page_dim, 1)

    def append(self, values: torch.Tensor) -> None:
        """Write each row's value to its place.

        Args:
            values: ``[rows, *shape]``.

        Raise ValueError for another shape.
        """
        by_row, size = self.by_row, self.page_size
        wanted = (len(self.positions), *by_row.shape[2:])
        if values.shape != wanted:
            raise ValueError(f"append: expected rows {list(wanted)}, got {list(values.shape)}")
        if _is_served(self.pages, values):  # in torch each of these small steps costs as much as all of them in NumPy
            positions = self.positions.numpy()
            pages = self.tables.numpy()[self.nodes.numpy(), positions // size]
            as_bits(by_row)[pages, positions % size] = as_bits(values)
            return
        by_row[self.tables[self.nodes, self.positions // size], self.positions % size] = values

    def rows_of(self, node: int) -> torch.Tensor:
        """Return a copy of all rows of a node ``[lengths[node], *shape]``, in order."""
        length = int(self.lengths[node])
        pages = self.tables[node, : -(-length // self.page_size)]
        return self.by_row.index_select(0, pages).flatten(0, 1)[:length]

    def take(self, nodes: Sequence[int]) -> PagedRows:
        """Return the pages of some nodes; the pages' rows stay where they are."""
        chosen = torch.as_tensor(nodes, dtype=torch.int64, device=self.tables.device)
        offsets, rows = taken_rows(self.offsets, nodes)
        tables, lengths = self.tables[chosen], self.lengths[chosen]
        of_rows = nodes_of(offsets), self.positions[rows], self.is_read[rows]
        return PagedRows(self.pages, tables, lengths, offsets, *of_rows, self.page_dim)

    def copied(self) -> PagedRows:
        """Return a copy in memory of its own."""
        copies = {name: getattr(self, name).clone() for name in self._fields[:-1]}
        return self._replace(**copies)


def _is_served(pages: torch.Tensor, values: torch.Tensor) -> bool:
    """Return whether these are plain CPU tensors of one dtype, as a worker has them, outside tracing and dispatch
    modes.
    """
    is_seen = torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack()
    if is_seen or not torch.is_inference_mode_enabled():
        return False
    if type(pages) is not torch.Tensor or type(values) is not torch.Tensor or values.requires_grad:
        return False
    return pages.is_cpu and values.is_cpu and pages.dtype == values.dtype


def nodes_of(offsets: torch.Tensor) -> torch.Tensor:
    """Return the node of each row ``[rows]`` int32, of offsets ``[nodes + 1]``."""
    return torch.repeat_interleave(offsets.diff()).to(torch.int32)


def taken_rows(offsets: torch.Tensor, nodes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the offsets of some nodes' rows when they lie together, and the rows that they have now."""
    ranges = [range(*offsets[node : node + 2].tolist()) for node in nodes]
    counts = torch.tensor([0, *map(len, ranges)], device=offsets.device)
    rows = torch.tensor([row for rows in ranges for row in rows], device=offsets.device)
    return counts.cumsum(0, dtype=torch.int32), rows
