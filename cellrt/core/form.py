"""FormBatchedTask (Algorithm 1, lines 24-32): which nodes go into a task, and the index arrays that say where its rows lie.

A task is formed in five passes over its rows: collect nodes in queue order, choose the number of steps and sort the
rows by length, write input rows, take output rows, then free the rows whose last reader this was. Freeing comes last, so
that no row is read and written in one task.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from cellrt.core import task_layout as layout
from cellrt.core.queue import num_ready, pop_ready
from cellrt.core.rows import give_row, take_row
from cellrt.core.tables import (
    CARRIED,
    CHAIN_NEXT,
    LAST_ONLY,
    LOCATION_SHIFT,
    LOOP,
    MIXED,
    NUM_LANES,
    NUM_PERMANENT,
    NUM_SIZE_CLASSES,
    ROW_MASK,
    STEPS,
)


@njit(cache=True, nogil=True)
def size_class(rows):
    """The power of two at or above ``rows``, as an exponent."""
    k = 0
    while (1 << k) < rows and k < NUM_SIZE_CLASSES - 1:
        k += 1
    return k


@njit(cache=True, nogil=True)
def step_time(t, type_id, rows):
    """Measured ns of one step at about this many rows; the nearest measured size if this one is not; 0 if none is."""
    wanted = size_class(rows)
    for distance in range(NUM_SIZE_CLASSES):
        if wanted - distance >= 0 and t.step_ns[type_id, wanted - distance] > 0:
            return t.step_ns[type_id, wanted - distance]
        if wanted + distance < NUM_SIZE_CLASSES and t.step_ns[type_id, wanted + distance] > 0:
            return t.step_ns[type_id, wanted + distance]
    return np.float32(0)


@njit(cache=True, nogil=True)
def _first_lane(t, type_id):
    """Lane to scan first: usually 0, but every ``fair_every``-th task the lane that was served longest ago."""
    settings, cell_type = t.settings[0], t.types[type_id]
    cell_type.num_formed += 1
    if cell_type.num_formed % settings.fair_every != 0:
        return 0
    best = 0
    for lane in range(NUM_LANES):
        if t.lanes[type_id * NUM_LANES + lane].head >= 0:
            if t.lanes[type_id * NUM_LANES + best].head < 0:
                best = lane
            elif t.lanes[type_id * NUM_LANES + lane].served < t.lanes[type_id * NUM_LANES + best].served:
                best = lane
    return best


@njit(cache=True, nogil=True)
def _collect(t, type_id, worker, nodes_at, limit, room):
    """Moves ready nodes of the type's queue to the buffer.

    Subgraphs are scanned in queue order; those pinned to another worker are passed over (Algorithm 1, line 27). A task
    holds nodes of graphs or of loops with one stop output, never both. ``room`` is the number of ints left for
    ragged inputs. Returns (rows, ragged ints, whether they are loops).
    """
    rows = ragged = 0
    stop, is_loop = -2, 0
    cell_type = t.types[type_id]
    first = _first_lane(t, type_id)
    left = min(limit, num_ready(t, type_id, worker))
    for k in range(-1, NUM_LANES):
        lane_id = first if k < 0 else k
        if k == first or left == 0:
            continue
        lane = t.lanes[type_id * NUM_LANES + lane_id]
        subgraph_id = lane.head
        while subgraph_id >= 0 and rows < left:
            subgraph = t.subgraphs[subgraph_id]
            following = subgraph.next
            if subgraph.pinned == 0 or subgraph.pinned == worker:
                while subgraph.num_ready > 0 and rows < left:
                    node = t.nodes[subgraph.ready_head]
                    loop = 1 if node.bits & LOOP else 0
                    if rows > 0 and (loop != is_loop or subgraph.loop_stop != stop):
                        break
                    extra = 2 * (node.num_refs - cell_type.num_inputs)
                    if rows > 0 and ragged + extra > room:
                        return rows, ragged, is_loop
                    ragged += extra
                    is_loop, stop = loop, subgraph.loop_stop
                    t.ints[nodes_at + rows] = pop_ready(t, subgraph)
                    lane.served = cell_type.num_formed
                    rows += 1
            subgraph_id = following
    return rows, ragged, is_loop


@njit(cache=True, nogil=True)
def _choose_steps(t, type_id, rows):
    """How many steps a task of ``rows`` rows may run (DESIGN, "Runs").

    As many as fit the join budget, so that nobody who arrives waits long to join; or as many as end before half a
    request more is expected, so that whole chains run at once at low load.
    """
    settings = t.settings[0]
    if not settings.runs:
        return 1
    step = step_time(t, type_id, rows)
    if step <= 0:
        return 1
    gap = max(settings.arrival_gap_ns, np.float64(settings.now_ns - settings.last_arrival_ns))
    steps = max(np.float64(settings.join_budget_ns), 0.5 * gap) / step
    return max(1, int(min(steps, np.float64(t.types[type_id].max_steps))))


@njit(cache=True, nogil=True)
def _run_length(t, node_id, limit):
    """How many nodes from ``node_id`` on can run one after the other with nothing else outstanding."""
    length = 1
    while length < limit and t.nodes[node_id + length - 1].bits & CHAIN_NEXT:
        if t.nodes[node_id + length].pending != 1:
            break
        length += 1
    return length


@njit(cache=True, nogil=True)
def _sort_rows(t, nodes_at, lengths_at, scratch_at, rows, limit, is_loop):
    """Writes each row's length and sorts rows by falling length (counting sort, stable); returns the longest."""
    ints = t.ints
    longest, shortest = 1, limit
    for row in range(rows):
        node_id = ints[nodes_at + row]
        if is_loop:
            subgraph = t.subgraphs[t.nodes[node_id].subgraph]
            length = min(limit, subgraph.loop_limit - subgraph.loop_steps)
        else:
            length = _run_length(t, node_id, limit)
        ints[lengths_at + row] = length
        longest, shortest = max(longest, length), min(shortest, length)
    if longest == shortest:
        return longest
    starts = np.zeros(longest + 2, np.int32)
    for row in range(rows):
        starts[longest - ints[lengths_at + row] + 1] += 1
    for k in range(1, longest + 1):
        starts[k] += starts[k - 1]
    for row in range(rows):
        ints[scratch_at + row] = ints[nodes_at + row]
        ints[scratch_at + rows + row] = ints[lengths_at + row]
    for row in range(rows):
        length = ints[scratch_at + rows + row]
        to = starts[longest - length]
        starts[longest - length] += 1
        ints[nodes_at + to] = ints[scratch_at + row]
        ints[lengths_at + to] = length
    return longest


