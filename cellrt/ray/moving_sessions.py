"""The engine's process as a replica has it: sessions come from other replicas when they are asked for here, and go.

Belongs to the replica's event loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from cellrt.errors import CellrtError, EngineClosedError, SessionError
from cellrt.process.remote_session import RemoteSession
from cellrt.ray.directory import MOST_BEGUN, Grant, Order, ReleasedState
from cellrt.ray.messages import key_of, parts_of
from cellrt.serve.backend import Backend
from cellrt.serve.server_settings import Settings

log = logging.getLogger("cellrt")
HEARD_S = 10.0
"""The time to wait for a grant that an order is about."""


@dataclass
class Asking:
    """A request that is answered; ``is_begun``: whether a session was handed out for it."""

    id: str
    is_begun: bool = False


ASKING: ContextVar[Asking | None] = ContextVar("ASKING", default=None)
"""The request that is answered in this context; None: it has no id."""


class Asked(Protocol):
    """The directory, as a replica asks it."""

    async def take(self, key: str, *, is_start: bool) -> Grant:
        """Take a session for this replica, as ``Directory.take`` does."""

    async def release(self, key: str, grant: int) -> None:
        """Note that a session has ended, as ``Directory.release`` does."""

    async def park(self, sessions: Mapping[Order, ReleasedState]) -> None:
        """Store this replica's states in the directory, as ``Directory.park`` does."""


class Held(NamedTuple):
    """A session that is here, the number of its grant, and the newest requests that were submitted here, by id."""

    session: RemoteSession
    grant: int
    begun: deque[str]


class MovingBackend(Backend):
    """A backend whose sessions move between replicas, as the module describes.

    ``directory``: says where sessions are.

    Attributes:
        is_leaving: whether no session begins or comes here any more.
    """

    def __init__(self, settings: Settings, directory: Asked) -> None:
        super().__init__(settings)
        self._directory = directory
        self.is_leaving = False
        self._held: dict[str, Held] = {}
        self._coming: dict[str, asyncio.Task[None]] = {}

    @property
    def held(self) -> Mapping[str, int]:
        """The sessions that are here, and the numbers of their grants."""
        return {key: held.grant for key, held in self._held.items()}

    async def session(self, model: str, id: str, *, is_start: bool) -> RemoteSession:
        """Return a session, as ``Backend.session`` does; bring its state here if another replica has it.

        The caller must submit to the session before the event loop goes on, or the session may have moved. Raise
        EngineClosedError too.
        """
        key = key_of(model, id)
        while True:
            coming, held = self._coming.get(key), self._held.get(key)
            if coming is not None:
                await asyncio.wait([coming])
            elif held is None:
                await self._bring(key, is_start)
                is_start = False
            elif is_start:
                with suppress(SessionError):  # it has moved, or ended
                    await asyncio.to_thread(held.session.reset)
                is_start = self._held.get(key) is not held
            else:
                self._held[key] = self._held.pop(key)  # used last
                asking = ASKING.get()
                if asking is not None:
                    asking.is_begun = True
                    held.begun.append(asking.id)
                return held.session

    async def _bring(self, key: str, is_start: bool) -> None:
        """Bring a session here, once for all that ask meanwhile; go on even if the first of them is cancelled."""
        task = self._coming[key] = asyncio.create_task(self._begin(key, is_start))
        task.add_done_callback(lambda _: self._coming.pop(key, None))
        await asyncio.shield(task)

    async def _begin(self, key: str, is_start: bool) -> None:
        """Begin a session here, or go on with one that was elsewhere."""
        if self.is_leaving:
            raise EngineClosedError("the replica leaves its sessions to the others")
        model, id = parts_of(key)
        grant = await self._directory.take(key, is_start=is_start)
        if not grant.number:
            why = "the replica that had it died" if grant.is_lost else "it has not begun, has ended or has expired"
            raise SessionError(f"session {id!r} of model {model!r} is on no replica: {why}")
        is_here = not is_start and grant.state is None
        try:
            session = await self.call("session", model, id, state=grant.state, must_be_open=is_here)
            if is_start:
                await asyncio.to_thread(session.reset)
        except CellrtError:
            await self._directory.release(key, grant.number)
            raise
        self._held[key] = Held(session, grant.number, deque(maxlen=MOST_BEGUN))
        if len(self._held) > self.settings.limits.max_sessions:
            await self._end_oldest()

    async def _end_oldest(self) -> None:
        key = next(iter(self._held))
        await self.end_session(*parts_of(key), self._held[key].session)

    async def give(self, order: Order) -> ReleasedState | None:
        """Give a session up, with its state after the requests that were submitted here; None if it is not here."""
        coming = self._coming.get(order.key)
        if coming is not None and self._grant_of(order.key) < order.grant:
            await asyncio.wait([coming], timeout=HEARD_S)
        held = self._held.get(order.key)
        if held is None or held.grant != order.grant:
            return None
        del self._held[order.key]  # whoever comes from now on asks the directory
        try:
            state: bytes = await asyncio.to_thread(held.session.export)
            await asyncio.to_thread(held.session.close)
        except CellrtError as error:
            log.warning("the state of session %s cannot be moved: %s", order.key, error)
            return None
        return ReleasedState(state, tuple(held.begun))

    async def leave(self) -> None:
        """Give every session up, and take no more."""
        self.is_leaving = True
        while self._held or self._coming:
            orders = [Order(key, held.grant) for key, held in self._held.items()]
            given = {order: await self.give(order) for order in orders}
            await self._directory.park({order: left for order, left in given.items() if left is not None})
            if self._coming and not self._held:
                # They may come from a replica that leaves too, and waits for one of these.
                await asyncio.wait(self._coming.values(), return_when=asyncio.FIRST_COMPLETED)

    def _grant_of(self, key: str) -> int:
        held = self._held.get(key)
        return 0 if held is None else held.grant

    def forget_session(self, model: str, id: str) -> None:
        """Forget a session, as ``Backend.forget_session`` does."""
        held = self._held.pop(key_of(model, id), None)
        if held is not None:
            task = asyncio.ensure_future(self._directory.release(key_of(model, id), held.grant))
            task.add_done_callback(_note_failure)

    async def end_session(self, model: str, id: str, session: RemoteSession) -> None:
        """End a session, as ``Backend.end_session`` does, unless it has moved."""
        held = self._held.get(key_of(model, id))
        if held is None or held.session is not session:
            return  # it has moved
        await super().end_session(model, id, session)

    def _forget_engine(self) -> None:
        super()._forget_engine()
        self._held.clear()


def _note_failure(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.warning("the directory did not hear of a session's end: %s", error)
