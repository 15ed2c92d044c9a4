"""The whole-state validator: every invariant of the tables, checked slowly and in plain Python.

Tests call it after each step, the engine in debug mode when it is idle. It returns the broken rules, so that a test can
corrupt a table and see it fail.
"""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import numpy as np

from cellrt.core.checks.validate_records import page_rules, record_rules, state_rows
from cellrt.core.state import buddy_allocator, page_list
from cellrt.core.state.moves import DEAD, FREE, LEFT, LIVE, QUEUED, REQUEST, SUBGRAPH, word_of
from cellrt.core.state.page_list import PageList, page_list_at
from cellrt.core.state.tables import (
    ANSWERS,
    BORROWED,
    BRING,
    GRANULE,
    HOST,
    LOCATION_SHIFT,
    MAX_KINDS,
    MAX_STATES,
    MAX_SUBMISSIONS,
    NUM_PERMANENT,
    NUM_PRIORITIES,
    PENDING,
    ROW_MASK,
    SUBMITTED,
    TAKEN,
    TOLD,
    Tables,
)
from cellrt.core.state.task_layout import TaskView

REGIONS = {
    "node": buddy_allocator.NODES,
    "value": buddy_allocator.VALUES,
    "link": buddy_allocator.LINKS,
    "subgraph": buddy_allocator.SUBGRAPHS,
    "place": buddy_allocator.PLACES,
}


def broken_rules(t: Tables) -> list[str]:
    """Return one line for each broken invariant; none if the state is sound. The cost is the size of the tables."""
    tables = *_blocks(t), *_queues(t), *_flights(t), *_rows(t), *_pages(t), *_written(t), *_reservations(t)
    return [*tables, *_door(t)]


def _live(t: Tables) -> list[int]:
    return np.flatnonzero(t.requests["state"] != FREE).tolist()


def _door(t: Tables) -> list[str]:
    rules = []
    submitted, taken, answers, told = t.door[[SUBMITTED, TAKEN, ANSWERS, TOLD]].tolist()
    if not taken <= submitted <= taken + MAX_SUBMISSIONS or not told <= answers <= told + t.answered.size:
        rules.append("the door's rings are read before they are written, or written over")
    whose = t.requests["submission"][_live(t)]
    numbers = t.requests["number"][_live(t)]
    for at in np.flatnonzero(t.submissions["is_there"]).tolist():
        row, its = t.submissions[at], numbers[whose == at + 1]
        if int(row["num_admitted"]) - int(row["num_answered"]) != its.size or len(set(its.tolist())) != its.size:
            rules.append(f"submission {at}: its requests are miscounted")
    live = t.requests[_live(t)]
    by_door = live["session"][(live["submission"] != 0) & (live["session"] >= 0)].tolist()
    if sorted(by_door) != np.flatnonzero(t.leases["ticket"] < 0).tolist():
        rules.append("sessions are leased to other requests than run")
    if not t.submissions["is_there"][whose[whose > 0] - 1].all():
        rules.append("a request is of a submission that is not there")
    return rules


