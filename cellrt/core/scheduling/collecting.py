"""The choice of the ready rows that go into a task, in the order of the cell type's queues (Algorithm 1, lines 24-32).

The client priority whose turn it is comes first, then the others. Subgraphs are scanned in queue order; those pinned to
another worker are passed over (line 27). A task holds nodes and steps of chains and loops. But loops that run have
tasks of their own, and only one output of a task says stop. The collected rows are counted in ``Forming``;
``span_choice.py`` takes rows of chains and loops for a task of a cell with spans.
"""

from __future__ import annotations

from cellrt.core.pages.span_arrays import task_room
from cellrt.core.running.records import ragged_ints
from cellrt.core.scheduling.policy import put_in_order
from cellrt.core.scheduling.span_choice import add_rows, begin_spans, take_span
from cellrt.core.state.queue import backlog_of, nth_priority, pop_ready
from cellrt.core.state.record_layout import body_of, record_of
from cellrt.core.state.tables import GRAPH, LOOP, NUM_PRIORITIES, CellType, Tables
from cellrt.native.jit import compiled


@compiled
def collect(t: Tables, type_id: int, priority: int, worker: int, nodes_at: int) -> None:
    """Write the rows of a task to the buffer, from ``nodes_at`` on, and count them in ``t.forming``.

    A row is its node, or the complement of its chain or loop. ``priority`` is the client priority whose turn it is.
    """
    forming, cell_type, settings = t.forming[0], t.types[type_id], t.settings[0]
    _begin(t, cell_type, type_id, worker)
    is_ordered = settings.steps_first + settings.prompts_apart > 0
    # Single steps and chains with several steps are collected in two passes, if one kind goes before the other.
    passes = 2 if cell_type.has_spans and is_ordered and not cell_type.is_whole else 1
    for number in range(passes):
        forming.are_long = 1 - number if settings.prompts_apart and passes == 2 else number
        for k in range(NUM_PRIORITIES):
            its_priority = nth_priority(priority, k)
            if number == 0 and forming.rows < forming.most_rows:
                put_in_order(t, type_id, its_priority, worker)
            subgraph_id = t.lanes[backlog_of(type_id, its_priority)].head
            while subgraph_id >= 0 and forming.rows < forming.most_rows and forming.spans < forming.most_spans:
                subgraph = t.subgraphs[subgraph_id]
                # Taking a subgraph may take it out of its queue: remember the next one.
                following = subgraph.next
                if subgraph.num_ready > 0 and (subgraph.pinned == 0 or subgraph.pinned == worker):
                    if cell_type.has_spans:
                        goes_on = take_span(t, cell_type, subgraph_id, worker, nodes_at, passes)
                    else:
                        goes_on = _take(t, cell_type, subgraph_id, nodes_at)
                    if not goes_on:
                        return
                subgraph_id = following
        if settings.prompts_apart and forming.rows > 0 and passes == 2:
            return
        if not forming.are_long:
            forming.singles = forming.rows


@compiled
def _begin(t: Tables, cell_type: CellType, type_id: int, worker: int) -> None:
    """Begin a task without rows. Ready nodes that no worker holds are shared out among the idle workers."""
    forming, settings = t.forming[0], t.settings[0]
    forming.rows = forming.spans = forming.ragged = forming.nodes = forming.loops = forming.is_loop = 0
    forming.priorities = forming.new = forming.singles = 0
    forming.stop, forming.room = -1, task_room(t, cell_type)
    forming.most_rows = forming.most_spans = cell_type.max_batch
    if cell_type.has_spans:
        forming.most_rows = cell_type.max_rows
        begin_spans(t, type_id, worker)
        return
    share, unpinned, pinned = max(1, settings.idle_workers) if settings.split else 1, 0, 0
    for priority in range(NUM_PRIORITIES):
        unpinned += t.ready[backlog_of(type_id, priority), 0]
        pinned += t.ready[backlog_of(type_id, priority), worker]
    shared = pinned + max((unpinned + share - 1) // share, cell_type.large_batch)
    forming.most_rows = min(forming.most_rows, shared)


@compiled
def _take(t: Tables, cell_type: CellType, subgraph_id: int, nodes_at: int) -> bool:
    """Move ready rows of a subgraph to the task, if they may be in it; return False if its buffer is full."""
    forming, subgraph = t.forming[0], t.subgraphs[subgraph_id]
    if subgraph.what == GRAPH:
        return _take_nodes(t, cell_type, subgraph_id, nodes_at)
    runs, stop = 0, -1
    if subgraph.what == LOOP:
        runs, stop = body_of(t, subgraph).runs, record_of(t, subgraph).stop
    if not _fits_with(t, runs, stop):
        return True
    count = min(subgraph.num_ready, forming.most_rows - forming.rows)
    if cell_type.num_ragged > 0:
        extra = ragged_ints(t, cell_type, subgraph)
        if forming.rows > 0 and forming.ragged + extra > forming.room:
            return False
        if extra > 0:
            count = max(1, min(count, (forming.room - forming.ragged) // extra))
            forming.ragged += count * extra
    add_rows(t, subgraph_id, count, runs, nodes_at)
    return True


@compiled
def _take_nodes(t: Tables, cell_type: CellType, subgraph_id: int, nodes_at: int) -> bool:
    """Move ready nodes of a subgraph to the task, as ``_take`` does."""
    forming, subgraph = t.forming[0], t.subgraphs[subgraph_id]
    if not _fits_with(t, 0, -1):
        return True
    while subgraph.num_ready > 0 and forming.rows < forming.most_rows:
        most = forming.most_rows - forming.rows
        if cell_type.num_ragged > 0:
            extra, most = 2 * (t.nodes[subgraph.ready_head].num_refs - cell_type.num_inputs), 1
            if forming.rows > 0 and forming.ragged + extra > forming.room:
                return False
            forming.ragged += extra
        count = pop_ready(t, subgraph, nodes_at + forming.rows, most)
        forming.rows, forming.nodes = forming.rows + count, forming.nodes + count
    forming.priorities |= 1 << subgraph.priority
    return True


@compiled
def _fits_with(t: Tables, runs: int, stop: int) -> bool:
    """Return whether rows may be in one task with those that are in it."""
    forming = t.forming[0]
    if forming.rows == 0 or (runs == forming.is_loop and stop == forming.stop):
        return True
    return runs == forming.is_loop and runs == 0 and min(stop, forming.stop) < 0
