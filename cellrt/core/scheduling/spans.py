"""Which chains and loops go into a task of a cell with spans, and with how many rows each.

Loops and chains with one step come first, so that nobody who waits for his next token waits for a long input, then
chains as far as rows and pages reach (ORCA section 4.2; Pensieve section 3.4.2 calls it unified scheduling). Without
``steps_first`` all are in one order, and nobody goes before one that does not fit; what finds no page is passed over.
With ``prompts_apart`` a task has chains with several steps alone or, if none of these can go, single steps alone.
Of a cell that has all steps of a chain in one task none is a single step, and what does not fit is passed over. Those
that no worker has yet are shared out among the workers with nothing to do, where that gains anything
(``gathering.py``).
"""

from __future__ import annotations

from cellrt.core.pages.pages import claim_pages
from cellrt.core.pages.span_arrays import page_ints
from cellrt.core.running.records import ragged_ints
from cellrt.core.scheduling.gathering import gains_by_sharing, steps_of_new, steps_without_a_worker
from cellrt.core.scheduling.policy import put_in_order
from cellrt.core.state.moves import LIVE
from cellrt.core.state.queue import backlog_of, nth_priority
from cellrt.core.state.record_layout import record_of
from cellrt.core.state.tables import NUM_PRIORITIES, CellType, Request, Subgraph, Tables
from cellrt.native.jit import compiled

ALL = 1 << 30


@compiled
def collect_spans(
    t: Tables, type_id: int, priority: int, worker: int, nodes_at: int, room: int
) -> tuple[int, int, int, int]:
    """Writes the chains and loops of a task to the buffer, one int for each of their rows.

    ``room`` is the number of ints left for pages and ragged inputs. Returns (rows, ints of those, the output that says
    stop of its loops or -1, client priorities as bits).
    """
    cell_type, settings = t.types[type_id], t.settings[0]
    rows = spans = used = priorities = 0
    stop, singles, new = -1, 0, 0
    most_new = _share_of_new(t, type_id)
    may_begin = settings.joins > 0 or not _has_pages(t, worker)
    passes = 2 if (settings.steps_first or settings.prompts_apart) and not cell_type.is_whole else 1
    for number in range(passes):
        are_long = 1 - number if settings.prompts_apart and passes == 2 else number
        for k in range(NUM_PRIORITIES):
            its_priority = nth_priority(priority, k)
            if number == 0:
                put_in_order(t, type_id, its_priority, worker)
            subgraph_id = t.lanes[backlog_of(type_id, its_priority)].head
            while subgraph_id >= 0 and rows < cell_type.max_rows and spans < cell_type.max_batch:
                subgraph = t.subgraphs[subgraph_id]
                its_turn = passes == 1 or (subgraph.num_ready > 1) == (are_long > 0)
                its_turn = its_turn and (may_begin or _has_begun(t.requests[subgraph.request]))
                if subgraph.pinned in (0, worker) and subgraph.num_ready > 0 and its_turn:
                    its_stop = record_of(t, subgraph).stop
                    extra = page_ints(t, cell_type, subgraph)
                    extra += ragged_ints(t, cell_type, subgraph) if cell_type.num_ragged > 0 else 0
                    fits = (rows == 0 or used + extra <= room) and (stop < 0 or its_stop < 0 or stop == its_stop)
                    fits = fits and not (cell_type.is_whole and subgraph.num_ready > cell_type.max_rows - rows)
                    if not (fits or settings.steps_first):
                        return rows, used, stop, priorities
                    fits = fits and not (are_long and _is_taken(t, nodes_at, singles, subgraph_id))
                    is_new = subgraph.pinned == 0
                    if fits and (not is_new or new < most_new):
                        count = _rows_of(t, cell_type, subgraph, worker, cell_type.max_rows - rows)
                        if cell_type.num_ragged > 0:
                            count = min(count, max(1, (room - used) // extra))
                            extra *= count
                        for each in range(count):
                            t.ints[nodes_at + rows + each] = ~subgraph_id
                        if settings.reserve_pages and count == 0 and not _has_begun(t.requests[subgraph.request]):
                            may_begin = False  # who comes behind does not begin before
                        if count > 0:
                            new += steps_of_new(subgraph, count) if is_new else 0
                            rows, spans, used, stop = rows + count, spans + 1, used + extra, max(stop, its_stop)
                            priorities |= 1 << subgraph.priority
                subgraph_id = subgraph.next
        if settings.prompts_apart and rows > 0:
            break
        singles = rows if not are_long else singles
    return rows, used, stop, priorities


@compiled
def _has_pages(t: Tables, worker: int) -> bool:
    """Whether a request has pages at a worker."""
    for request_id in range(t.settings[0].num_requests):
        if t.requests[request_id].state == LIVE and t.requests[request_id].home == worker:
            return True
    return False


@compiled
def _has_begun(request: Request) -> bool:
    """Whether a request has its first pages, or never has any."""
    return request.home > 0 or request.num_page_lists == 0


@compiled
def _share_of_new(t: Tables, type_id: int) -> int:
    """How many steps of chains and loops that no worker has yet one worker takes."""
    settings = t.settings[0]
    if settings.split == 0 or settings.idle_workers <= 1:
        return ALL
    steps = steps_without_a_worker(t, type_id)
    if not gains_by_sharing(t, type_id, steps, settings.idle_workers):
        return ALL
    return (steps + settings.idle_workers - 1) // settings.idle_workers


@compiled
def _is_taken(t: Tables, nodes_at: int, singles: int, subgraph_id: int) -> bool:
    """Whether a chain that is long by now was taken as one with one step: more of it is ready once its pages have a
    worker, where the steps that it reads are on their way."""
    for row in range(singles):
        if t.ints[nodes_at + row] == ~subgraph_id:
            return True
    return False


@compiled
def _rows_of(t: Tables, cell_type: CellType, subgraph: Subgraph, worker: int, most: int) -> int:
    """How many steps of a chain or loop go into a task; none if there are no pages for them, or for some of a whole."""
    count = min(subgraph.num_ready, most)
    taken = claim_pages(t, subgraph, worker, count)
    return 0 if cell_type.is_whole and taken < count else taken
