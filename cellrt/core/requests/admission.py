"""Admission: a compiled graph becomes rows of the tables, or waits if it does not fit."""

from __future__ import annotations

from cellrt.core.pages.pages import begin_pages, end_pages
from cellrt.core.requests.session_state import WORDS, begin_states, end_states
from cellrt.core.running.record_ends import give_places, give_records
from cellrt.core.running.records import begin_record
from cellrt.core.state import page_list
from cellrt.core.state.buddy_allocator import LINKS, NODES, PLACES, SUBGRAPHS, VALUES, allocate_block, free_block
from cellrt.core.state.copying import copy_row
from cellrt.core.state.event_log import log_event
from cellrt.core.state.moves import DEAD, DONE, FREE, LEFT, LIVE, move_request
from cellrt.core.state.pointers import OpenTemplate
from cellrt.core.state.queue import enqueue, rows_in_flight
from cellrt.core.state.record_layout import most_steps
from cellrt.core.state.rows import can_reserve, give_row, take_row
from cellrt.core.state.tables import (
    ADMITTED,
    BORROWED,
    ENDED,
    EXTERNAL,
    HOST,
    NEVER,
    NO_ROW,
    NUM_PERMANENT,
    Request,
    Tables,
)
from cellrt.native.jit import compiled
from cellrt.native.row_types import Matrix, Rows


@compiled
def _allocate(
    t: Tables, request: Request, num_nodes: int, num_values: int, num_links: int, num_subgraphs: int, num_places: int
) -> bool:
    """Allocate the five blocks of a request, or none of them."""
    nodes = allocate_block(t.blocks, NODES, num_nodes)
    values = allocate_block(t.blocks, VALUES, num_values)
    links = allocate_block(t.blocks, LINKS, num_links)
    subgraphs = allocate_block(t.blocks, SUBGRAPHS, num_subgraphs)
    places = allocate_block(t.blocks, PLACES, num_places)
    if min(nodes, values, links, subgraphs, places) < 0:
        for region, first, size in (
            (NODES, nodes, num_nodes),
            (VALUES, values, num_values),
            (LINKS, links, num_links),
            (SUBGRAPHS, subgraphs, num_subgraphs),
            (PLACES, places, num_places),
        ):
            if first >= 0:
                free_block(t.blocks, region, first, size)
        return False
    request.first_node, request.num_nodes = nodes, num_nodes
    request.first_value, request.num_values = values, num_values
    request.first_link, request.num_links = links, num_links
    request.first_subgraph, request.num_subgraphs = subgraphs, num_subgraphs
    request.first_place, request.num_places = places, num_places
    return True


@compiled
def _free_blocks(t: Tables, request: Request) -> None:
    """Free the five blocks of a request."""
    free_block(t.blocks, NODES, int(request.first_node), int(request.num_nodes))
    free_block(t.blocks, VALUES, int(request.first_value), int(request.num_values))
    free_block(t.blocks, LINKS, int(request.first_link), int(request.num_links))
    free_block(t.blocks, SUBGRAPHS, int(request.first_subgraph), int(request.num_subgraphs))
    free_block(t.blocks, PLACES, int(request.first_place), int(request.num_places))


@compiled
def _copy_graph(t: Tables, request_id: int, template: OpenTemplate) -> None:
    """Copy a template's rows to the request's blocks, turning ids of rows into absolute ones."""
    request = t.requests[request_id]
    for k in range(template.nodes.size):
        node = t.nodes[request.first_node + k]
        t.nodes[request.first_node + k] = template.nodes[k]
        node.subgraph += request.first_subgraph
        node.first_value += request.first_value
        node.first_link += request.first_link
        if node.next_ready >= 0:
            node.next_ready += request.first_node
    for k in range(template.values.size):
        t.values[request.first_value + k] = template.values[k]
    for k in range(template.links.size):
        t.links[request.first_link + k] = template.links[k]
    for k in range(template.subgraphs.size):
        subgraph = t.subgraphs[request.first_subgraph + k]
        t.subgraphs[request.first_subgraph + k] = template.subgraphs[k]
        subgraph.request = request_id
        subgraph.priority = request.priority
        if subgraph.ready_head >= 0:
            subgraph.ready_head += request.first_node
            subgraph.ready_tail += request.first_node
        if subgraph.record >= 0:
            subgraph.record += request.first_link
            begin_record(t, request, subgraph)


