"""Chains and loops while they run: from a record's place in a template to its last row.

``record_layout.py`` says what a record is. What a chain or loop reads as a whole it holds until it is over.
"""

from __future__ import annotations

from cellrt.core import page_list
from cellrt.core import record_layout as record
from cellrt.core.jit import compiled, inlined
from cellrt.core.moves import BLOCKED, QUEUED
from cellrt.core.queue import dequeue, enqueue, refresh, set_ready, unpin_if_idle
from cellrt.core.rows import give_row, take_row
from cellrt.core.tables import CHAIN, LOCATION_SHIFT, MEMBER, MIXED, PENDING, STARTS


@compiled
def output_at(t, subgraph, output):
    """Where an output of a record begins."""
    num_inputs = t.types[subgraph.cell_type].num_inputs
    return subgraph.record + record.HEADER + record.INPUT * num_inputs + record.OUTPUT * output


@compiled
def most_steps(t, subgraph):
    """Nodes of a subgraph: steps of a chain, the most steps of a loop, and of a loop of several cells of each cell."""
    if subgraph.record < 0:
        return subgraph.nodes_left
    if subgraph.what == MEMBER:
        return t.links[t.links[subgraph.record + record.BODY] + record.LIMIT]
    return t.links[subgraph.record + record.LENGTH]


@compiled
def begin_record(t, request, subgraph):
    """Turns ids that count from the request's first ones into those of the tables."""
    links, at, cell_type = t.links, subgraph.record, t.types[subgraph.cell_type]
    links[at + record.TAPS] += request.first_link if subgraph.what == CHAIN else request.first_value
    links[at + record.EDGES] += request.first_link
    links[at + record.FOLLOWERS] += request.first_link
    for k in range(links[at + record.NUM_TAPS]):
        links[links[at + record.TAPS] + record.TAP * k + 2] += request.first_value
    for k in range(links[at + record.NUM_EDGES]):
        links[links[at + record.EDGES] + record.EDGE * k + 1] += request.first_subgraph
    for k in range(links[at + record.NUM_FOLLOWERS]):
        links[links[at + record.FOLLOWERS] + k] += request.first_subgraph
    for port in range(cell_type.num_inputs):
        to = at + record.HEADER + record.INPUT * port
        mode = links[to + record.MODE]
        if mode == record.WHOLE or mode == record.CARRY:
            links[to + record.AT] += request.first_value
        elif mode == record.SAME or mode == record.LAST:
            links[to + record.SOURCE] += request.first_subgraph
            links[to + record.AT] += request.first_value if mode == record.LAST else 0
        elif mode == record.PAGED:
            links[to + record.AT] = request.page_lists + page_list.WORDS * links[to + record.AT]
        elif mode == record.LEADS:
            links[to + record.AT] += request.first_place
        elif mode == record.STEP or mode == record.ALL or mode == record.EMITTED:
            links[to + record.AT] += request.first_place
            if links[to + record.SOURCE] >= 0:
                links[to + record.SOURCE] += request.first_subgraph
        elif mode == record.MANY or mode == record.EACH:
            links[to + record.AT] += request.first_link
            for k in range(links[to + record.START]):
                links[links[to + record.AT] + k] += request.first_value
    if subgraph.what != CHAIN:
        links[at + record.MORE_ROWS] += request.first_link
    if subgraph.what == MEMBER:
        links[at + record.BODY] += request.first_link
    for output in range(cell_type.num_outputs):
        to = output_at(t, subgraph, output)
        for word in (record.SEQUENCE, record.RESULT):
            if links[to + word] >= 0:
                links[to + word] += request.first_place
    links[at + record.PLAIN] = _plain_steps(t, subgraph)


@compiled
def _plain_steps(t, subgraph):
    """How many steps at the begin of a chain only hand on its state: nobody looks at them, waits for them or follows
    them, and each is ready when the one before is sent."""
    links, at, cell_type = t.links, subgraph.record, t.types[subgraph.cell_type]
    is_led = links[at + record.NUM_SOURCES] + links[at + record.NUM_FOLLOWERS] + links[at + record.KEEPS] > 0
    if subgraph.what != CHAIN or is_led or cell_type.has_spans or not cell_type.carries:
        return 0
    for output in range(cell_type.num_outputs):
        to = output_at(t, subgraph, output)
        if links[to + record.SEQUENCE] >= 0 or links[to + record.RESULT] >= 0:
            return 0
    steps = min(links[at + record.TAP_STEP], links[at + record.LENGTH] - 1)
    if links[at + record.NUM_EDGES] > 0:
        steps = min(steps, links[links[at + record.EDGES]] - 1)
    return steps


@compiled
def row_of(t, value):
    """The handle of a value's row; of a new session's state that of what it begins with."""
    return value.row if value.row > STARTS else t.values[STARTS - value.row].row


