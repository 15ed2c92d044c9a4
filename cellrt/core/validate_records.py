"""What the whole-state validator (``validate.py``) checks of chains and loops: who may take a step, and which rows they
have."""

from __future__ import annotations

import numpy as np

from cellrt.core import page_list
from cellrt.core import record_layout as record
from cellrt.core.moves import LIVE, QUEUED
from cellrt.core.tables import CHAIN, LOOP, MEMBER, Tables


def record_rules(t: Tables, subgraph_id: int) -> list[str]:
    """A chain or loop that says it is ready may take a step, and its progress is in order."""
    subgraph = t.subgraphs[subgraph_id]
    at, is_queued = int(subgraph["record"]), int(subgraph["state"]) == QUEUED
    length, position, done = (int(t.links[at + word]) for word in (record.LENGTH, record.POSITION, record.DONE))
    if not 0 <= done <= position <= length:
        return [f"subgraph {subgraph_id}: {done} steps done of {position} sent of {length}"]
    is_loop = int(subgraph["what"]) != CHAIN
    if int(subgraph["what"]) == MEMBER:
        if wrong := _body(t, subgraph, length):
            return [f"subgraph {subgraph_id}: {wrong}"]
    cell_type, in_flight = t.types[int(subgraph["cell_type"])], int(subgraph["in_flight"])
    waits, most = in_flight and (t.links[at + record.KEEPS] or is_loop), length
    if cell_type["carries"] or is_loop:
        most = 1
    if int(subgraph["what"]) == MEMBER and cell_type["ahead"]:
        waits = 0 < t.links[int(t.links[at + record.BODY]) + record.STOPPED] <= position
    if int(subgraph["what"]) == LOOP:
        lead = int(t.links[at + record.UNSEEN]) - position
        most, ahead = max(1, 1 + lead), int(cell_type["ahead"])
        waits = in_flight and (t.links[at + record.KEEPS] or lead < 0)
        waits = waits and (not ahead or _loop_tasks(t, subgraph) > ahead)
        if is_queued and (done < position) != (in_flight > 0):
            return [f"subgraph {subgraph_id}: {done} steps done of {position} sent, {in_flight} tasks in flight"]
    if wrong := _turns(t, subgraph) if is_loop else "":
        return [f"subgraph {subgraph_id}: {wrong}"]
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


def _loop_tasks(t: Tables, subgraph: np.void) -> int:
    """Tasks in flight with steps of a loop of one cell."""
    links, at = t.links, int(subgraph["record"])
    unseen, position, done = (int(links[at + word]) for word in (record.UNSEEN, record.POSITION, record.DONE))
    return int(subgraph["in_flight"]) - max(0, unseen - done) if position > unseen else 0


def _state_words(t: Tables, subgraph: np.void, output: int) -> list[int]:
    """The links of the rows of its own that a loop or member has an output's state in."""
    cell_type, at = t.types[int(subgraph["cell_type"])], int(subgraph["record"])
    to, ahead = at + record.num_words(int(cell_type["num_inputs"]), output), int(cell_type["ahead"])
    more = int(t.links[at + record.MORE_ROWS]) + ahead * output
    return [to + record.FIRST_ROW, to + record.SECOND_ROW, *range(more, more + ahead)]


def _turns(t: Tables, subgraph: np.void) -> str:
    """What is wrong with the rows that tasks in flight write a loop's state to, or nothing: each has its own, and none
    has that of the last step that is done."""
    cell_type, at = t.types[int(subgraph["cell_type"])], int(subgraph["record"])
    tasks, sent = _loop_tasks(t, subgraph), int(t.links[at + record.NUM_SENT])
    is_member = int(subgraph["what"]) == MEMBER
    if is_member:
        sent = int(t.links[at + record.POSITION])
        tasks = sent - int(t.links[at + record.DONE])
    is_live = int(t.requests["state"][int(subgraph["request"])]) == LIVE and int(subgraph["state"]) == QUEUED
    if not cell_type["ahead"] or not is_live or not tasks:
        return ""
    for output in range(int(cell_type["num_outputs"])):
        to, words = at + record.num_words(int(cell_type["num_inputs"]), output), _state_words(t, subgraph, output)
        if not t.links[to + record.IS_STATE]:
            continue
        rows = [int(t.links[words[task % len(words)]]) for task in range(sent - tasks, sent)]
        rows.append(int(t.links[words[(sent - tasks - 1) % len(words)] if is_member else to + record.PREVIOUS_ROW]))
        if len(set(rows)) != len(rows) or 0 in rows[:-1] or rows[-2] != t.links[to + record.ROW]:
            return f"{tasks} tasks in flight, behind the last step that is done, have rows {rows}"
    return ""


