"""The part of the whole-state validator (``validate.py``) for chains and loops: their readiness and their rows."""

from __future__ import annotations

import numpy as np

from cellrt.core.state.moves import LIVE, QUEUED
from cellrt.core.state.page_list import page_list_at
from cellrt.core.state.record_layout import BODY_WORDS, SAME, STEP, body_at, inputs_of, outputs_of, record_at
from cellrt.core.state.tables import CHAIN, Request, Subgraph, Tables


def record_rules(t: Tables, subgraph_id: int) -> list[str]:
    """Return what is wrong with the progress of a chain or loop, or with the steps that it is ready for."""
    subgraph = t.subgraphs[subgraph_id]
    record, is_queued = record_at(t.links, int(subgraph["record"])), int(subgraph["state"]) == QUEUED
    length, position, done = int(record.end), int(record.position), int(record.done)
    if not 0 <= done <= position <= length:
        return [f"subgraph {subgraph_id}: {done} steps done of {position} sent of {length}"]
    is_loop = int(subgraph["what"]) != CHAIN
    cell_type, in_flight = t.types[int(subgraph["cell_type"])], int(subgraph["in_flight"])
    waits, most = in_flight > 0 and record.keeps > 0, 1 if cell_type["carries"] else length
    if is_loop:
        if wrong := _body(t, subgraph, length) or _turns(t, subgraph):
            return [f"subgraph {subgraph_id}: {wrong}"]
        most = max(1, 1 + int(record.unseen) - position)
        waits = waits and not cell_type["ahead"]
        waits = waits or 0 < body_at(t.links, record.body).stopped <= position
        waits = waits or _loop_tasks(t, subgraph) > cell_type["ahead"]
        if is_queued and (done < position) != (in_flight > 0):
            return [f"subgraph {subgraph_id}: {done} steps done of {position} sent, {in_flight} tasks in flight"]
    steps = range(position, position if waits else min(length, position + most))
    ready = next((k for k, step in enumerate(steps) if not _is_fed(t, subgraph, step)), len(steps))
    if cell_type["is_whole"] and ready < length and not is_loop:
        ready = 0
    home = int(t.requests["home"][int(subgraph["request"])])
    if is_queued and cell_type["has_spans"] and home and int(subgraph["pinned"]) != home:
        return [f"subgraph {subgraph_id} is pinned to {int(subgraph['pinned'])}, its pages are at {home}"]
    if is_queued and int(subgraph["num_ready"]) != ready:
        return [f"subgraph {subgraph_id} may take {ready} steps, but is ready for {int(subgraph['num_ready'])}"]
    return []


def _loop_tasks(t: Tables, subgraph: Subgraph) -> int:
    """Return the number of tasks in flight with steps of a loop's cell."""
    record = record_at(t.links, int(subgraph["record"]))
    unseen = int(record.unseen)
    return int(subgraph["in_flight"]) - max(0, unseen - int(record.done)) if record.position > unseen else 0


def _turns(t: Tables, subgraph: Subgraph) -> str:
    """Return what is wrong with the rows that tasks in flight write a loop's state to; empty if nothing is.

    Each task has its own row, and none has that of the last step that is done.
    """
    cell_type, record = t.types[int(subgraph["cell_type"])], record_at(t.links, int(subgraph["record"]))
    tasks, sent = _loop_tasks(t, subgraph), int(record.num_sent)
    is_live = int(t.requests["state"][int(subgraph["request"])]) == LIVE and int(subgraph["state"]) == QUEUED
    if not cell_type["ahead"] or not is_live or not tasks:
        return ""
    for output, turns in outputs_of(t, subgraph):
        if not output.is_state:
            continue
        rows = [int(turns[task % turns.size]) for task in range(sent - tasks, sent)]
        rows.append(int(turns[(sent - tasks - 1) % turns.size]))
        if len(set(rows)) != len(rows) or 0 in rows[:-1] or rows[-2] != output.row:
            return f"{tasks} tasks in flight, behind the last step that is done, have rows {rows}"
    return ""


