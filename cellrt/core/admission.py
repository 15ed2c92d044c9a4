"""Admission: a compiled graph becomes rows of the tables, or waits if it does not fit."""

from __future__ import annotations

from cellrt.core.buddy_allocator import LINKS, NODES, SUBGRAPHS, VALUES, allocate_block, free_block
from cellrt.core.event_log import log_event
from cellrt.core.jit import compiled
from cellrt.core.moves import DEAD, FREE, LIVE, move_request
from cellrt.core.queue import enqueue
from cellrt.core.rows import can_reserve, give_row, take_row
from cellrt.core.session_state import WORDS, begin_states, end_states
from cellrt.core.tables import ADMITTED, ENDED, HOST, LANES_PER_PRIORITY, NUM_PERMANENT, NUM_PRIORITIES, RESULT_READY


@compiled
def _allocate(t, request, num_nodes, num_values, num_links, num_subgraphs):
    """Allocates the four blocks of a request, or none of them."""
    nodes = allocate_block(t.blocks, NODES, num_nodes)
    values = allocate_block(t.blocks, VALUES, num_values)
    links = allocate_block(t.blocks, LINKS, num_links)
    subgraphs = allocate_block(t.blocks, SUBGRAPHS, num_subgraphs)
    if min(nodes, values, links, subgraphs) < 0:
        for region, first, size in (
            (NODES, nodes, num_nodes),
            (VALUES, values, num_values),
            (LINKS, links, num_links),
            (SUBGRAPHS, subgraphs, num_subgraphs),
        ):
            if first >= 0:
                free_block(t.blocks, region, first, size)
        return False
    request.first_node, request.num_nodes = nodes, num_nodes
    request.first_value, request.num_values = values, num_values
    request.first_link, request.num_links = links, num_links
    request.first_subgraph, request.num_subgraphs = subgraphs, num_subgraphs
    return True


@compiled
def _copy_graph(t, request_id, shape):
    """Copies a shape's rows to the request's blocks, turning ids of rows into absolute ones."""
    request = t.requests[request_id]
    for k in range(shape.nodes.size):
        node = t.nodes[request.first_node + k]
        t.nodes[request.first_node + k] = shape.nodes[k]
        node.subgraph += request.first_subgraph
        node.first_value += request.first_value
        node.first_link += request.first_link
        if node.next_ready >= 0:
            node.next_ready += request.first_node
    for k in range(shape.values.size):
        t.values[request.first_value + k] = shape.values[k]
    for k in range(shape.links.size):
        t.links[request.first_link + k] = shape.links[k]
    for k in range(shape.subgraphs.size):
        subgraph = t.subgraphs[request.first_subgraph + k]
        t.subgraphs[request.first_subgraph + k] = shape.subgraphs[k]
        subgraph.request = request_id
        subgraph.priority = NUM_PRIORITIES - 1 - request.lane // LANES_PER_PRIORITY
        if subgraph.ready_head >= 0:
            subgraph.ready_head += request.first_node
            subgraph.ready_tail += request.first_node


@compiled
def admit(t, shape, sequence, lane, streamed, session, rows):
    """Appends a request; returns its id, or -1 if tables or arenas have no room for it now.

    Writes to ``rows`` the host row of each external value (-1 if nothing reads it), then of each state of its
    ``session`` (-1 if it is here already, or there is no session): the caller copies the request's tensors there before
    it schedules. The last of ``rows`` gets the link index of the result rows. Subgraphs that need nothing from others
    are handed to the scheduler.
    """
    settings = t.settings[0]
    request_id = settings.free_request
    num_results, num_states, num_kinds = shape.results.size, shape.states.size // 2, shape.needs.shape[0]
    num_links = shape.links.size + 2 * num_results + WORDS * num_states + 2 * num_kinds
    if request_id < 0 or not can_reserve(t, shape.needs):
        return -1
    request = t.requests[request_id]
    if not _allocate(t, request, shape.nodes.size, shape.values.size, num_links, shape.subgraphs.size):
        return -1
    settings.free_request = request.next_free
    settings.num_live += 1
    move_request(t, request, LIVE)
    request.sequence, request.lane, request.streamed = sequence, lane, streamed
    request.started_ns = 0
    request.nodes_left, request.in_flight, request.num_results = shape.nodes.size, 0, num_results
    request.results = request.first_link + shape.links.size
    request.session, request.num_states = session, num_states
    request.states = request.results + 2 * num_results
    request.needs = request.states + WORDS * num_states
    _copy_graph(t, request_id, shape)
    for k in range(num_results):
        t.links[request.results + k] = -1
        t.links[request.results + num_results + k] = shape.results[k]
    for kind in range(num_kinds):
        t.links[request.needs + 2 * kind] = shape.needs[kind, 0]
        t.links[request.needs + 2 * kind + 1] = shape.needs[kind, 1]
        t.kinds[kind].reserved_worker += shape.needs[kind, 0]
        t.kinds[kind].reserved_host += shape.needs[kind, 1]
    begin_states(t, request, session, shape, rows, shape.externals.size)
    for k in range(shape.externals.size):
        value = t.values[request.first_value + shape.externals[k]]
        rows[k] = -1
        if value.readers > 0:
            value.row = take_row(t, HOST, value.kind)
            rows[k] = value.row
    rows[shape.externals.size + num_states] = request.results
    log_event(t, ADMITTED, request_id, -1, shape.nodes.size)
    for k in range(request.num_subgraphs):
        if t.subgraphs[request.first_subgraph + k].waiting == 0:
            enqueue(t, request.first_subgraph + k)
    return request_id


@compiled
def release(t, request_id):
    """Gives back everything an ended request holds. Nothing of it may be in flight."""
    request = t.requests[request_id]
    for k in range(request.results, request.results + request.num_results):
        if t.links[k] >= 0:
            give_row(t, t.links[k], t.links[k + request.num_results] & (RESULT_READY - 1))
    end_states(t, request)
    if request.state == DEAD or request.num_states > 0:
        for k in range(request.num_values):
            value = t.values[request.first_value + k]
            if value.row >= NUM_PERMANENT:
                give_row(t, value.row, value.kind)
                value.row = -1
    log_event(t, ENDED, request_id, -1, request.state)
    num_kinds = (request.first_link + request.num_links - request.needs) // 2
    for kind in range(num_kinds):
        t.kinds[kind].reserved_worker -= t.links[request.needs + 2 * kind]
        t.kinds[kind].reserved_host -= t.links[request.needs + 2 * kind + 1]
    free_block(t.blocks, NODES, int(request.first_node), int(request.num_nodes))
    free_block(t.blocks, VALUES, int(request.first_value), int(request.num_values))
    free_block(t.blocks, LINKS, int(request.first_link), int(request.num_links))
    free_block(t.blocks, SUBGRAPHS, int(request.first_subgraph), int(request.num_subgraphs))
    move_request(t, request, FREE)
    request.next_free = t.settings[0].free_request
    t.settings[0].free_request = request_id
    t.settings[0].num_live -= 1


@compiled
def release_many(t, request_ids):
    """Releases several requests in one call."""
    for k in range(request_ids.size):
        release(t, request_ids[k])
