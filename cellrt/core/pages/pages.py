"""Pages of growing states: taken as a state grows, brought to the worker that goes on with it, moved out for others.

Everything else that a request holds is reserved at admission. Of pages, admission only makes sure that those of all
live requests and sessions, grown to their ends, fit in one worker's arena and the host's together. So a request is
admitted long before a worker has room for all pages that it may need. When pages run out (Pensieve section 3.4.3.5):

- A request that has none at a worker gets its first there only while a tenth of the arena stays free for those that
  run, and while no earlier request waits for its pages to come back.
- If no request that has pages can go on, the latest arrival is *suspended* (``suspension.py``): its pages move to the
  host, or are dropped where that is cheaper (``recomputation.py``). They come back, all before its next step, as soon
  as they fit beside that tenth. If the host took only some of them, they come back as soon as they fit beside one page
  for each earlier request that has pages there. A suspended request is always later than the ones that go on, and a
  request that does not fit in an empty arena is refused at once: so the oldest always finishes.

All pages of a request that are at a worker are at one, its *home*. Pages are freed when nothing of their request is in
flight, so a request that takes one may write to it at once. Moves are written to ``copies`` for the driver, which
copies in that order before it launches anything else. Several page tables may name a page (``holders.py``): it is freed
with the last of them.
"""

from __future__ import annotations

from cellrt.core.pages.holders import copy_page, give_page, take_page
from cellrt.core.pages.recomputation import free_again, rows_again
from cellrt.core.pages.span_arrays import fits_in_a_task
from cellrt.core.state.buddy_allocator import PLACES, allocate_block, free_block
from cellrt.core.state.moves import DEAD, LIVE
from cellrt.core.state.page_list import PageList, page_list_at, page_list_of
from cellrt.core.state.pointers import OpenTemplate
from cellrt.core.state.queue import refresh
from cellrt.core.state.record_layout import input_of, record_of
from cellrt.core.state.tables import (
    BRING,
    HOST,
    LOCATION_SHIFT,
    MAX_COPIES,
    MAX_KINDS,
    MAX_STATES,
    NEVER,
    NO_ROW,
    Arena,
    Request,
    Slot,
    Subgraph,
    Tables,
)
from cellrt.native.jit import compiled

KEPT_FREE = 10
"""The divisor of an arena's pages that gives those kept for requests that run."""
NEVER_FITS = -1


@compiled
def pages_of(rows: int, page_size: int) -> int:
    """Return the number of pages that hold this many rows."""
    return (rows + page_size - 1) // page_size


@compiled
def begin_pages(t: Tables, request: Request, session: int, template: OpenTemplate) -> int:
    """Make a request's page lists, with the pages that its session kept.

    Return 1; 0 if there is no room for them now, or NEVER_FITS if there never is. Without room nothing changes.
    """
    count = template.pages.shape[0]
    request.home = request.pages_away = 0
    # Describe the lists first: whether there is room depends on all of them together.
    for k in range(count):
        listed, slot = page_list_of(t, request, k), template.pages[k, 3]
        length = t.slots[session * MAX_STATES + slot].length if session >= 0 and slot >= 0 else 0
        page_size = template.pages[k, 1]
        listed.kind, listed.page_size = template.pages[k, 0], page_size
        listed.before = listed.rows = length
        listed.capacity = pages_of(length + template.pages[k, 2], page_size)
        listed.slot = slot if session >= 0 else -1
        listed.held = listed.is_broken = listed.num_again = 0
    # Nothing is taken yet, so that a request without room leaves no trace.
    if not fits_in_a_task(t, request, template):
        return NEVER_FITS
    for k in range(count):
        room = _room_for(t, request, count, page_list_of(t, request, k).kind, session)
        if room != 1:
            return room
    for k in range(count):
        listed = page_list_of(t, request, k)
        listed.place = allocate_block(t.blocks, PLACES, listed.capacity)
        if listed.place < 0:
            for j in range(k):
                _free_block_of(t, page_list_of(t, request, j))
            return 0
    for k in range(count):
        _fill(t, request, session, page_list_of(t, request, k))
    return 1


