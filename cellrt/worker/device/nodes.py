"""Operations of tasks whose cells get the rows of each node.

A failed node is tried again with all its rows, as they depend on each other.
"""

from __future__ import annotations

import torch

from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput
from cellrt.worker.device.device_attempt import DeviceAttempt, DeviceOutcome, Inputs
from cellrt.worker.device.node_reading import words_of
from cellrt.worker.device.operations import Counts, Operations
from cellrt.worker.device.signature import InputSignature
from cellrt.worker.failed_rows import Failure, Failures, take_rows


class NodeAttempt(DeviceAttempt):
    """An attempt to run a cell on one task. The rows of ``Attempt`` are the task's nodes.

    Attributes:
        offsets: where each node's rows begin, without the padding, and the number of rows.
    """

    offsets: tuple[int, ...]

    def put(self, whole: DeviceOutcome, first: int, end: int, outcome: DeviceOutcome) -> None:
        """Put the outcome of some nodes in its place (see ``Attempt``)."""
        rows = slice(self.offsets[first], self.offsets[end])
        targets = *whole.outputs, whole.bad, whole.done_steps, whole.is_over
        found = *outcome.outputs, outcome.bad, outcome.done_steps, outcome.is_over
        for target, value in zip(targets, found):
            if len(value):
                target[rows] = value

    def _take(self, first: int, end: int) -> Inputs:
        whole, nodes = self._inputs(), range(first, end)
        rows = range(self.offsets[first], self.offsets[end])
        values = [_taken(value, nodes, rows) for value in whole.values]
        bad = None if whole.bad is None else whole.bad[rows.start : rows.stop]
        stopped = None if whole.stopped is None else whole.stopped[rows.start : rows.stop]
        return Inputs([len(rows)], values, None, bad, stopped)


class NodeOperations(Operations):
    """The operations of such tasks; the arguments are those of ``Operations``."""

    def run(self, counts: Counts, failures: Failures | None) -> None:
        """Run the task (see ``Operations``); a failed node fails all its rows."""
        if failures is None:
            super().run(counts, None)
            return
        of_nodes = Failures()
        super().run(counts, of_nodes)
        failures.split = of_nodes.split if failures.split is None else failures.split
        failed, offsets = {failure.row for failure in failures}, counts.offsets
        for node, error in of_nodes:
            rows = range(offsets[node], offsets[node + 1])
            failures += [Failure(row, error) for row in rows if row not in failed]

    def _attempt(self, counts: Counts) -> DeviceAttempt:
        stop, device = self._signature.stop, self._memory.device
        attempt = NodeAttempt(self._placed, device, len(counts.offsets) - 1, self._inputs, stop, None)
        attempt.offsets = counts.offsets
        return attempt

    def _without(self, number: int, stopped: torch.Tensor, value: CellInput) -> CellInput:
        """Return an input without stopped rows (see ``Operations``).

        A node that has stopped gets the page of padding nodes (``node_reading.py``).
        """
        if isinstance(value, Spans):
            return value
        if not isinstance(value, PagedRows):
            return super()._without(number, stopped, value)
        is_over = stopped.index_select(0, value.offsets[:-1])
        unused = len(value.pages) - 1 if list(self._placed.cell.inputs.values())[number].appends else 0
        return value._replace(
            tables=value.tables.masked_fill(is_over[:, None], unused),
            lengths=value.lengths.masked_fill(is_over, 1),
            positions=value.positions.masked_fill(stopped, 0),
        )

    def _gather(self, number: int, given: InputSignature) -> CellInput:
        spec = list(self._placed.cell.inputs.values())[number]
        if not spec.has_nodes:
            return super()._gather(number, given)
        signature = self._signature
        rows, nodes = signature.sizes[0], signature.num_nodes
        numbers = words_of(nodes + 1 + 2 * rows)
        offsets, of_rows, steps = self._numbers(signature.nodes_at, nodes + 1, rows, rows)
        is_read = self._words[signature.nodes_at + numbers :].view(torch.bool)[:rows]
        if spec.span:
            return Spans(offsets, steps, is_read)
        tables, lengths, positions = self._numbers(given.offsets_at, nodes * given.num_rows, nodes, rows)
        pages = self._memory.arenas[self._memory.location][given.kind]
        tables = tables.view(nodes, given.num_rows)
        return PagedRows(pages, tables, lengths, offsets, of_rows, positions, is_read, spec.page_dim)

    def _numbers(self, at: int, *counts: int) -> list[torch.Tensor]:
        """Return consecutive arrays of int32, from word ``at`` on."""
        return list(torch.split(self._words[at:].view(torch.int32)[: sum(counts)], list(counts)))


def _taken(value: CellInput, nodes: range, rows: range) -> CellInput:
    return value.take(nodes) if isinstance(value, PagedRows | Spans) else take_rows(value, rows)
