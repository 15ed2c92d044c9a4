"""The memory of a task as a cell's kernel sees it, and the copies of rows into and out of it."""

from __future__ import annotations

from cellrt.core.state import task_layout as layout
from cellrt.core.state.tables import LOCATION_SHIFT, MIXED, NUM_PERMANENT, ROW_MASK
from cellrt.native.jit import compiled
from cellrt.native.memory import copy_bytes, read_float, write_word
from cellrt.native.row_types import Matrix, Rows

DONE = 0
REFUSED = -1

# What a kernel finds at the address of its task, in int64 words: three numbers, then the address of each input, of
# each output, and for each input the address of its int64 offsets [positions + 1] if it is ragged.
STEPS = 0
POSITIONS = 1
BATCH_SIZES = 2  # address of int64 [steps]
FIRST_INPUT = 3

# Columns of a port, which is an input or an output of the kernel: where its record is in the task's buffer, bytes of a
# row, whether it is ragged (an input) or must be finite float32 (an output), which of the kernel's outputs an input is
# carried from (-1: none), and from FIRST_ARENA on the address of its kind's arena at each location.
RECORD = 0
ROW_BYTES = 1
FLAG = 2
CARRY = 3
FIRST_ARENA = 4

# A tensor, as a kernel of a cell with spans or pages is told of it, in int64 words: where it lies, torch's number of
# the dtype, how many dimensions; sizes, then strides.
MOST_DIMS = 8
AT, DTYPE, DIMS, SIZES = range(4)
STRIDES = SIZES + MOST_DIMS
TENSOR = STRIDES + MOST_DIMS
FIRST_TENSOR = 1
"""The first word after the number of tensors."""

ALIGNMENT = 64


@compiled
def aligned(size: int) -> int:
    """Return the next multiple of ALIGNMENT."""
    return (size + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@compiled
def gather(buffer: Rows[int], port: Rows[int], own: int, target: int) -> int:
    """Copy an input's rows to ``target`` unless they lie together already; return where they are."""
    record, size = port[RECORD], port[ROW_BYTES]
    source, count = buffer[record + layout.IN_SOURCE], buffer[record + layout.IN_COUNT]
    rows = buffer[buffer[record + layout.IN_ROWS] :][:count]
    if source == MIXED:
        for k in range(count):
            at = own if rows[k] < NUM_PERMANENT else rows[k] >> LOCATION_SHIFT
            copy_bytes(target + k * size, port[FIRST_ARENA + at] + (rows[k] & ROW_MASK) * size, size)
        return target
    arena = port[FIRST_ARENA + (source if source >= 0 else own)]
    together = 1
    while together < count and rows[together] == rows[0] + together:
        together += 1
    if count > 0 and together == count:
        return arena + rows[0] * size
    for k in range(count):
        copy_bytes(target + k * size, arena + rows[k] * size, size)
    return target


@compiled
def read_offsets(buffer: Rows[int], ports: Matrix, task: int, number: int, positions: int, at: int) -> int:
    """Write an input's offsets to ``at`` if it is ragged, and where they are to the task; return what lies behind."""
    port = ports[number]
    write_word(task, FIRST_INPUT + ports.shape[0] + number, at)
    if not port[FLAG]:
        return at
    offsets = buffer[port[RECORD] + layout.IN_OFFSETS]
    for position in range(positions + 1):
        write_word(at, position, buffer[offsets + position])
    return aligned(at + 8 * (positions + 1))


@compiled
def put(buffer: Rows[int], port: Rows[int], own: int, host: int, states: int, results: int) -> None:
    """Copy an output's rows to where their readers find them: from ``states`` to arena rows, from ``results`` to the
    host; the two differ for a loop that shows every step.
    """
    record, size = port[RECORD], port[ROW_BYTES]
    rows = buffer[buffer[record + layout.OUT_STORE_ROWS] :]
    positions = buffer[buffer[record + layout.OUT_STORE_POSITIONS] :]
    for k in range(buffer[record + layout.OUT_STORES]):
        copy_bytes(port[FIRST_ARENA + own] + rows[k] * size, states + positions[k] * size, size)
    rows = buffer[buffer[record + layout.OUT_RESULT_ROWS] :]
    positions = buffer[buffer[record + layout.OUT_RESULT_POSITIONS] :]
    for k in range(buffer[record + layout.OUT_RESULTS]):
        copy_bytes(port[FIRST_ARENA + host] + rows[k] * size, results + positions[k] * size, size)


@compiled
def are_finite(address: int, count: int) -> bool:
    """Return whether ``count`` float32 numbers at an address are all finite."""
    for k in range(count):
        value = read_float(address, k)
        if value - value != 0:  # infinite, or not a number
            return False
    return True