@compiled
def _take_externals(t: Tables, request: Request, template: OpenTemplate, rows: Rows[int], at: int) -> None:
    """Take host rows for those of the request's own tensors that are read.

    Write them to ``rows`` from ``at`` on, -1 for the others.
    """
    for k in range(template.externals.shape[0]):
        count, place, first = template.externals[k, 0], template.externals[k, 1], template.externals[k, 2]
        if place >= 0:
            kind = _kind_at(t, request, place)
            for j in range(count):
                rows[at + j] = take_row(t, HOST, kind)
                t.places[request.first_place + place + j] = rows[at + j]
        else:
            for j in range(count):
                rows[at + j] = NO_ROW
                if first >= 0 and t.values[request.first_value + first + j].readers > 0:
                    value = t.values[request.first_value + first + j]
                    value.row = take_row(t, HOST, value.kind)
                    rows[at + j] = value.row
        at += count
    for k in range(request.first_value, request.first_value + request.num_values):
        value = t.values[k]
        if value.bits & EXTERNAL and value.bits & BORROWED:
            value.row = t.places[request.first_place + value.row]


@compiled
def _kind_at(t: Tables, request: Request, place: int) -> int:
    """Return the kind of the rows of the list that begins at a place."""
    first = 0
    for k in range(request.num_lists):
        if first == place:
            return t.links[request.lists + 2 * k]
        first += t.links[request.lists + 2 * k + 1]
    return -1


@compiled
def _reserve(t: Tables, request: Request, template: OpenTemplate) -> None:
    """Write down the lists in a request's places, and the rows that are reserved for it."""
    for k in range(template.lists.shape[0]):
        t.links[request.lists + 2 * k] = template.lists[k, 0]
        t.links[request.lists + 2 * k + 1] = template.lists[k, 1]
    for kind in range(template.needs.shape[0]):
        t.links[request.needs + 2 * kind] = template.needs[kind, 0]
        t.links[request.needs + 2 * kind + 1] = template.needs[kind, 1]
        t.kinds[kind].reserved_worker += template.needs[kind, 0]
        t.kinds[kind].reserved_host += template.needs[kind, 1]


@compiled
def _hand_over(t: Tables, request: Request) -> None:
    """Hand the subgraphs that need nothing from others to the scheduler."""
    for k in range(request.first_subgraph, request.first_subgraph + request.num_subgraphs):
        if t.subgraphs[k].waiting == 0:
            enqueue(t, k)


@compiled
def admit(
    t: Tables,
    template: OpenTemplate,
    sequence: int,
    priority: int,
    client: int,
    deadline_ns: int,
    schedule_by_ns: int,
    streamed: int,
    session: int,
    rows: Rows[int],
    at: int,
) -> int:
    """Append a request; return its id, -1 if tables or arenas have no room for it now, or -2 if they never have.

    The latter is so if the pages that its session kept and those that the request adds are more than a worker has.

    ``deadline_ns``, ``schedule_by_ns``: when it must be done and have begun, or NEVER.

    Write to ``rows`` from ``at`` on the host row of each external value (-1 if nothing reads it), then of each state of
    its ``session`` (-1 if it is here already, or there is no session): the caller copies the request's tensors there
    before it schedules. The last of ``rows`` gets the place of the first result. Subgraphs that need nothing from
    others are handed to the scheduler.
    """
    # Allocate: if anything does not fit, nothing has changed.
    settings = t.settings[0]
    request_id = settings.free_request
    num_lists, num_states, num_kinds = template.lists.shape[0], template.states.shape[0], template.needs.shape[0]
    num_links = template.links.size + 2 * num_lists + WORDS * num_states + 2 * num_kinds
    num_links += page_list.WORDS * template.pages.shape[0]
    if request_id < 0 or not can_reserve(t, template.needs):
        return -1
    num_places = 0
    for k in range(num_lists):
        num_places += template.lists[k, 1]
    request = t.requests[request_id]
    if not _allocate(
        t, request, template.nodes.size, template.values.size, num_links, template.subgraphs.size, num_places
    ):
        return -1
    request.page_lists = request.first_link + template.links.size + 2 * num_lists + WORDS * num_states
    request.num_page_lists = template.pages.shape[0]
    if request.num_page_lists > 0:
        room = begin_pages(t, request, session, template)
        if room != 1:
            _free_blocks(t, request)
            return room - 1
    # Fill the request's row.
    settings.free_request = request.next_free
    settings.num_live += 1
    move_request(t, request, LIVE)
    request.sequence, request.priority, request.streamed = sequence, priority, streamed
    request.client, request.admitted_ns = client, settings.now_ns
    request.deadline_ns, request.schedule_by_ns = deadline_ns, schedule_by_ns
    request.started_ns = request.nodes_left = request.length = request.submission = 0
    request.session, request.num_states, request.num_lists = session, num_states, num_lists
    request.lists = request.first_link + template.links.size
    request.states = request.lists + 2 * num_lists
    request.needs = request.page_lists + page_list.WORDS * request.num_page_lists
    # Copy the graph, then reserve and take rows.
    _copy_graph(t, request_id, template)
    for k in range(template.subgraphs.size):
        request.nodes_left += template.subgraphs[k].nodes_left
        request.length += most_steps(t, t.subgraphs[request.first_subgraph + k])
    for place in range(request.first_place, request.first_place + num_places):
        t.places[place] = NO_ROW
    _reserve(t, request, template)
    num_externals = 0
    for k in range(template.externals.shape[0]):
        num_externals += template.externals[k, 0]
    begin_states(t, request, session, template, rows, at + num_externals)
    _take_externals(t, request, template, rows, at)
    rows[at + num_externals + num_states] = request.first_place
    log_event(t, ADMITTED, request_id, -1, request.nodes_left)
    _hand_over(t, request)
    return request_id


