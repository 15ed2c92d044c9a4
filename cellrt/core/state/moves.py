"""The one table of states and legal moves: of requests and subgraphs in the tables, of live requests and sessions.

Every state is written through this file: by the compiled core with ``move_request`` and ``move_subgraph``, which count
an illegal move for the validator to report, and by the engine with ``check_move``, which raises. ``docs/states.md`` is
drawn from these tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from cellrt.core.state.tables import Request, Subgraph, Tables
from cellrt.errors import InternalError
from cellrt.native.jit import compiled


class RequestState(IntEnum):
    """The states of a request in the scheduler's tables."""

    FREE = 0
    LIVE = 1
    DONE = 2
    DEAD = 3
    LEFT = 4


class SubgraphState(IntEnum):
    """The states of a subgraph in the scheduler's tables."""

    BLOCKED = 0
    QUEUED = 1
    HANDED_OUT = 2


class LiveState(IntEnum):
    """The states of a request towards its client, from submission to its end."""

    SUBMITTED = 0
    IN_SESSION = 1
    WAITING = 2
    ADMITTED = 3
    ENDING = 4
    ENDED = 5


class SessionState(IntEnum):
    """The states of a session."""

    IDLE = 0
    WAITING = 1
    RUNNING = 2
    ENDED = 3


_WIDTH = 8  # bits for the moves from one state


@dataclass(frozen=True)
class StateMachine:
    """States with their meanings, and moves with their causes. ``bits`` has one bit for each legal move."""

    title: str
    states: Mapping[IntEnum, str]
    moves: Mapping[tuple[IntEnum, IntEnum], str]
    bits: int = field(init=False)

    def __post_init__(self) -> None:
        bits = sum(1 << (_WIDTH * before + after) for before, after in self.moves)
        object.__setattr__(self, "bits", bits)


REQUEST = StateMachine(
    "A request in the tables",
    {
        RequestState.FREE: "the row belongs to nobody",
        RequestState.LIVE: "its nodes are scheduled",
        RequestState.DONE: "all nodes are complete; its results wait to be read",
        RequestState.DEAD: "ended early; its rows come back when nothing of it is in flight",
        RequestState.LEFT: "its results are read; tasks that went ahead of a stop are in flight",
    },
    {
        (RequestState.FREE, RequestState.LIVE): "admitted",
        (RequestState.LIVE, RequestState.DONE): "last node complete",
        (RequestState.LIVE, RequestState.DEAD): "failed, cancelled, late, or its worker is lost",
        (RequestState.DONE, RequestState.FREE): "results read, released",
        (RequestState.DEAD, RequestState.FREE): "nothing in flight, released",
        (RequestState.DONE, RequestState.LEFT): "results read, tasks in flight",
        (RequestState.LEFT, RequestState.FREE): "nothing in flight, released",
    },
)
SUBGRAPH = StateMachine(
    "A subgraph in the tables",
    {
        SubgraphState.BLOCKED: "a producer in another subgraph is outstanding",
        SubgraphState.QUEUED: "in its cell type's queue: the scheduler may take its ready nodes",
        SubgraphState.HANDED_OUT: "out of the queue: all its nodes are submitted, or its request is dead",
    },
    {
        (SubgraphState.BLOCKED, SubgraphState.QUEUED): "producers complete, or all sent to one worker (early release)",
        (SubgraphState.QUEUED, SubgraphState.HANDED_OUT): "last node submitted, loop over, or request dead",
        (SubgraphState.HANDED_OUT, SubgraphState.QUEUED): "a loop's next step is of another cell type",
    },
)
LIVE_REQUEST = StateMachine(
    "A request towards its client",
    {
        LiveState.SUBMITTED: "handed in; no turn has seen it",
        LiveState.IN_SESSION: "behind other requests of its session",
        LiveState.WAITING: "waits for room in the tables and arenas",
        LiveState.ADMITTED: "in the tables",
        LiveState.ENDING: "answered; rows of it are still held",
        LiveState.ENDED: "answered, and nothing of it is left",
    },
    {
        (LiveState.SUBMITTED, LiveState.WAITING): "accepted",
        (LiveState.SUBMITTED, LiveState.IN_SESSION): "accepted for a session",
        (
            LiveState.SUBMITTED,
            LiveState.ENDED,
        ): "refused: no time for it, no worker is left, or the engine closed",
        (LiveState.IN_SESSION, LiveState.WAITING): "what came before it in the session is over",
        (LiveState.IN_SESSION, LiveState.ENDED): "cancelled, late, or the session ended",
        (LiveState.WAITING, LiveState.ADMITTED): "there is room",
        (LiveState.WAITING, LiveState.ENDED): "cancelled, late, or the session ended",
        (LiveState.ADMITTED, LiveState.ENDING): "done, failed, cancelled, late, or its worker is lost",
        (LiveState.ENDING, LiveState.ENDED): "its rows are back",
    },
)
SESSION = StateMachine(
    "A session",
    {
        SessionState.IDLE: "nothing to do; its state lies at a worker or in host memory",
        SessionState.WAITING: "its next request waits for room",
        SessionState.RUNNING: "a request of it has its state",
        SessionState.ENDED: "takes no requests any more",
    },
    {
        (SessionState.IDLE, SessionState.WAITING): "a request's turn",
        (SessionState.WAITING, SessionState.RUNNING): "the request is admitted",
        (SessionState.WAITING, SessionState.IDLE): "the request ended before",
        (SessionState.RUNNING, SessionState.IDLE): "the request gave the state back",
        (SessionState.IDLE, SessionState.ENDED): "closed, expired, or its worker is lost",
        (SessionState.WAITING, SessionState.ENDED): "its worker is lost",
    },
)
MACHINES = (REQUEST, SUBGRAPH, LIVE_REQUEST, SESSION)


# For compiled code: the states as plain numbers, and the legal moves as bits.
FREE, LIVE, DONE, DEAD, LEFT = (int(state) for state in RequestState)
BLOCKED, QUEUED, HANDED_OUT = (int(state) for state in SubgraphState)
_REQUEST_BITS, _SUBGRAPH_BITS = REQUEST.bits, SUBGRAPH.bits


@compiled
def move_request(t: Tables, request: Request, to: int) -> None:
    """Write the state of a request's row; a move that is not legal is counted."""
    if not (_REQUEST_BITS >> (_WIDTH * int(request.state) + to)) & 1:
        t.settings[0].illegal_moves += 1
    request.state = to


@compiled
def move_subgraph(t: Tables, subgraph: Subgraph, to: int) -> None:
    """Write the state of a subgraph's row; a move that is not legal is counted."""
    if not (_SUBGRAPH_BITS >> (_WIDTH * int(subgraph.state) + to)) & 1:
        t.settings[0].illegal_moves += 1
    subgraph.state = to


def check_move(machine: StateMachine, before: IntEnum, after: IntEnum, what: object) -> None:
    """Raise InternalError, naming ``what``, unless the machine has this move."""
    if not machine.bits >> (_WIDTH * before + after) & 1:
        raise InternalError(f"{what}: no legal move from {before.name} to {after.name}")


def word_of(machine: StateMachine, state: int) -> str:
    """Return a state's name."""
    return next(known.name for known in machine.states if known == state)
