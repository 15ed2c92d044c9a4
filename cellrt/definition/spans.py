"""What a cell sees of inputs that tell it which rows are of one node: spans, and states that grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Spans(NamedTuple):
    """Which rows of a batch are of one node, and which steps of their chain or loop they are.

    Attributes:
        offsets: ``[nodes + 1]`` int64; node n has rows ``offsets[n]:offsets[n + 1]`` of the batch, at least one.
        positions: ``[rows]`` int64: each row's step, 0 for the first of its chain or loop.
    """

    offsets: torch.Tensor
    positions: torch.Tensor

    @property
    def nodes(self) -> torch.Tensor:
        """The node of each row ``[rows]`` int64."""
        return nodes_of(self.offsets)

    def take(self, nodes: Sequence[int]) -> Spans:
        """Those of some nodes."""
        offsets, rows = taken_rows(self.offsets, nodes)
        return Spans(offsets, self.positions[rows])

    def copied(self) -> Spans:
        """A copy in memory of its own."""
        return Spans(*(value.clone() for value in self))


class PagedRows(NamedTuple):
    """A state that grows by a row at a time, as the cell sees it: rows of each node, in pages wherever there is room.

    Row r of node n is ``pages[tables[n, r // page_size], r % page_size]``. A cell writes to no row but those at the
    ``positions`` of its own rows, and there only if it appends (see ``append``); the runtime may run a task twice.

    Attributes:
        pages: ``[any, page_size, *shape]``: the pages of all nodes, and of others.
        tables: ``[nodes, most pages of one]`` int64, filled up with 0.
        lengths: ``[nodes]`` int64: rows of each node, those that this task appends among them.
        offsets: ``[nodes + 1]`` int64; node n has rows ``offsets[n]:offsets[n + 1]`` of the batch, at least one.
        nodes: ``[rows]`` int64: the node of each row of the batch.
        positions: ``[rows]`` int64: the row of the state that each row of the batch appends; zeros if it appends none.
    """

    pages: torch.Tensor
    tables: torch.Tensor
    lengths: torch.Tensor
    offsets: torch.Tensor
    nodes: torch.Tensor
    positions: torch.Tensor

    @property
    def page_size(self) -> int:
        """Rows of a page."""
        return self.pages.shape[1]

    def append(self, values: torch.Tensor) -> None:
        """Writes each row's value to its place.

        Args:
            values: ``[rows, *shape]``.
        """
        pages = self.tables[self.nodes, self.positions // self.page_size]
        self.pages[pages, self.positions % self.page_size] = values

    def rows_of(self, node: int) -> torch.Tensor:
        """A copy of all rows of a node ``[lengths[node], *shape]``, in order."""
        length = int(self.lengths[node])
        pages = self.tables[node, : -(-length // self.page_size)]
        return self.pages[pages].flatten(0, 1)[:length]

    def take(self, nodes: Sequence[int]) -> PagedRows:
        """Those of some nodes; their rows stay where they are."""
        chosen = torch.as_tensor(nodes, dtype=torch.int64)
        offsets, rows = taken_rows(self.offsets, nodes)
        return PagedRows(
            self.pages, self.tables[chosen], self.lengths[chosen], offsets, nodes_of(offsets), self.positions[rows]
        )

    def copied(self) -> PagedRows:
        """A copy in memory of its own."""
        return PagedRows(*(value.clone() for value in self))


def nodes_of(offsets: torch.Tensor) -> torch.Tensor:
    """The node of each row ``[rows]`` int64, of offsets ``[nodes + 1]``."""
    return torch.repeat_interleave(offsets.diff())


def taken_rows(offsets: torch.Tensor, nodes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The offsets of some nodes' rows when they lie together, and the rows that they have now."""
    ranges = [range(*offsets[node : node + 2].tolist()) for node in nodes]
    counts = torch.tensor([0, *map(len, ranges)])
    return counts.cumsum(0), torch.tensor([row for rows in ranges for row in rows], dtype=torch.int64)
