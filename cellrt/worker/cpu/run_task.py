"""A whole task on a CPU in one compiled call: gather its rows, call the cell's kernel, store its outputs.

The call does not touch Python, so the interpreter lock is free meanwhile. The kernel refuses a task that it cannot run
(a token that does not exist), and that task is run through the cell's module instead (``cpu_executor.py``).
"""

from __future__ import annotations

from cellrt.core.state import task_layout as layout
from cellrt.definition.task_memory import (
    ALIGNMENT,
    BATCH_SIZES,
    DONE,
    FIRST_INPUT,
    FLAG,
    POSITIONS,
    RECORD,
    REFUSED,
    ROW_BYTES,
    STEPS,
    aligned,
    are_finite,
    gather,
    put,
    read_offsets,
)
from cellrt.native.jit import compiled, entry
from cellrt.native.memory import call, read_byte, read_word, write_word
from cellrt.native.row_types import Matrix, Rows
from cellrt.worker.cpu.run_loop import loop_bytes, run_loop, stop_output


@compiled
def _scratch_bytes(buffer: Rows[int], ports: Matrix, num_inputs: int) -> int:
    """Return the bytes of scratch for a task: its words, batch sizes, offsets, input rows and output rows."""
    positions = buffer[layout.H_POSITIONS]
    size = 8 * (FIRST_INPUT + ports.shape[0] + num_inputs + buffer[layout.H_STEPS])
    for k in range(ports.shape[0]):
        count = positions
        if k < num_inputs:
            count = buffer[ports[k, RECORD] + layout.IN_COUNT]
            size += 8 * (positions + 1) if ports[k, FLAG] else 0
        size += aligned(count * ports[k, ROW_BYTES]) + ALIGNMENT
    return int(size + 2 * ALIGNMENT)


@entry
def run_task(
    buffer: Rows[int],
    ports: Matrix,
    num_inputs: int,
    own: int,
    host: int,
    kernel: int,
    constants: int,
    scratch: Rows[int],
) -> int:
    """Run the task in ``buffer`` with the kernel at an address; ``own`` is the worker's location.

    Return DONE, REFUSED (then nothing was stored), or the bytes of ``scratch`` that are needed.
    """
    is_loop = buffer[layout.H_IS_LOOP] != 0
    wanted = loop_bytes(buffer, ports, num_inputs) if is_loop else _scratch_bytes(buffer, ports, num_inputs)
    if scratch.size < wanted:
        return wanted
    if is_loop:
        return run_loop(buffer, ports, num_inputs, own, host, kernel, constants, aligned(scratch.ctypes.data))
    positions, steps, num_ports = buffer[layout.H_POSITIONS], buffer[layout.H_STEPS], ports.shape[0]
    # The scratch: the kernel's words, the batch sizes, then inputs and outputs.
    task = aligned(scratch.ctypes.data)
    sizes = task + 8 * (FIRST_INPUT + num_ports + num_inputs)
    stop = stop_output(buffer, ports, num_inputs)
    if stop >= 0 and ports[stop, ROW_BYTES] != 1:
        return REFUSED
    write_word(task, STEPS, steps)
    write_word(task, POSITIONS, positions)
    write_word(task, BATCH_SIZES, sizes)
    for step in range(steps):
        write_word(sizes, step, buffer[buffer[layout.H_BATCH_SIZES] + step])
    at = aligned(sizes + 8 * steps)
    for k in range(num_inputs):
        write_word(task, FIRST_INPUT + k, gather(buffer, ports[k], own, at))
        behind = aligned(at + buffer[ports[k, RECORD] + layout.IN_COUNT] * ports[k, ROW_BYTES])
        at = read_offsets(buffer, ports, task, k, positions, behind)
    for k in range(num_inputs, num_ports):
        write_word(task, FIRST_INPUT + k, at)
        at = aligned(at + positions * ports[k, ROW_BYTES])
    # Nothing is stored unless the kernel took the task and its outputs are finite.
    if call(kernel, constants, task) != 0:
        return REFUSED
    for k in range(num_inputs, num_ports):
        if ports[k, FLAG] and not are_finite(read_word(task, FIRST_INPUT + k), positions * ports[k, ROW_BYTES] // 4):
            return REFUSED
    for k in range(num_inputs, num_ports):
        values = read_word(task, FIRST_INPUT + k)
        put(buffer, ports[k], own, host, values, values)
    if stop >= 0:
        note_stops(buffer, read_word(task, FIRST_INPUT + stop))
    return DONE


@compiled
def note_stops(buffer: Rows[int], flags: int) -> None:
    """Write the rows that said stop at their first step: in a loop of several cells, they take no more steps."""
    for row in range(buffer[layout.H_ROWS]):
        length = buffer[buffer[layout.H_LENGTHS] + row]
        buffer[buffer[layout.H_DONE_STEPS] + row] = -length if read_byte(flags, row) else length
