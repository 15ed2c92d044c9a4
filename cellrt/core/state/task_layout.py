"""The layout of a task's int32 buffer: the scheduler writes it, the executor reads it.

All positions are relative to the start of the buffer. A task holds ``rows`` rows of up to ``steps`` successive steps
each, rows sorted by falling length; step s has ``batch_sizes[s]`` rows, and *position* ``sum(batch_sizes[:s]) + row``
is that row at that step (as in torch's PackedSequence). All rows of a loop's task have all steps of its run, but a row
that stops leaves the batch.

The header has the words below, then one ``INPUT`` record per input port and one ``OUTPUT`` record per output port.
Compiled code reads them by their numbers; Python reads a task through a ``TaskView``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

H_ROWS = 0
H_STEPS = 1
H_POSITIONS = 2
H_IS_LOOP = 3
H_NODES = 4  # position of [rows] first node of each row, or ~subgraph of a chain or loop
H_LENGTHS = 5  # position of [rows] number of steps of each row
H_BATCH_SIZES = 6  # position of [steps]
H_DONE_STEPS = 7  # position of [rows]: the worker writes how many steps a row of a loop took, negative if it stopped
H_FAILED = 8  # position of [rows]: the worker writes 1 where the cell failed
H_STOP_OUTPUT = 9  # the output that says stop for the rows that are of loops; -1 if none is
H_NOTES = 10  # position of the notes of host rows to give back at completion, up to the end of the buffer
# For cells with spans, which take the rows of each node together (``span_arrays.py``):
H_NUM_SPANS = 11
H_SPANS = 12  # position of [spans + 1] first rows, then [spans] steps of their chains or loops
H_LEAST_STEPS = 13  # the number of steps after which a loop's run ends with the first row that stops
H_FLAGS = 14  # position of [rows] flags that are read, if rows are of loops that go ahead and may stop; else 0
H_NEW_FLAGS = 15  # position of [rows] flags that are written
H_GOES_ON = 16  # 1: the next task is short, and runs before its worker takes a turn
HEADER = 17

# Flags of loops that go ahead: the worker keeps in them whether a row has stopped, for the next task. For each row the
# buffer has the number of the flag that it reads, and of the flag that it writes. They are never the same, so that a
# task may run twice. The numbers of the written flags lie right after those of the read ones. A row that has stopped
# takes no step (0 done), and none of its results is written at the host.
FLAGS = 2
NEVER_STOPPED = 0  # the flag that is never set, for a row without an earlier task in flight, or that is of no loop
NOBODYS = 1  # the flag that no row reads

# Input record.
IN_SOURCE = 0  # location of all rows, or MIXED (then rows are handles, else row numbers)
IN_COUNT = 1
IN_ROWS = 2  # position of [count] rows: those of the first step for carried state, else those of every position
# For a ragged input, the position of [positions + 1] offsets. For pages, whose numbers are the rows, the position of
# [spans + 1] offsets, then [spans] lengths in rows, then [spans] lengths before the task appends. Otherwise -1.
IN_OFFSETS = 3
INPUT = 4

# Output record.
OUT_STORES = 0  # how many outputs go to arena rows
OUT_STORE_POSITIONS = 1  # position of [stores] positions (for a loop: of rows, whose state after the run is stored)
OUT_STORE_ROWS = 2  # position of [stores] row numbers at this worker
OUT_RESULTS = 3  # how many outputs go to the host
OUT_RESULT_POSITIONS = 4  # as OUT_STORE_POSITIONS, unless OUT_RESULT_STEPS says otherwise
OUT_RESULT_ROWS = 5  # position of [results] host row numbers
# 1 if every step of some row of a loop is a result: a position is then row * steps + step, or rows * steps + row for
# the last step of a row of which only that is a result. 0 if only the last steps of rows are results.
OUT_RESULT_STEPS = 6
OUTPUT = 7


class TaskView:
    """A view of a task's buffer that has a name for each part. Arrays are views: writing to them writes to the buffer.

    Attributes:
        num_rows, num_steps, num_positions, is_loop: see the header.
        least_steps: the number of steps after which a loop's run ends with the first row that stops.
        stop_output: the output that says stop for the rows that are of loops; -1 if none is.
        inputs, outputs: the words of each record.

    Args:
        buffer: the task's buffer.
        num_inputs, num_outputs: the numbers of its cell's inputs and outputs; 0 if no record is needed.
    """

    def __init__(self, buffer: NDArray[np.int32], num_inputs: int = 0, num_outputs: int = 0) -> None:
        self.buffer = buffer
        end = HEADER + INPUT * num_inputs
        words: list[int] = buffer[: end + OUTPUT * num_outputs].tolist()
        self._words = words
        self.num_rows, self.num_steps, self.num_positions = words[H_ROWS], words[H_STEPS], words[H_POSITIONS]
        self.is_loop, self.stop_output = bool(words[H_IS_LOOP]), words[H_STOP_OUTPUT]
        self.least_steps = words[H_LEAST_STEPS]
        self.inputs = [words[at : at + INPUT] for at in range(HEADER, end, INPUT)]
        self.outputs = [words[at : at + OUTPUT] for at in range(end, len(words), OUTPUT)]

    @property
    def nodes(self) -> NDArray[np.int32]:
        """The first node of each row ``[num_rows]``, or ``~subgraph`` of a chain or loop."""
        return self._part(self._words[H_NODES], self.num_rows)

    @property
    def lengths_at(self) -> int:
        """The position where ``lengths`` begin."""
        return self._words[H_LENGTHS]

    @property
    def lengths(self) -> NDArray[np.int32]:
        """The number of steps of each row ``[num_rows]``; for a loop the most that it may take."""
        return self._part(self.lengths_at, self.num_rows)

    @property
    def batch_sizes_at(self) -> int:
        """The position where ``batch_sizes`` begin."""
        return self._words[H_BATCH_SIZES]

    @property
    def batch_sizes(self) -> NDArray[np.int32]:
        """The rows of each step ``[num_steps]``, never growing."""
        return self._part(self.batch_sizes_at, self.num_steps)

    @property
    def done_steps(self) -> NDArray[np.int32]:
        """The worker's answer for a loop: the steps that each row took, negative if it stopped ``[num_rows]``."""
        return self._part(self._words[H_DONE_STEPS], self.num_rows)

    @property
    def goes_ahead(self) -> bool:
        """True if its rows are of loops that may have stopped in an earlier task, which is in flight."""
        return self.flags_at > 0

    @property
    def flags_at(self) -> int:
        """The position where ``flags`` begin."""
        return self._words[H_FLAGS]

    @property
    def flags(self) -> NDArray[np.int32]:
        """The flags that rows of loops that go ahead read and write, by number ``[2, num_rows]``."""
        return self._part(self.flags_at, FLAGS * self.num_rows).reshape(FLAGS, -1)

    @property
    def spans(self) -> NDArray[np.int32]:
        """The first row of each span, then the number of rows ``[spans + 1]``."""
        return self._part(self._words[H_SPANS], self._words[H_NUM_SPANS] + 1)

    @property
    def has_failed(self) -> NDArray[np.int32]:
        """The worker's answer: 1 for each row on which the cell failed ``[num_rows]``."""
        return self._part(self._words[H_FAILED], self.num_rows)

    def rows_of_span(self, span: int) -> range:
        """Return the rows of one span."""
        return range(*self.spans[span : span + 2].tolist())

    def _part(self, at: int, count: int) -> NDArray[np.int32]:
        return self.buffer[at : at + count]


def input_record_at(number: int) -> int:
    """Return the position of the record of an input."""
    return HEADER + INPUT * number


def output_record_at(num_inputs: int, number: int) -> int:
    """Return the position of the record of an output."""
    return HEADER + INPUT * num_inputs + OUTPUT * number
