"""A front end's connection to the engine's process, which is opened anew when the process was replaced.

Belongs to the front end's event loop; calls that may wait for the engine's process are made in threads.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from cellrt.engine.frozen import HEAP
from cellrt.engine.future import RequestFuture
from cellrt.errors import CellrtError, DefinitionError, DeviceError, EngineClosedError, UnknownModelError
from cellrt.process.client import Client, connect
from cellrt.process.pieces import Pieces
from cellrt.process.remote_session import RemoteSession
from cellrt.serve.described import Described, describe
from cellrt.serve.server_settings import Settings

log = logging.getLogger("cellrt")
LOOK_EVERY_S = 0.05
"""The seconds between two checks whether the process is gone, or back."""
ASK_EVERY_S = 0.5
"""The seconds between two questions to the process, whether it has workers, and which models."""
CONNECT_S = 5.0
"""The seconds to wait for an engine that is being started, before the next try."""
NOT_READY = (
    "the server is not ready, and stays so: %d of %d models cannot be served (%s). Mend and load each anew (POST "
    "/v2/repository/models/MODEL/load), take it out (.../unload), or start the server again"
)
"""The log's advice to an operator about models that no front end can serve; the log has the reasons before it."""
SLOW = ("load", "unregister")
"""Calls that take as long as loading a model: they run one after the other, and no other call waits for them."""


class Unserved(NamedTuple):
    """A model that is loaded and cannot be served: its version and the reason."""

    version: int
    why: str


