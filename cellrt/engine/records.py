"""What a client hands in, what the engine keeps of it until its end, and of a session from opening to closing."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from cellrt.core.processor import Template
from cellrt.core.state.moves import LIVE_REQUEST, SESSION, LiveState, SessionState, check_move
from cellrt.engine.answers import fits
from cellrt.engine.brought import Brought, Externals
from cellrt.engine.future import RequestFuture, Result
from cellrt.engine.futures import Ends, Outcomes, SingleOutcomes
from cellrt.engine.registry import Model, Plan
from cellrt.engine.stream import Channel
from cellrt.engine.together import Together
from cellrt.engine.turns import Call
from cellrt.errors import CellrtError, SessionError
from cellrt.graph.results import StateLayout

ALONE = (0,)
"""The number of a request that is alone in its bulk."""
NOT_ADMITTED = (-1,)
NO_MEMORY = memoryview(b"")


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
        arrival_ns, deadline_ns, schedule_by_ns: on the engine's clock.
        channel: where the steps of one that is streamed go; it is alone.
        sessions: whose state each has.
        order: when they are admitted, in ascending order of this, then by arrival.
        client: who submitted them, for policies: 0 in this process.
        ends: makes who is told how they end: see ``alone`` and ``together``.

    Attributes:
        outcome: who that is.
        bulk: whom they go on with in Python; None until a turn takes them in, or while compiled code has them.
        first: the number of the first of them there.
        row: where compiled code has them (``door.py``), or -1.
        memory: where it puts their results.
        num_told: how many it has answered whose clients were told.
    """

    __slots__ = (
        "_manager",
        "_may_join",
        "arrival_ns",
        "bulk",
        "channel",
        "client",
        "count",
        "deadline_ns",
        "externals",
        "first",
        "memory",
        "model",
        "num_told",
        "order",
        "outcome",
        "plan",
        "priority",
        "results",
        "row",
        "schedule_by_ns",
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
        schedule_by_ns: int | None,
        channel: Channel | None,
        sessions: Sequence[SessionRecord] | None,
        order: float,
        ends: Callable[[Arrival], RequestFuture | Ends],
        client: int,
    ) -> None:
        self._manager, self.model, self.plan, self.externals = manager, model, plan, externals
        self.sequence, self.count, self.priority, self.order = sequence, count, priority, order
        self.client = client
        self.arrival_ns, self.channel, self.sessions = arrival_ns, channel, sessions
        self.deadline_ns, self.schedule_by_ns = deadline_ns, schedule_by_ns
        self._may_join = count == 1 and channel is None and not self.has_deadline
        self.outcome = ends(self)
        self.bulk: Bulk | None = None
        self.first = self.num_told = 0
        self.row = -1
        self.memory = NO_MEMORY
        self.results: Together | None = None

    @property
    def may_go_by_door(self) -> bool:
        """Whether compiled code may admit and answer them."""
        return (
            self.channel is None
            and self.sessions is None
            and not self.has_deadline
            and fits(self.externals, self.count, self.plan.answers)
        )

    def of(self, number: int) -> Result:
        """The results of a request that compiled code has answered; asked for once. As ``Results``."""
        return self.plan.answers.result_in(self.memory, self.count, number)

    def of_many(self, numbers: Sequence[int]) -> list[Result]:
        """As of ``Results``."""
        return self._results().of_many(numbers)

    def bytes_of(self, number: int) -> list[tuple[int, int, memoryview]]:
        """As of ``Together``."""
        return self._results().bytes_of(number)

    def _results(self) -> Together:
        if self.results is None:
            self.results = self.plan.answers.results_in(self.memory, self.count)
        return self.results

    @property
    def has_deadline(self) -> bool:
        """Whether they must be done, or have begun, by some time."""
        return self.deadline_ns is not None or self.schedule_by_ns is not None

    def follows(self, before: Arrival) -> bool:
        """Whether this is a request that may go on with the one that came right before it."""
        return (
            self._may_join
            and before._may_join
            and self.plan.answered_with is before.plan.answered_with  # so they are of one model
            and self.sequence == before.sequence + 1
            and (self.sessions is None) == (before.sessions is None)
            and (self.priority, self.order, self.client) == (before.priority, before.order, before.client)
        )

    def ask_to_cancel(self, future: RequestFuture) -> None:
        """Has a request ended early; for its future, from any thread."""
        self.cancel(future.place)

    def cancel(self, number: int) -> None:
        """Has a request ended early, if it has not ended; from any thread."""
        self._manager.ask_to_cancel(self, number)

    def refuse_in_callback(self) -> None:
        """Raises RequestError in a future's callback."""
        self._manager.refuse_in_callback()


def alone(arrival: Arrival) -> RequestFuture:
    """The future of a request that is all that was submitted."""
    return RequestFuture(arrival, 0, arrival.sequence)


