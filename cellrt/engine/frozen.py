"""No pause for garbage: what lives when a model is registered is frozen, and no collection looks at it again.

A full collection visits every object that Python tracks, 100,000s of them once torch and Numba are imported, and stops
all threads for it. Whoever makes objects while serving brings one about.

The collector belongs to the process, and so does what is here: all engines of a process share ``HEAP``.
"""

from __future__ import annotations

import gc
import threading


class FrozenHeap:
    """Freezes the process's objects as long as somebody holds them frozen; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a collection in here may end an engine that was dropped
        self._holders: set[int] = set()
        self._are_ours = False

    def freeze(self, holder: int) -> None:
        """Collects what is garbage, then freezes all that is left, for this holder too."""
        with self._lock:
            if not self._holders:
                self._are_ours = gc.get_freeze_count() == 0
            self._holders.add(holder)
            gc.collect()
            gc.freeze()

    def release(self, holder: int) -> None:
        """After the last holder's release all objects are as before, unless some were frozen before the first's."""
        with self._lock:
            if holder not in self._holders:
                return
            self._holders.discard(holder)
            if not self._holders and self._are_ours:
                gc.unfreeze()


HEAP = FrozenHeap()
