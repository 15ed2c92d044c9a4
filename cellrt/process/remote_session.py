"""Sessions of an engine in another process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

from cellrt.engine.awaited import Awaited
from cellrt.engine.due import Due, due
from cellrt.engine.future import RequestFuture, Result, as_awaitable
from cellrt.engine.serving_session import ServingSession, own_sessions, state_bytes
from cellrt.engine.stream import Channel
from cellrt.errors import DeviceError, EngineClosedError
from cellrt.process.link import Link
from cellrt.process.model_binding import Binding
from cellrt.process.pending import when_accepted

Submit = Callable[[Binding, Sequence[Any], Sequence[int], Due, int, bool, Channel | None], Sequence[RequestFuture]]
HandIn = Callable[
    [Binding, Sequence[Any], Due, int, Channel | None, Sequence[int], Awaited | None], Sequence[RequestFuture]
]


class RemoteSession(ServingSession):
    """A client's session, as ``Client.session`` returns it: see ``ServingSession``.

    Requests that wait for room in the queue run in the order in which they get it.
    """

    _gone = (EngineClosedError, DeviceError)

    def __init__(self, submit: Submit, hand_in: HandIn, link: Link, number: int, id: str, binding: Binding) -> None:
        self._submit_for, self._hand_in, self._link = submit, hand_in, link
        self._number, self._id, self._binding = number, id, binding
        self._line = link.line_of(number)
        weakref.finalize(self, link.send_news).atexit = False
        binding.users.add(weakref.ref(self, binding.users.discard))  # later: so it goes first

    @property
    def model(self) -> str:
        """The name of its model."""
        return self._binding.name

    @property
    def id(self) -> str:
        """The id that it was opened with, or a random one."""
        return self._id

    def _submit(self, request: Any, due: Due, priority: int, wait: bool, channel: Channel | None) -> RequestFuture:
        return self._submit_for(self._binding, [request], [self._number], due, priority, wait, channel)[0]

    async def _infer(self, request: Any, deadline: float | None, schedule_by: float | None, priority: int) -> Result:
        return await as_awaitable(self._submit(request, due(deadline, schedule_by), priority, False, None))

    async def _submit_when_room(self, request: Any, due: Due, priority: int) -> RequestFuture:
        self._link.refuse_in_callback()
        what = self._binding, [request], due, priority, None, [self._number]
        return (await when_accepted(lambda accepted: self._hand_in(*what, accepted)))[0]

    def _cut_back(self, rows: int) -> None:
        self._link.cut_back(self._number, rows)

    def export(self) -> bytes:
        """Return the state, like ``Session.export``."""
        return self._link.call("export", session=self._number).blob

    def restore(self, state: bytes) -> None:
        """Replace the state, like ``Session.restore``."""
        self._link.call("restore", state_bytes(state), session=self._number)

    def copy_to(self, sessions: Sequence[RemoteSession]) -> None:
        """Copy the state to other sessions, like ``Session.copy_to``."""
        others = [number for _, number in parts_of(sessions, self._link, self.model)]
        self._link.call("copy", session=self._number, others=others)

    def close(self) -> None:
        """Close the session, like ``Session.close``."""
        if not self._link.is_parents:
            self._link.call("close", session=self._number)

    def leave(self) -> None:
        """Close the session without waiting, like ``Session.leave``."""
        if not self._link.is_parents:
            self._link.tell("close", session=self._number)


def parts_of(sessions: Sequence[object], link: Link, model: str) -> list[tuple[Binding, int]]:
    """Return sessions' bindings and numbers. Raise RequestError unless all are of this connection and model."""
    own = own_sessions(sessions, RemoteSession, model, "client", lambda session: session._link is link)
    return [(session._binding, session._number) for session in own]
