"""Arena rows as a stack of free row numbers per location and kind, and the reservations that keep it from running dry.

A request is admitted only when the most rows it can ever hold at once (``needs`` of its template) are still unreserved,
so taking a row in the middle of the work cannot fail (DESIGN, rule 8). The reservation holds at every worker, because
any of them may run any subgraph.

A stack starts with all rows of its arena, the lowest on top. The rows at its bottom that were never taken are not
written down, so that a new arena costs nothing, however large.
"""

from __future__ import annotations

from cellrt.core.state.tables import LOCATION_SHIFT, MAX_KINDS, NUM_PERMANENT, Tables
from cellrt.native.jit import compiled
from cellrt.native.row_types import Rows


@compiled
def take_row(t: Tables, location: int, kind: int) -> int:
    """Return the handle of a free row. The caller holds a reservation; -1 if that rule was broken."""
    arena = t.arenas[location * MAX_KINDS + kind]
    if arena.num_free == 0:
        return -1
    arena.num_free -= 1
    if arena.num_free < arena.num_fresh:
        arena.num_fresh = arena.num_free
        return fresh_row(location, arena.capacity, arena.num_free)
    return t.free_rows[arena.first + arena.num_free]


@compiled
def fresh_row(location: int, capacity: int, place: int) -> int:
    """Return the handle that lies at a place of an arena's stack at first."""
    return (location << LOCATION_SHIFT) | (NUM_PERMANENT + capacity - 1 - place)


@compiled
def give_row(t: Tables, handle: int, kind: int) -> None:
    """Give back a row; permanent rows stay where they are."""
    if handle < NUM_PERMANENT:
        return
    arena = t.arenas[(handle >> LOCATION_SHIFT) * MAX_KINDS + kind]
    t.free_rows[arena.first + arena.num_free] = handle
    arena.num_free += 1


@compiled
def can_reserve(t: Tables, needs: Rows[int]) -> bool:
    """Return whether the rows ``needs[kind, (worker, host)]`` are unreserved; ``pages.py`` checks the pages."""
    for kind in range(needs.shape[0]):
        k = t.kinds[kind]
        if k.is_paged:
            continue
        if k.reserved_worker + needs[kind, 0] > k.worker_rows or k.reserved_host + needs[kind, 1] > k.host_rows:
            return False
    return True
