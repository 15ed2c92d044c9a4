"""Memory that an engine shares with the processes of its workers.

One file without a name, which grows and never shrinks: it goes with the last process that has it, however that ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import weakref
from typing import NamedTuple


class Place(NamedTuple):
    """A part of a pool, in bytes; it begins at a page."""

    offset: int
    size: int


class SharedPool:
    """Gives out places and maps them. Safe from several threads.

    Attributes:
        fd: of the file, for a process that is started.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("cellrt-worker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._size = 0
        self._lock = threading.Lock()

    def allocate(self, size: int) -> Place:
        """A new place, of zeros; memory is taken when it is written to."""
        with self._lock:
            place = Place(self._size, max(1, size))
            self._size += -(-place.size // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self.fd, self._size)
        return place

    def map(self, place: Place) -> memoryview:
        """The bytes of a place, mapped as long as somebody has the view."""
        return mapped(self.fd, place)

    def free(self, place: Place) -> None:
        """Gives the memory of a place back; the place is not given out again."""
        with mmap.mmap(self.fd, place.size, offset=place.offset) as memory:
            memory.madvise(mmap.MADV_REMOVE)


def mapped(fd: int, place: Place) -> memoryview:
    """The bytes of a place of the pool behind a descriptor."""
    return memoryview(mmap.mmap(fd, place.size, offset=place.offset))
