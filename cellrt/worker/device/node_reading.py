"""Reads shapes of tasks whose cell is told which rows are of one node: it has spans, or states that grow in pages.

What it is told lies in the words, as int32 and bytes, so that on the device it is there without another operation:

- of the task: offsets ``[nodes + 1]``, each row's node and its step ``[rows]``; then, from a new word on, whether each
  row is read ``[rows]``, bytes;
- of each input with pages: tables ``[nodes, pages of a node]``, lengths ``[nodes]``, positions ``[rows]``.

The numbers of rows and nodes are padded, and tasks are captured: further nodes have a row of no position, and append it
to a page that nobody reads. Where each node has one row, as in the steps of loops, it stays so. With pieces of longer
inputs among them, the last of the further nodes has all further rows. Pages of a node are rounded up to a power of two,
for there are more at each step.
"""

from __future__ import annotations

from cellrt.worker.device import words
from cellrt.worker.device.packing import TaskReader
from cellrt.worker.device.shape import NODES, InputShape
from cellrt.worker.device.signature import NOWHERE, InputSignature

FLAGS_A_WORD = 8


class NodeReader(TaskReader):
    """Reads a task for the plain form."""

    form = NODES

    def _nodes_words(self) -> int:
        rows, nodes, cell = self._shape.rows, self._shape.nodes, self._type.cell
        numbers, flags = words_of(nodes + 1 + 2 * rows), -(-rows // FLAGS_A_WORD)
        at = self._room(numbers + flags)
        self._operations.append((words.NODES, at, len(cell.inputs), len(cell.outputs), 0, rows, nodes))
        return at

    def _input(self, number: int, kind: int, given: InputShape) -> InputSignature:
        spec = list(self._type.cell.inputs.values())[number]
        if spec.span:
            return InputSignature(kind, 0, (), NOWHERE, 0)
        if not spec.page_size:
            return super()._input(number, kind, given)
        rows, nodes, width = self._shape.rows, self._shape.nodes, given.num_rows
        at = self._room(words_of(nodes * (width + 1) + rows))
        unused = self._arenas.trash_row(kind) if spec.appends else 0
        self._operations.append((words.PAGES, at, number, width, unused, rows, nodes))
        return InputSignature(kind, width, (), at, 0)


def words_of(numbers: int) -> int:
    """How many words int32 numbers take."""
    return -(-numbers // words.INTS_A_WORD)
