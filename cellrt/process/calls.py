"""What clients may call by name in the engine's process: each call in a thread of its own, since some take long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from cellrt.engine.engine import Engine
from cellrt.engine.registry import Model
from cellrt.engine.session import Session
from cellrt.errors import SessionError
from cellrt.process.binding import described
from cellrt.process.guest import Guest
from cellrt.process.source import ModelSource

Answer = tuple[Any, bytes]
"""What JSON can hold, and bytes."""


class Calls:
    """The functions, for any thread.

    Args:
        engine: that they are about.
        announce: tells every client that there is another model of a name, or none.
        count_clients: how many there are.
    """

    def __init__(self, engine: Engine, announce: Callable[[str], None], count_clients: Callable[[], int]) -> None:
        self._engine, self._announce, self._count_clients = engine, announce, count_clients
        self._register_lock = threading.Lock()
        self._sources: WeakKeyDictionary[Model, ModelSource] = WeakKeyDictionary()
        self._by_name: dict[str, Callable[..., Answer]] = {
            "bind": self._bind,
            "check": self._check,
            "close": self._close,
            "export": self._export,
            "open": self._open,
            "register": self._register,
            "reset": self._reset,
            "restore": self._restore,
            "statistics": self._statistics,
            "unregister": self._unregister,
        }

    def run(self, guest: Guest, name: str, arguments: dict[str, Any], blob: bytes) -> Answer:
        """Calls a function; raises what it raises, and KeyError if there is none of that name."""
        return self._by_name[name](guest, blob, **arguments)

    def _register(self, guest: Guest, _: bytes, source: str, **options: Any) -> Answer:
        found = ModelSource(source)
        model = found.load()
        with self._register_lock:
            self._engine.register(model, **options)
            self._sources[self._engine._submission.model(model.name)] = found
        self._announce(model.name)
        return None, b""

    def _unregister(self, guest: Guest, _: bytes, model: str) -> Answer:
        self._engine.unregister(model)
        self._announce(model)
        return None, b""

    def _bind(self, guest: Guest, _: bytes, model: str, known: list[int]) -> Answer:
        return self._binding(guest, self._engine._submission.model(model), known), b""

    def _binding(self, guest: Guest, model: Model, known: list[int]) -> dict[str, Any]:
        """What a client must know to unfold for a model: its description, unless it has that."""
        if model not in self._sources:
            with self._register_lock:  # whoever registered it is about to note where it comes from
                pass
        number = guest.number_of(model)
        is_current = self._engine._models.get(model.name) is model
        description = None
        if number not in known:
            description = described(number, model, self._sources[model], self._engine._registry)
        return {"binding": number, "is_current": is_current, "description": description}

    def _open(
        self, guest: Guest, state: bytes, model: str, id: str | None, has_state: bool, known: list[int]
    ) -> Answer:
        session = self._engine.session(model, id, state=state if has_state else None)
        number = guest.add_session(session, is_own=id is None)
        binding = self._binding(guest, session._record.model, known)
        return {"session": number, "id": session.id, **binding}, b""

    def _reset(self, guest: Guest, _: bytes, session: int) -> Answer:
        _session_of(guest, session).reset()
        return None, b""

    def _export(self, guest: Guest, _: bytes, session: int) -> Answer:
        return None, _session_of(guest, session).export()

    def _restore(self, guest: Guest, state: bytes, session: int) -> Answer:
        _session_of(guest, session).restore(state)
        return None, b""

    def _close(self, guest: Guest, _: bytes, session: int) -> Answer:
        known = guest.sessions.get(session)
        if known is not None:
            known[0].close()
            guest.sessions.pop(session, None)
        return None, b""

    def _statistics(self, guest: Guest, _: bytes) -> Answer:
        return {**self._engine.statistics(), "clients": self._count_clients()}, b""

    def _check(self, guest: Guest, _: bytes) -> Answer:
        self._engine.check()
        return None, b""


def _session_of(guest: Guest, number: int) -> Session:
    known = guest.sessions.get(number)
    if known is None:
        raise SessionError(f"session {number} of this client is closed")
    return known[0]