def _blocks(t: Tables) -> list[str]:
    rules = []
    for name, region in REGIONS.items():
        used = []
        for request in _live(t):
            first, size = int(t.requests[f"first_{name}"][request]), int(t.requests[f"num_{name}s"][request])
            if size:
                used.append((first, first + -(-size // GRANULE) * GRANULE))
        if region == buddy_allocator.PLACES:
            used += [(first, first + -(-size // GRANULE) * GRANULE) for first, size in _page_blocks(t)]
        used.sort()
        if any(a[1] > b[0] for a, b in pairwise(used)):
            rules.append(f"{name} blocks of two requests overlap")
        total = buddy_allocator.num_free_rows(t.blocks, region) + sum(end - start for start, end in used)
        if total != buddy_allocator.num_rows(t.blocks, region):
            rules.append(f"{name} rows: {total} free and used of {buddy_allocator.num_rows(t.blocks, region)}")
    return rules


def _page_lists(t: Tables, request: int) -> list[PageList]:
    """Return each page list of a live request."""
    row = t.requests[request]
    first = int(row["page_lists"])
    ends = range(first, first + page_list.WORDS * int(row["num_page_lists"]), page_list.WORDS)
    return [page_list_at(t.links, at) for at in ends]


def _page_blocks(t: Tables) -> list[tuple[int, int]]:
    """Return (first place, places) of each block of pages, and of rows to be read again, of requests and sessions."""
    lists = [listed for request in _live(t) for listed in _page_lists(t, request)]
    blocks = [(int(listed.place), int(listed.capacity)) for listed in lists]
    blocks += [(int(listed.again), int(listed.num_again)) for listed in lists]
    blocks += [(int(slot["place"]), int(slot["capacity"])) for slot in t.slots[t.slots["capacity"] > 0]]
    return [block for block in blocks if block[1]]


def _queues(t: Tables) -> list[str]:
    rules = []
    ready = np.zeros_like(t.ready)
    seen: Counter[int] = Counter()
    # Walk along each lane, and count what is ready in it.
    for lane_id in np.flatnonzero(t.lanes["head"] >= 0).tolist():
        previous, subgraph_id = -1, int(t.lanes["head"][lane_id])
        while subgraph_id >= 0 and seen[subgraph_id] == 0:
            seen[subgraph_id] += 1
            subgraph = t.subgraphs[subgraph_id]
            if int(subgraph["cell_type"]) != lane_id // NUM_PRIORITIES or int(subgraph["previous"]) != previous:
                rules.append(f"subgraph {subgraph_id} is in the wrong queue or place")
            if subgraph["state"] != QUEUED or t.requests["state"][subgraph["request"]] != LIVE:
                rules.append(f"subgraph {subgraph_id} is queued but not marked so, or its request is not live")
            priority = lane_id % NUM_PRIORITIES
            if int(subgraph["priority"]) != priority:
                rules.append(f"subgraph {subgraph_id} has another client priority than its lane")
            backlog = int(subgraph["cell_type"]) * NUM_PRIORITIES + priority
            ready[backlog, int(subgraph["pinned"])] += int(subgraph["num_ready"])
            previous, subgraph_id = subgraph_id, int(subgraph["next"])
        if previous != int(t.lanes["tail"][lane_id]):
            rules.append(f"lane {lane_id} does not end at its tail")
    if not np.array_equal(ready, t.ready):
        rules.append("ready counts differ from the queues")
    # Each queued subgraph of a live request must be in a lane, and no other.
    for request in _live(t):
        first = int(t.requests["first_subgraph"][request])
        for k in range(first, first + int(t.requests["num_subgraphs"][request])):
            rules.extend(_ready_list(t, k))
            if (int(t.subgraphs["state"][k]) == QUEUED) != bool(seen[k]):
                rules.append(
                    f"subgraph {k} is {word_of(SUBGRAPH, int(t.subgraphs['state'][k]))}, but its queue says otherwise"
                )
    return rules


def _ready_list(t: Tables, subgraph_id: int) -> list[str]:
    if int(t.subgraphs["record"][subgraph_id]) >= 0:
        return record_rules(t, subgraph_id)
    count, node = 0, int(t.subgraphs["ready_head"][subgraph_id])
    limit = int(t.subgraphs["num_ready"][subgraph_id])
    while node >= 0 and count <= limit:
        if int(t.nodes["pending"][node]) != 0:
            return [f"node {node} is ready with {int(t.nodes['pending'][node])} inputs pending"]
        count, node = count + 1, int(t.nodes["next_ready"][node])
    return [] if count == limit else [f"subgraph {subgraph_id}: {count} nodes in its ready list, {limit} counted"]


def _flights(t: Tables) -> list[str]:
    rules = []
    size = int(t.settings["buffer_ints"][0])
    subgraphs: Counter[int] = Counter()
    running: Counter[int] = Counter()
    at_workers: Counter[int] = Counter()
    for task in np.flatnonzero(t.tasks["in_use"]).tolist():
        running[int(t.tasks["cell_type"][task])] += 1
        at_workers[int(t.tasks["cell_type"][task])] |= 1 << int(t.tasks["worker"][task])
        for id in TaskView(t.ints[task * size : (task + 1) * size]).nodes.tolist():
            subgraph = ~id if id < 0 else int(t.nodes["subgraph"][id])
            subgraphs[subgraph] += 1
            row = t.subgraphs[subgraph]
            if not row["is_loose"] and int(row["pinned"]) != int(t.tasks["worker"][task]):
                rules.append(f"subgraph {subgraph} has a task at a worker but is not pinned there")
    for type_id in range(int(t.settings["num_types"][0])):
        if int(t.types["joined_at"][type_id]) & ~at_workers[type_id]:
            rules.append(f"cell type {type_id}: waits to join a task that there is not")
        if int(t.types["num_running"][type_id]) != running[type_id]:
            rules.append(f"cell type {type_id}: running tasks miscounted")
    for request in _live(t):
        row = t.requests[request]
        for k in range(int(row["first_subgraph"]), int(row["first_subgraph"]) + int(row["num_subgraphs"])):
            if int(t.subgraphs["in_flight"][k]) != subgraphs[k]:
                rules.append(f"subgraph {k}: rows in flight miscounted")
            if int(t.subgraphs["waiting"][k]) < 0 or int(t.subgraphs["sent"][k]) > int(t.subgraphs["waiting"][k]):
                rules.append(f"subgraph {k}: more producers sent than waited for")
    return rules


def _held_rows(t: Tables) -> dict[tuple[int, int], list[int]]:
    """Return the handles that live requests and sessions hold, by (location, kind)."""
    held: dict[tuple[int, int], list[int]] = {}
    for request in _live(t):
        row = t.requests[request]
        values = t.values[int(row["first_value"]) : int(row["first_value"]) + int(row["num_values"])]
        owned = (values["row"] >= NUM_PERMANENT) & (values["bits"] & BORROWED == 0)
        for value in values[owned]:
            held.setdefault((int(value["row"]) >> LOCATION_SHIFT, int(value["kind"])), []).append(int(value["row"]))
        place = int(row["first_place"])
        for k in range(int(row["lists"]), int(row["lists"]) + 2 * int(row["num_lists"]), 2):
            kind, count = t.links[k : k + 2].tolist()
            for handle in t.places[place : place + count].tolist():
                handle = PENDING - handle if handle < PENDING else handle
                if handle >= NUM_PERMANENT:
                    held.setdefault((handle >> LOCATION_SHIFT, kind), []).append(handle)
            place += count
        for k in range(int(row["first_subgraph"]), int(row["first_subgraph"]) + int(row["num_subgraphs"])):
            for handle, kind in state_rows(t, k):
                held.setdefault((handle >> LOCATION_SHIFT, kind), []).append(handle)
        for listed in _page_lists(t, request):
            for handle in t.places[listed.place : listed.place + listed.held].tolist():
                held.setdefault((handle >> LOCATION_SHIFT, int(listed.kind)), []).append(handle)
    for slot in t.slots[t.slots["row"] >= NUM_PERMANENT]:
        held.setdefault((int(slot["row"]) >> LOCATION_SHIFT, int(slot["kind"])), []).append(int(slot["row"]))
    for slot in t.slots[t.slots["pages"] > 0]:
        for handle in t.places[int(slot["place"]) : int(slot["place"]) + int(slot["pages"])].tolist():
            held.setdefault((handle >> LOCATION_SHIFT, int(slot["kind"])), []).append(handle)
    return held


def _rows(t: Tables) -> list[str]:
    """Return the arenas whose free and held rows overlap, or are not all of its rows while nothing is in flight.

    Rows that were never taken are the highest of an arena, and only counted: most are such.
    """
    rules = []
    held = _held_rows(t)
    idle = not t.tasks["in_use"].any()
    for at in np.flatnonzero(t.arenas["capacity"] > 0).tolist():
        location, kind = divmod(at, MAX_KINDS)
        arena = t.arenas[at]
        first, fresh = int(arena["first"]), int(arena["num_fresh"])
        first_fresh = (location << LOCATION_SHIFT) + NUM_PERMANENT + int(arena["capacity"]) - fresh
        its = held.pop((location, kind), [])
        if t.kinds["is_paged"][kind]:
            rules.extend(_holders(t, at, its))
            its = sorted(set(its))
        used = t.free_rows[first + fresh : first + int(arena["num_free"])].tolist() + its
        if len(set(used)) != len(used) or max(used, default=0) >= first_fresh:
            rules.append(f"arena of kind {kind} at {location}: a row is held twice, or held and free")
        counted, total = fresh + len(used), int(arena["capacity"])
        if counted > total or (idle and counted != total):
            rules.append(f"arena of kind {kind} at {location}: {counted} rows of {total} accounted for")
    rules.extend(f"rows held in no arena: {place}" for place in held)
    return rules


def _holders(t: Tables, at: int, held: list[int]) -> list[str]:
    """Return the pages whose count of holders is not the number of page tables that name them.

    ``held`` are the handles that page tables name at an arena.
    """
    first, capacity = int(t.arenas["first"][at]), int(t.arenas["capacity"][at])
    named = np.bincount([(handle & ROW_MASK) - NUM_PERMANENT for handle in held], minlength=capacity)
    return [
        f"arena of kind {at % MAX_KINDS} at {at // MAX_KINDS}: page {row + NUM_PERMANENT} has "
        f"{int(t.holders[first + row])} holders, {int(named[row])} page tables name it"
        for row in np.flatnonzero(named != t.holders[first : first + capacity]).tolist()
    ]


def _written(t: Tables) -> list[str]:
    """Return the pages that will be written to and are named by several page tables.

    A request writes to its pages from its own first row on, a session to the page of its next row.
    """
    rules = []
    for request in _live(t):
        for listed in _page_lists(t, request):
            pages = t.places[listed.place : listed.place + listed.held][listed.before // listed.page_size :]
            if _num_shared(t, int(listed.kind), pages.tolist()):
                rules.append(f"request {request}: a page that it writes to is shared")
    for at in np.flatnonzero(t.slots["pages"]).tolist():
        slot = t.slots[at]
        its = t.places[int(slot["place"]) :][: int(slot["pages"])][int(slot["length"]) // int(slot["page_size"]) :]
        if _num_shared(t, int(slot["kind"]), its.tolist()):
            rules.append(f"session {at // MAX_STATES}: the page of its next row is shared")
    return rules


def _num_shared(t: Tables, kind: int, handles: list[int]) -> int:
    """Return how many of these pages several tables name."""
    firsts = [int(t.arenas["first"][(handle >> LOCATION_SHIFT) * MAX_KINDS + kind]) for handle in handles]
    return sum(int(t.holders[at + (handle & ROW_MASK) - NUM_PERMANENT]) > 1 for at, handle in zip(firsts, handles))


def _pages(t: Tables) -> list[str]:
    """Return what is wrong with the pages of requests, and with states of sessions whose rows are nowhere.

    The pages of a request are at its home or at the host, where they are counted, and hold the rows of the steps that
    were sent. A session's rows are in pages, or come with its next request.
    """
    rules = []
    for request in _live(t):
        locations: list[int] = []
        for listed in _page_lists(t, request):
            locations += (t.places[listed.place : listed.place + listed.held] >> LOCATION_SHIFT).tolist()
        away, home = int(t.requests["pages_away"][request]), int(t.requests["home"][request])
        if locations and locations.count(HOST) != away:
            rules.append(f"request {request}: {away} pages counted at the host, {locations.count(HOST)} are")
        if elsewhere := set(locations) - {HOST, home}:
            rules.append(f"request {request}: pages at {sorted(elsewhere)}, its home is {home}")
        rules.extend(f"request {request}: {wrong}" for wrong in page_rules(t, t.requests[request]))
    is_nowhere = (t.slots["length"] > 0) & (t.slots["pages"] == 0) & (t.slots["row"] != BRING)
    for at in np.flatnonzero(is_nowhere).tolist():
        rules.append(f"session {at // MAX_STATES}: rows of its state {at % MAX_STATES} are nowhere")
    return rules


def _reservations(t: Tables) -> list[str]:
    rules = []
    reserved = np.zeros((MAX_KINDS, 2), np.int64)
    # Sum up what live requests and sessions reserve.
    for request in _live(t):
        row = t.requests[request]
        end = int(row["first_link"]) + int(row["num_links"])
        needs = t.links[int(row["needs"]) : end].reshape(-1, 2)
        reserved[: len(needs)] += needs
        for listed in _page_lists(t, request):
            reserved[listed.kind, 0] += listed.capacity
    for slot in t.slots[t.slots["row"] >= NUM_PERMANENT]:
        reserved[int(slot["kind"]), int(int(slot["row"]) >> LOCATION_SHIFT == HOST)] += 1
    for slot in t.slots[t.slots["pages"] > 0]:
        reserved[int(slot["kind"]), 0] += int(slot["pages"])
    if not np.array_equal(reserved[:, 0], t.kinds["reserved_worker"]) or not np.array_equal(
        reserved[:, 1], t.kinds["reserved_host"]
    ):
        rules.append("reservations differ from what the live requests and sessions need")
    # No more may be reserved than there is.
    kinds = t.kinds
    room = kinds["worker_rows"] + np.where(kinds["is_paged"], kinds["host_rows"], 0)
    if (kinds["reserved_worker"] > room).any() or (kinds["reserved_host"] > kinds["host_rows"]).any():
        rules.append("more rows reserved than there are")
    # Requests must be counted, and released when nothing of them is in flight.
    live = len(_live(t))
    if int(t.settings["num_live"][0]) != live:
        rules.append(f"{int(t.settings['num_live'][0])} requests counted, {live} live")
    if int(t.settings["illegal_moves"][0]):
        rules.append(f"{int(t.settings['illegal_moves'][0])} moves between states that moves.py does not have")
    for request in _live(t):
        row = t.requests[request]
        own = slice(int(row["first_subgraph"]), int(row["first_subgraph"]) + int(row["num_subgraphs"]))
        if row["state"] in (DEAD, LEFT) and not t.subgraphs["in_flight"][own].any():
            word = word_of(REQUEST, int(row["state"])).lower()
            rules.append(f"request {request} is {word} with nothing in flight, but not released")
    return rules
