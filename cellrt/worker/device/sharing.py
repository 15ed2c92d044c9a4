"""What the device workers of one process must agree on: who has which stream, and who captures.

Torch hands out the streams of a pool in turns, so sooner or later two objects are one stream: two engines on a device
would wait for each other, and a capture of one would record what the other does. One capture at a time goes on in the
process, without a collection of garbage, which may call what no capture allows.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakValueDictionary

import torch

from cellrt.errors import DeviceError

MOST_TRIES = 64
"""More than a pool of torch has streams."""


class StreamPool:
    """The streams of torch's pools that devices have: each as long as its object lives. Any thread may ask."""

    def __init__(self) -> None:
        self._taken: WeakValueDictionary[tuple[torch.device, int], torch.cuda.Stream] = WeakValueDictionary()
        self._lock = threading.Lock()

    def take(self, device: torch.device) -> torch.cuda.Stream:
        """A stream that nobody else took. Raises DeviceError if there is none left."""
        with self._lock:
            for _ in range(MOST_TRIES):
                stream = torch.cuda.Stream(device)
                if (device, stream.cuda_stream) not in self._taken:
                    self._taken[device, stream.cuda_stream] = stream
                    return stream
        raise DeviceError(f"{device}: no stream of its pool is free; close other engines on it")


STREAMS = StreamPool()
_CAPTURING = threading.RLock()


@contextmanager
def capturing() -> Iterator[None]:
    """While it lasts, no other thread is here, and no garbage is collected."""
    with _CAPTURING:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
