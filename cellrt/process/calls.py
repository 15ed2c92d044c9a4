"""Functions that clients call by name in the engine's process. Most calls have a thread, since some take long."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from cellrt.engine.engine import Engine
from cellrt.engine.explanation import HAS_ENDED
from cellrt.engine.registry import Model
from cellrt.engine.trace import admission_of
from cellrt.errors import DefinitionError, RequestError, SessionError, UnknownModelError
from cellrt.process.client_connection import ClientConnection
from cellrt.process.model_binding import described
from cellrt.process.source import ModelSource
from cellrt.view.chrome_trace import chrome_trace
from cellrt.view.waits import waits_of

LONGEST_ID = 40
"""The most characters of a request's id: two numbers of 64 bits."""
WAIT_FOR_NOTHING = frozenset({"has_workers"})
"""The functions that the thread which receives messages calls itself: front ends ask them twice a second."""
Answer = tuple[Any, bytes]
"""An answer: a JSON value, and bytes."""


@dataclass
class Entry:
    """A model that was registered by its source, and may be loaded anew.

    Attributes:
        source: where it comes from.
        options: see ``Engine.register``.
        version: the number of times it was registered.
        is_loaded: whether it is registered now.
    """

    source: ModelSource
    options: dict[str, Any]
    version: int = 0
    is_loaded: bool = False


