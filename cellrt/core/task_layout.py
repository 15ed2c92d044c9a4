"""How a task's buffer of int32 is laid out: the scheduler writes it, the executor reads it.

All positions are relative to the start of the buffer. A task holds ``rows`` rows of up to ``steps`` successive
steps each, rows sorted by falling length; step s has ``batch_sizes[s]`` rows, and *position*
``sum(batch_sizes[:s]) + row`` is that row at that step (as in torch's PackedSequence). A loop's task has every
row at every position of its run, but rows that stop early leave.

The header has the words below, then one ``INPUT`` record per input port and one ``OUTPUT`` record per output port.
"""

from __future__ import annotations

H_ROWS = 0
H_STEPS = 1
H_POSITIONS = 2
H_IS_LOOP = 3
H_NODES = 4  # position of [rows] first node of each row
H_LENGTHS = 5  # position of [rows] number of steps of each row
H_BATCH_SIZES = 6  # position of [steps]
H_DONE_STEPS = 7  # position of [rows]: the worker writes how many steps a loop's row took (negative: it stopped)
H_FAILED = 8  # position of [rows]: the worker writes 1 where the cell failed
H_STOP_OUTPUT = 9
H_NOTES = 10  # position of the notes of host rows to give back at completion, up to the end of the buffer
HEADER = 11

# Input record.
IN_SOURCE = 0  # location of all rows, or MIXED (then rows are handles, else row numbers)
IN_COUNT = 1
IN_ROWS = 2  # position of [count] rows: of the first step for carried state, else of every position
IN_OFFSETS = 3  # position of [positions + 1] offsets of a ragged input, or -1
INPUT = 4

# Output record.
OUT_STORES = 0  # how many outputs go to arena rows
OUT_STORE_POSITIONS = 1  # position of [stores] positions (of a loop: rows, the state after the run)
OUT_STORE_ROWS = 2  # position of [stores] row numbers at this worker
OUT_RESULTS = 3  # how many outputs go to the host
OUT_RESULT_POSITIONS = 4  # as OUT_STORE_POSITIONS, unless OUT_RESULT_STEPS says otherwise
OUT_RESULT_ROWS = 5  # position of [results] host row numbers
# 1 if some row of a loop shows every step: its positions are row * steps + step, and rows * steps + row is the last
# step of a row that shows no other. 0 if all rows show their last step alone.
OUT_RESULT_STEPS = 6
OUTPUT = 7
