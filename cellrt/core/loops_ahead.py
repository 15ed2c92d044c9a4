"""Loops of one cell that go ahead: the next task is sent before it is known whether one before it said stop.

Tasks of a loop run on one worker in order and are taken in in order. One behind a task that stopped or failed counts
nothing: its rows were masked where it ran (``task_layout.py``), so that no state has moved and no result is shown.

A task writes the state of an output to a row that no task in flight reads or writes: of n tasks in flight each has its
own, and the state before them has one. These rows take turns. When nothing is in flight, or the loop is over, all but
the one after the last step that is done go back: a task that is still in flight may write to them, but whoever takes
them comes behind it on the same stream.
"""

from __future__ import annotations

from cellrt.core import record_layout as record
from cellrt.core import task_layout as layout
from cellrt.core.jit import compiled
from cellrt.core.queue import refresh
from cellrt.core.records import give_late_rows, kind_of, output_at
from cellrt.core.rows import give_row, take_row


@compiled
def send_run(t, subgraph_id, steps):
    """Notes that a task with so many steps of a loop was submitted; makes the next ready if it may go ahead."""
    links, at = t.links, t.subgraphs[subgraph_id].record
    links[at + record.POSITION] += steps
    links[at + record.NUM_SENT] += 1
    refresh(t, subgraph_id)


@compiled
def row_ahead(t, subgraph, output, to, worker, kind):
    """The row that a loop's next task writes the state of an output to, which is at ``to``."""
    links, word = t.links, _word_of(t, subgraph, output, t.links[subgraph.record + record.NUM_SENT])
    if links[word] == 0:
        links[word] = take_row(t, worker, kind)
    if subgraph.in_flight == 0:
        links[to + record.PREVIOUS_ROW] = links[to + record.ROW]
    links[to + record.ROW] = links[word]
    return links[word]


@compiled
def _word_of(t, subgraph, output, task):
    """The link of the row that task number ``task`` writes the state of an output to."""
    ahead = t.types[subgraph.cell_type].ahead
    place = task % (ahead + 2)
    if place < 2:
        return output_at(t, subgraph, output) + record.FIRST_ROW + place
    return t.links[subgraph.record + record.MORE_ROWS] + ahead * output + place - 2


@compiled
def write_flags(t, task, base, end):
    """Writes from ``end`` on which flags the rows of a task read and write; returns the new end."""
    ints, rows, nodes_at = t.ints, task.rows, base + t.ints[base + layout.H_NODES]
    ints[base + layout.H_FLAGS], ints[base + layout.H_NEW_FLAGS] = end - base, end + rows - base
    for row in range(rows):
        subgraph_id = ~ints[nodes_at + row]
        subgraph = t.subgraphs[subgraph_id]
        turn = t.links[subgraph.record + record.NUM_SENT] % 2
        own = layout.NOBODYS + 1 + 2 * subgraph_id
        ints[end + row] = own + 1 - turn if subgraph.in_flight > 0 else layout.NEVER_STOPPED
        ints[end + rows + row] = own + turn
    return end + layout.FLAGS * rows


@compiled
def note_run(t, subgraph, done, has_failed):
    """Takes in how the oldest task of a loop in flight went: what state stays. Returns whether it counts.

    ``done``: steps, negative if it stopped. Comes for dead requests too, whose session may keep the state.
    """
    links, at = t.links, subgraph.record
    task = links[at + record.NUM_SENT] - 1 - subgraph.in_flight
    if links[at + record.NUM_SENT] == record.OVER:
        return False
    is_over = has_failed or (done < 0 and links[at + record.STOP] != record.NO_STOP)
    if not has_failed:
        links[at + record.DONE] += abs(done)
        give_late_rows(t, subgraph)
    for output in range(t.types[subgraph.cell_type].num_outputs):
        to = output_at(t, subgraph, output)
        if links[to + record.IS_STATE]:
            if not has_failed:
                links[to + record.PREVIOUS_ROW] = links[_word_of(t, subgraph, output, task)]
            if is_over or subgraph.in_flight == 0:
                _keep_one(t, subgraph, output)
    if is_over:
        links[at + record.NUM_SENT] = record.OVER
    elif subgraph.in_flight == 0:
        links[at + record.NUM_SENT] = 1  # the next task takes the second row
    return True


@compiled
def _keep_one(t, subgraph, output):
    """Gives back all rows of an output's state but that of the last step that is done, which becomes the first."""
    links, to, kept = t.links, output_at(t, subgraph, output), 0
    links[to + record.ROW] = links[to + record.PREVIOUS_ROW]
    for task in range(t.types[subgraph.cell_type].ahead + 2):
        word = _word_of(t, subgraph, output, task)
        if links[word] > 0 and links[word] == links[to + record.ROW]:
            kept = links[word]
        elif links[word] > 0:
            give_row(t, links[word], kind_of(t, subgraph, output))
        links[word] = 0
    links[to + record.FIRST_ROW] = kept
