"""The suspension of requests when pages run out at a worker: the latest arrival goes first (Pensieve section 3.4.3.5).

Its pages are copied to the host, or dropped and computed again (``recomputation.py``).
"""

from __future__ import annotations

from cellrt.core.pages.pages import feed_all, follow_home, move_page, num_away
from cellrt.core.pages.recomputation import begin_anew, drop_list, is_cheaper, loop_of_pages
from cellrt.core.state.moves import LIVE
from cellrt.core.state.page_list import page_list_of
from cellrt.core.state.queue import num_ready, rows_in_flight
from cellrt.core.state.tables import HOST, LOCATION_SHIFT, MAX_COPIES, MAX_KINDS, STARVED, STUCK, Request, Tables
from cellrt.native.jit import compiled

ALL_KINDS = -1


@compiled
def starvation(t: Tables, worker: int) -> int:
    """Return STARVED if some work found no page at a worker, STUCK if that worker cannot go on either, else 0.

    It can go on if a task is in flight there, or can be formed, of a cell type that has pages of such a kind.
    """
    starved = _starved_kinds(t, worker)
    if not starved:
        return 0
    for task_id in range(t.tasks.size):
        task = t.tasks[task_id]
        if task.in_use and task.worker == worker and _page_kinds(t, task.cell_type) & starved:
            return STARVED
    for type_id in range(t.settings[0].num_types):
        if _page_kinds(t, type_id) & starved and num_ready(t, type_id, worker) > 0:
            return STARVED
    return STUCK


@compiled
def _starved_kinds(t: Tables, worker: int) -> int:
    """Return the kinds of pages, as bits, of cell types that found none at a worker."""
    kinds = 0
    for type_id in range(t.settings[0].num_types):
        if t.types[type_id].starved_at >> worker & 1:
            kinds |= _page_kinds(t, type_id)
    return kinds


@compiled
def _page_kinds(t: Tables, type_id: int) -> int:
    """Return the kinds of pages, as bits, that a cell type reads or appends to.

    They are all kinds for a cell type with spans and no pages, which waits for all pages of its requests.
    """
    cell_type, kinds = t.types[type_id], 0
    for port in range(cell_type.first_port, cell_type.first_port + cell_type.num_inputs):
        if t.ports[port].page_size > 0:
            kinds |= 1 << t.ports[port].kind
    return kinds if kinds or not cell_type.has_spans else ALL_KINDS


@compiled
def suspend(t: Tables, worker: int) -> bool:
    """Move or drop the pages of the latest arrival at a worker that has some; return whether any page moved.

    Requests with pages of a kind that is needed are preferred. None is suspended without room at the host, while a task
    of the latest arrival is in flight, or if no other request has pages at the worker or waits for some. Then others
    must wait until the latest arrival ends.
    """
    # Prefer a request whose pages are of a kind that is needed.
    latest = _latest(t, worker, _starved_kinds(t, worker))
    if latest < 0:
        latest = _latest(t, worker, ALL_KINDS)
    if latest < 0 or rows_in_flight(t, t.requests[latest]) > 0:
        return False
    if _num_holders(t, worker) < 2 and not _others_starve(t, t.requests[latest].sequence):
        return False
    request, settings, moved = t.requests[latest], t.settings[0], 0
    # Drop the pages if computing them again is cheaper.
    loop = loop_of_pages(t, request)
    if loop >= 0 and is_cheaper(t, request, t.subgraphs[loop]) and begin_anew(t, request, t.subgraphs[loop]):
        _drop(t, request)
        return True
    # Else move them to the host, as far as there is room.
    for k in range(request.num_page_lists):
        listed = page_list_of(t, request, k)
        kind = listed.kind
        for place in range(listed.place, listed.place + listed.held):
            is_room = t.arenas[HOST * MAX_KINDS + kind].num_free > 0 and settings.num_copies < MAX_COPIES
            if t.places[place] >> LOCATION_SHIFT != HOST and is_room:
                move_page(t, place, HOST, kind)
                moved += 1
    request.pages_away += moved
    request.home = _home_of(t, request)
    follow_home(t, request)
    feed_all(t)
    return moved > 0


@compiled
def _latest(t: Tables, worker: int, kinds: int) -> int:
    """Return the latest arrival with pages of some kinds at a worker that have room at the host, or -1."""
    latest = -1
    for request_id in range(t.settings[0].num_requests):
        request = t.requests[request_id]
        if request.state == LIVE and request.home == worker and _can_lend(t, request, kinds):
            if latest < 0 or request.sequence > t.requests[latest].sequence:
                latest = request_id
    return latest


@compiled
def _num_holders(t: Tables, worker: int) -> int:
    """Return the number of requests that have pages at a worker."""
    count = 0
    for request_id in range(t.settings[0].num_requests):
        count += t.requests[request_id].state == LIVE and t.requests[request_id].home == worker
    return count


@compiled
def _drop(t: Tables, request: Request) -> None:
    """Drop all pages of a request, whose loop begins anew."""
    for k in range(request.num_page_lists):
        drop_list(t, page_list_of(t, request, k))
    request.home = request.pages_away = 0
    follow_home(t, request)
    feed_all(t)


@compiled
def _can_lend(t: Tables, request: Request, kinds: int) -> bool:
    """Return whether a page of a request that is at a worker, of one of these kinds, has room at the host."""
    for k in range(request.num_page_lists):
        listed = page_list_of(t, request, k)
        kind = listed.kind
        has_room = t.arenas[HOST * MAX_KINDS + kind].num_free > 0
        if has_room and kinds >> kind & 1 and num_away(t, listed) < listed.held:
            return True
    return False


@compiled
def _others_starve(t: Tables, sequence: int) -> bool:
    """Return whether an earlier request waits for pages that it holds at the host, or for its first ones."""
    for request_id in range(t.settings[0].num_requests):
        request = t.requests[request_id]
        if request.state == LIVE and request.num_page_lists > 0 and request.home == 0 and request.sequence < sequence:
            return True
    return False


@compiled
def _home_of(t: Tables, request: Request) -> int:
    """Return the worker where pages of a request are, or 0."""
    for k in range(request.num_page_lists):
        listed = page_list_of(t, request, k)
        for place in range(listed.place, listed.place + listed.held):
            if t.places[place] >> LOCATION_SHIFT != HOST:
                return t.places[place] >> LOCATION_SHIFT
    return 0
