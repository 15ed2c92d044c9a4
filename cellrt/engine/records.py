"""What the engine keeps of requests from submission to their end, and of a session from opening to closing."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from numpy.typing import NDArray

from cellrt.core.moves import LIVE_REQUEST, SESSION, LiveState, SessionState, check_move
from cellrt.engine.future import RequestFuture
from cellrt.engine.futures import Outcomes
from cellrt.engine.registry import Model, Plan
from cellrt.engine.stream import Channel
from cellrt.engine.turns import Call
from cellrt.errors import CellrtError, SessionError
from cellrt.graph.results import StateLayout

Externals = list[tuple[int, NDArray[Any]]]
"""Kind and rows ``[requests * n, *shape]`` (see ``as_bits``) of each of the requests' tensors."""


NOT_ADMITTED = (-1,)
ALONE = (0,)
"""The number of a request that is alone in its bulk."""


class Canceller(Protocol):
    """What requests must know of their engine."""

    def ask_to_cancel(self, bulk: Bulk, number: int) -> None:
        """Has a request ended early, if it has not ended; from any thread."""

    def refuse_in_callback(self) -> None:
        """Raises RequestError in a future's callback, where waiting for the engine would never end."""


class Bulk:
    """Requests of one graph that were submitted together, from submission to their end; most often one.

    Each is called by its number, 0, 1, ... Belongs to the holder of the turn once it is handed in. One that is streamed
    is alone.

    Args:
        manager: of their engine; None once all are answered.
        plan, externals: what to run, with the requests' tensors.
        model: theirs.
        sequence: the order of the first's arrival; the others follow it.
        count: how many they are.
        priority: the client's.
        arrival_ns, deadline_ns: on the engine's clock.
        channel: where their steps go.
        sessions: whose state each has; no session is there twice.
        order, lane: the policy's admission key and their lane.

    Attributes:
        outcomes: how each ends, for its client.
        size: how many.
        states: the LiveState of each.
        ids: in the processor, of those that were admitted.
        num_waiting, num_left: how many wait for room, are not answered.
        is_in_line: whether it is among those that may have a request that waits for room.
        next: number of the first that may wait.
        errors: why cells failed on requests; None if none did.
    """

    __slots__ = (
        "arrival_ns",
        "channel",
        "deadline_ns",
        "errors",
        "externals",
        "ids",
        "is_in_line",
        "lane",
        "manager",
        "model",
        "next",
        "num_left",
        "num_streamed",
        "num_waiting",
        "order",
        "outcomes",
        "plan",
        "priority",
        "results_at",
        "sequence",
        "sessions",
        "size",
        "states",
    )

    def __init__(
        self,
        manager: Canceller | None,
        plan: Plan,
        externals: Externals,
        model: Model,
        sequence: int,
        count: int,
        priority: int,
        arrival_ns: int,
        deadline_ns: int | None,
        channel: Channel | None,
        sessions: Sequence[SessionRecord] | None,
        order: float,
        lane: int,
    ) -> None:
        self.manager, self.plan, self.externals, self.model = manager, plan, externals, model
        self.sequence, self.priority = sequence, priority
        self.arrival_ns, self.deadline_ns, self.channel, self.sessions = arrival_ns, deadline_ns, channel, sessions
        self.order, self.lane = order, lane
        self.outcomes = Outcomes(self, sequence, count)
        self.size = count
        self.states = bytearray(count)  # LiveState.SUBMITTED is 0
        self.ids = array("i", NOT_ADMITTED) * count
        self.num_waiting = self.next = self.num_streamed = 0
        self.num_left = count
        self.is_in_line = False
        self.results_at = -1
        """The place of its results, if it is streamed."""
        self.errors: dict[int, CellrtError] | None = None

    def name_of(self, number: int) -> str:
        """A request, for errors."""
        return f"request {self.sequence_of(number)} of model {self.model.name!r}"

    def session_of(self, number: int) -> SessionRecord | None:
        """A request's session; None if it has none."""
        return None if self.sessions is None else self.sessions[number]

    def sequence_of(self, number: int) -> int:
        """The order of a request's arrival among all of the engine."""
        return self.sequence + number

    def number_of(self, sequence: int) -> int:
        """A request's number, by its order of arrival."""
        return sequence - self.sequence

    def numbers_of(self, sequences: list[int]) -> Sequence[int]:
        """The same of several; as a range where they are in a row, as those mostly are that end together."""
        if self.size == 1:
            return ALONE
        begin, first = sequences[0], sequences[0] - self.sequence
        if sequences == list(range(begin, begin + len(sequences))):
            return range(first, first + len(sequences))
        return [sequence - self.sequence for sequence in sequences]

    def move(self, numbers: Iterable[int], to: LiveState) -> None:
        """Requests go to another state. Raises InternalError if a move is not legal (``core/moves.py``)."""
        states, legal = self.states, _MAY_COME_FROM[to]
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
        first, end = self.next, self.size
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

    def goes_with(self, other: Bulk) -> bool:
        """Whether requests of both may be admitted in one call."""
        return (
            self.plan.template.template is other.plan.template.template
            and self.lane == other.lane
            and (self.sessions is None) == (other.sessions is None)
            and self.channel is other.channel is None
        )

    def tensor(self, index: int, numbers: Sequence[int]) -> NDArray[Any]:
        """The rows of the tensor ``index`` of some requests: ``[requests * n, *shape]``."""
        values, each = self.externals[index][1], len(self.externals[index][1]) // self.size
        if self.size == 1:
            return values
        if isinstance(numbers, range):
            return values[numbers.start * each : numbers.stop * each]
        shape = values.shape[1:]
        return values.reshape(self.size, each, *shape)[list(numbers)].reshape(-1, *shape)

    def ask_to_cancel(self, future: RequestFuture) -> None:
        """Has a request ended early; for its future, from any thread."""
        if self.manager is not None:
            self.manager.ask_to_cancel(self, future.place)

    def refuse_in_callback(self) -> None:
        """Raises RequestError in a future's callback."""
        if self.manager is not None:
            self.manager.refuse_in_callback()


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
        """Goes to another state. Raises InternalError if the move is not legal (``core/moves.py``)."""
        check_move(SESSION, self.state, to, self)
        self.state = to
