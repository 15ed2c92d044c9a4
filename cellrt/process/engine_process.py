"""An engine in a process of its own, and its first client."""

from __future__ import annotations

import inspect
from typing import Any

from cellrt.engine.engine import Engine
from cellrt.engine.serving import CLOSE_S, check_timeout
from cellrt.errors import DefinitionError, EngineClosedError
from cellrt.process import address as addresses
from cellrt.process.client import Client
from cellrt.process.starting import Started


class EngineProcess(Client):
    """An engine in a process of its own, and its first client; others ``connect`` to its ``address``.

    The engine ends with this object: when it is closed or dropped, and when its process ends, in whatever way.

    Args:
        workers: see ``Engine``.
        address: where clients connect: "@name", or the path of a socket; default an unused name.
        options: see ``Engine``. Its process freezes its heap unless ``freeze`` is False, and this one only if it is
            True (see ``connect``).

    Raises DefinitionError if the engine cannot be made of these, or the address is taken.
    """

    def __init__(self, workers: int | list[str] | None = None, *, address: str | None = None, **options: Any) -> None:
        known = inspect.signature(Engine).parameters
        for name in options:
            if name not in known:
                raise DefinitionError(f"EngineProcess: unknown option {name!r}; an engine has {sorted(known)}")
        where = addresses.new_address() if address is None else addresses.check_address(address)
        self._started = Started(where, {"workers": workers, **options})
        self._started.wait()
        try:
            super().__init__(where, freeze=options.get("freeze", False))
        except BaseException:
            self._started.end()
            raise

    @property
    def pid(self) -> int:
        """The id of the engine's process."""
        return self._started.process.pid

    def close(self, timeout: float = CLOSE_S) -> None:
        """End the engine, for all clients; requests that are not done end with EngineClosedError. May be called twice.

        A process that has not ended after ``timeout`` seconds is killed. In a forked process nothing ends.
        """
        if self._link.is_parents:
            return
        self._link.refuse_in_callback()
        timeout = check_timeout(timeout)
        self._link.expect_end(EngineClosedError("the engine is closed"))
        self._started.end_within(timeout)
        super().close()