@njit(cache=True, nogil=True)
def read_value(t, value, worker, freed_at, num_freed):
    """Counts one read of a value by a task of ``worker``; notes its row as free if it was the last.

    A row elsewhere is still to be read when the task runs: it is counted when the task completes.
    Returns (handle, number of rows noted, whether the row is remote).
    """
    handle = value.row
    if handle < NUM_PERMANENT:
        return handle, num_freed, 0
    if handle >> LOCATION_SHIFT != worker:
        return handle, num_freed, 1
    value.readers -= 1
    if value.readers == 0:
        value.row = -1
        t.ints[freed_at + 2 * num_freed] = handle
        t.ints[freed_at + 2 * num_freed + 1] = value.kind
        num_freed += 1
    return handle, num_freed, 0


@njit(cache=True, nogil=True)
def _input_rows(t, task, base, sizes, rows_at, offsets_at, freed_at):
    """Writes the handle of every input row, and counts the reads; returns (rows noted as free, rows that are remote).

    Inputs that are carried from step to step within the run have no row; reading them only lowers the count.
    """
    ints, cell_type, worker = t.ints, t.types[task.cell_type], task.worker
    nodes_at, lengths_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_LENGTHS]
    num_freed = remote = 0
    start = 0
    for step in range(1 if task.is_loop else task.steps):
        for row in range(sizes[step]):
            first_id = ints[nodes_at + row]
            node = t.nodes[first_id if task.is_loop else first_id + step]
            subgraph = t.subgraphs[node.subgraph]
            request = t.requests[subgraph.request]
            at = node.first_link
            for port in range(cell_type.num_inputs):
                info = t.ports[cell_type.first_port + port]
                count = 1
                if info.ragged:
                    count = t.links[at]
                    at += 1
                if task.is_loop and info.carry >= 0 and subgraph.loop_steps > 0:
                    value = t.values[node.first_value + info.carry]
                    handle = value.row
                    if handle >> LOCATION_SHIFT != worker:
                        remote = 1
                    else:
                        ints[freed_at + 2 * num_freed] = handle
                        ints[freed_at + 2 * num_freed + 1] = value.kind
                        num_freed += 1
                    ints[rows_at[port]] = handle
                    rows_at[port] += 1
                elif info.carry >= 0 and step > 0:
                    t.values[t.nodes[first_id + step - 1].first_value + info.carry].readers -= 1
                elif task.is_loop and info.carry < 0:
                    for k in range(count):
                        handle = t.values[request.first_value + t.links[at + k]].row
                        if handle >= NUM_PERMANENT and handle >> LOCATION_SHIFT != worker:
                            remote = 1
                        ints[rows_at[port] + k] = handle
                    rows_at[port] += count
                else:
                    for k in range(count):
                        value = t.values[request.first_value + t.links[at + k]]
                        handle, num_freed, elsewhere = read_value(t, value, worker, freed_at, num_freed)
                        remote |= elsewhere
                        ints[rows_at[port] + k] = handle
                    rows_at[port] += count
                if info.ragged:
                    ints[offsets_at[port] + start + row + 1] = ints[offsets_at[port] + start + row] + count
                at += count
        start += sizes[step]
    return num_freed, remote


