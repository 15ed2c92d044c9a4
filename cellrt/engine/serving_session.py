"""The interface of sessions for clients: the same, whichever process the engine runs in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Self, TypeVar

from cellrt.engine.copies import NOT_PLAIN, begun, deep_copy, plain_copy
from cellrt.engine.due import Due, due
from cellrt.engine.future import RequestFuture, Result, as_awaitable
from cellrt.engine.stream import Channel, Stream
from cellrt.errors import CellrtError, EngineClosedError, RequestError, SessionError
from cellrt.numbers import as_integer

MOST_ROWS = 1 << 31


class ServingSession(ABC):
    """A client's session, as ``session`` of an engine returns it. Safe from any thread.

    Its requests run in the order of their submission, each from the state that the one before left; a request that
    failed or was cancelled leaves the state of the last completed task's last step (see ``Graph.chain``).

    ``with engine.session(...) as session:`` closes it at the end: its state is dropped, so ``export`` it before if it
    is to go on.
    """

    _gone: tuple[type[CellrtError], ...] = (EngineClosedError,)
    """The errors that say that the session's state is gone with its engine."""

    @property
    @abstractmethod
    def model(self) -> str:
        """The name of its model."""

    @property
    @abstractmethod
    def id(self) -> str:
        """The id that it was opened with, or a random one."""

    @abstractmethod
    def _submit(self, request: Any, due: Due, priority: int, wait: bool, channel: Channel | None) -> RequestFuture:
        """Submit a request; with a channel, its steps go there."""

    @abstractmethod
    async def _submit_when_room(self, request: Any, due: Due, priority: int) -> RequestFuture:
        """Submit a request when there is a place for it; others of the loop go on meanwhile."""

    @abstractmethod
    def _infer(
        self, request: Any, deadline: float | None, schedule_by: float | None, priority: int
    ) -> Coroutine[Any, Any, Result]:
        """Return the results of a request that is the session's own."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(*self._gone):
            self.close()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model!r}, {self.id!r})"

    def submit(
        self,
        request: Any,
        *,
        deadline: float | None = None,
        schedule_by: float | None = None,
        priority: int = 1,
        wait: bool = False,
    ) -> RequestFuture:
        """Submit a request as ``Engine.submit`` does.

        If the session has ended, raise SessionError; the future does so of an engine in another process.
        """
        return self._submit(request, due(deadline, schedule_by), priority, wait, None)

    def infer(
        self,
        request: Any,
        *,
        deadline: float | None = None,
        schedule_by: float | None = None,
        priority: int = 1,
        wait: bool = False,
    ) -> Coroutine[Any, Any, Result]:
        """Submit a request and await its results, as ``Engine.infer`` does."""
        own = deep_copy(request) if wait else plain_copy(request)
        if own is NOT_PLAIN:
            how: Any = {"deadline": deadline, "schedule_by": schedule_by, "priority": priority}
            return begun(lambda: self.submit(request, **how))
        infer = self._infer_when_room if wait else self._infer
        return infer(own, deadline, schedule_by, priority)

    async def _infer_when_room(
        self, request: Any, deadline: float | None, schedule_by: float | None, priority: int
    ) -> Result:
        return await as_awaitable(await self._submit_when_room(request, due(deadline, schedule_by), priority))

    def stream(
        self,
        request: Any,
        *,
        deadline: float | None = None,
        schedule_by: float | None = None,
        priority: int = 1,
        wait: bool = False,
        max_unread: int | None = None,
    ) -> Stream:
        """Submit a request and stream its results, as ``Engine.stream`` does."""
        channel = Channel(max_unread)
        return Stream(self._submit(request, due(deadline, schedule_by), priority, wait, channel), channel)

    def reset(self) -> None:
        """Make the session new, after the requests submitted so far: the next begins as the first did.

        It does not wait. Raise as ``cut_back`` does.
        """
        self._cut_back(0)

    def cut_back(self, rows: int) -> None:
        """Cut the session back to the first ``rows`` rows of all its states, after the requests submitted so far.

        Afterwards it is as a session that never had the later rows, such as those of an answer whose end was not
        wanted. All states must grow by a row a step, as keys and values do. It does not wait: a session that has fewer
        rows, or a state of a fixed size, ends, and its next request says so. 0 makes any session new.

        Raise RequestError if ``rows`` is no number of rows, SessionError if the session has ended, EngineClosedError.
        Of an engine in another process a session that has ended fails the next request instead.
        """
        count = as_integer(rows)
        if count is None or not 0 <= count < MOST_ROWS:
            raise RequestError(f"cut_back: expected a number of rows, got {rows!r:.80}")
        self._cut_back(count)

    @abstractmethod
    def _cut_back(self, rows: int) -> None:
        """Cut the session back, without waiting."""

    @abstractmethod
    def export(self) -> bytes:
        """Return the state after the requests submitted so far, in the safetensors format: see ``restore``.

        Tensors are ``[*shape]``, those of a growing state ``[rows, *shape]``; for a new session, which has no state
        yet, ``[0, *shape]``.
        """

    @abstractmethod
    def restore(self, state: bytes) -> None:
        """Take over a state that ``export`` gave, in this or another process, after the requests submitted so far.

        Raise SessionError if it is not the state of a session of the same cells, OverloadError if the states in host
        memory take all that they may (``SessionLimits.max_saved_bytes``).
        """

    @abstractmethod
    def copy_to(self, sessions: Sequence[Self]) -> None:
        """Give other sessions of the model the state that this one has, after the requests submitted to each so far.

        So the rows that they have in common are computed once. States that grow, as keys and values do, share their
        pages until they differ, and begin at the same worker. If there is no room for that, if a state of a fixed size
        is kept, or if another session is at work, the state is copied: once for all of them in host memory, and it
        comes with the next request of each.

        Raise RequestError for anything but other sessions of this model, SessionError if one has ended, OverloadError
        if the states in host memory take all that they may; some may have the state then.
        """

    @abstractmethod
    def close(self) -> None:
        """End the session after the requests submitted so far and free its state; its id may be used anew.

        It does nothing if the session has ended, nor in a forked process: the session is the parent's.
        """

    @abstractmethod
    def leave(self) -> None:
        """Close the session as ``close`` does, without waiting."""


S = TypeVar("S", bound=ServingSession)


def own_sessions(
    sessions: Sequence[object], kind: type[S], model: str, owner: str, is_own: Callable[[S], bool]
) -> list[S]:
    """Return sessions with their type. Raise RequestError unless all are of this kind, model and owner."""
    own: list[S] = []
    for place, session in enumerate(sessions):
        if not isinstance(session, kind):
            given = type(session).__name__
            raise RequestError(f"sessions[{place}]: expected what the {owner}'s session() gives, got {given}")
        if session.model != model:
            raise RequestError(f"sessions[{place}]: {session} is not one of model {model!r}")
        if not is_own(session):
            raise RequestError(f"sessions[{place}]: {session} is one of another {owner}")
        own.append(session)
    return own


def state_bytes(state: object) -> bytes:
    """Return the bytes that ``export`` gave, from any object that holds bytes. Raise SessionError for other objects."""
    if isinstance(state, bytes | bytearray | memoryview):
        return bytes(state)
    raise SessionError(f"not a session's state: expected the bytes that export gave, got {type(state).__name__}")
