"""A sign of life in work that may take long the first time."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

QUIET_S = 4.0


@contextmanager
def announced(message: str) -> Iterator[None]:
    """Logs a warning if what runs inside takes longer than a few seconds."""
    timer = threading.Timer(QUIET_S, logging.getLogger("cellrt").warning, [message])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
