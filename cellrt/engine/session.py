"""A session of an engine in this process: requests of one client that continue from each other's state."""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from numpy.typing import NDArray

from cellrt.definition.bits import as_bits
from cellrt.definition.spec import RowSpec, describe
from cellrt.engine.due import Due
from cellrt.engine.future import RequestFuture, Result
from cellrt.engine.manager import Manager
from cellrt.engine.request_group import SessionRecord
from cellrt.engine.serving import Serving
from cellrt.engine.serving_session import ServingSession, own_sessions, state_bytes
from cellrt.engine.sessions import Sessions
from cellrt.engine.stream import Channel
from cellrt.engine.submission import Submission
from cellrt.errors import EngineClosedError, RequestError, SessionError
from cellrt.graph.results import StateLayout


class Session(ServingSession):
    """A client's session, as ``Engine.session`` returns it: see ``ServingSession``."""

    def __init__(
        self, engine: Serving, submission: Submission, manager: Manager, record: SessionRecord, specs: list[RowSpec]
    ) -> None:
        self._engine = engine  # is not given up while one of its sessions is in use
        self._submission, self._manager, self._record, self._specs = submission, manager, record, specs

    @property
    def model(self) -> str:
        """The name of its model."""
        return self._record.model.name

    @property
    def id(self) -> str:
        """The id that it was opened with, or a random one."""
        return self._record.key

    def _submit(self, request: Any, due: Due, priority: int, wait: bool, channel: Channel | None) -> RequestFuture:
        self._engine._collector.flush()
        return self._submission.submit_in([self._record], [request], due, priority, wait, channel)[0]

    def _infer(
        self, request: Any, deadline: float | None, schedule_by: float | None, priority: int
    ) -> Coroutine[Any, Any, Result]:
        return self._engine._infer(self.model, request, self, deadline, schedule_by, priority)

    async def _submit_when_room(self, request: Any, due: Due, priority: int) -> RequestFuture:
        self._engine._collector.flush()
        return (await self._submission.submit_when_room(self.model, [request], due, priority, self._record))[0]

    def _cut_back(self, rows: int) -> None:
        self._engine._collector.flush()
        self._manager.tell_in(self._record, lambda sessions: sessions.cut_back(self._record, rows))

    def export(self) -> bytes:
        """Return the state (``ServingSession.export``)."""
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
        """Take over a state (``ServingSession.restore``)."""
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
        """Give other sessions the state that this one has (``ServingSession.copy_to``)."""
        records = records_of(sessions, self._engine, self.model)
        if any(record is self._record or record.model is not self._record.model for record in records):
            raise RequestError(f"copy_to: expected other sessions of the model of {self._record}")
        self._engine._collector.flush()
        left, saved = self._manager.call_in(self._record, lambda sessions: sessions.copy(self._record, records))
        for record in left:
            self._manager.call_in(record, partial(Sessions.replace, record=record, saved=saved))

    def close(self) -> None:
        """End the session (``ServingSession.close``)."""
        if self._record.error is not None or self._manager.turns.is_parents:
            return
        self._engine._collector.flush()
        ended = SessionError(f"{self._record} is closed")
        with suppress(SessionError):  # what it was asked before may have ended it
            self._manager.call_in(self._record, lambda sessions: sessions.end(self._record, ended))

    def leave(self) -> None:
        """Close the session without waiting (``ServingSession.leave``)."""
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


def records_of(sessions: Sequence[object], engine: object, model: str) -> list[SessionRecord]:
    """Return an engine's records of sessions. Raise RequestError unless all are of this engine and model."""
    own = own_sessions(sessions, Session, model, "engine", lambda session: session._engine is engine)
    return [session._record for session in own]
