"""The explanation of what a live request waits for, in words: which part of it, which step, which worker."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cellrt.core.processor import Processor
from cellrt.core.state.moves import SubgraphState
from cellrt.core.state.record_layout import body_at, record_at
from cellrt.core.state.tables import CHAIN, GRAPH, NUM_PRIORITIES, Tables

Namer = Callable[[int], str]
"""A function that returns the name of a cell type, by its id."""


def explain(processor: Processor, request: int, name_of: Namer) -> list[str]:
    """Return a line for each part (subgraph) of a live request that is not complete.

    ``request`` is its id in the tables. Reads all tasks in flight: for people, not for every request.
    """
    t = processor.tables
    row, lines = t.requests[request], []
    tasks = _tasks_by_subgraph(processor)
    first = int(row["first_subgraph"])
    for subgraph in range(first, first + int(row["num_subgraphs"])):
        state, in_flight = int(t.subgraphs["state"][subgraph]), int(t.subgraphs["in_flight"][subgraph])
        if state == SubgraphState.HANDED_OUT and in_flight == 0:
            continue
        told = [_in_flight(t, subgraph, tasks.get(subgraph, ()))] if in_flight else []
        if state == SubgraphState.BLOCKED:
            told.append(f"waits for {_plural(int(t.subgraphs['waiting'][subgraph]), 'result')} of other parts")
        elif state == SubgraphState.QUEUED:
            told.append(_queued(t, subgraph, in_flight))
        lines.append(f"{_what(t, subgraph, name_of)}: {', '.join(told)}")
    if int(row["pages_away"]):
        lines.append(f"{_plural(int(row['pages_away']), 'page')} of it must come back from the host")
    return lines


def _plural(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _what(t: Tables, subgraph: int, name_of: Namer) -> str:
    """Return what a subgraph is, and how far it is."""
    row = t.subgraphs[subgraph]
    name = name_of(int(row["cell_type"]))
    if int(row["what"]) == GRAPH:
        return f"{_plural(int(row['nodes_left']), 'node')} of {name} not submitted"
    record = record_at(t.links, int(row["record"]))
    if int(row["what"]) == CHAIN:
        return f"chain of {name}, {record.done} of {record.end} steps done"
    body = body_at(t.links, record.body)
    kind = "loop" if body.num_members == 1 else "part of a loop"
    return f"{kind} of {name}, {record.done} of at most {body.limit} steps done"


def _in_flight(t: Tables, subgraph: int, tasks: Sequence[int]) -> str:
    workers = sorted({int(t.tasks["worker"][task]) for task in tasks})
    numbers = ", ".join(str(int(t.tasks["number"][task])) for task in tasks)
    where = " and ".join(map(str, workers))
    return f"in task {numbers} at worker {where}" if tasks else "in flight"


def _queued(t: Tables, subgraph: int, in_flight: int) -> str:
    """Return what a subgraph in its queue waits for."""
    row = t.subgraphs[subgraph]
    ready, worker, cell_type = int(row["num_ready"]), int(row["pinned"]), int(row["cell_type"])
    if ready == 0:
        if in_flight:
            return "goes on when that is done"
        return "waits for a step of another part, or for pages"
    where = f"worker {worker}" if worker else "any worker"
    before, other = 0, int(t.lanes["head"][cell_type * NUM_PRIORITIES + int(row["priority"])])
    while other >= 0 and other != subgraph:
        before += int(t.subgraphs["num_ready"][other] > 0)
        other = int(t.subgraphs["next"][other])
    starved, joining = int(t.types["starved_at"][cell_type]), int(t.types["joined_at"][cell_type])
    why = f", {before} before it in the queue"
    if worker and starved >> worker & 1:
        why += ", and the worker has no free page"
    if worker and joining >> worker & 1:
        why += ", and joins the tasks in flight when one has ended"
    running = int(t.types["num_running"][cell_type])
    return f"{_plural(ready, 'row')} ready for {where}{why}, {_plural(running, 'task')} of the cell running"


def _tasks_by_subgraph(processor: Processor) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for task in processor.tables.tasks["in_use"].nonzero()[0].tolist():
        for _, subgraph in processor.rows_in_flight(task):
            if task not in found.setdefault(subgraph, []):
                found[subgraph].append(task)
    return found