@compiled
def num_rows(template: OpenTemplate) -> int:
    """Return how many rows ``admit`` writes for a request."""
    count = template.states.shape[0] + 1
    for each in range(template.externals.shape[0]):
        count += template.externals[each, 0]
    return int(count)


@compiled
def set_lengths(template: OpenTemplate, lengths: Matrix, k: int) -> None:
    """Set the lengths of a template to those of request ``k``."""
    for j in range(template.patches.shape[0]):
        word = template.patches[j, 1]
        for number in range(lengths.shape[1]):
            word += template.patches[j, 2 + number] * lengths[k, number]
        template.memory[template.patches[j, 0]] = word


@compiled
def deadline_of(deadlines_ns: Matrix, k: int, which: int) -> int:
    """Return when a request must be done (0) or have begun (1); NEVER if there are fewer deadlines."""
    return int(deadlines_ns[k, which]) if k < deadlines_ns.shape[0] else NEVER


@compiled
def admit_many(
    t: Tables,
    template: OpenTemplate,
    lengths: Matrix,
    sequences: Rows[int],
    priority: int,
    client: int,
    deadlines_ns: Matrix,
    streamed: int,
    sessions: Rows[int],
    rows: Rows[int],
    ids: Rows[int],
) -> int:
    """Admit requests of one template in order, as far as there is room; return how many, with their ids in ``ids``.

    ``lengths`` are those of each, or one row for all. ``rows`` gets what ``admit`` writes for each, one after the
    other. ``sessions``, none twice, and ``deadlines_ns`` (done by, begun by) are those of each, or empty for none.
    """
    at = 0
    for k in range(sequences.size):
        if k < lengths.shape[0]:
            set_lengths(template, lengths, k)
        session = sessions[k] if k < sessions.size else -1
        done_ns, begun_ns = deadline_of(deadlines_ns, k, 0), deadline_of(deadlines_ns, k, 1)
        how = priority, client, done_ns, begun_ns, streamed, session
        ids[k] = admit(t, template, sequences[k], *how, rows, at)
        if ids[k] < 0:
            return k
        at += num_rows(template)
    return sequences.size


@compiled
def release(t: Tables, request_id: int) -> None:
    """Free everything that an ended request holds. Nothing of it may be in flight."""
    request = t.requests[request_id]
    is_whole = request.num_states == 0 or request.state != DEAD
    end_states(t, request)
    end_pages(t, request, is_whole)
    give_places(t, request)
    if request.state == DEAD or request.num_states > 0:
        give_records(t, request)
        for k in range(request.num_values):
            value = t.values[request.first_value + k]
            if value.row >= NUM_PERMANENT and not value.bits & BORROWED:
                give_row(t, value.row, value.kind)
                value.row = NO_ROW
    log_event(t, ENDED, request_id, -1, request.state)
    num_kinds = (request.first_link + request.num_links - request.needs) // 2
    for kind in range(num_kinds):
        t.kinds[kind].reserved_worker -= t.links[request.needs + 2 * kind]
        t.kinds[kind].reserved_host -= t.links[request.needs + 2 * kind + 1]
    _free_blocks(t, request)
    move_request(t, request, FREE)
    request.next_free = t.settings[0].free_request
    t.settings[0].free_request = request_id
    t.settings[0].num_live -= 1


@compiled
def finish(t: Tables, request_id: int) -> bool:
    """Release a request that is done; return whether it is not yet, as tasks of it that went ahead are in flight."""
    request = t.requests[request_id]
    if request.state == DONE and rows_in_flight(t, request) > 0:
        move_request(t, request, LEFT)
        return True
    release(t, request_id)
    return False


@compiled
def finish_many(t: Tables, request_ids: Rows[int], started_ns: Rows[int]) -> int:
    """Release requests that are done; write when the first task of each was submitted to ``started_ns``.

    Return how many are not released yet: see ``finish``.
    """
    left = 0
    for k in range(request_ids.size):
        started_ns[k] = t.requests[request_ids[k]].started_ns
        left += 1 if finish(t, request_ids[k]) else 0
    return left


@compiled
def copy_results(t: Tables, request_ids: Rows[int], positions: Rows[int], arena: Matrix, values: Matrix) -> None:
    """Copy the results of complete requests at these positions from byte rows of the host's arena to ``values``.

    They are copied request by request. No loop of a request may have stopped before these positions.
    """
    at = 0
    for k in range(request_ids.size):
        first = t.requests[request_ids[k]].first_place
        for j in range(positions.size):
            copy_row(values, at, arena, t.places[first + positions[j]])
            at += 1