def _body(t: Tables, subgraph: np.void, length: int) -> str:
    """What is wrong with the body of a member that has begun ``length`` steps, or nothing."""
    body = int(t.links[int(subgraph["record"]) + record.BODY])
    words, request = t.links[body : body + record.MEMBERS + 1].tolist(), t.requests[int(subgraph["request"])]
    members = int(request["first_subgraph"]) + t.links[body + record.MEMBERS + 1 :][: words[record.MEMBERS]]
    begun, sent, done = (
        t.links[t.subgraphs["record"][members] + word] for word in (record.LENGTH, record.POSITION, record.DONE)
    )
    if (begun != length).any() or length > words[record.LIMIT]:
        return f"its body has begun {begun.tolist()} steps of {words[record.LIMIT]}"
    if int(request["state"]) != LIVE or int(subgraph["state"]) != QUEUED:
        return ""
    by_all, ahead = words[record.ALL_DONE], int(t.types["ahead"][int(subgraph["cell_type"])])
    if words[record.LEFT] != (done <= by_all).sum() or (done < by_all).any() or (done > by_all + 1).any():
        return f"{words[record.LEFT]} members are counted that have not done {by_all + 1} steps; done are {done}"
    if words[record.TO_SEND] != (sent < length).sum() or (sent < length - 1).any():
        return f"{words[record.TO_SEND]} members are counted that have not sent {length} steps; sent are {sent}"
    if length - by_all > ahead + 1:
        return f"{length} steps are begun, {by_all} done, and it goes ahead by {ahead}"
    position = int(t.links[int(subgraph["record"]) + record.POSITION])
    if by_all < position < length and int(subgraph["pinned"]) != words[record.SENT_AT]:
        return f"pinned to {int(subgraph['pinned'])}, the step before is at {words[record.SENT_AT]}"
    return ""


def _is_fed(t: Tables, subgraph: np.void, step: int) -> bool:
    """Whether what a step reads, of chains that its own follows, is done or sent to the worker this is pinned to."""
    at = int(subgraph["record"])
    for port in range(int(t.types["num_inputs"][int(subgraph["cell_type"])])):
        words = t.links[at + record.num_words(port, 0) :][: record.INPUT]
        if words[record.MODE] not in (record.STEP, record.SAME) or words[record.SOURCE] < 0:
            continue
        source = t.subgraphs[words[record.SOURCE]]
        is_sent = t.settings["early_release"][0] and 0 < int(source["pinned"]) == int(subgraph["pinned"])
        made = t.links[int(source["record"]) + (record.POSITION if is_sent else record.DONE)]
        if words[record.START] + words[record.DIRECTION] * step >= made:
            return False
    return True


def state_rows(t: Tables, subgraph_id: int) -> list[tuple[int, int]]:
    """(handle, kind) of the rows of its own that a chain or loop has its state in."""
    subgraph = t.subgraphs[subgraph_id]
    if int(subgraph["record"]) < 0:
        return []
    cell_type, found = t.types[int(subgraph["cell_type"])], []
    inputs = int(cell_type["num_inputs"])
    for output in range(int(cell_type["num_outputs"])):
        at = int(subgraph["record"]) + record.num_words(inputs, output)
        kind = int(t.ports["kind"][int(cell_type["first_port"]) + inputs + output])
        words = [int(t.links[at + word]) for word in (record.FIRST_ROW, record.SECOND_ROW, record.LATE_ROW)]
        if int(subgraph["what"]) != CHAIN:
            words += t.links[_state_words(t, subgraph, output)[2:]].tolist()
        found += [(word, kind) for word in words if word > 0]
    return found


def page_rules(t: Tables, request: np.void) -> list[str]:
    """What is wrong with a request's growing states: each has pages for the steps that were sent, and the rows of those
    that are done and were before any stop or failure."""
    done, rules = dict[int, int](), list[str]()
    for k in range(int(request["first_subgraph"]), int(request["first_subgraph"]) + int(request["num_subgraphs"])):
        subgraph = t.subgraphs[k]
        cell_type, at = t.types[int(subgraph["cell_type"])], int(subgraph["record"])
        for port in range(int(cell_type["num_inputs"]) if at >= 0 else 0):
            if not t.ports["appends"][int(cell_type["first_port"]) + port]:
                continue
            words = t.links[at + record.num_words(port, 0) :][: record.INPUT]
            state = t.links[words[record.AT] :][: page_list.WORDS]
            sent = int(state[page_list.BASE] + words[record.START] + t.links[at + record.POSITION])
            done[int(words[record.AT])] = done.get(int(words[record.AT]), 0) + int(t.links[at + record.DONE])
            if t.links[at + record.POSITION] and sent > state[page_list.HELD] * state[page_list.PAGE_SIZE]:
                rules.append(f"{sent} rows were sent, {state[page_list.HELD]} pages are held")
    for at, count in done.items():
        state = t.links[at : at + page_list.WORDS]
        if not state[page_list.IS_BROKEN] and state[page_list.ROWS] - state[page_list.BASE] != count:
            rules.append(f"{state[page_list.ROWS] - state[page_list.BASE]} rows are counted of {count} that are done")
    return rules
