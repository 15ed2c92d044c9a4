"""Loops that go ahead: the next task is sent before it is known whether an earlier one said stop.

Tasks of a loop run on one worker in order and are taken in in order. A task after one that stopped or failed counts
nothing: its rows were masked where it ran (``task_layout.py``), so that no state has moved and no result is shown.
Pages that it appended to hold no more rows than before, and are freed when nothing of the request is in flight.

A task writes the state of an output to a row that no task in flight reads or writes: each of n tasks in flight has its
own row, and the state before them has one. These rows are used in turns, by the number of the task, and belong to the
loop until it ends or moves to another worker. Then those that tasks in flight may write to are freed too, but a task
that takes them comes later on the same stream. A loop that goes ahead of nothing has two such rows.
"""

from __future__ import annotations

from cellrt.core.running.records import kind_of
from cellrt.core.state import task_layout as layout
from cellrt.core.state.record_layout import NO_STOP, ROWS_AT, body_of, output_of, output_position, record_of
from cellrt.core.state.rows import give_row, take_row
from cellrt.core.state.tables import CHAIN, LOCATION_SHIFT, Subgraph, Tables, Task
from cellrt.native.jit import compiled


@compiled
def state_after(t: Tables, task: Task, subgraph: Subgraph, number: int, kind: int) -> int:
    """Take the row that the next task of a loop's cell writes the state of output ``number`` to."""
    output, at = output_of(t, subgraph, number), _turn_of(t, subgraph, number, record_of(t, subgraph).num_sent)
    _bring(t, task, subgraph, number, kind)
    if t.links[at] == 0:
        t.links[at] = take_row(t, task.worker, kind)
    output.previous_row = output.row
    output.row = t.links[at]
    return t.links[at]


@compiled
def _turn_of(t: Tables, subgraph: Subgraph, output: int, task: int) -> int:
    """Return the link of the row that task number ``task`` writes the state of an output to."""
    cell_type = t.types[subgraph.cell_type]
    return output_position(subgraph.record, cell_type, output) + ROWS_AT + task % (cell_type.ahead + 2)


@compiled
def write_flags(t: Tables, task: Task, base: int, end: int) -> int:
    """Write from ``end`` on the flags that the rows of a task read and write, if any are of a loop that may stop.

    Return the new end.
    """
    ints, rows, nodes_at = t.ints, task.rows, base + t.ints[base + layout.H_NODES]
    may_stop, before = task.is_loop == 1, 0
    for row in range(rows):
        id = ints[nodes_at + row]
        before = before + 1 if row > 0 and ints[nodes_at + row - 1] == id else 0
        ints[end + row], ints[end + rows + row] = layout.NEVER_STOPPED, layout.NOBODYS
        if id >= 0 or t.subgraphs[~id].what == CHAIN:
            continue
        task.goes_ahead = 1
        record = record_of(t, t.subgraphs[~id])
        if record.position + before >= record.unseen:
            may_stop = _write_flags_of(t, task, t.subgraphs[~id], end + row, end + rows + row) or may_stop
    if not may_stop:
        return end
    ints[base + layout.H_FLAGS], ints[base + layout.H_NEW_FLAGS] = end - base, end + rows - base
    return end + layout.FLAGS * rows


@compiled
def _write_flags_of(t: Tables, task: Task, subgraph: Subgraph, read_at: int, written_at: int) -> bool:
    """Write the flags that the next steps of a loop's cell read and write; return whether there are any.

    All steps read the flag of the cell that may say stop, as it was at the task before.
    """
    record, body = record_of(t, subgraph), body_of(t, subgraph)
    if body.stopper < 0 or (body.runs and record.stop == NO_STOP and not task.is_loop):
        return False
    own = layout.NOBODYS + 1 + 2 * (t.requests[subgraph.request].first_subgraph + body.stopper)
    reads = record.position > max(body.all_done, record.unseen)
    writes = body.runs > 0 or record.stop != NO_STOP
    if reads:
        t.ints[read_at] = own + (record.num_sent + 1) % 2
    if writes:
        t.ints[written_at] = own + record.num_sent % 2
    return reads or writes


@compiled
def settle(t: Tables, subgraph: Subgraph, task: int) -> None:
    """Set the state of a loop's cell to what task number ``task`` wrote, or with -1 to what it began with.

    Later tasks do not count.
    """
    for number in range(t.types[subgraph.cell_type].num_outputs):
        output = output_of(t, subgraph, number)
        if output.is_state:
            row = t.links[_turn_of(t, subgraph, number, task)] if task >= 0 else 0
            output.row = row if row > 0 else output.late_row


@compiled
def keep_last(t: Tables, subgraph: Subgraph) -> None:
    """Give back all rows of the state of a loop's cell that has ended, but those of its last step.

    Those become the first rows.
    """
    record, turns = record_of(t, subgraph), t.types[subgraph.cell_type].ahead + 2
    if not body_of(t, subgraph).runs:
        settle(t, subgraph, record.done - 1)
    for number in range(t.types[subgraph.cell_type].num_outputs):
        output, kind, kept = output_of(t, subgraph, number), kind_of(t, subgraph, number), 0
        if not output.is_state:
            continue
        for turn in range(turns):
            at = _turn_of(t, subgraph, number, turn)
            if t.links[at] > 0 and t.links[at] == output.row:
                kept = t.links[at]
            else:
                give_row(t, t.links[at], kind)
            t.links[at] = 0
        output.first_row = kept
    record.position = record.done


@compiled
def _bring(t: Tables, task: Task, subgraph: Subgraph, number: int, kind: int) -> None:
    """Move the state of an output to a task's worker, where the loop goes on with nothing in flight.

    A row that is read elsewhere is given back when all members have done the step.
    """
    output = output_of(t, subgraph, number)
    row = output.row
    if row == 0 or row >> LOCATION_SHIFT == task.worker:
        return
    task.reads_late = 1
    for turn in range(t.types[subgraph.cell_type].ahead + 2):
        at = _turn_of(t, subgraph, number, turn)
        if t.links[at] == row:
            output.late_row = row
        else:
            give_row(t, t.links[at], kind)
        t.links[at] = 0
