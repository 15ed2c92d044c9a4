"""State that the device workers of one process share: the owners of streams, and the lock of captures.

Torch hands out the streams of a pool in turns, so sooner or later two objects are one stream: two engines on a device
would wait for each other, and a capture of one would record what the other does. The process makes one capture at a
time, without garbage collection, which may call functions that are not allowed during a capture.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch

from cellrt.errors import DeviceError

_CAPTURING = threading.RLock()
MOST_TRIES = 64
"""The most streams to try: more than a pool of torch has."""


class StreamPool:
    """The streams of torch's pools that devices have. Safe from any thread.

    No weak reference to a stream is made: torch before 2.13 does not clear those of CUDA's (its pull request 183403),
    so that they would be read after the stream is gone.
    """

    def __init__(self) -> None:
        self._owners: WeakValueDictionary[tuple[torch.device, int], object] = WeakValueDictionary()
        self._lock = threading.RLock()

    def take(self, device: torch.device, owner: object) -> torch.cuda.Stream:
        """Return a stream without another owner, until the owner releases it or is gone.

        Raise DeviceError if all are taken.
        """
        with self._lock:
            found = self._find(device)
            if found is None:
                with _CAPTURING:
                    gc.collect()  # owners that only a collection takes away
                found = self._find(device)
            if found is None:
                raise DeviceError(f"{device}: no stream of its pool is free; close other engines on it")
            self._owners[device, found.cuda_stream] = owner
            return found

    def release(self, owner: object) -> None:
        """Release the streams of an owner."""
        with self._lock:
            for key in [key for key, taken_by in self._owners.items() if taken_by is owner]:
                del self._owners[key]

    def _find(self, device: torch.device) -> torch.cuda.Stream | None:
        for _ in range(MOST_TRIES):
            stream = torch.cuda.Stream(device)
            if (device, stream.cuda_stream) not in self._owners:
                return stream
        return None


STREAMS = StreamPool()


@contextmanager
def capturing() -> Iterator[None]:
    """Keep other threads out of the block, and garbage collection off within it."""
    with _CAPTURING:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
