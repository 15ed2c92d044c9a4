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
        self._holders: dict[int, int] = {}
        """With how many models of each were gone when it froze last."""
        self._are_ours = False

    def freeze(self, holder: int, num_gone: int = 0) -> None:
        """Collects what is garbage, then freezes all that is left, for this holder too.

        ``num_gone``: models of the holder that were replaced or taken out so far. Where there are more than when it
        froze last, all is thawed first: else their weights would stay, since a module and its functions are a cycle.
        """
        with self._lock:
            if not self._holders:
                self._are_ours = gc.get_freeze_count() == 0
            elif self._are_ours and num_gone > self._holders.get(holder, 0):
                gc.unfreeze()
            self._holders[holder] = num_gone
            gc.collect()
            gc.freeze()

    def release(self, holder: int) -> None:
        """After the last holder's release all objects are as before, unless some were frozen before the first's."""
        with self._lock:
            if holder not in self._holders:
                return
            del self._holders[holder]
            if not self._holders and self._are_ours:
                gc.unfreeze()


HEAP = FrozenHeap()
