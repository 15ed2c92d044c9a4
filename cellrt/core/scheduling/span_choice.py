"""The choice of the chains and loops that go into a task of a cell with spans, and of the number of rows of each.

Loops and chains with one step come first, so that no next token waits for a long input, then chains as far as rows and
pages reach (ORCA section 4.2; Pensieve section 3.4.2 calls it unified scheduling). Without ``steps_first`` all are in
one order, and none goes before one that does not fit; those that find no page are passed over. With ``prompts_apart`` a
task has chains with several steps alone or, if none of these can go, single steps alone. If a cell takes all steps of a
chain in one task none is a single step, and chains that do not fit are passed over. Chains and loops that have no
worker yet are shared out among the workers with nothing to do, where that gains anything (``gathering.py``).
"""

from __future__ import annotations

from cellrt.core.pages.pages import claim_pages
from cellrt.core.pages.span_arrays import page_ints
from cellrt.core.running.records import ragged_ints
from cellrt.core.scheduling.gathering import gains_by_sharing, steps_of_new, steps_without_a_worker
from cellrt.core.state.moves import LIVE
from cellrt.core.state.record_layout import record_of
from cellrt.core.state.tables import LOOP, CellType, Request, Subgraph, Tables
from cellrt.native.jit import compiled

ALL = 1 << 30


@compiled
def begin_spans(t: Tables, type_id: int, worker: int) -> None:
    """Set how much of the chains and loops without a worker may be in the task that is being formed."""
    t.forming[0].most_new = _share_of_new(t, type_id)
    t.forming[0].may_begin = int(t.settings[0].joins > 0 or not _has_pages(t, worker))


@compiled
def take_span(t: Tables, cell_type: CellType, subgraph_id: int, worker: int, nodes_at: int, passes: int) -> bool:
    """Move ready rows of a chain or loop to the task that is being formed, as far as it has pages for them.

    Return False if none behind it may go before it.
    """
    forming, settings, subgraph = t.forming[0], t.settings[0], t.subgraphs[subgraph_id]
    its_turn = passes == 1 or int(subgraph.num_ready > 1) == forming.are_long
    has_begun = _has_begun(t.requests[subgraph.request])
    if not its_turn or not (forming.may_begin or has_begun):
        return True
    # Look whether it fits, and whether it may.
    stop, left = record_of(t, subgraph).stop, cell_type.max_rows - forming.rows
    extra = page_ints(t, cell_type, subgraph)
    extra += ragged_ints(t, cell_type, subgraph) if cell_type.num_ragged > 0 else 0
    fits = forming.rows == 0 or forming.ragged + extra <= forming.room
    fits = fits and (forming.stop < 0 or stop < 0 or stop == forming.stop)
    fits = fits and not (cell_type.is_whole and subgraph.num_ready > left)
    if not (fits or settings.steps_first):
        return False
    is_new = subgraph.pinned == 0
    if not fits or (is_new and forming.new >= forming.most_new):
        return True
    if forming.are_long and _is_taken(t, nodes_at, forming.singles, subgraph_id):
        return True
    # Take as many rows as find pages and room.
    count = _rows_of(t, cell_type, subgraph, worker, left)
    if cell_type.num_ragged > 0:
        count = min(count, max(1, (forming.room - forming.ragged) // extra))
        extra *= count
    if settings.reserve_pages and count == 0 and not has_begun:
        forming.may_begin = 0  # later requests do not begin before it
    if count > 0:
        forming.new += steps_of_new(subgraph, count) if is_new else 0
        forming.ragged, forming.spans = forming.ragged + extra, forming.spans + 1
        add_rows(t, subgraph_id, count, 0, nodes_at)
    return True


@compiled
def add_rows(t: Tables, subgraph_id: int, count: int, runs: int, nodes_at: int) -> None:
    """Add rows of a chain or loop to the task that is being formed.

    ``runs``: 1 if a task may take several steps of it.
    """
    forming, subgraph = t.forming[0], t.subgraphs[subgraph_id]
    for row in range(nodes_at + forming.rows, nodes_at + forming.rows + count):
        t.ints[row] = ~subgraph_id
    forming.rows += count
    forming.priorities |= 1 << subgraph.priority
    if subgraph.what == LOOP:
        forming.loops, forming.is_loop = forming.loops + count, runs
        forming.stop = max(forming.stop, record_of(t, subgraph).stop)


@compiled
def _has_pages(t: Tables, worker: int) -> bool:
    """Return whether a request has pages at a worker."""
    for request_id in range(t.settings[0].num_requests):
        if t.requests[request_id].state == LIVE and t.requests[request_id].home == worker:
            return True
    return False


@compiled
def _has_begun(request: Request) -> bool:
    """Return whether a request has its first pages, or never has any."""
    return request.home > 0 or request.num_page_lists == 0


@compiled
def _share_of_new(t: Tables, type_id: int) -> int:
    """Return how many steps of chains and loops without a worker one worker takes."""
    settings = t.settings[0]
    if settings.split == 0 or settings.idle_workers <= 1:
        return ALL
    steps = steps_without_a_worker(t, type_id)
    if not gains_by_sharing(t, type_id, steps, settings.idle_workers):
        return ALL
    return (steps + settings.idle_workers - 1) // settings.idle_workers


@compiled
def _is_taken(t: Tables, nodes_at: int, singles: int, subgraph_id: int) -> bool:
    """Return whether a chain that is long by now was taken as one with one step.

    More of it is ready once its pages have a worker, where the steps that it reads are on their way.
    """
    for row in range(singles):
        if t.ints[nodes_at + row] == ~subgraph_id:
            return True
    return False


@compiled
def _rows_of(t: Tables, cell_type: CellType, subgraph: Subgraph, worker: int, most: int) -> int:
    """Return how many steps of a chain or loop go into a task: as many as find pages, or none of a whole chain."""
    count = min(subgraph.num_ready, most)
    taken = claim_pages(t, subgraph, worker, count)
    return 0 if cell_type.is_whole and taken < count else taken
