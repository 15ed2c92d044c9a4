"""Who lends his pages when they run out at a worker: the latest arrival there (Pensieve section 3.4.3.5).

Its pages are copied to the host, or dropped and computed again (``recomputation.py``).
"""

from __future__ import annotations

from cellrt.core import page_list
from cellrt.core.jit import compiled
from cellrt.core.moves import LIVE
from cellrt.core.pages import feed_all, follow_home, move_page, num_away
from cellrt.core.queue import num_ready, rows_in_flight
from cellrt.core.recomputation import begin_anew, drop_list, is_cheaper, loop_of_pages
from cellrt.core.tables import HOST, LOCATION_SHIFT, MAX_COPIES, MAX_KINDS

STARVED, STUCK = 1, 2


@compiled
def starvation(t, worker):
    """STARVED if some work found no page at a worker when it was last looked at; STUCK if besides nothing that has
    pages is in flight there or can go on; else 0."""
    starved = 0
    for type_id in range(t.settings[0].num_types):
        starved |= t.types[type_id].starved_at >> worker & 1
    if not starved:
        return 0
    for task_id in range(t.tasks.size):
        task = t.tasks[task_id]
        if task.in_use and task.worker == worker and t.types[task.cell_type].has_spans:
            return STARVED
    for type_id in range(t.settings[0].num_types):
        if t.types[type_id].has_spans and num_ready(t, type_id, worker) > 0:
            return STARVED
    return STUCK


@compiled
def suspend(t, worker):
    """Moves the pages of the latest arrival at a worker that has any for which there is room at the host, if another
    has some there too and nothing of it is in flight; or drops them. Returns whether any page moved."""
    latest, holders = -1, 0
    for request_id in range(t.settings[0].num_requests):
        request = t.requests[request_id]
        if request.state == LIVE and request.home == worker:
            holders += 1
            is_later = latest < 0 or request.sequence > t.requests[latest].sequence
            if is_later and rows_in_flight(t, request) == 0 and _can_lend(t, request):
                latest = request_id
    if latest < 0 or (holders < 2 and not _others_starve(t, t.requests[latest].sequence)):
        return False
    request, settings, moved = t.requests[latest], t.settings[0], 0
    loop = loop_of_pages(t, request)
    if loop >= 0 and is_cheaper(t, request, t.subgraphs[loop]) and begin_anew(t, request, t.subgraphs[loop]):
        _drop(t, request)
        return True
    for k in range(request.num_page_lists):
        at = request.page_lists + page_list.WORDS * k
        kind = t.links[at + page_list.KIND]
        for place in range(t.links[at + page_list.PLACE], t.links[at + page_list.PLACE] + t.links[at + page_list.HELD]):
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
def _drop(t, request):
    """Gives back all pages of a request, whose loop begins anew."""
    for k in range(request.num_page_lists):
        drop_list(t, request.page_lists + page_list.WORDS * k)
    request.home = request.pages_away = 0
    follow_home(t, request)
    feed_all(t)


@compiled
def _can_lend(t, request):
    """Whether a page of a request that is at a worker has room at the host."""
    for k in range(request.num_page_lists):
        at = request.page_lists + page_list.WORDS * k
        has_room = t.arenas[HOST * MAX_KINDS + t.links[at + page_list.KIND]].num_free > 0
        if has_room and num_away(t, at) < t.links[at + page_list.HELD]:
            return True
    return False


@compiled
def _others_starve(t, sequence):
    """Whether an earlier request waits for pages that it holds at the host, or for its first ones."""
    for request_id in range(t.settings[0].num_requests):
        request = t.requests[request_id]
        if request.state == LIVE and request.num_page_lists > 0 and request.home == 0 and request.sequence < sequence:
            return True
    return False


@compiled
def _home_of(t, request):
    """The worker where pages of a request are, or 0."""
    for k in range(request.num_page_lists):
        at = request.page_lists + page_list.WORDS * k
        for place in range(t.links[at + page_list.PLACE], t.links[at + page_list.PLACE] + t.links[at + page_list.HELD]):
            if t.places[place] >> LOCATION_SHIFT != HOST:
                return t.places[place] >> LOCATION_SHIFT
    return 0
