"""What the engine keeps of a request from submission to its end, and of a session from opening to closing."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from cellrt.core.moves import LIVE_REQUEST, SESSION, LiveState, SessionState, check_move
from cellrt.core.policy import Job
from cellrt.engine.future import RequestFuture
from cellrt.engine.registry import Model, Plan
from cellrt.engine.stream import Channel
from cellrt.engine.turns import Call
from cellrt.errors import CellrtError, SessionError
from cellrt.graph.results import StateLayout


@dataclass(eq=False, slots=True)
class LiveRequest:
    """A request from submission to its end. Belongs to the holder of the turn once it is handed in."""

    future: RequestFuture
    plan: Plan | None
    """What to run, with the request's tensors; None once nothing of it is needed."""
    model: Model
    job: Job
    arrival_ns: int
    deadline_ns: int | None
    channel: Channel | None
    order: float
    """The policy's admission key."""
    lane: int
    session: SessionRecord | None = None
    state: LiveState = LiveState.SUBMITTED
    id: int = -1
    """Its id in the processor once it is admitted."""
    results_at: int = -1
    num_streamed: int = 0
    error: CellrtError | None = None
    """Why a cell failed on it, until it is answered."""

    def __str__(self) -> str:
        return f"request {self.job.sequence} of model {self.model.name!r}"

    def move(self, to: LiveState) -> None:
        """Goes to another state. Raises InternalError if the move is not legal (``core/moves.py``)."""
        check_move(LIVE_REQUEST, self.state, to, self)
        self.state = to
        if to is LiveState.ENDED:
            self.plan = None

    @property
    def is_answered(self) -> bool:
        """Whether its client has the outcome."""
        return self.state >= LiveState.ENDING


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
    running: LiveRequest | None = None
    """Its request that waits for room or runs."""
    queue: OrderedDict[LiveRequest | Call[Any], None] = field(default_factory=OrderedDict)
    """What it was asked after that, in order; who gives up leaves it at once."""
    last_used_s: float = 0.0
    error: SessionError | None = None
    """Why it takes no requests any more."""

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
