"""Fewer pauses for garbage collection: objects that live when a model is registered are frozen.

A frozen object is not visited by later collections. A full collection visits every object that Python tracks, 100,000s
of them once torch and Numba are imported, and stops all threads for it. Any thread that makes objects while serving may
start one.

The collector belongs to the process, and so does what is here: all engines of a process share ``HEAP``.
"""

from __future__ import annotations

import gc
import mmap
import threading
from contextlib import suppress
from pathlib import Path

import torch

WORTH_A_PAUSE_BYTES, WORTH_A_PAUSE_MODELS = 64 << 20, 100
"""The growth of memory, and the number of models given up, from which on frozen garbage is worth collecting."""


class FrozenHeap:
    """The process's objects, frozen as long as any holder wants them so; safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # reentrant: a collection in here may end an engine that was dropped
        self._holders: dict[int, int] = {}
        """The number of models of each holder that were gone when all was thawed last."""
        self._least_bytes = 0
        """The least memory in use since then."""
        self._are_ours = False

    def freeze(self, holder: int, num_gone: int = 0) -> None:
        """Collect garbage, then freeze all objects that are left, for this holder too.

        ``num_gone``: models of the holder that were replaced or removed so far. They may be garbage and frozen, since a
        module and its functions are a cycle. Once memory has grown by so much, all is thawed first, which takes a fifth
        of a second in which nothing else runs.
        """
        with self._lock:
            is_first, more = not self._holders, num_gone - self._holders.setdefault(holder, num_gone)
            if is_first:
                self._are_ours = gc.get_freeze_count() == 0
            elif self._are_ours and more:
                self._least_bytes = min(self._least_bytes, in_use := memory_in_use())
                if in_use - self._least_bytes >= WORTH_A_PAUSE_BYTES or more >= WORTH_A_PAUSE_MODELS:
                    gc.unfreeze()
                    self._holders[holder], is_first = num_gone, True
            gc.collect()
            gc.freeze()
            if is_first:
                self._least_bytes = memory_in_use()

    def release(self, holder: int) -> None:
        """Thaw all objects after the last holder's release, unless some were frozen before the first one's freeze."""
        with self._lock:
            if holder not in self._holders:
                return
            del self._holders[holder]
            if not self._holders and self._are_ours:
                gc.unfreeze()


def memory_in_use() -> int:
    """Return the bytes of the process's memory, and of its tensors on CUDA devices."""
    used = 0
    with suppress(OSError):  # elsewhere than on Linux
        used = int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
    if torch.cuda.is_initialized():
        used += sum(torch.cuda.memory_allocated(device) for device in range(torch.cuda.device_count()))
    return used


HEAP = FrozenHeap()
