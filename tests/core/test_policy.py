"""Policies: what they say of a request becomes the lane of its subgraphs."""

from __future__ import annotations

import pytest

from cellrt.core.policy import BatchMakerPolicy, Job, lane_of
from cellrt.core.tables import LANES_PER_PRIORITY, NUM_PRIORITIES


class Given(BatchMakerPolicy):
    """One sub-lane for all."""

    def __init__(self, lane: int) -> None:
        self._lane = lane

    def lane(self, job: Job) -> int:
        return self._lane


@pytest.mark.parametrize(("lane", "becomes"), [(-3, 0), (0, 0), (2, 2), (99, LANES_PER_PRIORITY - 1)])
@pytest.mark.parametrize("priority", range(NUM_PRIORITIES))
def test_a_request_stays_in_the_lanes_of_its_priority_whatever_the_policy_says(lane, becomes, priority):
    above = (NUM_PRIORITIES - 1 - priority) * LANES_PER_PRIORITY
    assert lane_of(Given(lane), Job(0, 1, priority, None)) == above + becomes
