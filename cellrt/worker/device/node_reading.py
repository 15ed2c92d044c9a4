"""Readers of the shapes of tasks whose cells get the rows of each node: they have spans, or states that grow in pages.

The arrays for them are in the words, as int32 and bytes, so that on the device they need no further operation:

- of the task: offsets ``[nodes + 1]``, each row's node and its step ``[rows]``; then, from a new word on, whether each
  row is read ``[rows]``, bytes;
- of each input with pages: tables ``[nodes, pages of a node]``, lengths ``[nodes]``, positions ``[rows]``.

The numbers of rows and nodes are padded, and tasks are captured: padding nodes have a row of no position, and append it
to a page that is never read. Where each node has one row, as in the steps of loops, so have padding nodes. With pieces
of longer inputs among them, the last of the padding nodes has all padding rows. Pages of a node are rounded up to a
power of two, for there are more at each step.
"""

from __future__ import annotations

from cellrt.worker.device import words
from cellrt.worker.device.packing import TaskReader
from cellrt.worker.device.shape import NODES, InputShape
from cellrt.worker.device.signature import NOWHERE, InputSignature

FLAGS_A_WORD = 8


class NodeReader(TaskReader):
    """A reader of such a task for the plain form."""

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
    """Return the number of words that int32 numbers take."""
    return -(-numbers // words.INTS_A_WORD)
