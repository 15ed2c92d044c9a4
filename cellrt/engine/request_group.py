"""What a client hands in, what the engine keeps of it until its end, and of a session from opening to closing."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.moves import LIVE_REQUEST, SESSION, LiveState, SessionState, check_move
from cellrt.engine.answers import fits
from cellrt.engine.future import PackedResults, RequestFuture, Result
from cellrt.engine.futures import Ends, Made, Outcomes
from cellrt.engine.registry import Model, Plan
from cellrt.engine.stream import Channel
from cellrt.engine.together import Together
from cellrt.engine.turns import Call
from cellrt.errors import CellrtError, SessionError
from cellrt.graph.results import StateLayout

ALONE = (0,)
"""The number of a request that is alone in its group."""
NOT_ADMITTED = (-1,)
NO_MEMORY = memoryview(b"")
NO_STATES = bytearray()
NO_TICKETS = array("q")
Inputs: TypeAlias = list[tuple[int, NDArray[Any]]]
"""Kind and rows ``[requests * n, *shape]`` (see ``as_bits``) of each of the requests' tensors."""
NO_INPUTS: Inputs = []
"""In place of those that were forgotten; never written to."""
NO_TENSORS = bytearray()
NONE_BROUGHT: Sequence[tuple[int, np.dtype[Any], tuple[int, ...], int]] = ()


class _Nobody:
    """Who is told of requests whose client was told of all: see ``Ends``."""

    def fail(self, number: int, error: CellrtError) -> None:
        """Tell nobody."""

    def note(self, numbers: Sequence[int], results: PackedResults, first: int, made: Made) -> None:
        """Tell nobody."""


NOBODY = _Nobody()


class Canceller(Protocol):
    """What requests must know of their engine."""

    def ask_to_cancel(self, group: RequestGroup, number: int) -> None:
        """Has a request ended early, if it has not ended; from any thread."""

    def refuse_in_callback(self) -> None:
        """Raises RequestError in a future's callback, where waiting for the engine would never end."""

    def have_told(self) -> None:
        """Has a turn tell of what is answered, and was not told."""