def together(arrival: Arrival) -> Outcomes:
    """The outcomes of requests that were submitted together."""
    return Outcomes(arrival, arrival.sequence, arrival.count)


class Bulk:
    """Requests that go on together, from when a turn takes them in to their end: those of one arrival, or of several
    that came right behind each other and are answered alike.

    Each is called by its number, 0, 1, ... Belongs to the holder of the turn. One that is streamed is alone.

    Args:
        arrivals: what was handed in; if there are several, each is one request.

    Attributes:
        outcomes: how each ends, for its client.
        tensors: what each brings.
        size: how many.
        model, priority, order, client, deadline_ns, schedule_by_ns, channel: as of the arrivals.
        sessions: whose state each has; None if they have none. Of two of one session the second waits for the first.
        sequence: the first's; the others follow it.
        states: the LiveState of each.
        ids: in the processor, of those that were admitted.
        num_waiting, num_left: how many wait for room, are not answered.
        is_in_line: whether it is among those that may have a request that waits for room.
        next: number of the first that may wait.
        errors: why cells failed on requests; None if none did.
    """

    __slots__ = (
        "_arrivals_ns",
        "_plans",
        "channel",
        "client",
        "deadline_ns",
        "errors",
        "ids",
        "is_in_line",
        "model",
        "next",
        "num_left",
        "num_streamed",
        "num_waiting",
        "order",
        "outcomes",
        "priority",
        "results_at",
        "schedule_by_ns",
        "sequence",
        "sessions",
        "size",
        "states",
        "tensors",
    )

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        first = arrivals[0]
        self.model, self.priority, self.order, self.client = first.model, first.priority, first.order, first.client
        self.deadline_ns, self.schedule_by_ns = first.deadline_ns, first.schedule_by_ns
        self.channel, self.sessions = first.channel, first.sessions
        if self.sessions is not None and len(arrivals) > 1:
            self.sessions = [record for arrival in arrivals for record in arrival.sessions or ()]
        self.sequence, self.size = first.sequence, first.count if len(arrivals) == 1 else len(arrivals)
        each = zip(*[(one.plan, one.externals, one.arrival_ns, one.outcome) for one in arrivals])
        plans, externals, arrivals_ns, outcomes = map(list, each)
        self._plans: list[Plan] = plans
        """One for all, or that of each."""
        self._arrivals_ns: list[int] = arrivals_ns
        """One for all, or that of each."""
        self.tensors = Brought(externals, self.size)
        self.outcomes: Ends
        if len(arrivals) > 1 or isinstance(first.outcome, RequestFuture):
            self.outcomes = SingleOutcomes(outcomes)
        else:
            self.outcomes = first.outcome
        for number, arrival in enumerate(arrivals):
            arrival.bulk, arrival.first = self, number
        self.states = bytearray(self.size)  # LiveState.SUBMITTED is 0
        self.ids = array("i", NOT_ADMITTED) * self.size
        self.num_waiting = self.next = self.num_streamed = 0
        self.num_left = self.size
        self.is_in_line = False
        self.results_at = -1
        """The place of its results, if it is streamed."""
        self.errors: dict[int, CellrtError] | None = None

    @property
    def answered_with(self) -> object:
        """As of the plans."""
        return self._plans[0].answered_with

    def plan(self, number: int) -> Plan:
        """What runs for a request."""
        plans = self._plans
        return plans[number] if len(plans) > 1 else plans[0]

    def plans(self, numbers: Sequence[int]) -> list[Plan]:
        """What runs for some requests: of each, or once if that is the same."""
        plans = self._plans
        if len(plans) == 1:
            return plans
        return plans[numbers.start : numbers.stop] if isinstance(numbers, range) else [plans[k] for k in numbers]

    def num_rows(self, numbers: Sequence[int]) -> int:
        """Nodes of some requests; a loop counts as its step limit."""
        plans = self.plans(numbers)
        return plans[0].num_nodes * len(numbers) if len(plans) == 1 else sum([plan.num_nodes for plan in plans])

    def arrival_ns(self, number: int) -> int:
        """When a request arrived."""
        arrivals_ns = self._arrivals_ns
        return arrivals_ns[number] if len(arrivals_ns) > 1 else arrivals_ns[0]

    def arrivals_ns(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """When some requests arrived, in order, and how many then."""
        if len(self._arrivals_ns) == 1:
            return [(self._arrivals_ns[0], len(numbers))]
        return [(self._arrivals_ns[number], 1) for number in numbers]

    def name_of(self, number: int) -> str:
        """A request, for errors."""
        return f"request {self.sequence_of(number)} of model {self.model.name!r}"

    def session_of(self, number: int) -> SessionRecord | None:
        """A request's session; None if it has none."""
        return None if self.sessions is None else self.sessions[number]

    def sequence_of(self, number: int) -> int:
        """The order of a request's arrival among all of the engine."""
        return self.sequence + number

    def move(self, numbers: Iterable[int], to: LiveState) -> None:
        """Requests go to another state. Raises InternalError if a move is not legal (``core/state/moves.py``)."""
        states, legal = self.states, _MAY_COME_FROM[to]
        if self.size == 1 and states[0] in legal:  # as most are
            states[0] = to
            return
        if isinstance(numbers, range) and not states[numbers.start : numbers.stop].strip(legal):  # all, in one step
            states[numbers.start : numbers.stop] = _OF_STATE[to] * len(numbers)
            return
        for number in numbers:
            if states[number] not in legal:
                check_move(LIVE_REQUEST, LiveState(states[number]), to, self.name_of(number))
            states[number] = to

    def note_ids(self, numbers: Sequence[int], ids: Sequence[int]) -> None:
        """Takes in the ids that requests got in the processor."""
        if isinstance(numbers, range):
            self.ids[numbers.start : numbers.stop] = array("i", ids)
        else:
            for number, request_id in zip(numbers, ids):
                self.ids[number] = request_id

    def is_answered(self, number: int) -> bool:
        """Whether a request's client has the outcome."""
        return self.states[number] >= LiveState.ENDING

    def unanswered(self) -> list[int]:
        """The requests whose clients have no outcome."""
        return [number for number, state in enumerate(self.states) if state < LiveState.ENDING]

    def kindred(self) -> Template | None:
        """With whom the first that waits for room may be admitted: those of one template, whatever their lengths; or
        (None) all that have none."""
        if len(self._plans) > 1:
            while self.states[self.next] != LiveState.WAITING:
                self.next += 1
        return self.plan(self.next).kindred

    def waiting(self, most: int) -> Sequence[int]:
        """The first of those that wait for room and may be admitted together, at most so many."""
        first, end = self.next, self.size
        if end == 1:
            return ALONE
        plans, kindred = self._plans if len(self._plans) > 1 else (), self.kindred()
        found: list[int] = []
        if self.num_waiting == end - first:
            last = min(end, first + most)
            for number, plan in enumerate(plans[first:last], first):
                if plan.kindred is not kindred:
                    return range(first, number)
            return range(first, last)
        for number in range(first, end):
            if self.states[number] == LiveState.WAITING:
                if plans and plans[number].kindred is not kindred:
                    break
                found.append(number)
                if len(found) == most:
                    break
        return found

    def goes_with(self, other: Bulk) -> bool:
        """Whether requests of both that wait may be admitted in one call."""
        return (
            (self.priority, self.client) == (other.priority, other.client)
            and (self.sessions is None) == (other.sessions is None)
            and self.channel is other.channel is None
            and self.kindred() is other.kindred()
        )


Asked: TypeAlias = tuple[Bulk, int]
"""A request of a session: its bulk, and its number there."""

_MAY_COME_FROM = [bytes(before for before, after in LIVE_REQUEST.moves if after is to) for to in LiveState]
"""By state: the states from which one may come there."""
_OF_STATE = [bytes((state,)) for state in LiveState]


@dataclass(eq=False, slots=True)
class SessionRecord:
    """A session. Belongs to the holder of the turn; ``error`` may be read from any thread."""

    model: Model
    key: str
    states: tuple[StateLayout, ...]
    state: SessionState = SessionState.IDLE
    id: int = -1
    """Its id in the processor, from its first request on."""
    saved: list[NDArray[Any]] | None = None
    """Its state in host memory, as ``definition.bits.as_bits``, if it is not at a worker (or new)."""
    running: Asked | None = None
    """Its request that waits for room or runs."""
    queue: OrderedDict[Asked | Call[Any], None] = field(default_factory=OrderedDict)
    """What it was asked after that, in order; who gives up leaves it at once."""
    last_used_s: float = 0.0
    is_leaving: bool = False
    """Whether it ends after what it was asked so far, and its id may be used anew: its model was taken out."""
    error: SessionError | None = None
    """Why it takes no requests any more."""

    @property
    def is_free(self) -> bool:
        """Whether it has nothing to do before what it is asked now."""
        return self.running is None and not self.queue

    @property
    def num_rows(self) -> int:
        """States that are rows; the others grow, and come behind them."""
        return sum(not layout.page_size for layout in self.states)

    def __str__(self) -> str:
        return f"session {self.key!r} of model {self.model.name!r}"

    def move(self, to: SessionState) -> None:
        """Goes to another state. Raises InternalError if the move is not legal (``core/state/moves.py``)."""
        check_move(SESSION, self.state, to, self)
        self.state = to
