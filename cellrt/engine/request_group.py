"""The engine's records of requests that were handed in together, until their end, and of sessions until they close."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.moves import LIVE_REQUEST, SESSION, LiveState, SessionState, check_move
from cellrt.engine.answer_layout import fits
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
"""The kind and the rows ``[requests * n, *shape]`` (see ``as_bits``) of each of the requests' tensors."""
NO_INPUTS: Inputs = []
"""An empty list, in place of inputs that are no longer needed; it is never written to."""
NO_TENSORS = bytearray()
NONE_BROUGHT: Sequence[tuple[int, np.dtype[Any], tuple[int, ...], int]] = ()


class _Nobody:
    """A receiver of ends (see ``Ends``) for requests whose client knows all ends already."""

    def fail(self, number: int, error: CellrtError) -> None:
        """Do nothing."""

    def note(self, numbers: Sequence[int], results: PackedResults, first: int, made: Made) -> None:
        """Do nothing."""


NOBODY = _Nobody()


class Canceller(Protocol):
    """The methods of an engine that requests call."""

    def ask_to_cancel(self, group: RequestGroup, number: int) -> None:
        """End a request early, if it has not ended; from any thread."""

    def refuse_in_callback(self) -> None:
        """Raise RequestError in a future's callback, where waiting for the engine would never end."""

    def have_told(self) -> None:
        """Have a turn notify clients of answers of which they were not notified yet."""