@compiled
def _room_for(t: Tables, request: Request, count: int, kind: int, session: int) -> int:
    """Return whether all lists of one kind fit, as ``begin_pages`` does."""
    wanted = here = saved = 0
    for k in range(count):
        listed = page_list_of(t, request, k)
        if listed.kind == kind:
            wanted += listed.capacity
            if listed.slot >= 0:
                slot = t.slots[session * MAX_STATES + listed.slot]
                here += slot.pages
                if slot.row == BRING:
                    saved += pages_of(slot.length, listed.page_size)
    table = t.kinds[kind]
    if wanted > table.worker_rows:
        return NEVER_FITS
    is_room = table.reserved_worker - here + wanted <= table.worker_rows + table.host_rows
    return 1 if is_room and saved <= t.arenas[HOST * MAX_KINDS + kind].num_free else 0


@compiled
def _fill(t: Tables, request: Request, session: int, listed: PageList) -> None:
    """Reserve pages for a list, and give it those of its session.

    If their contents come with the request, it gets as many pages at the host.
    """
    place = listed.place
    kind = listed.kind
    t.kinds[kind].reserved_worker += listed.capacity
    for k in range(listed.capacity):
        t.places[place + k] = NO_ROW
    if listed.slot < 0:
        return
    slot = t.slots[session * MAX_STATES + listed.slot]
    if slot.row == BRING:
        listed.held = pages_of(slot.length, listed.page_size)
        request.pages_away += listed.held
        for k in range(listed.held):
            t.places[place + k] = take_page(t, HOST, kind)
    else:
        listed.held = slot.pages
        for k in range(slot.pages):
            t.places[place + k] = t.places[slot.place + k]
            request.home = max(request.home, t.places[place + k] >> LOCATION_SHIFT)
            request.pages_away += 1 if t.places[place + k] >> LOCATION_SHIFT == HOST else 0
    t.kinds[kind].reserved_worker -= slot.pages
    slot.pages = slot.length = slot.row = 0
    _leave_slot(t, slot)


@compiled
def _leave_slot(t: Tables, slot: Slot) -> None:
    """Free the list of pages of a slot."""
    if slot.capacity > 0:
        free_block(t.blocks, PLACES, int(slot.place), int(slot.capacity))
        slot.capacity = 0


@compiled
def _free_block_of(t: Tables, listed: PageList) -> None:
    free_block(t.blocks, PLACES, int(listed.place), int(listed.capacity))


@compiled
def end_pages(t: Tables, request: Request, is_whole: bool) -> None:
    """Free an ended request's pages, or leave them to its session.

    A request that is done leaves all its rows. Another leaves the rows of each state up to the last step that all
    states have reached, or only the rows from before the request unless ``is_whole``.
    """
    # States of one request may be at different steps if it ended early: find the last step that all have reached.
    common = 1 << 30
    for k in range(request.num_page_lists):
        listed = page_list_of(t, request, k)
        if listed.slot >= 0:
            common = min(common, listed.rows - listed.before)
    for k in range(request.num_page_lists):
        listed = page_list_of(t, request, k)
        slot_id, rows = listed.slot, 0
        if slot_id >= 0:
            rows = listed.before + (common if is_whole else 0)
            if request.state != DEAD:
                rows = listed.rows
        # Free the pages after these rows, and their reservation.
        pages = pages_of(rows, listed.page_size)
        for page in range(pages, listed.held):
            give_page(t, t.places[listed.place + page], listed.kind)
        t.kinds[listed.kind].reserved_worker -= listed.capacity - pages
        if pages > 0:
            slot = t.slots[request.session * MAX_STATES + slot_id]
            slot.place, slot.capacity = listed.place, listed.capacity
            slot.pages, slot.length, slot.page_size = pages, rows, listed.page_size
            slot.kind = listed.kind
        else:
            _free_block_of(t, listed)
    # Cell types that found no page may find one now.
    if request.num_page_lists > 0:
        free_again(t, request)
        if t.settings[0].next_home == request.sequence:
            t.settings[0].next_home = NEVER
        feed_all(t)


