"""The loss of a worker: requests with work or rows there are killed, and its tasks end as failed."""

from __future__ import annotations

from cellrt.core.completion.completion import complete, kill, tell
from cellrt.core.requests.admission import release
from cellrt.core.state import task_layout as layout
from cellrt.core.state.moves import LIVE
from cellrt.core.state.notices import NOTICE_FAILED, NOTICE_RELEASED
from cellrt.core.state.queue import rows_in_flight
from cellrt.core.state.record_layout import output_of
from cellrt.core.state.tables import LOCATION_SHIFT, NUM_PERMANENT, Request, Tables
from cellrt.native.jit import compiled
from cellrt.native.row_types import Matrix


@compiled
def lose_worker(t: Tables, worker: int, notices: Matrix) -> int:
    """Kill every request that has a task or a row at a lost worker; return the number of notices.

    ``notices`` [3 * live requests, 2] must have room.
    """
    count = 0
    for request_id in range(t.settings[0].num_requests):
        request = t.requests[request_id]
        if request.state == LIVE and _touches(t, request, worker):
            kill(t, request_id)
            count = tell(notices, count, request_id, NOTICE_FAILED)
            if rows_in_flight(t, request) == 0:
                release(t, request_id)
                count = tell(notices, count, request_id, NOTICE_RELEASED)
    for task_id in range(t.tasks.size):
        if t.tasks[task_id].in_use and t.tasks[task_id].worker == worker:
            _fail_all(t, task_id)
            count = complete(t, task_id, 0, notices, count)
    return count


@compiled
def _fail_all(t: Tables, task_id: int) -> None:
    """Mark every row of a lost task as failed, so that no state is continued from it."""
    base = task_id * t.settings[0].buffer_ints
    failed_at = base + t.ints[base + layout.H_FAILED]
    for row in range(t.tasks[task_id].rows):
        t.ints[failed_at + row] = 1


@compiled
def _touches(t: Tables, request: Request, worker: int) -> bool:
    if request.num_page_lists > 0 and request.home == worker:
        return True
    for k in range(request.first_subgraph, request.first_subgraph + request.num_subgraphs):
        subgraph = t.subgraphs[k]
        if subgraph.pinned == worker and subgraph.in_flight > 0:
            return True
        if subgraph.record >= 0:
            for k in range(t.types[subgraph.cell_type].num_outputs):
                output = output_of(t, subgraph, k)
                if output.row > 0 and output.row >> LOCATION_SHIFT == worker:
                    return True
                if output.late_row > 0 and output.late_row >> LOCATION_SHIFT == worker:
                    return True  # another cell of the same loop may still read it
    for k in range(request.first_value, request.first_value + request.num_values):
        if t.values[k].row >= NUM_PERMANENT and t.values[k].row >> LOCATION_SHIFT == worker:
            return True
    for k in range(request.first_place, request.first_place + request.num_places):
        if t.places[k] >= NUM_PERMANENT and t.places[k] >> LOCATION_SHIFT == worker:
            return True
    return False