class RequestGroup:
    """Requests of one graph that a client hands in together, most often one, until their end.

    Requests have numbers 0, 1, ... in their group. The client writes the record until it is handed in, and the holder
    of the turn from then on. A streamed request is alone in its group.

    Args:
        manager: the engine's manager.
        model: the requests' model.
        plan, inputs: what to run, and the requests' tensors.
        sequence: the sequence number of the first request, by arrival; the others follow it.
        count: the number of requests.
        priority: the priority that the client gave.
        arrival_ns, deadline_ns, schedule_by_ns: times on the engine's clock.
        channel: the channel for the steps of a streamed request.
        sessions: the session of each request; None if they have none. The second of two requests of one session waits
            for the first.
        order: requests are admitted in ascending order of this number, then by arrival.
        client: the number of the client, for policies: 0 in this process.
        ends: makes the receiver of the requests' ends: see ``alone`` and ``together``.

    Attributes:
        outcome: the receiver of the requests' ends.
        tensors, brought: the memory to which C has copied the requests' tensors, and of each its kind, dtype, shape
            and first byte; or empty.
        row: the row of compiled code's table that has the requests (``door.py``), or -1.
        tickets: the tickets of their sessions, while compiled code has the requests.
        memory: the memory to which compiled code writes their results.
        num_told: the number of requests that compiled code answered, and whose clients were notified.

    Attributes that a group has from ``begin`` on, when a turn in Python takes it over:
        states: the LiveState of each request.
        ids: the ids in the processor of the requests that were admitted.
        num_waiting, num_left: the number of requests that wait for room, and that are not answered.
        is_in_line: True if the group is in the queue of those that may have a request that waits for room.
        next: the number of the first request that may wait.
        num_streamed, results_at: the steps of a streamed request that were sent, and the place of its results.
        errors: the errors of cells by request; None if there are none.
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
        """Have Python handle the requests from now on: none is admitted yet."""
        self.states = bytearray(self.count)  # LiveState.SUBMITTED is 0
        self.ids = array("i", NOT_ADMITTED) * self.count
        self.num_waiting = self.next = self.num_streamed = 0
        self.num_left = self.count
        self.is_in_line = False
        self.results_at = -1
        self.errors: dict[int, CellrtError] | None = None

    def forget(self) -> None:
        """Drop what is not needed once all are answered, as a client may keep the group for its results."""
        self.inputs, self.outcome = NO_INPUTS, NOBODY

    @property
    def is_begun(self) -> bool:
        """True if Python handles the requests, and not compiled code."""
        return self.states is not NO_STATES

    @property
    def may_go_by_door(self) -> bool:
        """True if compiled code may admit and answer the requests, provided that their sessions are leased to it."""
        return self.channel is None and fits(self.inputs, self.count, self.plan.answers)

    def of(self, number: int) -> Result:
        """Return the results of a request that compiled code has answered, as ``Results.of`` does."""
        return self.plan.answers.result_in(self.memory, self.count, number)

    def of_many(self, numbers: Sequence[int]) -> list[Result]:
        """Return the results of some requests, as ``Results.of_many`` does."""
        return self._results().of_many(numbers)

    def stacked(self, count: int) -> Result | None:
        """Return the results of all requests together, as ``Results.stacked`` does."""
        return self._results().stacked(count)

    def bytes_of(self, number: int) -> list[tuple[int, int, memoryview]]:
        """Return the bytes of a request's results, as ``Together.bytes_of`` does."""
        return self._results().bytes_of(number)

    def _results(self) -> Together:
        if self.results is None:
            self.results = self.plan.answers.results_in(self.memory, self.count)
        return self.results

    @property
    def is_over(self) -> bool:
        """True if all requests are answered."""
        return not self.num_left if self.is_begun else self.num_told == self.count

    @property
    def has_deadline(self) -> bool:
        """True if the requests must be done, or must have begun, by some time."""
        return self.deadline_ns is not None or self.schedule_by_ns is not None

    def ask_to_cancel(self, future: RequestFuture) -> None:
        """End a future's request early; from any thread."""
        self.cancel(future.place)

    def cancel(self, number: int) -> None:
        """End a request early, if it has not ended; from any thread."""
        self._manager.ask_to_cancel(self, number)

    def refuse_in_callback(self) -> None:
        """Raise RequestError in a future's callback."""
        self._manager.refuse_in_callback()

    def have_told(self) -> None:
        """Have a turn notify clients of answers of which they were not notified yet."""
        self._manager.have_told()

    def num_rows(self, count: int) -> int:
        """Return the nodes of this many requests; a loop counts as its step limit."""
        rows: int = self.plan.num_nodes * count
        return rows

    def name_of(self, number: int) -> str:
        """Return the name of a request in errors."""
        return f"request {self.sequence_of(number)} of model {self.model.name!r}"

    def session_of(self, number: int) -> SessionRecord | None:
        """Return a request's session; None if it has none."""
        return None if self.sessions is None else self.sessions[number]

    def sequence_of(self, number: int) -> int:
        """Return a request's sequence number, by arrival, in the engine."""
        return self.sequence + number

    def input_counts(self) -> list[int]:
        """Return the number of rows of each tensor of a request."""
        return [len(values) // self.count for _, values in self.inputs]

    def input_rows(self, index: int, numbers: Sequence[int]) -> NDArray[Any]:
        """Return the rows ``[n, *shape]`` of the tensor ``index`` of some requests, one request after the other."""
        values, each = self.inputs[index][1], len(self.inputs[index][1]) // self.count
        if len(numbers) == self.count:
            return values
        if isinstance(numbers, range):
            rows: NDArray[Any] = values[numbers.start * each : numbers.stop * each]
            return rows
        shape = values.shape[1:]
        return values.reshape(self.count, each, *shape)[list(numbers)].reshape(-1, *shape)

    def move(self, numbers: Iterable[int], to: LiveState) -> None:
        """Move requests to another state. Raise InternalError if a move is not legal (``core/state/moves.py``)."""
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
        """Note the ids that requests got in the processor."""
        if isinstance(numbers, range):
            self.ids[numbers.start : numbers.stop] = array("i", ids)
        else:
            for number, request_id in zip(numbers, ids):
                self.ids[number] = request_id

    def is_answered(self, number: int) -> bool:
        """Return whether a request is answered."""
        return self.states[number] >= LiveState.ENDING

    def unanswered(self) -> list[int]:
        """Return the numbers of the requests that are not answered."""
        return [number for number, state in enumerate(self.states) if state < LiveState.ENDING]

    def waiting(self, most: int) -> Sequence[int]:
        """Return the numbers of the first requests that wait for room, at most this many."""
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
        """Return whether waiting requests of both groups may be admitted in one call."""
        return (
            (self.priority, self.client) == (other.priority, other.client)
            and (self.sessions is None) == (other.sessions is None)
            and self.channel is other.channel is None
            and self.plan.admission_group is other.plan.admission_group
        )


def alone(group: RequestGroup) -> RequestFuture:
    """Return the future of a request that was submitted alone."""
    return RequestFuture(group, 0, group.sequence)


def together(group: RequestGroup) -> Outcomes:
    """Return the outcomes of requests that were submitted together."""
    return Outcomes(group, group.sequence, group.count)


Asked: TypeAlias = tuple[RequestGroup, int]
"""A request of a session: its group, and its number there."""

_MAY_COME_FROM = [bytes(before for before, after in LIVE_REQUEST.moves if after is to) for to in LiveState]
"""The states from which a request may move to a state, for each state."""
_OF_STATE = [bytes((state,)) for state in LiveState]


class Seat(NamedTuple):
    """A name that a client in another process has for a session: a number of its own, in the region that it has."""

    region: int
    client: int
    number: int


@dataclass(eq=False, slots=True)
class SessionRecord:
    """A session's record. The holder of the turn uses it; any thread may read ``error``."""

    model: Model
    key: str
    states: tuple[StateLayout, ...]
    state: SessionState = SessionState.IDLE
    id: int = -1
    """Its id in the processor, from its first request on."""
    saved: list[NDArray[Any]] | None = None
    """Its state in host memory, as ``definition.bits.as_bits``; None if it is at a worker, or the session is new."""
    running: Asked | None = None
    """Its request that waits for room or runs."""
    queue: OrderedDict[Asked | Call[Any], None] = field(default_factory=OrderedDict)
    """The requests and calls that follow, in order; one that is cancelled leaves the queue at once."""
    last_used_s: float = 0.0
    is_leaving: bool = False
    """True if its model was unregistered: it ends after its queue, and its id may be used anew."""
    error: SessionError | None = None
    """The reason why it takes no more requests."""
    ticket: int = field(default_factory=count(1).__next__)
    """A number that no other session has; ids in the processor are used again."""
    num_asked: int = 0
    """The number of items that clients put into the engine's inbox for it; changed under the gate."""
    num_heard: int = 0
    """The number of these items that turns have read."""
    seats: tuple[Seat, ...] = ()
    """The names that clients in other processes have for it."""

    @property
    def is_free(self) -> bool:
        """True if it has no request or call to finish first."""
        return self.running is None and not self.queue

    @property
    def num_rows(self) -> int:
        """The number of states of one row; they come before those that grow."""
        return sum(not layout.page_size for layout in self.states)

    def __str__(self) -> str:
        return f"session {self.key!r} of model {self.model.name!r}"

    def move(self, to: SessionState) -> None:
        """Move to another state. Raise InternalError if the move is not legal (``core/state/moves.py``)."""
        check_move(SESSION, self.state, to, self)
        self.state = to