@compiled
def drop_pages(t: Tables, slot: Slot) -> None:
    """Free the pages of a session's slot, or forget that they come with its next request."""
    slot.length = 0
    if slot.capacity == 0:
        return
    for k in range(slot.pages):
        give_page(t, t.places[slot.place + k], slot.kind)
    t.kinds[slot.kind].reserved_worker -= slot.pages
    slot.pages = 0
    _leave_slot(t, slot)
    feed_all(t)


@compiled
def feed_all(t: Tables) -> None:
    """Let every cell type that found no page look again."""
    for type_id in range(t.settings[0].num_types):
        t.types[type_id].starved_at = 0


@compiled
def claim_pages(t: Tables, subgraph: Subgraph, worker: int, count: int) -> int:
    """Bring a request's pages to a worker, all or none, and take pages for the next ``count`` steps of a chain or loop.

    Return for how many of these steps there are pages.
    """
    cell_type, request = t.types[subgraph.cell_type], t.requests[subgraph.request]
    settings, has_pages = t.settings[0], request.pages_away > 0
    if request.num_page_lists == 0:
        return count
    if request.home == 0 and request.sequence > settings.next_home:
        return 0
    if settings.reserve_pages and not _can_take_all(t, request, worker):
        return 0
    # Bring back the pages that are at the host or were dropped, if all of them fit.
    again = rows_again(t, subgraph) if request.home == 0 else 0
    is_here = request.home > 0 or request.pages_away + again > 0
    if request.pages_away + again > 0:
        if not _can_bring(t, request, worker, again):
            settings.next_home = request.sequence
            return 0
        _bring(t, request, worker)  # all, before any page is taken: there is room for these
    # Take pages for the next steps, or all that the request may need.
    if settings.reserve_pages:
        _take_all(t, request, worker)
        has_pages = True
    for port in range(cell_type.num_inputs):
        info, read = t.ports[cell_type.first_port + port], input_of(t, subgraph, port)
        if info.page_size == 0:
            continue
        listed = page_list_at(t.links, read.at)
        if info.appends:
            first = listed.before + read.start + record_of(t, subgraph).position
            _extend(t, listed, worker, first + count, is_here or has_pages)
            count = max(0, min(count, listed.held * info.page_size - first))
        has_pages = has_pages or listed.held > 0
    # Its first pages make this worker its home.
    if has_pages and settings.next_home == request.sequence:
        settings.next_home = NEVER
    if has_pages and request.home == 0:
        request.home = worker
        follow_home(t, request)
    return count


@compiled
def _can_take_all(t: Tables, request: Request, worker: int) -> bool:
    """Return whether all pages that a request may need are at a worker, or could be."""
    for k in range(request.num_page_lists):
        kind, wanted = page_list_of(t, request, k).kind, 0
        for other in range(request.num_page_lists):
            listed = page_list_of(t, request, other)
            if listed.kind == kind:
                wanted += listed.capacity - listed.held + num_away(t, listed)
        if wanted > t.arenas[worker * MAX_KINDS + kind].num_free:
            return False
    return True


@compiled
def _take_all(t: Tables, request: Request, worker: int) -> None:
    """Take all pages that a request may need."""
    for k in range(request.num_page_lists):
        listed = page_list_of(t, request, k)
        while listed.held < listed.capacity:
            place = listed.place + listed.held
            t.places[place] = take_page(t, worker, listed.kind)
            listed.held += 1


@compiled
def follow_home(t: Tables, request: Request) -> None:
    """Let the chains and loops of a request follow the new home of its pages."""
    for k in range(request.first_subgraph, request.first_subgraph + request.num_subgraphs):
        if t.types[t.subgraphs[k].cell_type].has_spans:
            refresh(t, k)