@njit(cache=True, nogil=True)
def _finish_input(t, record, rows_from, rows_to):
    """Finds where the rows of one input lie; if all at one location, turns handles into row numbers."""
    ints = t.ints
    source = -2
    for k in range(rows_from, rows_to):
        handle = ints[k]
        if handle >= NUM_PERMANENT:
            location = handle >> LOCATION_SHIFT
            if source == -2:
                source = location
            elif source != location:
                source = MIXED
                break
    ints[record + layout.IN_SOURCE] = source
    ints[record + layout.IN_COUNT] = rows_to - rows_from
    if source != MIXED:
        for k in range(rows_from, rows_to):
            ints[k] &= ROW_MASK


@njit(cache=True, nogil=True)
def _write_inputs(t, task, base, sizes, end):
    """Lays out and writes all inputs; returns (position of the rows noted as free, their number)."""
    ints, cell_type = t.ints, t.types[task.cell_type]
    num_inputs = cell_type.num_inputs
    rows_at = np.empty(num_inputs, np.int64)
    starts = np.empty(num_inputs, np.int64)
    offsets_at = np.full(num_inputs, -1, np.int64)
    nodes_at = base + ints[base + layout.H_NODES]
    for port in range(num_inputs):
        info = t.ports[cell_type.first_port + port]
        record = base + layout.HEADER + port * layout.INPUT
        count = task.rows if info.carry >= 0 or task.is_loop else task.positions
        positions = count
        ints[record + layout.IN_OFFSETS] = -1
        if info.ragged:
            ints[record + layout.IN_OFFSETS] = end - base
            offsets_at[port] = end
            ints[end] = 0
            end += positions + 1
            count = _count_ragged(t, task, nodes_at, sizes, port)
        ints[record + layout.IN_ROWS] = end - base
        rows_at[port] = starts[port] = end
        end += count
    num_freed, remote = _input_rows(t, task, base, sizes, rows_at, offsets_at, end)
    task.has_remote = remote
    for port in range(num_inputs):
        _finish_input(t, base + layout.HEADER + port * layout.INPUT, starts[port], rows_at[port])
    return end, num_freed


