"""Sessions of an engine in another process."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Self

from cellrt.engine.awaited import Awaited
from cellrt.engine.copies import NOT_PLAIN, begun, deep_copy, plain_copy
from cellrt.engine.due import Due, due
from cellrt.engine.future import RequestFuture, Result, as_awaitable
from cellrt.engine.session import checked_rows, own_sessions, state_bytes
from cellrt.engine.stream import Channel, Stream
from cellrt.errors import DeviceError, EngineClosedError
from cellrt.process.link import Link
from cellrt.process.model_binding import Binding
from cellrt.process.pending import when_accepted

Submit = Callable[[Binding, Sequence[Any], Sequence[int], Due, int, bool, Channel | None], Sequence[RequestFuture]]
HandIn = Callable[
    [Binding, Sequence[Any], Due, int, Channel | None, Sequence[int], Awaited | None], Sequence[RequestFuture]
]


class RemoteSession:
    """A client's session, which ``Client.session`` returns, with the methods and errors of ``Session``.

    Safe from any thread. Its requests run in the order of their submission; those that wait for room in the queue, in
    the
    order in which they get it.
    """

    def __init__(self, submit: Submit, hand_in: HandIn, link: Link, number: int, id: str, binding: Binding) -> None:
        self._submit, self._hand_in, self._link = submit, hand_in, link
        self._number, self._id, self._binding = number, id, binding
        weakref.finalize(self, link.send_news).atexit = False
        binding.users.add(weakref.ref(self, binding.users.discard))  # later: so it goes first

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(EngineClosedError, DeviceError):  # then the state is gone already
            self.close()

    def __repr__(self) -> str:
        return f"RemoteSession({self.model!r}, {self.id!r})"

    @property
    def model(self) -> str:
        """The name of its model."""
        return self._binding.name

    @property
    def id(self) -> str:
        """The id that it was opened with, or a random one."""
        return self._id

    def submit(
        self,
        request: Any,
        *,
        deadline: float | None = None,
        schedule_by: float | None = None,
        priority: int = 1,
        wait: bool = False,
    ) -> RequestFuture:
        """Submit a request, like ``Client.submit``. If the session has ended, the future raises SessionError."""
        when = due(deadline, schedule_by)
        return self._submit(self._binding, [request], [self._number], when, priority, wait, None)[0]

    def infer(
        self,
        request: Any,
        *,
        deadline: float | None = None,
        schedule_by: float | None = None,
        priority: int = 1,
        wait: bool = False,
    ) -> Coroutine[Any, Any, Result]:
        """Return the result of a request, like ``Client.infer``."""
        own = deep_copy(request) if wait else plain_copy(request)
        how: Any = {"deadline": deadline, "schedule_by": schedule_by, "priority": priority}
        if own is NOT_PLAIN:
            return begun(lambda: self.submit(request, **how))
        return self._infer(own, how, wait)

    async def _infer(self, request: Any, how: dict[str, Any], wait: bool) -> Result:
        if not wait:
            return await as_awaitable(self.submit(request, **how))
        self._link.refuse_in_callback()
        when = due(how["deadline"], how["schedule_by"])
        what = self._binding, [request], when, how["priority"], None, [self._number]
        return await as_awaitable((await when_accepted(lambda accepted: self._hand_in(*what, accepted)))[0])

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
        """Return a request's steps as they are made, like ``Client.stream``."""
        channel = Channel(max_unread)
        when = due(deadline, schedule_by)
        futures = self._submit(self._binding, [request], [self._number], when, priority, wait, channel)
        return Stream(futures[0], channel)

    def reset(self) -> None:
        """Reset the state, like ``Session.reset``, without waiting.

        If the session has ended, its next request fails.
        """
        self._link.cut_back(self._number, 0)

    def cut_back(self, rows: int) -> None:
        """Cut a growing state back to its first rows, like ``Session.cut_back``."""
        self._link.cut_back(self._number, checked_rows(rows))

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
