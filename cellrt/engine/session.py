"""A session: requests of one client that continue from each other's state."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, Self, TypeVar

import torch
from numpy.typing import NDArray

from cellrt.definition.bits import as_bits
from cellrt.definition.spec import RowSpec, describe
from cellrt.engine.copies import NOT_PLAIN, begun, deep_copy, plain_copy
from cellrt.engine.due import due
from cellrt.engine.future import RequestFuture, Result, as_awaitable
from cellrt.engine.manager import Manager
from cellrt.engine.request_group import SessionRecord
from cellrt.engine.serving import Serving
from cellrt.engine.sessions import Sessions
from cellrt.engine.stream import Channel, Stream
from cellrt.engine.submission import Submission
from cellrt.errors import EngineClosedError, RequestError, SessionError
from cellrt.graph.results import StateLayout
from cellrt.numbers import as_integer

MOST_ROWS = 1 << 31


class OfModel(Protocol):
    """A session, wherever its engine is."""

    @property
    def model(self) -> str:
        """The name of its model."""


S = TypeVar("S", bound=OfModel)


class Session:
    """A client's session, as ``Engine.session`` returns it. Safe from any thread.

    Its requests run in the order of their submission, each from the state that the one before left; a request that
    failed or was cancelled leaves the state of the last completed task's last step (see ``Graph.chain``).

    ``with engine.session(...) as session:`` closes it at the end: its state is dropped, so ``export`` it before if it
    is to go on.
    """

    def __init__(
        self, engine: Serving, submission: Submission, manager: Manager, record: SessionRecord, specs: list[RowSpec]
    ) -> None:
        self._engine = engine  # is not given up while one of its sessions is in use
        self._submission, self._manager, self._record, self._specs = submission, manager, record, specs

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(EngineClosedError):  # then the state is gone already
            self.close()

    def __repr__(self) -> str:
        return f"Session({self.model!r}, {self.id!r})"

    @property
    def model(self) -> str:
        """The name of its model."""
        return self._record.model.name

    @property
    def id(self) -> str:
        """The id that it was opened with, or a random one."""
        return self._record.key

    def submit(
        self,
        request: Any,
        *,
        deadline: float | None = None,
        schedule_by: float | None = None,
        priority: int = 1,
        wait: bool = False,
    ) -> RequestFuture:
        """Submit a request as ``Engine.submit`` does; also raise SessionError if the session has ended."""
        self._engine._collector.flush()
        return self._submission.submit_in([self._record], [request], due(deadline, schedule_by), priority, wait)[0]

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
        if wait:
            return self._infer_when_room(deep_copy(request), deadline, schedule_by, priority)
        own = plain_copy(request)
        if own is NOT_PLAIN:
            how: Any = {"deadline": deadline, "schedule_by": schedule_by, "priority": priority}
            return begun(lambda: self.submit(request, **how))
        return self._engine._infer(self.model, own, self, deadline, schedule_by, priority)

    async def _infer_when_room(
        self, request: Any, deadline: float | None, schedule_by: float | None, priority: int
    ) -> Result:
        self._engine._collector.flush()
        record, submit = self._record, self._submission.submit_when_room
        return await as_awaitable(
            (await submit(self.model, [request], due(deadline, schedule_by), priority, record))[0]
        )

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
        self._engine._collector.flush()
        channel = Channel(max_unread)
        when = due(deadline, schedule_by)
        future = self._submission.submit_in([self._record], [request], when, priority, wait, channel)[0]
        return Stream(future, channel)

    def reset(self) -> None:
        """Make the session new, after the requests submitted so far: the next begins as the first did.

        It does not wait. Raise SessionError if the session has ended, EngineClosedError.
        """
        self.cut_back(0)

    def cut_back(self, rows: int) -> None:
        """Cut the session back to the first ``rows`` rows of all its states, after the requests submitted so far.

        Afterwards it is as a session that never had the later rows, such as those of an answer whose end was not
        wanted. All states must grow by a row a step, as keys and values do. It does not wait: a session that has fewer
        rows, or a state of a fixed size, ends, and its next request says so. 0 makes any session new.

        Raise RequestError if ``rows`` is no number of rows, SessionError if the session has ended, EngineClosedError.
        """
        count = checked_rows(rows)
        self._engine._collector.flush()
        self._manager.tell_in(self._record, lambda sessions: sessions.cut_back(self._record, count))

    def export(self) -> bytes:
        """Return the state after the requests submitted so far, in the safetensors format: see ``restore``.

        Tensors are ``[*shape]``, those of a growing state ``[rows, *shape]``; for a new session, which has no state
        yet, ``[0, *shape]``.
        """
        self._engine._collector.flush()
        saved = self._manager.call_in(self._record, lambda sessions: sessions.read(self._record))
        from safetensors.torch import save  # here: a bare machine with a GPU need not have it

        tensors = {}
        for k, (state, spec) in enumerate(zip(self._record.states, self._specs)):
            value = torch.empty((0, *_row_shape(state, spec)), dtype=spec.dtype, device="cpu")
            if saved is not None:
                value = torch.from_numpy(saved[k]).view(spec.dtype)
            tensors[f"{k}.{state.name}.{state.cell}"] = value
        return save(tensors)

    def restore(self, state: bytes) -> None:
        """Take over a state that ``export`` gave, in this or another process, after the requests submitted so far.

        Raise SessionError if it is not the state of a session of the same cells, OverloadError if the states in host
        memory take all that they may (``SessionLimits.max_saved_bytes``).
        """
        self._engine._collector.flush()
        from safetensors import SafetensorError
        from safetensors.torch import load

        try:
            tensors = load(state_bytes(state))
        except (SafetensorError, KeyError, TypeError) as error:
            raise SessionError(f"{self._record}: not a session's state: {error}") from None
        saved: list[NDArray[Any]] = []
        is_new = all(value.shape[:1] == (0,) for value in tensors.values())
        for k, (layout, spec) in enumerate(zip(self._record.states, self._specs)):
            name = f"{k}.{layout.name}.{layout.cell}"
            if name not in tensors:
                raise SessionError(
                    f"{self._record}: the state is of other cells or weights: {name!r} is not in it, whose end says "
                    "which weights; a state does not go over to new ones (see docs/serving.md)"
                )
            value = tensors.pop(name)
            shape = _row_shape(layout, spec)
            if layout.page_size or is_new:
                shape = (*value.shape[:1], *shape)
            if (tuple(value.shape), value.dtype) != (shape, spec.dtype):
                raise SessionError(f"{self._record}: {name!r}: expected {spec}, got {describe(value)}")
            saved.append(as_bits(value))
        if tensors:
            raise SessionError(f"{self._record}: the state is of other cells: unknown are {sorted(tensors)}")
        self._manager.call_in(self._record, lambda sessions: sessions.replace(self._record, None if is_new else saved))

    def copy_to(self, sessions: Sequence[Session]) -> None:
        """Give other sessions of the model the state that this one has, after the requests submitted to each so far.

        So the rows that they have in common are computed once. States that grow, as keys and values do, share their
        pages until they differ, and begin at the same worker. If there is no room for that, if a state of a fixed size
        is kept, or if another session is at work, the state is copied: once for all of them in host memory, and it
        comes with the next request of each.

        Raise RequestError for anything but other sessions of this model, SessionError if one has ended, OverloadError
        if the states in host memory take all that they may; some may have the state then.
        """
        records = records_of(sessions, self._engine, self.model)
        if any(record is self._record or record.model is not self._record.model for record in records):
            raise RequestError(f"copy_to: expected other sessions of the model of {self._record}")
        self._engine._collector.flush()
        left, saved = self._manager.call_in(self._record, lambda sessions: sessions.copy(self._record, records))
        for record in left:
            self._manager.call_in(record, partial(Sessions.replace, record=record, saved=saved))

    def close(self) -> None:
        """End the session after the requests submitted so far and free its state; its id may be used anew.

        It does nothing if the session has ended, nor in a forked process: the session is the parent's.
        """
        if self._record.error is not None or self._manager.turns.is_parents:
            return
        self._engine._collector.flush()
        ended = SessionError(f"{self._record} is closed")
        with suppress(SessionError):  # what it was asked before may have ended it
            self._manager.call_in(self._record, lambda sessions: sessions.end(self._record, ended))

    def leave(self) -> None:
        """Close the session as ``close`` does, without waiting."""
        if self._record.error is not None or self._manager.turns.is_parents:
            return
        self._engine._collector.flush()
        ended = SessionError(f"{self._record} is closed")
        with suppress(SessionError, EngineClosedError):
            self._manager.tell_in(self._record, lambda sessions: sessions.end(self._record, ended))


def _row_shape(layout: StateLayout, spec: RowSpec) -> tuple[int, ...]:
    """Return the shape of a row of a state, given the spec of the arenas' rows."""
    if not layout.page_size:
        return spec.shape
    return spec.shape[: layout.page_dim] + spec.shape[layout.page_dim + 1 :]


def checked_rows(rows: object) -> int:
    """Return the rows that a session is to keep. Raise RequestError if they are no such number."""
    count = as_integer(rows)
    if count is None or not 0 <= count < MOST_ROWS:
        raise RequestError(f"cut_back: expected a number of rows, got {rows!r:.80}")
    return count


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


def records_of(sessions: Sequence[object], engine: object, model: str) -> list[SessionRecord]:
    """Return an engine's records of sessions. Raise RequestError unless all are of this engine and model."""
    own = own_sessions(sessions, Session, model, "engine", lambda session: session._engine is engine)
    return [session._record for session in own]