class Backend:
    """A front end's connection to the engine's process, with a description of each model.

    Attributes:
        is_draining: whether the server is about to end; it is not ready then.
        is_connected: set by the first connection, or when the server ends, as no one should wait for one any more.
        engine_lost: set when the present process of the engine is gone; its successor has another event.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.is_draining = False
        self.is_connected = asyncio.Event()
        self.engine_lost = asyncio.Event()
        self._client: Client | None = None
        self._pieces: tuple[Client, Pieces] | None = None
        self._has_workers = self._has_models = True
        self._unserved: dict[str, Unserved] = {}
        self._described: dict[str, Described] = {}
        self._models_changed = asyncio.Event()
        """An event that is set when the engine reports that a model was registered or removed, by any client."""
        self._looking = asyncio.Lock()
        self._num_gone = 0
        self._sessions: OrderedDict[tuple[str, str], RemoteSession] = OrderedDict()
        self._locks: dict[str, asyncio.Lock] = {}
        self._slow = ThreadPoolExecutor(1, "cellrt-load")

    @property
    def client(self) -> Client:
        """The connection. Raises DeviceError as long as there is none."""
        client = self._client
        if client is None or client.is_lost:
            raise DeviceError("the engine's process is not there; it is being started")
        return client

    @property
    def pieces(self) -> Pieces:
        """The collector that sends requests of many sessions together.

        Raises DeviceError as long as there is no connection.
        """
        client = self.client
        if self._pieces is None or self._pieces[0] is not client:
            self._pieces = client, Pieces(client)
        return self._pieces[1]

    @property
    def is_ready(self) -> bool:
        """True if there are loaded models, and every one of them can be served now."""
        return self.takes_requests and self._has_models and not self._unserved

    @property
    def takes_requests(self) -> bool:
        """True if there is an engine with a worker, and the server is not about to end."""
        is_there = self._client is not None and not self._client.is_lost
        return is_there and self._has_workers and not self.is_draining

    def drain(self) -> None:
        """Record that the server is about to end."""
        self.is_draining = True
        self.is_connected.set()

    def why_unserved(self, name: str) -> str:
        """Return why a model that is loaded cannot be served; an empty text if it can."""
        return self._unserved[name].why if name in self._unserved else ""

    async def keep_connected(self) -> None:
        """Connect, and connect anew when the process was replaced. Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._keep_described())
            loop = asyncio.get_running_loop()
            asked_s = loop.time()
            while True:
                try:
                    if self._client is None or self._client.is_lost:
                        await self._connect()
                    elif loop.time() > asked_s + ASK_EVERY_S:
                        asked_s = loop.time()
                        with suppress(CellrtError):  # it is gone, and is looked for in the next round
                            self._has_workers = await asyncio.to_thread(self._client.has_workers)
                except Exception:  # or nothing would be served any more
                    log.exception("the engine's process cannot be connected to; trying again")
                    await asyncio.sleep(ASK_EVERY_S)
                await asyncio.sleep(LOOK_EVERY_S)

    async def _keep_described(self) -> None:
        """Describe models that are loaded later, so that readiness includes them; this may take long."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_EVERY_S):
                    await self._models_changed.wait()
            self._models_changed.clear()
            client = self._client
            if client is not None and not client.is_lost:
                try:
                    await self._describe_new(client)
                except CellrtError as error:  # the process is gone, or the server is about to end
                    log.debug("nothing was described: %s", error)
                except Exception:
                    log.exception("a model cannot be described")

    async def _describe_new(self, client: Client) -> None:
        for name, version in (await self._look_what_is_loaded(client)).items():
            known = self._unserved.get(name)
            if known is not None and known.version == version:
                continue
            try:
                await self.model(name)
            except UnknownModelError:  # it was taken out meanwhile
                pass
            except DefinitionError as error:
                if client is self._client:
                    self._note_unserved(name, version, error)

    async def _look_what_is_loaded(self, client: Client) -> dict[str, int]:
        """Return the versions of the loaded models by name, and update readiness with them."""
        async with self._looking:  # the latest look counts
            entries = await asyncio.to_thread(client.models)
            loaded = {entry["name"]: int(entry["version"]) for entry in entries if entry["is_loaded"]}
            if client is self._client:
                self._has_models = bool(loaded)
                self._unserved = {name: each for name, each in self._unserved.items() if name in loaded}
        return loaded

    def _note_unserved(self, name: str, version: int, error: DefinitionError) -> Unserved:
        """Record that a model cannot be served, and log it once."""
        known = self._unserved.get(name)
        if known is None or known.version != version:
            log.error("%s", error)
            self._unserved[name] = known = Unserved(version, str(error))
        return known

    async def _connect(self) -> None:
        lost, self._client, self._pieces = self._client, None, None
        self._forget_engine()
        if lost is not None:
            await asyncio.to_thread(lost.close)
        client = None
        try:
            client = await asyncio.to_thread(connect, self.settings.address, timeout=CONNECT_S, freeze=False)
            entries = await asyncio.to_thread(client.models)
            loaded = {entry["name"]: int(entry["version"]) for entry in entries if entry["is_loaded"]}
            await asyncio.to_thread(client.number)
            described, unserved = await asyncio.to_thread(self._describe_all, client, loaded)
        except Exception as error:
            if client is not None:
                await asyncio.to_thread(client.close)
            if not isinstance(error, CellrtError):
                raise
            log.debug("no engine yet: %s", error)
            return
        hear = asyncio.get_running_loop().call_soon_threadsafe
        client._bindings.on_change = partial(hear, self._models_changed.set)
        HEAP.freeze(id(self), self._num_gone)
        self._described, self._unserved, self._has_models = described, unserved, bool(loaded)
        self._client, self._has_workers = client, True
        if unserved:
            log.error(NOT_READY, len(unserved), len(loaded), ", ".join(unserved))
        self.is_connected.set()

    def _forget_engine(self) -> None:
        """Forget the sessions and models of a process that is gone."""
        self.engine_lost.set()
        self.engine_lost = asyncio.Event()
        self._described.clear()
        self._sessions.clear()

    def _describe_all(
        self, client: Client, loaded: Mapping[str, int]
    ) -> tuple[dict[str, Described], dict[str, Unserved]]:
        """Return the models that can be served, and those that cannot, whose reasons are logged.

        ``loaded``: versions by name.
        """
        described, unserved = {}, {}
        for name, version in loaded.items():
            try:
                described[name] = self._describe(client, name)
            except DefinitionError as error:
                log.error("%s", error)
                unserved[name] = Unserved(version, str(error))
        return described, unserved

    def _describe(self, client: Client, name: str) -> Described:
        """Return a model's description. Raise DefinitionError if it cannot be served, whatever the reason."""
        try:
            return describe(client.binding(name), self.settings.limits)
        except CellrtError:
            raise
        except Exception as error:
            raise DefinitionError(f"model {name!r} cannot be served: {type(error).__name__}: {error}") from error

    def known(self, name: str) -> Described | None:
        """Return a model's current description without waiting; None if the caller must ``await model``."""
        client = self.client
        if self.is_draining:
            raise EngineClosedError("the server is about to end")
        described = self._described.get(name)
        if described is None or not client.has_binding(name) or described.binding is not client.binding(name):
            return None
        return described

    async def model(self, name: str, version: str | None = None) -> Described:
        """Return a model's description. Raise UnknownModelError, DefinitionError, DeviceError, EngineClosedError."""
        described = self.known(name)
        if described is None:
            lock = self._locks.setdefault(name, asyncio.Lock())
            async with lock:
                described = self.known(name)
                if described is None:
                    client = self.client
                    try:
                        described = await asyncio.to_thread(self._describe, client, name)
                        self._num_gone += name in self._described
                        self._described[name] = described
                        HEAP.freeze(id(self), self._num_gone)
                    except DefinitionError as error:  # it is not ready from now on, not only when one looks next
                        if client is self._client and client.has_binding(name):
                            self._note_unserved(name, client.binding(name).version, error)
                        raise
                    finally:
                        self._locks.pop(name, None)
        self._unserved.pop(name, None)
        described.check_version(version)
        return described

    def trace_id(self, future: RequestFuture) -> str:
        """Return a request's id in ``/debug/requests/...``; empty if no requests are remembered."""
        return self._client.trace_id(future) if self.settings.timeline and self._client is not None else ""

    async def call(self, name: str, *args: Any, **options: Any) -> Any:
        """Call a method of the client that waits for the engine's process."""
        method = partial(getattr(self.client, name), *args, **options)
        return await asyncio.get_running_loop().run_in_executor(self._slow if name in SLOW else None, method)

    async def load(self, name: str) -> None:
        """Register a model of the index anew. Raise what ``Client.load`` and ``model`` raise."""
        await self.call("load", name)
        await self.model(name)
        await self._look_what_is_loaded(self.client)

    async def unload(self, name: str) -> None:
        """Remove a model after its earlier requests have ended. Raise what ``Client.unregister`` raises."""
        await self.call("unregister", name)
        await self._look_what_is_loaded(self.client)

    async def session(self, model: str, id: str, *, is_start: bool) -> RemoteSession:
        """Return a session: a new one, or one that is open. Raise SessionError, RequestError, OverloadError.

        With several front ends another one may have ended it, and begun a new one of that id: only the engine knows.
        """
        key = model, id
        session = self._sessions.get(key) if self.settings.front_ends == 1 else None
        if session is None or is_start:
            session = await self.call("session", model, id, must_be_open=not is_start)
            if is_start and session._binding.is_outdated:  # it was begun with the model before
                await asyncio.to_thread(session.close)
                session = await self.call("session", model, id)
            if is_start:
                await asyncio.to_thread(session.reset)
        if self.settings.front_ends > 1:  # another one may end it, and this one would not know
            return session
        self._sessions[key] = session
        self._sessions.move_to_end(key)
        if len(self._sessions) > self.settings.limits.max_sessions:
            self._sessions.popitem(last=False)
        return session

    def forget_session(self, model: str, id: str) -> None:
        """Forget a session that has ended."""
        self._sessions.pop((model, id), None)

    async def end_session(self, model: str, id: str, session: RemoteSession) -> None:
        """Close a session after its earlier requests."""
        self.forget_session(model, id)
        with suppress(CellrtError):  # it has ended, or its engine has
            await asyncio.to_thread(session.close)

    async def close(self) -> None:
        """Close the connection to the engine's process."""
        HEAP.release(id(self))
        self._slow.shutdown(wait=False, cancel_futures=True)
        client, self._client = self._client, None
        if client is not None:
            await asyncio.to_thread(client.close)