@compiled
def input_row(t, subgraph, port, step):
    """The handle that an input reads ``step`` steps after the next one; of the state only at the next."""
    links, at = t.links, subgraph.record
    to = at + record.HEADER + record.INPUT * port
    mode, position = links[to + record.MODE], links[at + record.POSITION] + step
    if mode == record.STEP or (mode == record.LEADS and position <= links[at + record.LEAD]):
        return t.places[links[to + record.AT] + links[to + record.STRIDE] * position]
    if mode == record.EACH:
        return row_of(t, t.values[links[links[to + record.AT] + position]])
    if mode == record.LEADS or (mode == record.CARRY and position > 0):
        if links[to + record.AGAIN] > 0 and position <= links[at + record.UNSEEN]:
            return t.places[links[to + record.AGAIN] - 1 + position]
        return links[output_at(t, subgraph, links[to + record.SOURCE]) + record.ROW]
    if mode == record.SAME or (mode == record.LAST and position > 0):
        return member_row(t, links, to, position)
    return row_of(t, t.values[links[to + record.AT]])


@compiled
def member_row(t, links, to, position):
    """The handle of what an input reads of another member of its body, at step ``position`` or the one before."""
    source = t.subgraphs[links[to + record.SOURCE]]
    output = output_at(t, source, links[to + record.STRIDE])
    is_ahead = links[to + record.MODE] == record.LAST and links[source.record + record.POSITION] > position
    return links[output + (record.PREVIOUS_ROW if is_ahead else record.ROW)]


@compiled
def num_rows_of(t, subgraph, port):
    """Rows of a ragged input."""
    to = subgraph.record + record.HEADER + record.INPUT * port
    if t.links[to + record.MODE] == record.EMITTED:
        loop = t.subgraphs[t.links[to + record.SOURCE]].record
        return t.links[loop + record.DONE] - t.links[loop + record.LEAD]
    return t.links[to + record.START]


@compiled
def ragged_ints(t, cell_type, subgraph):
    """Ints that the ragged inputs of a chain's or loop's step need beyond one row each."""
    count = 0
    for port in range(cell_type.num_inputs):
        if t.ports[cell_type.first_port + port].ragged:
            count += 2 * num_rows_of(t, subgraph, port)
    return count


@compiled
def ragged_row(t, subgraph, port, k):
    """The handle of row ``k`` of a ragged input."""
    links, to = t.links, subgraph.record + record.HEADER + record.INPUT * port
    if links[to + record.MODE] == record.ALL:
        return t.places[links[to + record.AT] + links[to + record.STRIDE] * k]
    if links[to + record.MODE] == record.EMITTED:
        handle = t.places[links[to + record.AT] + k]
        return handle if handle > PENDING else PENDING - handle
    return row_of(t, t.values[links[links[to + record.AT] + k]])


@inlined
def bring_state(t, task, to, kind):
    """Has the rows of output ``to``'s state be at a task's worker, where the chain or loop goes on with nothing in
    flight. One that the task reads elsewhere goes back when it is complete."""
    links = t.links
    if links[to + record.FIRST_ROW] == 0 or links[to + record.FIRST_ROW] >> LOCATION_SHIFT == task.worker:
        return
    task.reads_late = 1
    for word in (record.FIRST_ROW, record.SECOND_ROW):
        if links[to + word] > 0 and links[to + word] == links[to + record.ROW]:
            links[to + record.LATE_ROW] = links[to + word]
        elif links[to + word] > 0:
            give_row(t, links[to + word], kind)
        links[to + word] = 0


@inlined
def state_row(t, to, worker, kind):
    """The row that a task writes the state of output ``to`` to: not the one that it reads."""
    links, word = t.links, record.FIRST_ROW
    if links[to + word] > 0 and links[to + word] == links[to + record.ROW]:
        word = record.SECOND_ROW
    if links[to + word] == 0:
        links[to + word] = take_row(t, worker, kind)
    return links[to + word]


@compiled
def first_tap(t, at, low, step):
    """The first tap of a step or a later one, from number ``low`` on."""
    high = t.links[at + record.NUM_TAPS]
    while low < high:
        middle = (low + high) // 2
        if t.links[t.links[at + record.TAPS] + record.TAP * middle] < step:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def tap_of(t, at, step, output):
    """The value that an output of a step is, or -1; ``step`` is not sent yet."""
    links = t.links
    if links[at + record.TAP_STEP] > step:
        return -1
    for k in range(first_tap(t, at, links[at + record.NEXT_TAP], step), links[at + record.NUM_TAPS]):
        tap = links[at + record.TAPS] + record.TAP * k
        if links[tap] > step:
            return -1
        if links[tap] == step and links[tap + 1] == output:
            return links[tap + 2]
    return -1


@compiled
def count_sent(t, subgraph_id, worker):
    """Counts an edge whose producer was submitted to ``worker``; releases the subgraph early if it was the last."""
    subgraph = t.subgraphs[subgraph_id]
    subgraph.sent_to = worker if subgraph.sent == 0 or subgraph.sent_to == worker else MIXED
    subgraph.sent += 1
    home = t.requests[subgraph.request].home if t.types[subgraph.cell_type].has_spans else 0
    if subgraph.sent == subgraph.waiting and subgraph.sent_to == worker and (home == 0 or home == worker):
        subgraph.pinned = worker
        enqueue(t, subgraph_id)