@compiled
def _can_bring(t: Tables, request: Request, worker: int, rows: int) -> bool:
    """Return whether a worker has room for the pages of a request that are at the host or were dropped.

    ``rows`` is the number of rows whose pages were dropped.
    """
    if t.settings[0].num_copies + request.pages_away > MAX_COPIES:
        return False
    kept = _num_before(t, request) if request.home > 0 else 0
    for k in range(request.num_page_lists):
        kind, away = page_list_of(t, request, k).kind, 0
        for other in range(request.num_page_lists):
            listed = page_list_of(t, request, other)
            if listed.kind == kind:
                if other < k:
                    away = 0  # looked at already
                    break
                away += max(pages_of(rows, listed.page_size), num_away(t, listed))
        arena = t.arenas[worker * MAX_KINDS + kind]
        if away > 0 and not (_has_spare(arena, away) if request.home == 0 else away + kept <= arena.num_free):
            return False
    return True


@compiled
def _num_before(t: Tables, request: Request) -> int:
    """Return the number of earlier requests that have pages at the home of a request.

    The pages of a partly suspended request come back only when each of these could take a page too: else it would be
    suspended again at once.
    """
    count = 0
    for request_id in range(t.settings[0].num_requests):
        other = t.requests[request_id]
        if other.state == LIVE and other.home == request.home and other.sequence < request.sequence:
            count += 1
    return count


@compiled
def _bring(t: Tables, request: Request, worker: int) -> None:
    """Move all pages of a request that are at the host to a worker."""
    for k in range(request.num_page_lists):
        listed = page_list_of(t, request, k)
        for page in range(listed.held):
            if t.places[listed.place + page] >> LOCATION_SHIFT == HOST:
                move_page(t, listed.place + page, worker, listed.kind)
    request.pages_away = 0


@compiled
def num_away(t: Tables, listed: PageList) -> int:
    """Return the number of pages of a list that are at the host."""
    away = 0
    for k in range(listed.place, listed.place + listed.held):
        away += 1 if t.places[k] >> LOCATION_SHIFT == HOST else 0
    return away


@compiled
def _has_spare(arena: Arena, wanted: int) -> bool:
    """Return whether this many pages are free beside those kept for requests that run, or the whole arena is free."""
    return arena.num_free == arena.capacity or (arena.num_free - wanted) * KEPT_FREE >= arena.capacity


@compiled
def move_page(t: Tables, place: int, location: int, kind: int) -> None:
    """Move the page at a place to another location, where one is free; other tables that name it keep it."""
    handle = t.places[place]
    t.places[place] = copy_page(t, handle, location, kind)
    give_page(t, handle, kind)


@compiled
def _extend(t: Tables, listed: PageList, worker: int, rows: int, is_here: bool) -> None:
    """Take pages for this many rows, as far as there are any.

    A request's first pages are only taken while a tenth of the arena is free.
    """
    kind = listed.kind
    wanted = min(pages_of(rows, listed.page_size), listed.capacity)
    arena = t.arenas[worker * MAX_KINDS + kind]
    if not is_here and wanted > listed.held and not _has_spare(arena, 1):
        return
    while listed.held < wanted and arena.num_free > 0:
        t.places[listed.place + listed.held] = take_page(t, worker, kind)
        listed.held += 1


@compiled
def note_appended(t: Tables, subgraph: Subgraph, steps: int) -> None:
    """Count the rows that steps of a chain or loop appended, one for each step."""
    cell_type = t.types[subgraph.cell_type]
    for port in range(cell_type.num_inputs):
        if t.ports[cell_type.first_port + port].appends:
            listed = page_list_at(t.links, input_of(t, subgraph, port).at)
            if not listed.is_broken:
                listed.rows += steps


@compiled
def break_pages(t: Tables, request: Request) -> None:
    """Count nothing that a request appends after one of its rows failed: later rows may have read the failed one."""
    for k in range(request.num_page_lists):
        page_list_of(t, request, k).is_broken = 1
