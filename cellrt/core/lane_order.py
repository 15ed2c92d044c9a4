"""In which order a task looks through the lanes of its cell type."""

from __future__ import annotations

from cellrt.core.jit import compiled
from cellrt.core.tables import LANES_PER_PRIORITY, NUM_LANES, NUM_PRIORITIES


@compiled
def first_lane(t, type_id, priority):
    """The lane of a client priority to scan first: the first of its lanes, but every ``fair_every``-th task the one
    that was served longest ago."""
    settings, cell_type = t.settings[0], t.types[type_id]
    best = (NUM_PRIORITIES - 1 - priority) * LANES_PER_PRIORITY
    cell_type.num_formed += 1
    if cell_type.num_formed % settings.fair_every != 0:
        return best
    lanes = type_id * NUM_LANES
    for lane in range(best, best + LANES_PER_PRIORITY):
        if t.lanes[lanes + lane].head >= 0:
            if t.lanes[lanes + best].head < 0 or t.lanes[lanes + lane].served < t.lanes[lanes + best].served:
                best = lane
    return best


@compiled
def lane_at(first, k):
    """The k-th lane to scan: those of one client priority, which begin at ``first``, then the others in order."""
    if k < LANES_PER_PRIORITY:
        return first + k
    return k if k >= first + LANES_PER_PRIORITY else k - LANES_PER_PRIORITY