class Calls:
    """The functions that clients call. Safe from any thread.

    Args:
        engine: the engine that they control.
        announce: sends every client the result of a function of its connection: news of a model.
        count_clients: returns the number of clients.
    """

    def __init__(
        self,
        engine: Engine,
        announce: Callable[[Callable[[ClientConnection], object]], None],
        count_clients: Callable[[], int],
    ) -> None:
        self._engine, self._announce, self._count_clients = engine, announce, count_clients
        self._register_lock, self._tell_lock = threading.Lock(), threading.Lock()
        self._num_connections = 0
        engine._registrar.on_renewed = self._tell
        self._catalogue: dict[str, Entry] = {}
        self._connections: WeakValueDictionary[int, ClientConnection] = WeakValueDictionary()
        """Connections by their numbers in the ids of timelines."""
        self._by_name: dict[str, Callable[..., Answer]] = {
            "bind": self._bind,
            "check": self._check,
            "close": self._close,
            "copy": self._copy,
            "explain": self._explain,
            "export": self._export,
            "has_workers": self._has_workers,
            "load": self._load,
            "models": self._models,
            "number": self._number,
            "open": self._open,
            "register": self._register,
            "restore": self._restore,
            "statistics": self._statistics,
            "timeline": self._timeline,
            "unregister": self._unregister,
        }

    def run(self, connection: ClientConnection, name: str, arguments: dict[str, Any], blob: bytes) -> Answer:
        """Call a function. Raise what it raises, and KeyError if there is none of that name."""
        return self._by_name[name](connection, blob, **arguments)

    def _explain(self, connection: ClientConnection, _: bytes, id: int) -> Answer:
        found = connection.request(id)
        if found is None:
            return HAS_ENDED, b""
        if isinstance(found, str):
            return found, b""
        return self._engine._explain(*found), b""

    def _register(self, connection: ClientConnection, _: bytes, source: str, **options: Any) -> Answer:
        found = ModelSource(source)
        self.register(found, options)
        return None, b""

    def register(self, source: ModelSource, options: dict[str, Any], name: str | None = None) -> None:
        """Register a model, and add it to the catalogue. Raise DefinitionError, EngineClosedError.

        ``name``: the name that it must have.
        """
        model = source.load()
        if name not in (None, model.name):
            raise DefinitionError(
                f"model {name!r} cannot be loaded anew: {source.text} makes a model named {model.name!r} now; "
                "all is as it was"
            )
        with self._register_lock:
            self._engine.register(model, **options)
            entry = self._catalogue.setdefault(model.name, Entry(source, options))
            entry.source, entry.options, entry.is_loaded = source, options, True
            entry.version += 1
            origin = self._engine._submission.model(model.name).origin
            origin.version, origin.source = entry.version, source
        self._tell(model.name)

    def _tell(self, name: str) -> None:
        """Tell clients that there is another model of a name, or none; sessions may go on with earlier ones.

        Clients that unfold for it get its description too, so that a callback that submits need not wait for it.
        """
        with self._tell_lock:  # so that the last news is the current state
            used = {record.model for record in self._engine._manager.sessions if record.model.name == name}
            now = self._engine._models.get(name)
            versions = sorted({model.origin.version for model in (used if now is None else used | {now})})
            description: dict[str, Any] | None = None
            if now is not None and now.origin.source is not None:  # else its registration tells later
                description = described(now, self._engine._registry)

            def news_for(connection: ClientConnection) -> object:
                its = None
                if now is not None and description is not None and connection.wants(now):
                    number = connection.number_of(now, ())
                    if number is not None:  # else another has taken its place, whose registration tells, too
                        its = {"binding": number, "description": description}
                return {"model": name, "versions": versions, "now": its}

            self._announce(news_for)

    def _load(self, connection: ClientConnection, _: bytes, model: str) -> Answer:
        """Register a model of the catalogue anew, from where it came. Running requests go on with the former one."""
        entry = self._catalogue.get(model)
        if entry is None:
            raise UnknownModelError(f"model {model!r} was never registered; those were: {sorted(self._catalogue)}")
        self.register(entry.source, {**entry.options, "replace": True}, model)
        return None, b""

    def _models(self, connection: ClientConnection, _: bytes) -> Answer:
        return [
            {"name": name, "source": entry.source.text, "version": entry.version, "is_loaded": entry.is_loaded}
            for name, entry in sorted(self._catalogue.items())
        ], b""

    def _unregister(self, connection: ClientConnection, _: bytes, model: str) -> Answer:
        with self._register_lock:
            self._engine.unregister(model)
            if model in self._catalogue:
                self._catalogue[model].is_loaded = False
        self._tell(model)
        return None, b""

    def _bind(self, connection: ClientConnection, _: bytes, model: str, known: list[int]) -> Answer:
        value = None
        while value is None:  # if the model is given up meanwhile, another has taken its place, or none
            value = self._binding(connection, self._engine._submission.model(model), known)
        connection.names.add(model)
        return value, b""

    def _binding(self, connection: ClientConnection, model: Model, known: list[int]) -> dict[str, Any] | None:
        """Return a model's binding, with its description unless the client has that.

        None: the model was released meanwhile.
        """
        if model.origin.source is None:
            with self._register_lock:  # its registration is about to set the source
                pass
        number = connection.number_of(model, known)
        if number is None:
            return None
        is_current = self._engine._models.get(model.name) is model
        description = None
        if number not in known:
            description = described(model, self._engine._registry)
        return {"binding": number, "is_current": is_current, "description": description}

    def _open(
        self,
        connection: ClientConnection,
        state: bytes,
        model: str,
        id: str | None,
        has_state: bool,
        must_be_open: bool,
        known: list[int],
    ) -> Answer:
        session = self._engine.session(model, id, state=state if has_state else None, must_be_open=must_be_open)
        binding = self._binding(connection, session._record.model, known)
        if binding is None:  # the session, which kept its model, has ended meanwhile
            raise SessionError(str(session._record.error))
        number = connection.add_session(session, is_own=id is None)
        return {"session": number, "id": session.id, **binding}, b""

    def _export(self, connection: ClientConnection, _: bytes, session: int) -> Answer:
        return None, connection.session(session).export()

    def _restore(self, connection: ClientConnection, state: bytes, session: int) -> Answer:
        connection.session(session).restore(state)
        return None, b""

    def _copy(self, connection: ClientConnection, _: bytes, session: int, others: list[int]) -> Answer:
        connection.session(session).copy_to([connection.session(other) for other in others])
        return None, b""

    def _close(self, connection: ClientConnection, _: bytes, session: int) -> Answer:
        known = connection.sessions.get(session)
        if known is not None:
            known[0].close()
            connection.forget_session(session)
        return None, b""

    def _statistics(self, connection: ClientConnection, _: bytes) -> Answer:
        return {**self._engine.statistics(), "clients": self._count_clients()}, b""

    def _has_workers(self, connection: ClientConnection, _: bytes) -> Answer:
        return self._engine.has_workers(), b""

    def _timeline(self, connection: ClientConnection, _: bytes, request: str | None, count: int) -> Answer:
        """Return the last requests and their tasks, or one request with its tasks, in the format of
        ``view.chrome_trace``.
        """
        timeline = self._engine.timeline()
        if request is not None:
            number = self._number_of(request)
            shown = timeline.of(number)
            if not shown.requests:
                raise RequestError(f"request {request!r} has not ended, or ended long ago")
            (span,) = shown.requests
            manager = self._engine._manager
            admission = manager.turns.call(partial(admission_of, manager._processor.tables, number, span.arrival_s))
            waits = waits_of(timeline.tasks, span, admission)
        else:
            shown, waits = timeline.last(count) if timeline.requests else timeline, {}
        return None, json.dumps(chrome_trace(shown.tasks, shown.requests, waits)).encode()

    def _number(self, connection: ClientConnection, _: bytes) -> Answer:
        """Return the client's number in the ids of timelines."""
        with self._register_lock:
            number = next((number for number, known in self._connections.items() if known is connection), None)
            if number is None:
                number = self._num_connections = self._num_connections + 1
                self._connections[number] = connection
        return number, b""

    def _number_of(self, request: str) -> int:
        """Return a request's number in the engine, given its id at the client. Raise RequestError."""
        connection, _, id = request.partition("-")
        is_known = len(request) <= LONGEST_ID and connection.isdecimal() and id.isdecimal()
        known = self._connections.get(int(connection)) if is_known else None
        number = known.numbers.get(int(id)) if known is not None else None
        if number is None:
            raise RequestError(f"request {request!r:.80} is not known (any more)")
        return number

    def _check(self, connection: ClientConnection, _: bytes) -> Answer:
        self._engine.check()
        return None, b""