class RequestGroup:
    """Requests of one graph that a client hands in together, most often one, from then to their end.

    Each is called by its number, 0, 1, ... Written by its client, and from when it is handed in by the holder of the
    turn. One that is streamed is alone.

    Args:
        manager: of their engine.
        model: theirs.
        plan, inputs: what to run, with the requests' tensors.
        sequence: the order of the first's arrival; the others follow it.
        count: how many they are.
        priority: the client's.
        arrival_ns, deadline_ns, schedule_by_ns: on the engine's clock.
        channel: where the steps of one that is streamed go.
        sessions: whose state each has; None if they have none. Of two of one session the second waits for the first.
        order: when they are admitted, in ascending order of this, then by arrival.
        client: who submitted them, for policies: 0 in this process.
        ends: makes who is told how they end: see ``alone`` and ``together``.

    Attributes:
        outcome: who that is.
        tensors, brought: where compiled C has copied the requests' tensors, and of each its kind, dtype, shape and
            first byte there; or empty.
        row: where compiled code has them (``door.py``), or -1.
        tickets: of their sessions, if it has them.
        memory: where it puts their results.
        num_told: how many it has answered whose clients were told.

    Attributes that a group has from ``begin`` on, when a turn in Python takes it in:
        states: the LiveState of each.
        ids: in the processor, of those that were admitted.
        num_waiting, num_left: how many wait for room, are not answered.
        is_in_line: whether it is among those that may have a request that waits for room.
        next: number of the first that may wait.
        num_streamed, results_at: steps that were sent of one that is streamed, and the place of its results.
        errors: why cells failed on requests; None if none did.
    """

    __slots__ = (
        "_inputs",
        "_manager",
        "arrival_ns",
        "brought",
        "channel",
        "client",
        "count",
        "deadline_ns",
        "errors",
        "ids",
        "is_in_line",
        "memory",
        "model",
        "next",
        "num_left",
        "num_streamed",
        "num_told",
        "num_waiting",
        "order",
        "outcome",
        "plan",
        "priority",
        "results",
        "results_at",
        "row",
        "schedule_by_ns",
        "sequence",
        "sessions",
        "states",
        "tensors",
        "tickets",
    )

    def __init__(
        self,
        manager: Canceller,
        model: Model,
        plan: Plan,
        inputs: Inputs,
        sequence: int,
        count: int,
        priority: int,
        arrival_ns: int,
        deadline_ns: int | None,
        schedule_by_ns: int | None,
        channel: Channel | None,
        sessions: Sequence[SessionRecord] | None,
        order: float,
        ends: Callable[[RequestGroup], RequestFuture | Ends],
        client: int,
    ) -> None:
        self._manager, self.model, self.plan = manager, model, plan
        self.sequence, self.count, self.priority, self.order = sequence, count, priority, order
        self.client = client
        self.arrival_ns, self.channel, self.sessions = arrival_ns, channel, sessions
        self.deadline_ns, self.schedule_by_ns = deadline_ns, schedule_by_ns
        self.outcome = ends(self)
        self.num_told, self.num_left, self.row = 0, count, -1
        self.memory, self.states = NO_MEMORY, NO_STATES
        self._inputs: Inputs | None = inputs
        self.tensors, self.brought = NO_TENSORS, NONE_BROUGHT
        self.results: Together | None = None
        self.tickets: array[int] = NO_TICKETS

    @property
    def inputs(self) -> Inputs:
        """The kind and rows of each of the requests' tensors."""
        if self._inputs is None:
            its = self.tensors
            self._inputs = [(kind, np.ndarray(shape, dtype, its, begin)) for kind, dtype, shape, begin in self.brought]
        return self._inputs

    @inputs.setter
    def inputs(self, inputs: Inputs) -> None:
        self._inputs, self.tensors = inputs, NO_TENSORS

    def begin(self) -> None:
        """Note that Python goes on with them: none is admitted."""
        self.states = bytearray(self.count)  # LiveState.SUBMITTED is 0
        self.ids = array("i", NOT_ADMITTED) * self.count
        self.num_waiting = self.next = self.num_streamed = 0
        self.num_left = self.count
        self.is_in_line = False
        self.results_at = -1
        self.errors: dict[int, CellrtError] | None = None

    def forget(self) -> None:
        """Give up what is not needed once all are answered, as long as somebody keeps their results."""
        self.inputs, self.outcome = NO_INPUTS, NOBODY

    @property
    def is_begun(self) -> bool:
        """Whether Python goes on with them, and not compiled code."""
        return self.states is not NO_STATES

    @property
    def may_go_by_door(self) -> bool:
        """Whether compiled code may admit and answer them, if they have no sessions, or these are leased."""
        return self.channel is None and fits(self.inputs, self.count, self.plan.answers)

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
    def is_over(self) -> bool:
        """Whether all have their outcome."""
        return not self.num_left if self.is_begun else self.num_told == self.count

    @property
    def has_deadline(self) -> bool:
        """Whether they must be done, or have begun, by some time."""
        return self.deadline_ns is not None or self.schedule_by_ns is not None

    def ask_to_cancel(self, future: RequestFuture) -> None:
        """Has a request ended early; for its future, from any thread."""
        self.cancel(future.place)

    def cancel(self, number: int) -> None:
        """Has a request ended early, if it has not ended; from any thread."""
        self._manager.ask_to_cancel(self, number)

    def refuse_in_callback(self) -> None:
        """Raises RequestError in a future's callback."""
        self._manager.refuse_in_callback()

    def have_told(self) -> None:
        """Has a turn tell of what is answered, and was not told."""
        self._manager.have_told()

    def num_rows(self, count: int) -> int:
        """Nodes of so many; a loop counts as its step limit."""
        rows: int = self.plan.num_nodes * count
        return rows

    def name_of(self, number: int) -> str:
        """A request, for errors."""
        return f"request {self.sequence_of(number)} of model {self.model.name!r}"

    def session_of(self, number: int) -> SessionRecord | None:
        """A request's session; None if it has none."""
        return None if self.sessions is None else self.sessions[number]

    def sequence_of(self, number: int) -> int:
        """The order of a request's arrival among all of the engine."""
        return self.sequence + number

    def input_counts(self) -> list[int]:
        """How many rows each tensor of a request has."""
        return [len(values) // self.count for _, values in self.inputs]

    def input_rows(self, index: int, numbers: Sequence[int]) -> NDArray[Any]:
        """The rows of the tensor ``index`` of some requests, ``[n, *shape]``, one behind the other."""
        values, each = self.inputs[index][1], len(self.inputs[index][1]) // self.count
        if len(numbers) == self.count:
            return values
        if isinstance(numbers, range):
            rows: NDArray[Any] = values[numbers.start * each : numbers.stop * each]
            return rows
        shape = values.shape[1:]
        return values.reshape(self.count, each, *shape)[list(numbers)].reshape(-1, *shape)

    def move(self, numbers: Iterable[int], to: LiveState) -> None:
        """Requests go to another state. Raises InternalError if a move is not legal (``core/state/moves.py``)."""
        states, legal = self.states, _MAY_COME_FROM[to]
        if self.count == 1 and states[0] in legal:  # as most are
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

    def waiting(self, most: int) -> Sequence[int]:
        """The first of those that wait for room, at most so many."""
        first, end = self.next, self.count
        if end == 1:
            return ALONE
        if self.num_waiting == end - first:
            return range(first, min(end, first + most))
        found: list[int] = []
        for number in range(first, end):
            if self.states[number] == LiveState.WAITING:
                found.append(number)
                if len(found) == most:
                    break
        return found

    def goes_with(self, other: RequestGroup) -> bool:
        """Whether requests of both that wait may be admitted in one call."""
        return (
            (self.priority, self.client) == (other.priority, other.client)
            and (self.sessions is None) == (other.sessions is None)
            and self.channel is other.channel is None
            and self.plan.kindred is other.plan.kindred
        )


def alone(group: RequestGroup) -> RequestFuture:
    """The future of a request that is all that was submitted."""
    return RequestFuture(group, 0, group.sequence)


def together(group: RequestGroup) -> Outcomes:
    """The outcomes of requests that were submitted together."""
    return Outcomes(group, group.sequence, group.count)


Asked: TypeAlias = tuple[RequestGroup, int]
"""A request of a session: its group, and its number there."""

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
    ticket: int = field(default_factory=count(1).__next__)
    """Tells it from others that have its id in the processor before or after it."""
    num_asked: int = 0
    """What clients have put into the engine's inbox for it; changed under the gate."""
    num_heard: int = 0
    """What of that turns have seen."""

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
