"""A loop's task in one compiled call: step by step, each row until it stops or the run ends.

After ``H_LEAST_STEPS`` steps the run ends with the first row that stops, so that its request is answered and another
takes its place. After each step at which rows left, the rows that go on are moved together, so the kernel never sees
the others.
"""

from __future__ import annotations

from cellrt.core.state import task_layout as layout
from cellrt.definition.task_memory import (
    ALIGNMENT,
    BATCH_SIZES,
    CARRY,
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
from cellrt.native.jit import compiled
from cellrt.native.memory import call, copy_bytes, move_bytes, read_byte, read_word, write_word
from cellrt.native.row_types import Matrix, Rows


@compiled
def _kept_rows(buffer: Rows[int], port: Rows[int]) -> int:
    """Return the rows that an output keeps: the last of each row, after those of every step if it shows them."""
    rows = buffer[layout.H_ROWS]
    return rows * (buffer[layout.H_STEPS] + 1) if buffer[port[RECORD] + layout.OUT_RESULT_STEPS] else rows


@compiled
def loop_bytes(buffer: Rows[int], ports: Matrix, num_inputs: int) -> int:
    """Return the bytes of scratch for a loop's task."""
    rows, num_ports = buffer[layout.H_ROWS], ports.shape[0]
    size = 8 * (FIRST_INPUT + 2 * num_ports + num_inputs + 1 + rows)
    for k in range(num_ports):
        if k >= num_inputs:
            size += aligned((rows + _kept_rows(buffer, ports[k])) * ports[k, ROW_BYTES]) + ALIGNMENT
        else:
            size += aligned(buffer[ports[k, RECORD] + layout.IN_COUNT] * ports[k, ROW_BYTES])
            size += aligned(8 * (rows + 1)) if ports[k, FLAG] else 0
    return int(size + 4 * ALIGNMENT)


@compiled
def stop_output(buffer: Rows[int], ports: Matrix, num_inputs: int) -> int:
    """Return the port of the output that says stop, or -1."""
    record = layout.HEADER + layout.INPUT * num_inputs + layout.OUTPUT * buffer[layout.H_STOP_OUTPUT]
    for k in range(num_inputs, ports.shape[0]):
        if buffer[layout.H_STOP_OUTPUT] >= 0 and ports[k, RECORD] == record:
            return k
    return -1


@compiled
def _keep(
    buffer: Rows[int],
    ports: Matrix,
    num_inputs: int,
    task: int,
    kept: int,
    place: int,
    row: int,
    step: int,
    leaves: bool,
) -> None:
    """Keep the outputs of one row of a step, which are at position ``place`` of the kernel's outputs."""
    rows, steps = buffer[layout.H_ROWS], buffer[layout.H_STEPS]
    for k in range(num_inputs, ports.shape[0]):
        size = ports[k, ROW_BYTES]
        source, target = read_word(task, FIRST_INPUT + k) + place * size, read_word(kept, k)
        if buffer[ports[k, RECORD] + layout.OUT_RESULT_STEPS]:
            copy_bytes(target + (row * steps + step) * size, source, size)
            target += rows * steps * size
        if leaves:
            copy_bytes(target + row * size, source, size)


@compiled
def _go_on(ports: Matrix, num_inputs: int, task: int, place: int, to: int) -> None:
    """Prepare the inputs of a row's next step, at position ``to``, from this step's outputs at position ``place``."""
    for k in range(num_inputs):
        size, target = ports[k, ROW_BYTES], read_word(task, FIRST_INPUT + k) + to * ports[k, ROW_BYTES]
        if ports[k, FLAG] and place != to:
            _move_values(ports[k], task, k, read_word(task, FIRST_INPUT + ports.shape[0] + k), place, to)
        elif ports[k, CARRY] >= 0:
            source = read_word(task, FIRST_INPUT + num_inputs + ports[k, CARRY])
            copy_bytes(target, source + place * size, size)
        elif place != to:
            copy_bytes(target, read_word(task, FIRST_INPUT + k) + place * size, size)


@compiled
def _move_values(port: Rows[int], task: int, number: int, offsets: int, place: int, to: int) -> None:
    """Move the values of a ragged input's row to the end of those of the row before ``to``."""
    values, size = read_word(task, FIRST_INPUT + number), port[ROW_BYTES]
    first, start = read_word(offsets, place), read_word(offsets, to)
    count = read_word(offsets, place + 1) - first
    move_bytes(values + start * size, values + first * size, count * size)
    write_word(offsets, to + 1, start + count)


@compiled
def _ends(buffer: Rows[int], active: int, flags: int, count: int, step: int) -> bool:
    """Return whether any row stops at a step, or has taken all the steps that it may."""
    for place in range(count):
        if step + 1 == buffer[buffer[layout.H_LENGTHS] + read_word(active, place)]:
            return True
        if flags != 0 and read_byte(flags, place) != 0:
            return True
    return False


@compiled
def run_loop(
    buffer: Rows[int], ports: Matrix, num_inputs: int, own: int, host: int, kernel: int, constants: int, task: int
) -> int:
    """Run a loop's task as ``run_task`` does, and write the steps that each row took.

    ``task`` is the address of the scratch.
    """
    rows, num_ports = buffer[layout.H_ROWS], ports.shape[0]
    # The scratch: the kernel's words, addresses of kept rows, the batch size, the active rows, then inputs and outputs.
    kept = task + 8 * (FIRST_INPUT + num_ports + num_inputs)
    sizes = kept + 8 * num_ports
    active = sizes + 8
    at = aligned(active + 8 * rows)
    for k in range(num_ports):
        write_word(task, FIRST_INPUT + k, at)
        if k < num_inputs:
            size = buffer[ports[k, RECORD] + layout.IN_COUNT] * ports[k, ROW_BYTES]
            place = gather(buffer, ports[k], own, at)
            if place != at:
                copy_bytes(at, place, size)
            at = read_offsets(buffer, ports, task, k, rows, aligned(at + size))
        else:
            at = aligned(at + rows * ports[k, ROW_BYTES])
            write_word(kept, k, at)
            at = aligned(at + _kept_rows(buffer, ports[k]) * ports[k, ROW_BYTES])
    # All rows are active at first.
    for row in range(rows):
        write_word(active, row, row)
    stop = stop_output(buffer, ports, num_inputs)
    if stop >= 0 and ports[stop, ROW_BYTES] != 1:
        return REFUSED
    # Each step runs the active rows, keeps what they gave, and moves those that go on to the front.
    count, step, has_ended = rows, 0, False
    write_word(task, STEPS, 1)
    write_word(task, BATCH_SIZES, sizes)
    while count > 0:
        write_word(task, POSITIONS, count)
        write_word(sizes, 0, count)
        if call(kernel, constants, task) != 0:
            return REFUSED
        left = 0
        for k in range(num_inputs, num_ports):
            values = read_word(task, FIRST_INPUT + k)
            if ports[k, FLAG] and not are_finite(values, count * ports[k, ROW_BYTES] // 4):
                return REFUSED
        flags = read_word(task, FIRST_INPUT + stop) if stop >= 0 else 0
        has_ended = has_ended or _ends(buffer, active, flags, count, step)
        is_last = has_ended and step + 1 >= buffer[layout.H_LEAST_STEPS]
        for place in range(count):
            row = read_word(active, place)
            stops = stop >= 0 and read_byte(flags, place) != 0
            leaves = stops or is_last or step + 1 == buffer[buffer[layout.H_LENGTHS] + row]
            _keep(buffer, ports, num_inputs, task, kept, place, row, step, leaves)
            if leaves:
                buffer[buffer[layout.H_DONE_STEPS] + row] = -(step + 1) if stops else step + 1
            else:
                _go_on(ports, num_inputs, task, place, left)
                write_word(active, left, row)
                left += 1
        count, step = left, step + 1
    # Copy states and results of all rows to the arenas, once no step can refuse any more.
    for k in range(num_inputs, num_ports):
        results = read_word(kept, k)
        states = results + (_kept_rows(buffer, ports[k]) - rows) * ports[k, ROW_BYTES]
        put(buffer, ports[k], own, host, states, results)
    return DONE
