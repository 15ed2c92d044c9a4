"""The counts of page tables, of requests and of sessions, that name a page: it is free when none does.

A page that is full is never written to, so any number of tables may name it (Kwon et al. 2023, section 4.4, share
blocks so). The page of a table's next row is named by that table alone: a table that shares another's rows gets a copy
of the last page, if that is not full (``sharing.py``).
"""

from __future__ import annotations

from cellrt.core.state.rows import give_row, take_row
from cellrt.core.state.tables import LOCATION_SHIFT, MAX_KINDS, NUM_PERMANENT, ROW_MASK, Tables
from cellrt.native.jit import compiled


@compiled
def holders_at(t: Tables, handle: int, kind: int) -> int:
    """Return the index in ``holders`` of the count of a page."""
    return t.arenas[(handle >> LOCATION_SHIFT) * MAX_KINDS + kind].first + (handle & ROW_MASK) - NUM_PERMANENT


@compiled
def take_page(t: Tables, location: int, kind: int) -> int:
    """Take a free page, which one table names from now on; return its handle, or -1 if there is none."""
    handle = take_row(t, location, kind)
    if handle >= 0:
        t.holders[holders_at(t, handle, kind)] = 1
    return handle


@compiled
def hold_page(t: Tables, handle: int, kind: int) -> None:
    """Count one more table that names a page."""
    t.holders[holders_at(t, handle, kind)] += 1


@compiled
def is_shared(t: Tables, handle: int, kind: int) -> bool:
    """Return whether several tables name a page."""
    return t.holders[holders_at(t, handle, kind)] > 1


@compiled
def give_page(t: Tables, handle: int, kind: int) -> None:
    """Count one table less that names a page, and free the page with the last."""
    at = holders_at(t, handle, kind)
    t.holders[at] -= 1
    if t.holders[at] == 0:
        give_row(t, handle, kind)


@compiled
def copy_page(t: Tables, handle: int, location: int, kind: int) -> int:
    """Return the handle of a copy of a page, where a page is free; the driver copies before it launches anything."""
    settings, target = t.settings[0], take_page(t, location, kind)
    at = 3 * settings.num_copies
    t.copies[at], t.copies[at + 1], t.copies[at + 2] = kind, handle, target
    settings.num_copies += 1
    return target
