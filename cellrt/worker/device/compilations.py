"""Counts of compilations by Triton and ``torch.compile``, by thread: a worker's own thread compiles while it serves."""

from __future__ import annotations

import importlib.util
import threading
from collections import Counter
from typing import Any


class Compilations:
    """The compilations of this process from the first ``watch_*`` on."""

    def __init__(self) -> None:
        self._counts: Counter[int] = Counter()
        self._watched: set[str] = set()
        self._lock = threading.Lock()

    def of_this_thread(self) -> int:
        """Return the number of compilations that the calling thread began."""
        return self._counts[threading.get_ident()]

    def watch_triton(self) -> None:
        """Count Triton's compilations from now on, if Triton is installed."""
        if importlib.util.find_spec("triton") is None or not self._is_first("triton"):
            return
        from triton import knobs

        before = knobs.runtime.jit_cache_hook

        def note(**arguments: Any) -> bool | None:
            self.note()
            return None if before is None else before(**arguments)

        knobs.runtime.jit_cache_hook = note

    def watch_torch(self) -> None:
        """Count compilations of ``torch.compile`` from now on."""
        if self._is_first("torch"):
            from torch._dynamo.callback import callback_handler

            callback_handler.register_start_callback(lambda *_: self.note())

    def _is_first(self, what: str) -> bool:
        with self._lock:
            is_first = what not in self._watched
            self._watched.add(what)
            return is_first

    def note(self, count: int = 1) -> None:
        """Count compilations that the calling thread began."""
        self._counts[threading.get_ident()] += count


COMPILATIONS = Compilations()
"""The only counter of the process, as Triton and torch have one set of hooks for a process."""