@njit(cache=True, nogil=True)
def _count_ragged(t, task, nodes_at, sizes, wanted):
    """Total number of rows of one ragged input over the task."""
    cell_type = t.types[task.cell_type]
    total = 0
    for step in range(1 if task.is_loop else task.steps):
        for row in range(sizes[step]):
            at = t.nodes[t.ints[nodes_at + row] + (0 if task.is_loop else step)].first_link
            for port in range(wanted + 1):
                count = 1
                if t.ports[cell_type.first_port + port].ragged:
                    count = t.links[at]
                    at += 1
                if port == wanted:
                    total += count
                at += count
    return total


@njit(cache=True, nogil=True)
def _write_outputs(t, task, base, sizes, end):
    """Takes an arena row for each output that somebody reads and a host row for each result; returns the end."""
    cell_type = t.types[task.cell_type]
    for output in range(cell_type.num_outputs):
        kind = t.ports[cell_type.first_port + cell_type.num_inputs + output].kind
        record = base + layout.HEADER + cell_type.num_inputs * layout.INPUT + output * layout.OUTPUT
        if task.is_loop:
            end = _loop_output(t, task, base, record, output, kind, end)
        else:
            end = _graph_output(t, task, base, sizes, record, output, kind, end)
    return end


@njit(cache=True, nogil=True)
def _graph_output(t, task, base, sizes, record, output, kind, end):
    ints = t.ints
    nodes_at = base + ints[base + layout.H_NODES]
    limit = task.positions
    positions_at, rows_at, result_positions_at, result_rows_at = end, end + limit, end + 2 * limit, end + 3 * limit
    stores = results = start = 0
    for step in range(task.steps):
        for row in range(sizes[step]):
            node = t.nodes[ints[nodes_at + row] + step]
            value = t.values[node.first_value + output]
            if value.readers > 0:
                handle = take_row(t, task.worker, kind)
                value.row = handle
                ints[positions_at + stores] = start + row
                ints[rows_at + stores] = handle & ROW_MASK
                stores += 1
            if value.result >= 0:
                handle = take_row(t, 0, kind)
                request = t.requests[t.subgraphs[node.subgraph].request]
                t.links[request.results + value.result] = handle
                ints[result_positions_at + results] = start + row
                ints[result_rows_at + results] = handle
                results += 1
        start += sizes[step]
    _describe_output(ints, record, base, stores, positions_at, rows_at, results, result_positions_at, result_rows_at)
    return end + 4 * limit


@njit(cache=True, nogil=True)
def _loop_output(t, task, base, record, output, kind, end):
    ints = t.ints
    nodes_at, lengths_at = base + ints[base + layout.H_NODES], base + ints[base + layout.H_LENGTHS]
    rows, limit = task.rows, task.rows * task.steps
    positions_at, rows_at = end, end + rows
    result_positions_at, result_rows_at = end + 2 * rows, end + 2 * rows + limit
    stores = results = 0
    every_step = 0
    for row in range(rows):
        node = t.nodes[ints[nodes_at + row]]
        value = t.values[node.first_value + output]
        subgraph = t.subgraphs[node.subgraph]
        request = t.requests[subgraph.request]
        if value.readers > 0 or value.bits & CARRIED:
            if value.row >= NUM_PERMANENT and not value.bits & CARRIED:
                give_row(t, value.row, kind)  # of the step before, which nobody will read
            value.row = take_row(t, task.worker, kind)
            ints[positions_at + stores] = row
            ints[rows_at + stores] = value.row & ROW_MASK
            stores += 1
        if value.bits & STEPS:
            every_step = 1
            for step in range(ints[lengths_at + row]):
                handle = take_row(t, 0, kind)
                t.links[request.results + value.result + subgraph.loop_steps + step] = handle
                ints[result_positions_at + results] = row * task.steps + step
                ints[result_rows_at + results] = handle
                results += 1
        elif value.bits & LAST_ONLY:
            handle = t.links[request.results + value.result]
            if handle < 0:
                handle = take_row(t, 0, kind)
                t.links[request.results + value.result] = handle
            ints[result_positions_at + results] = row
            ints[result_rows_at + results] = handle
            results += 1
    _describe_output(ints, record, base, stores, positions_at, rows_at, results, result_positions_at, result_rows_at)
    ints[record + layout.OUT_RESULT_STEPS] = every_step
    return end + 2 * rows + 2 * limit


