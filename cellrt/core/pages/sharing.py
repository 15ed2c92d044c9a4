"""Sessions that share the pages of their common rows, and sessions that are cut back.

A shared page is reserved once for each table that names it, as each may come to need a copy: a suspended request copies
its shared pages to the host. So sharing makes room for more running requests at a worker, but not for more admissions,
and every admitted request finishes whether pages are shared or not.
"""

from __future__ import annotations

from cellrt.core.pages.holders import copy_page, give_page, hold_page, is_shared
from cellrt.core.pages.pages import feed_all, pages_of
from cellrt.core.state.buddy_allocator import PLACES, allocate_block
from cellrt.core.state.tables import LOCATION_SHIFT, MAX_COPIES, MAX_KINDS, Slot, Tables
from cellrt.native.jit import compiled


@compiled
def share_pages(t: Tables, slot: Slot, other: Slot) -> bool:
    """Give an empty slot the rows of another session's slot: whole pages are shared, the rest is copied.

    Return False if there is no room for that, or the rows are not in pages; then the empty slot may have some of them.
    """
    kind, whole, table = slot.kind, slot.length // max(1, slot.page_size), t.kinds[slot.kind]
    if slot.row != 0 or pages_of(slot.length, max(1, slot.page_size)) != slot.pages:
        return False
    if slot.pages == 0:
        return True
    if table.reserved_worker + slot.pages > table.worker_rows + table.host_rows:
        return False
    place = allocate_block(t.blocks, PLACES, slot.pages)
    if place < 0:
        return False
    other.place, other.capacity, other.kind, other.page_size = place, slot.pages, kind, slot.page_size
    other.length = slot.length
    for k in range(slot.pages):
        handle = t.places[slot.place + k]
        if k < whole:
            hold_page(t, handle, kind)
        elif not _can_copy(t, handle, kind):
            return False
        else:
            handle = copy_page(t, handle, handle >> LOCATION_SHIFT, kind)
        t.places[place + k] = handle
        other.pages += 1
        table.reserved_worker += 1
    return True


@compiled
def cut_pages(t: Tables, slot: Slot, rows: int) -> bool:
    """Cut a session's slot back to its first ``rows`` rows.

    Return False, with nothing changed, if the last of these is in a shared page and there is no room for a copy of it,
    or if the rows are not in pages.
    """
    if slot.length == 0 or pages_of(slot.length, slot.page_size) != slot.pages:
        return False
    kind, pages = slot.kind, pages_of(rows, slot.page_size)
    last = slot.place + pages - 1
    if rows % slot.page_size > 0 and is_shared(t, t.places[last], kind):
        handle = t.places[last]
        if not _can_copy(t, handle, kind):
            return False
        t.places[last] = copy_page(t, handle, handle >> LOCATION_SHIFT, kind)
        give_page(t, handle, kind)
    for k in range(slot.place + pages, slot.place + slot.pages):
        give_page(t, t.places[k], kind)
    t.kinds[kind].reserved_worker -= slot.pages - pages
    slot.pages, slot.length = pages, rows
    feed_all(t)
    return True


@compiled
def _can_copy(t: Tables, handle: int, kind: int) -> bool:
    """Return whether there is room for a copy of a page at its location."""
    arena = t.arenas[(handle >> LOCATION_SHIFT) * MAX_KINDS + kind]
    return arena.num_free > 0 and t.settings[0].num_copies < MAX_COPIES
