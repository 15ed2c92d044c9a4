"""The validator is only worth its answers: damage each table in turn, and it must say what is wrong."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cellrt.core.checks.validate import broken_rules
from cellrt.core.entries import cancel
from cellrt.core.processor import Processor
from cellrt.core.state import buddy_allocator
from cellrt.core.state import task_layout as layout
from cellrt.core.state.moves import FREE, LIVE
from cellrt.core.state.pointers import address_of
from cellrt.core.state.record_layout import inputs_of, outputs_of, record_at
from cellrt.core.state.tables import BORROWED, LOCATION_SHIFT, MAX_KINDS, NUM_PERMANENT, NUM_PRIORITIES, Tables
from tests.core.graphs import add_step, add_tree, chain, leaves, make_processor, two_chains

Damage = Callable[[Tables], None]


def busy() -> Processor:
    """Two chains between two tasks, a third with a task in flight, and two requests of leaves, queued."""
    processor = make_processor(2)
    step, leaf = add_step(processor, 2), add_tree(processor, 4)
    later = add_step(processor, 2)
    for program in (chain(step, 3), chain(step, 3), two_chains(step, later, 3), leaves(leaf, 3), leaves(leaf, 3)):
        assert processor.admit(processor.compile(program), 0) is not None
    (task,) = processor.schedule(1)
    processor.complete(task, 0)
    assert len(processor.schedule(1)) == 1
    return processor


def task_of(t: Tables) -> int:
    return int(np.flatnonzero(t.tasks["in_use"])[0])


def chain_of(t: Tables, request: int) -> np.void:
    found: np.void = t.subgraphs[int(t.requests["first_subgraph"][request])]
    return found


def live_values(t: Tables) -> list[int]:
    """Values with a row that is theirs alone."""
    return np.flatnonzero((t.values["row"] >= NUM_PERMANENT) & (t.values["bits"] & BORROWED == 0)).tolist()


def overlap_nodes(t: Tables) -> None:
    t.requests["first_node"][4] = t.requests["first_node"][3]


def lose_free_block(t: Tables) -> None:
    order = next(k for k in range(buddy_allocator.NUM_ORDERS) if t.blocks[2 + k] >= 0)
    t.blocks[2 + order] = -1


def misplace_subgraph(t: Tables) -> None:
    t.subgraphs["cell_type"][int(t.lanes["head"][0])] = 1


def unmark_queued(t: Tables) -> None:
    t.subgraphs["state"][int(t.lanes["head"][0])] = 0


def cut_lane(t: Tables) -> None:
    t.lanes["tail"][NUM_PRIORITIES] = -1


def empty_lane(t: Tables) -> None:
    t.lanes["head"][NUM_PRIORITIES] = t.lanes["tail"][NUM_PRIORITIES] = -1


def miscount_ready(t: Tables) -> None:
    t.ready[1, 0] += 1


def ready_too_early(t: Tables) -> None:
    t.nodes["pending"][int(t.subgraphs["ready_head"][int(t.lanes["head"][NUM_PRIORITIES])])] = 1


def cut_ready_list(t: Tables) -> None:
    t.subgraphs["num_ready"][int(t.lanes["head"][NUM_PRIORITIES])] += 1


def unpin_in_flight(t: Tables) -> None:
    t.tasks["worker"][task_of(t)] = 2


def miscount_running(t: Tables) -> None:
    t.types["num_running"][0] += 1


def forget_task(t: Tables) -> None:
    t.tasks["in_use"][task_of(t)] = 0


def swap_node_of_task(t: Tables) -> None:
    at = task_of(t) * int(t.settings["buffer_ints"][0])
    t.ints[at + int(t.ints[at + layout.H_NODES])] = int(t.requests["first_node"][3])


def miscount_subgraph_in_flight(t: Tables) -> None:
    t.subgraphs["in_flight"][int(t.requests["first_subgraph"][3])] += 1


def send_too_much(t: Tables) -> None:
    t.subgraphs["sent"][int(t.requests["first_subgraph"][2]) + 1] = 5


def share_row(t: Tables) -> None:
    first, second = live_values(t)[:2]
    t.values["row"][first] = t.values["row"][second]


def hold_row_never_taken(t: Tables) -> None:
    """The highest of its arena."""
    value = live_values(t)[0]
    location, kind = int(t.values["row"][value]) >> LOCATION_SHIFT, int(t.values["kind"][value])
    capacity = int(t.arenas["capacity"][location * MAX_KINDS + kind])
    t.values["row"][value] = (location << LOCATION_SHIFT) + NUM_PERMANENT + capacity - 1


def free_row_twice(t: Tables) -> None:
    first = int(t.arenas["first"][0])
    t.free_rows[first : first + 2] = NUM_PERMANENT
    t.arenas["num_fresh"][0] = 0


def lose_row(t: Tables) -> None:
    for task in np.flatnonzero(t.tasks["in_use"]):
        t.tasks["in_use"][task] = 0
    t.values["row"][live_values(t)[0]] = -1


def move_row_to_nowhere(t: Tables) -> None:
    t.values["kind"][live_values(t)[0]] = MAX_KINDS - 1


def overfill_arena(t: Tables) -> None:
    t.arenas["capacity"][MAX_KINDS] -= 100


def change_needs(t: Tables) -> None:
    t.links[int(t.requests["needs"][0])] += 1


def reserve_too_much(t: Tables) -> None:
    t.kinds["worker_rows"][0] = 1


def miscount_live(t: Tables) -> None:
    t.settings["num_live"] += 1


def keep_dead(t: Tables) -> None:
    t.requests["state"][3] = 3


def move_illegally(t: Tables) -> None:
    idle = t.subgraphs["in_flight"][t.requests["first_subgraph"]] == 0
    request = int(np.flatnonzero((t.requests["state"] == LIVE) & idle)[0])
    t.requests["state"][request] = FREE
    cancel(address_of(t), request)


def take_back_a_step(t: Tables) -> None:
    record_at(t.links, int(chain_of(t, 0)["record"])).position = 0


def be_ready_unfed(t: Tables) -> None:
    inputs_of(t, chain_of(t, 0))[0].source = int(t.requests["first_subgraph"][0])


def forget_to_be_ready(t: Tables) -> None:
    subgraph = next(k for k in np.flatnonzero(t.subgraphs["num_ready"] == 1).tolist() if t.subgraphs["record"][k] >= 0)
    t.subgraphs["num_ready"][subgraph] = 0


def share_state(t: Tables) -> None:
    (mine, _), *_ = outputs_of(t, chain_of(t, 0))
    (other, _), *_ = outputs_of(t, chain_of(t, 1))
    mine.first_row = other.first_row


def share_place(t: Tables) -> None:
    first = int(t.requests["first_place"][0])
    t.places[first + 1] = t.places[first + 2]


def lose_place(t: Tables) -> None:
    t.tasks["in_use"][:] = 0
    t.places[int(t.requests["first_place"][0]) + 2] = -1


@pytest.mark.parametrize(
    ("damage", "rule"),
    [
        (take_back_a_step, "steps done of"),
        (be_ready_unfed, "may take 0 steps, but is ready for 1"),
        (forget_to_be_ready, "may take 1 steps, but is ready for 0"),
        (share_state, "a row is held twice"),
        (share_place, "a row is held twice"),
        (lose_place, "accounted for"),
        (move_illegally, "1 moves between states that moves.py does not have"),
        (overlap_nodes, "node blocks of two requests overlap"),
        (lose_free_block, "node rows"),
        (misplace_subgraph, "in the wrong queue or place"),
        (unmark_queued, "queued but not marked so"),
        (cut_lane, "does not end at its tail"),
        (empty_lane, "but its queue says otherwise"),
        (miscount_ready, "ready counts differ"),
        (ready_too_early, "is ready with 1 inputs pending"),
        (cut_ready_list, "nodes in its ready list"),
        (unpin_in_flight, "is not pinned there"),
        (miscount_running, "running tasks miscounted"),
        (forget_task, "rows in flight"),
        (swap_node_of_task, "rows in flight"),
        (miscount_subgraph_in_flight, "rows in flight miscounted"),
        (send_too_much, "more producers sent than waited for"),
        (share_row, "a row is held twice"),
        (hold_row_never_taken, "or held and free"),
        (free_row_twice, "a row is held twice"),
        (lose_row, "accounted for"),
        (move_row_to_nowhere, "rows held in no arena"),
        (overfill_arena, "accounted for"),
        (change_needs, "reservations differ"),
        (reserve_too_much, "more rows reserved than there are"),
        (miscount_live, "requests counted"),
        (keep_dead, "dead with nothing in flight"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_validator_names_the_damage(damage: Damage, rule: str):
    tables = busy().tables
    assert broken_rules(tables) == []
    damage(tables)
    assert any(rule in broken for broken in broken_rules(tables)), broken_rules(tables)