@njit(cache=True, nogil=True)
def _describe_output(ints, record, base, stores, positions_at, rows_at, results, result_positions_at, result_rows_at):
    ints[record + layout.OUT_STORES] = stores
    ints[record + layout.OUT_STORE_POSITIONS] = positions_at - base
    ints[record + layout.OUT_STORE_ROWS] = rows_at - base
    ints[record + layout.OUT_RESULTS] = results
    ints[record + layout.OUT_RESULT_POSITIONS] = result_positions_at - base
    ints[record + layout.OUT_RESULT_ROWS] = result_rows_at - base
    ints[record + layout.OUT_RESULT_STEPS] = 0


@njit(cache=True, nogil=True)
def form_batched_task(t, type_id, worker, task_id):
    """Forms at most one task of a cell type for a worker in task row ``task_id``; returns its number of rows.

    Dependencies are not touched: ``schedule.update_dependencies`` does that once the task is submitted.
    """
    ints, cell_type, task = t.ints, t.types[type_id], t.tasks[task_id]
    buffer_ints = t.settings[0].buffer_ints
    base = task_id * buffer_ints
    header = layout.HEADER + cell_type.num_inputs * layout.INPUT + cell_type.num_outputs * layout.OUTPUT
    nodes_at = base + header
    room = buffer_ints - header - cell_type.max_batch * (cell_type.per_row + 1)
    rows, ragged, is_loop = _collect(t, type_id, worker, nodes_at, cell_type.max_batch, room)
    if rows == 0:
        return 0
    steps = _choose_steps(t, type_id, rows)
    if steps > 1:
        ragged_steps = 1 if is_loop == 1 else steps
        space = buffer_ints - header - 4 * rows - ragged * ragged_steps
        steps = max(1, min(steps, space // (rows * cell_type.per_row + 1)))
        if ragged > 0 and is_loop == 0:
            steps = 1
    task.cell_type, task.worker, task.in_use, task.is_loop, task.rows = type_id, worker, 1, is_loop, rows
    lengths_at = nodes_at + rows
    task.steps = _sort_rows(t, nodes_at, lengths_at, lengths_at + rows, rows, steps, is_loop == 1)
    sizes = np.zeros(task.steps, np.int32)
    batch_sizes_at = lengths_at + rows
    done_at = batch_sizes_at + task.steps
    task.positions = 0
    for row in range(rows):
        task.positions += ints[lengths_at + row]
        sizes[ints[lengths_at + row] - 1] += 1
        ints[done_at + row] = ints[lengths_at + row]
        ints[done_at + rows + row] = 0
    for step in range(task.steps - 2, -1, -1):
        sizes[step] += sizes[step + 1]
    for step in range(task.steps):
        ints[batch_sizes_at + step] = sizes[step]
    ints[base + layout.H_ROWS], ints[base + layout.H_STEPS] = rows, task.steps
    ints[base + layout.H_POSITIONS], ints[base + layout.H_IS_LOOP] = task.positions, is_loop
    ints[base + layout.H_NODES], ints[base + layout.H_LENGTHS] = header, lengths_at - base
    ints[base + layout.H_BATCH_SIZES], ints[base + layout.H_DONE_STEPS] = batch_sizes_at - base, done_at - base
    ints[base + layout.H_FAILED] = done_at + rows - base
    ints[base + layout.H_STOP_OUTPUT] = t.subgraphs[t.nodes[ints[nodes_at]].subgraph].loop_stop
    freed_at, num_freed = _write_inputs(t, task, base, sizes, done_at + 2 * rows)
    _write_outputs(t, task, base, sizes, freed_at + 2 * num_freed)
    for k in range(num_freed):
        give_row(t, ints[freed_at + 2 * k], ints[freed_at + 2 * k + 1])
    task.expected_ns = step_time(t, type_id, rows) * task.steps
    return rows
