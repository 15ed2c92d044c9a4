"""What a client hands in: requests of one graph that were submitted together, on their way to a turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from numpy.typing import NDArray

from cellrt.engine.future import RequestFuture
from cellrt.engine.futures import Outcomes
from cellrt.engine.registry import Model, Plan
from cellrt.engine.stream import Channel

if TYPE_CHECKING:
    from cellrt.engine.records import Bulk, SessionRecord

Externals = list[tuple[int, NDArray[Any]]]
"""Kind and rows ``[requests * n, *shape]`` (see ``as_bits``) of each of the requests' tensors."""


class Canceller(Protocol):
    """What requests must know of their engine."""

    def ask_to_cancel(self, arrival: Arrival, place: int) -> None:
        """Has a request ended early, if it has not ended; from any thread."""

    def refuse_in_callback(self) -> None:
        """Raises RequestError in a future's callback, where waiting for the engine would never end."""


class Arrival:
    """Requests of one graph; most often one. Written by its client, and from then on by the holder of the turn.

    Args:
        manager: of their engine.
        model: theirs.
        plan, externals: what to run, with the requests' tensors.
        sequence: the order of the first's arrival; the others follow it.
        count: how many they are.
        priority: the client's.
        arrival_ns, deadline_ns: on the engine's clock.
        channel: where the steps of one that is streamed go; it is alone.
        sessions: whose state each has.
        order, lane: the policy's admission key and their lane.
        is_alone: whether it is all that was submitted, and one request.

    Attributes:
        outcome: how they end, for their client: the future of one alone, or the outcomes of all.
        bulk: whom they go on with; None until a turn takes them in.
        first: the number of the first of them there.
    """

    __slots__ = (
        "_manager",
        "_may_join",
        "arrival_ns",
        "bulk",
        "channel",
        "count",
        "deadline_ns",
        "externals",
        "first",
        "lane",
        "model",
        "order",
        "outcome",
        "plan",
        "priority",
        "sequence",
        "sessions",
    )

    def __init__(
        self,
        manager: Canceller,
        model: Model,
        plan: Plan,
        externals: Externals,
        sequence: int,
        count: int,
        priority: int,
        arrival_ns: int,
        deadline_ns: int | None,
        channel: Channel | None,
        sessions: Sequence[SessionRecord] | None,
        order: float,
        lane: int,
        is_alone: bool,
    ) -> None:
        self._manager, self.model, self.plan, self.externals = manager, model, plan, externals
        self.sequence, self.count, self.priority, self.order, self.lane = sequence, count, priority, order, lane
        self.arrival_ns, self.deadline_ns, self.channel, self.sessions = arrival_ns, deadline_ns, channel, sessions
        self._may_join = count == 1 and deadline_ns is None and channel is None
        self.outcome = RequestFuture(self, 0, sequence) if is_alone else Outcomes(self, sequence, count)
        self.bulk: Bulk | None = None
        self.first = 0

    def follows(self, before: Arrival) -> bool:
        """Whether this is a request that may go on with the one that came right before it."""
        return (
            self._may_join
            and before._may_join
            and self.plan.answered_with is before.plan.answered_with  # so they are of one model
            and self.sequence == before.sequence + 1
            and (self.sessions is None) == (before.sessions is None)
            and (self.priority, self.order, self.lane) == (before.priority, before.order, before.lane)
        )

    def ask_to_cancel(self, future: RequestFuture) -> None:
        """Has a request ended early; for its future, from any thread."""
        self._manager.ask_to_cancel(self, future.place)

    def refuse_in_callback(self) -> None:
        """Raises RequestError in a future's callback."""
        self._manager.refuse_in_callback()
