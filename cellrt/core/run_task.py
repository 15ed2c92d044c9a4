"""Runs a whole task on a CPU in one compiled call: gathers its rows, calls the cell's kernel, puts its outputs.

Nothing of it touches Python, so the interpreter lock is free meanwhile. What the kernel cannot do (a token that does
not exist, a loop) it refuses, and the task is run through the cell's module instead (``executor.py``).
"""

from __future__ import annotations

from cellrt.core import task_layout as layout
from cellrt.core.compiled import compiled, entry
from cellrt.core.memory import call, copy_bytes, read_float, read_word, write_word
from cellrt.core.tables import LOCATION_SHIFT, MIXED, NUM_PERMANENT, ROW_MASK

DONE = 0
REFUSED = -1

# What a kernel finds at the address of its task, in int64 words: three numbers, then the address of each input, of
# each output, and for each input the address of its int64 offsets [positions + 1] if it is ragged.
STEPS = 0
POSITIONS = 1
BATCH_SIZES = 2  # address of int64 [steps]
FIRST_INPUT = 3

# Columns of a port, which is an input or an output of the kernel: where its record is in the task's buffer, bytes of a
# row, whether it is ragged (an input) or must be finite float32 (an output), and from FIRST_ARENA on the address of
# its kind's arena at each location.
RECORD = 0
ROW_BYTES = 1
FLAG = 2
FIRST_ARENA = 3

_ALIGNMENT = 64


@compiled
def _aligned(size):
    return (size + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT


@compiled
def _scratch_bytes(buffer, ports, num_inputs):
    """Scratch for a task: its words, batch sizes, offsets, input rows and output rows."""
    positions = buffer[layout.H_POSITIONS]
    size = 8 * (FIRST_INPUT + ports.shape[0] + num_inputs + buffer[layout.H_STEPS])
    for k in range(ports.shape[0]):
        count = positions
        if k < num_inputs:
            count = buffer[ports[k, RECORD] + layout.IN_COUNT]
            size += 8 * (positions + 1) if ports[k, FLAG] else 0
        size += _aligned(count * ports[k, ROW_BYTES]) + _ALIGNMENT
    return size + 2 * _ALIGNMENT


@compiled
def _gather(buffer, port, own, target):
    """Copies an input's rows to ``target`` unless they lie together already; returns where they are."""
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
def _put(buffer, port, own, host, source):
    """Copies an output's rows to where its readers find them."""
    record, size = port[RECORD], port[ROW_BYTES]
    rows = buffer[buffer[record + layout.OUT_STORE_ROWS] :]
    positions = buffer[buffer[record + layout.OUT_STORE_POSITIONS] :]
    for k in range(buffer[record + layout.OUT_STORES]):
        copy_bytes(port[FIRST_ARENA + own] + rows[k] * size, source + positions[k] * size, size)
    rows = buffer[buffer[record + layout.OUT_RESULT_ROWS] :]
    positions = buffer[buffer[record + layout.OUT_RESULT_POSITIONS] :]
    for k in range(buffer[record + layout.OUT_RESULTS]):
        copy_bytes(port[FIRST_ARENA + host] + rows[k] * size, source + positions[k] * size, size)


@compiled
def _are_finite(address, count):
    for k in range(count):
        value = read_float(address, k)
        if value - value != 0:  # infinite, or not a number
            return False
    return True


@entry
def run_task(buffer, ports, num_inputs, own, host, kernel, constants, scratch):
    """Runs the task in ``buffer`` with the kernel at an address; ``own`` is the worker's location.

    Returns DONE, REFUSED (then nothing was put anywhere), or how many bytes of ``scratch`` are wanted.
    """
    wanted = _scratch_bytes(buffer, ports, num_inputs)
    if scratch.size < wanted:
        return wanted
    positions, steps, num_ports = buffer[layout.H_POSITIONS], buffer[layout.H_STEPS], ports.shape[0]
    task = _aligned(scratch.ctypes.data)
    sizes = task + 8 * (FIRST_INPUT + num_ports + num_inputs)
    write_word(task, STEPS, steps)
    write_word(task, POSITIONS, positions)
    write_word(task, BATCH_SIZES, sizes)
    for step in range(steps):
        write_word(sizes, step, buffer[buffer[layout.H_BATCH_SIZES] + step])
    at = _aligned(sizes + 8 * steps)
    for k in range(num_inputs):
        record = ports[k, RECORD]
        write_word(task, FIRST_INPUT + k, _gather(buffer, ports[k], own, at))
        at = _aligned(at + buffer[record + layout.IN_COUNT] * ports[k, ROW_BYTES])
        write_word(task, FIRST_INPUT + num_ports + k, at)
        if ports[k, FLAG]:
            for position in range(positions + 1):
                write_word(at, position, buffer[buffer[record + layout.IN_OFFSETS] + position])
            at = _aligned(at + 8 * (positions + 1))
    for k in range(num_inputs, num_ports):
        write_word(task, FIRST_INPUT + k, at)
        at = _aligned(at + positions * ports[k, ROW_BYTES])
    if call(kernel, constants, task) != 0:
        return REFUSED
    for k in range(num_inputs, num_ports):
        if ports[k, FLAG] and not _are_finite(read_word(task, FIRST_INPUT + k), positions * ports[k, ROW_BYTES] // 4):
            return REFUSED
    for k in range(num_inputs, num_ports):
        _put(buffer, ports[k], own, host, read_word(task, FIRST_INPUT + k))
    return DONE