@compiled
def count_done(t, subgraph_id, was_sent):
    """Counts an edge whose producer is complete; ``was_sent``: ``count_sent`` counted it."""
    subgraph = t.subgraphs[subgraph_id]
    subgraph.waiting -= 1
    if was_sent and subgraph.sent > 0:
        subgraph.sent -= 1
    if subgraph.waiting == 0 and subgraph.state == BLOCKED and subgraph.nodes_left > 0:
        enqueue(t, subgraph_id)
    elif subgraph.state == QUEUED:
        unpin_if_idle(t, subgraph_id)


@compiled
def send_steps(t, subgraph_id, steps, worker):
    """Notes that steps of a chain were submitted; wakes who may read them on the same worker (early release)."""
    subgraph = t.subgraphs[subgraph_id]
    links, at = t.links, subgraph.record
    position = links[at + record.POSITION] + steps
    links[at + record.POSITION] = position
    if position <= links[at + record.PLAIN]:
        return
    if links[at + record.TAP_STEP] < position:
        _pass_taps(t, at, position)
    if position == links[at + record.LENGTH]:
        subgraph.nodes_left = 0
        dequeue(t, subgraph_id)
        subgraph.num_ready = 0
    elif links[at + record.NUM_SOURCES] > 0 or links[at + record.KEEPS] or t.types[subgraph.cell_type].has_spans:
        refresh(t, subgraph_id)
    elif not t.types[subgraph.cell_type].carries:
        set_ready(t, subgraph, subgraph.num_ready - 1)
    if links[at + record.NUM_EDGES] + links[at + record.NUM_FOLLOWERS] > 0 and t.settings[0].early_release:
        _wake_sent(t, at, position, worker)


@compiled
def _pass_taps(t, at, position):
    """Goes on to the first tap that is not sent."""
    k = first_tap(t, at, t.links[at + record.NEXT_TAP], position)
    t.links[at + record.NEXT_TAP], t.links[at + record.TAP_STEP] = k, t.links[at + record.LENGTH]
    if k < t.links[at + record.NUM_TAPS]:
        t.links[at + record.TAP_STEP] = t.links[t.links[at + record.TAPS] + record.TAP * k]


@compiled
def _wake_sent(t, at, position, worker):
    links = t.links
    while links[at + record.NEXT_SENT] < links[at + record.NUM_EDGES]:
        edge = links[at + record.EDGES] + record.EDGE * links[at + record.NEXT_SENT]
        if links[edge] > position:
            break
        links[at + record.NEXT_SENT] += 1
        count_sent(t, links[edge + 1], worker)
    for k in range(links[at + record.NUM_FOLLOWERS]):
        follower_id = links[links[at + record.FOLLOWERS] + k]
        follower = t.subgraphs[follower_id]
        if follower.num_ready == 0 or not t.types[follower.cell_type].carries:  # else it has all that it can have
            refresh(t, follower_id)


@inlined
def note_steps(t, subgraph, steps, has_failed):
    """Takes in how a task went: what state stays. Comes for dead requests too, whose session may keep it."""
    links, at = t.links, subgraph.record
    if not has_failed:
        links[at + record.DONE] += steps
    if has_failed:
        for output in range(t.types[subgraph.cell_type].num_outputs):
            to = output_at(t, subgraph, output)
            links[to + record.ROW] = links[to + record.PREVIOUS_ROW]
    elif subgraph.what != MEMBER:  # whose other members may still read it
        give_late_rows(t, subgraph)


@compiled
def give_late_rows(t, subgraph):
    """Gives back the rows at another worker whose readers are done."""
    to = output_at(t, subgraph, 0)
    for output in range(t.types[subgraph.cell_type].num_outputs):
        if t.links[to + record.LATE_ROW] > 0:
            give_row(t, t.links[to + record.LATE_ROW], kind_of(t, subgraph, output))
            t.links[to + record.LATE_ROW] = 0
        to += record.OUTPUT


@compiled
def kind_of(t, subgraph, output):
    """The kind of an output's rows."""
    cell_type = t.types[subgraph.cell_type]
    return t.ports[cell_type.first_port + cell_type.num_inputs + output].kind


@compiled
def wake_done(t, at):
    """Wakes who waited for the steps of a chain that are done."""
    links = t.links
    while links[at + record.NEXT_DONE] < links[at + record.NUM_EDGES]:
        edge = links[at + record.EDGES] + record.EDGE * links[at + record.NEXT_DONE]
        if links[edge] > links[at + record.DONE]:
            break
        links[at + record.NEXT_DONE] += 1
        count_done(t, links[edge + 1], t.settings[0].early_release)
    for k in range(links[at + record.NUM_FOLLOWERS]):
        follower_id = links[links[at + record.FOLLOWERS] + k]
        follower = t.subgraphs[follower_id]
        # Else it has all that it can have, and waits for nothing that is only sent.
        if follower.num_ready == 0 or follower.pinned > 0 or not t.types[follower.cell_type].carries:
            refresh(t, follower_id)
