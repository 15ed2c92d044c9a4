"""What a client in another process writes to its region: a request that fits, or the end of the region."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from cellrt.core.checks.validate import broken_rules
from cellrt.core.processor import Processor
from cellrt.core.state.ports import Port
from cellrt.core.state.region_layout import (
    ENTRIES,
    ENTRY_BYTES,
    HANDED,
    HEAD_BYTES,
    MAX_PLANS,
    NUM_SLOTS,
    REGION_BYTES,
    RING,
    SLOT_BYTES,
    WORD_BYTES,
)
from cellrt.core.state.settings import Limits
from cellrt.core.state.tables import ANSWER, MAX_SUBMISSIONS, NUM_PRIORITIES, NUM_REGIONS, REGION_PLAN
from cellrt.core.templates.program import CARRY, OP_CHAIN, OP_EXTERNAL, OP_RESULT, STEP
from cellrt.native.row_types import new_table
from tests.effort import examples

LIMITS = Limits(max_requests=8, max_nodes=64, max_values=64, max_links=256, max_subgraphs=16, max_events=8)
NUMBER, STEPS, ROW_BYTES = 5, 3, 8
MEMORY = np.zeros(REGION_BYTES + 64, np.uint8)
ANY = st.integers(-(1 << 63), (1 << 63) - 1)
SLOTS = st.integers(0, NUM_SLOTS - 1) | st.sampled_from((-1, NUM_SLOTS, 1 << 62)) | ANY
PLANS = st.sampled_from((NUMBER, NUMBER + MAX_PLANS, NUMBER - MAX_PLANS, 0, -1)) | ANY
PRIORITIES = st.integers(0, NUM_PRIORITIES - 1) | st.integers(-(1 << 31), (1 << 31) - 1)


class Region:
    """A processor with a region, whose client may name one plan: a chain."""

    def __init__(self) -> None:
        self.processor = Processor(1, LIMITS)
        kind = self.processor.add_kind(64, 64)
        cell = self.processor.add_type([Port(kind), Port(kind, carry=0)], [Port(kind)], max_batch=4)
        program = [OP_EXTERNAL, kind, STEPS, OP_EXTERNAL, kind, 1, OP_CHAIN, cell, STEPS, STEP, 0, 1, CARRY, STEPS]
        self.template = self.processor.compile(np.array([*program, OP_RESULT, 2 * STEPS, 1, 1], np.int32))
        self.plans, self.answers = new_table(MAX_PLANS, REGION_PLAN), new_table(1, ANSWER)
        self.tensors = np.array([(kind, STEPS * ROW_BYTES), (kind, ROW_BYTES), *[(0, 0)] * 6], np.int64)
        self.t = self.processor.tables
        plan, row = self.plans[NUMBER : NUMBER + 1], self.t.regions[:1]
        plan["number"], plan["template_at"] = NUMBER, self.template.template.address
        plan["lengths_at"], plan["num_lengths"] = self.template.lengths.ctypes.data, self.template.lengths.size
        plan["answers_at"], plan["tensors_at"] = self.answers.ctypes.data, self.tensors.ctypes.data
        plan["num_tensors"], plan["num_answers"], plan["queue"] = 2, 1, 1
        MEMORY[:HEAD_BYTES] = 0
        self.at = MEMORY.ctypes.data + -MEMORY.ctypes.data % 64
        self.words = MEMORY[self.at - MEMORY.ctypes.data :][:HEAD_BYTES].view(np.int64)
        row["at"], row["plans_at"], row["first"], row["is_open"] = self.at, self.plans.ctypes.data, MAX_SUBMISSIONS, 1
        self.t.door[NUM_REGIONS] = 1
        self.t.queues["most"] = self.t.queues["most_rows"] = 1 << 40

    def write(self, slot: int, plan: int, id: int, arrival_ns: int, priority: int) -> None:
        """Write an entry to a slot, and its number to the ring, as far as there is such a slot."""
        if 0 <= slot < NUM_SLOTS:
            at = ENTRIES + slot * ENTRY_BYTES // WORD_BYTES
            self.words[at : at + 4] = plan, id, arrival_ns, priority
        self.words[RING + self.words[HANDED] % NUM_SLOTS] = slot

    def is_inside(self, first: int, size: int) -> bool:
        """Whether so many bytes lie in one slot."""
        begin = self.at + HEAD_BYTES
        return begin <= first and (first - begin) // SLOT_BYTES == (first + size - 1 - begin) // SLOT_BYTES < NUM_SLOTS


@given(SLOTS, PLANS, ANY, ANY, PRIORITIES, st.integers(0, 3) | ANY)
@settings(max_examples=examples(200))
def test_whatever_a_client_writes_its_submission_lies_in_its_region(slot, plan, id, arrival_ns, priority, handed):
    region = Region()
    region.write(slot, plan, id, arrival_ns, priority)
    region.words[HANDED] = handed
    found = region.processor.take_out(0)
    row = region.t.regions[0]
    assert row["is_broken"] == (region.words[HANDED] != row["taken"]) and row["taken"] == len(found)
    for number in found:
        its = region.t.submissions[number]
        assert MAX_SUBMISSIONS <= number < MAX_SUBMISSIONS + NUM_SLOTS
        assert 0 <= its["priority"] < NUM_PRIORITIES and 0 <= its["arrival_ns"] <= region.t.settings[0]["now_ns"]
        assert region.is_inside(int(its["results_at"]), ROW_BYTES)
        for k, size in enumerate(region.tensors[:2, 1].tolist()):
            assert region.is_inside(int(region.t.tensors[number, 2 * k]), size)


def test_a_slot_that_is_used_cannot_be_handed_in_again():
    region = Region()
    region.write(7, NUMBER, 1, 0, 1)
    region.words[HANDED] = 1
    assert region.processor.join() and region.processor.num_live == 1
    region.write(7, NUMBER, 2, 0, 1)
    region.words[HANDED] = 2
    assert not region.processor.join()
    assert region.t.regions[0]["is_broken"] and region.processor.num_live == 1
    assert not broken_rules(region.t)


def test_what_finds_no_place_in_a_queue_is_left_for_python():
    region = Region()
    region.t.queues["most"][0] = 1
    for slot in range(2):
        region.write(slot, NUMBER, slot, 0, 1)
        region.words[HANDED] += 1
    assert not region.processor.join()
    assert region.processor.num_live == 1 and region.t.queues["come"][:2].tolist() == [1, 1]
    assert region.processor.take_out(0) == [MAX_SUBMISSIONS + 1]


def test_what_found_no_place_is_the_same_request_whatever_its_client_writes_then():
    region = Region()
    region.t.queues["most"][1] = 0
    region.write(3, NUMBER, 1, 0, 1)
    region.words[HANDED] = 1
    assert not region.processor.join()
    region.words[RING] = 9
    region.t.queues["most"][1] = 1
    assert region.processor.join() and region.processor.num_live == 1
    assert np.flatnonzero(region.t.submissions["is_there"]).tolist() == [MAX_SUBMISSIONS + 3]
