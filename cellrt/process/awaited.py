"""What somebody waits for that the other end of a connection says."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from cellrt.errors import CellrtError


class Awaited:
    """Something that the engine's process will say once; ``then`` is called by whoever hears it."""

    def __init__(self, then: Callable[[], object] | None = None) -> None:
        self._said = threading.Event()
        self._then = then
        self.value: Any = None
        self.blob = b""
        self.error: CellrtError | None = None

    def say(self, value: Any = None, blob: bytes = b"", error: CellrtError | None = None) -> None:
        """Takes in what was said."""
        self.value, self.blob, self.error = value, blob, error
        self._said.set()
        if self._then is not None:
            self._then()

    def wait(self) -> None:
        """Waits; the end of the connection says something too."""
        self._said.wait()
