"""The built-in policies. ``docs/policies.md`` says how to write another."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cellrt.core.scheduling.policy import Policy
from cellrt.core.state.tables import Asked, Ready, Waiting
from cellrt.errors import DefinitionError
from cellrt.native.jit import making
from cellrt.native.row_types import Rows

REST = 1e19
"""The score, times nodes, of requests in neither set of DAS: after every deadline, which is below 2**63 ns."""
LATE = 1e30
"""The score of late requests: after all others."""


def by_length(waiting: Rows[Waiting], asked: Asked) -> None:
    """Score waiting rows by the nodes of their requests."""
    for k in range(waiting.size):
        waiting[k].score = waiting[k].length


def by_deadline(waiting: Rows[Waiting], asked: Asked) -> None:
    """Score waiting rows by the time when they must be done; those without a deadline come last."""
    for k in range(waiting.size):
        waiting[k].score = waiting[k].deadline_ns


def lowest_score(ready: Rows[Ready], asked: Asked) -> int:
    """Choose the cell type with the lowest score of all waiting rows."""
    best = 0
    for k in range(1, ready.size):
        if ready[k].first_score < ready[best].first_score:
            best = k
    return best


@making
def _sink(waiting: Rows[Waiting], order: NDArray[np.int64], k: int, count: int) -> None:
    """Restore the heap of the first ``count`` of ``order``, below its place ``k``.

    The shortest request comes first, and of equal ones the earlier.
    """
    while 2 * k + 1 < count:
        first = k
        for child in range(2 * k + 1, min(2 * k + 3, count)):
            one, other = waiting[order[child]], waiting[order[first]]
            if one.length < other.length or (one.length == other.length and one.sequence < other.sequence):
                first = child
        if first == k:
            return
        swapped = order[k]
        order[k] = order[first]
        order[first] = swapped
        k = first


def das(eta: float = 0.5, q: float = 0.75) -> Policy:
    """Return the deadline-aware scheduling of TCB (section 5.2, Algorithm 1: DAS), where a request is worth 1/length.

    If everything that waits fits in the task, requests go by arrival. Else the shortest that fit are counted. A share
    ``eta`` of them goes first (the utility-dominant set, rounded up). Then come the requests that are worth ``q`` of
    their mean or more, by deadline (the deadline-aware set), then the rest, the shortest first. Late requests go last,
    where the paper leaves them out. A deadline here is the time when a request must be done, so a late request that has
    begun is useless as well.

    A request counts with the rows that are ready: as many as it would take of this task. For a chain that must be whole
    these are all its rows, as in the paper; for a prompt, what is left of it. For a loop or a recurrent chain it is one
    row, so that as many of these as the task has rows are alike in size and differ in worth and deadline. A request is
    worth 1 by its length as a whole, also once it has begun: one that was chosen for its worth keeps it.

    A task is one row of all rows that it may have, B*L in the paper's words, as nothing is padded in it. So it is
    Theorem 5.1's case of B = 1. What is done in time is worth at least eta*q/(eta*q + 1) of what the best schedule of
    such rows gives that knows the future, and that is no less than the best of B rows of L. The theorem is about
    requests that one task completes, as of an encoder, in tasks that take the same time.

    A long request without a deadline waits for as long as shorter ones come: the bound on waiting does not hold.

    In the paper eta and q add up to 1, a half each. The theorem does not need that, and its share grows with both. Half
    the mean worth lets in nearly all requests where lengths differ little, so that the deadline alone decides: under
    overload that achieves less than the shortest first. With 0.75 it achieves as much (``docs/policies.md``).

    Args:
        eta, q: between 0 and 1.

    Raises:
        DefinitionError: they are not.
    """
    for name, given in (("eta", eta), ("q", q)):
        if not 0 < given < 1:
            raise DefinitionError(f"das: {name}: expected a number between 0 and 1, got {given!r}")

    def rank(waiting: Rows[Waiting], asked: Asked) -> None:
        order, count, rows = np.empty(waiting.size, np.int64), 0, 0
        for k in range(waiting.size):
            waiting[k].score = LATE
            if waiting[k].deadline_ns >= asked.now_ns:
                waiting[k].score = waiting[k].sequence
                order[count] = k
                count += 1
                rows += waiting[k].ready
        # Everything fits: the order of arrival is written already.
        if rows <= asked.most:
            return
        # Take the shortest requests that fit off the heap.
        for k in range(count // 2 - 1, -1, -1):
            _sink(waiting, order, k, count)
        left, room = count, asked.most
        while left == count or (left > 0 and waiting[order[0]].ready <= room):
            left -= 1
            first = order[0]
            room -= waiting[first].ready
            order[0] = order[left]
            order[left] = first  # so the shortest lie at the end, the shortest last
            _sink(waiting, order, 0, left)
        # Score the two sets and the rest.
        num_first, worth = math.ceil(eta * (count - left)), 0.0
        for k in range(count - 1, count - 1 - num_first, -1):
            worth += 1 / waiting[order[k]].length
        least = q * (worth / num_first)
        for k in range(count):
            row = waiting[order[k]]
            if k >= count - num_first:
                row.score = -1 / row.length
            elif 1 / row.length >= least:
                row.score = row.deadline_ns
            else:
                row.score = REST * row.length

    return Policy("deadline-aware-utility", rank, admit_by="length", is_bounded=False)


POLICIES = {
    policy.name: policy
    for policy in (
        Policy(),
        Policy("first-come-first-served", by_first=True),
        Policy("shortest-job-first", by_length, admit_by="length"),
        Policy("earliest-deadline-first", by_deadline, lowest_score, by_first=True, admit_by="deadline"),
        das(),
    )
}
"""The policies by name; the first, BatchMaker's Algorithm 1, is the default."""