def _body(t: Tables, subgraph: Subgraph, length: int) -> str:
    """Return what is wrong with the body of a member that has begun ``length`` steps; empty if nothing is."""
    own = record_at(t.links, int(subgraph["record"]))
    body, request = body_at(t.links, own.body), t.requests[int(subgraph["request"])]
    members = int(request["first_subgraph"]) + t.links[own.body + BODY_WORDS :][: body.num_members]
    records = [record_at(t.links, int(at)) for at in t.subgraphs["record"][members]]
    begun, sent, done = (np.array([getattr(each, name) for each in records]) for name in ("end", "position", "done"))
    if (begun != length).any() or length > body.limit:
        return f"its body has begun {begun.tolist()} steps of {body.limit}"
    if int(request["state"]) != LIVE or int(subgraph["state"]) != QUEUED:
        return ""
    by_all, ahead = int(body.all_done), int(t.types["ahead"][int(subgraph["cell_type"])])
    if body.left != (done <= by_all).sum() or (done < by_all).any() or (done > by_all + 1).any():
        return f"{body.left} members are counted that have not done {by_all + 1} steps; done are {done}"
    if body.runs:
        return "" if length == body.limit else f"{length} steps are begun of {body.limit}, and nobody is waited for"
    if body.to_send != (sent < length).sum() or (sent < length - 1).any():
        return f"{body.to_send} members are counted that have not sent {length} steps; sent are {sent}"
    if length - by_all > ahead + 1:
        return f"{length} steps are begun, {by_all} done, and it goes ahead by {ahead}"
    if by_all < own.position < length and int(subgraph["pinned"]) != body.sent_at:
        return f"pinned to {int(subgraph['pinned'])}, the step before is at {body.sent_at}"
    return ""


def _is_fed(t: Tables, subgraph: Subgraph, step: int) -> bool:
    """Return whether a step's inputs from other chains are done, or sent to the worker of its own subgraph."""
    for read in inputs_of(t, subgraph):
        if read.mode not in (STEP, SAME) or read.source < 0:
            continue
        source = t.subgraphs[read.source]
        is_sent = t.settings["early_release"][0] and 0 < int(source["pinned"]) == int(subgraph["pinned"])
        its = record_at(t.links, int(source["record"]))
        if read.start + read.direction * step >= (its.position if is_sent else its.done):
            return False
    return True


def state_rows(t: Tables, subgraph_id: int) -> list[tuple[int, int]]:
    """Return (handle, kind) of the rows of its own that a chain or loop keeps its state in."""
    subgraph = t.subgraphs[subgraph_id]
    if int(subgraph["record"]) < 0:
        return []
    cell_type, found = t.types[int(subgraph["cell_type"])], []
    inputs = int(cell_type["num_inputs"])
    for k, (output, turns) in enumerate(outputs_of(t, subgraph)):
        kind = int(t.ports["kind"][int(cell_type["first_port"]) + inputs + k])
        found += [(row, kind) for row in (*turns.tolist(), int(output.late_row)) if row > 0]
    return found


def page_rules(t: Tables, request: Request) -> list[str]:
    """Return what is wrong with a request's growing states.

    Each has pages for the steps that were sent. Its rows are those of the steps that were done before any stop or
    failure.
    """
    done, rules = dict[int, int](), list[str]()
    for k in range(int(request["first_subgraph"]), int(request["first_subgraph"]) + int(request["num_subgraphs"])):
        subgraph = t.subgraphs[k]
        if int(subgraph["record"]) < 0:
            continue
        cell_type, record = t.types[int(subgraph["cell_type"])], record_at(t.links, int(subgraph["record"]))
        for port, read in enumerate(inputs_of(t, subgraph)):
            if not t.ports["appends"][int(cell_type["first_port"]) + port]:
                continue
            state = page_list_at(t.links, read.at)
            sent = int(state.before + read.start + record.position)
            done[int(read.at)] = done.get(int(read.at), 0) + int(record.done)
            if record.position and sent > state.held * state.page_size:
                rules.append(f"{sent} rows were sent, {state.held} pages are held")
    for at, count in done.items():
        state = page_list_at(t.links, at)
        if not state.is_broken and state.rows - state.before != count:
            rules.append(f"{state.rows - state.before} rows are counted of {count} that are done")
    return rules
