"""Policies: in which order requests are admitted and their subgraphs queued. BatchMaker's order is the default."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cellrt.core.tables import LANES_PER_PRIORITY, NUM_PRIORITIES


class Job(NamedTuple):
    """What a policy may look at.

    Attributes:
        sequence: order of arrival.
        num_nodes: nodes of the cell graph (a loop counts as its step limit).
        priority: the client's, 0 (lowest) to 3.
        deadline_s: seconds from arrival, or None.
    """

    sequence: int
    num_nodes: int
    priority: int
    deadline_s: float | None


@dataclass(frozen=True)
class BatchMakerPolicy:
    """Cell types by priority, subgraphs and requests by arrival (Algorithm 1). Also the interface of a policy.

    A policy orders what has the same client priority; a higher one goes first in all of them (see ``schedule.py``).
    Requests of one graph that are submitted together are ordered as the first of them.

    Attributes:
        order_by_arrival: choose among cell types by their oldest request instead of their priority.
    """

    order_by_arrival: bool = False

    def lane(self, job: Job) -> int:
        """Sub-lane 0 (first) to LANES_PER_PRIORITY - 1 of the job's subgraphs; within a lane: first in, first out."""
        return 0

    def admission_key(self, job: Job) -> float:
        """Waiting requests are admitted in ascending order of this, then by arrival."""
        return 0.0


@dataclass(frozen=True)
class FirstComeFirstServed(BatchMakerPolicy):
    """Cell types, too, by arrival: the type whose queue has the oldest request goes first."""

    order_by_arrival: bool = True


@dataclass(frozen=True)
class ShortestJobFirst(BatchMakerPolicy):
    """Requests with fewer nodes first, in lanes of doubling size."""

    def lane(self, job: Job) -> int:
        """Lane by the power of two of the job's nodes."""
        return min(LANES_PER_PRIORITY - 1, job.num_nodes.bit_length())

    def admission_key(self, job: Job) -> float:
        """Fewest nodes first."""
        return float(job.num_nodes)


def lane_of(policy: BatchMakerPolicy, job: Job) -> int:
    """The queue lane of a job: the client's priority first, then the policy's sub-lane."""
    sub_lane = min(max(policy.lane(job), 0), LANES_PER_PRIORITY - 1)
    return (NUM_PRIORITIES - 1 - job.priority) * LANES_PER_PRIORITY + sub_lane
