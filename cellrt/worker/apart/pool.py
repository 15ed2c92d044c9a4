"""Memory that an engine shares with the processes of its workers.

It is one file without a name, which grows and never shrinks. It is freed with the last process that has it, however
that ends.
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
    """An allocator of places in shared memory, which it maps. Safe from several threads.

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
        """Return a new place, of zeros; its memory is allocated when it is written to."""
        with self._lock:
            place = Place(self._size, max(1, size))
            self._size += -(-place.size // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self.fd, self._size)
        return place

    def map(self, place: Place) -> memoryview:
        """Return the bytes of a place, mapped as long as the view exists."""
        return mapped(self.fd, place)

    def free(self, place: Place) -> None:
        """Free the memory of a place; the place is not allocated again."""
        with mmap.mmap(self.fd, place.size, offset=place.offset) as memory:
            memory.madvise(mmap.MADV_REMOVE)


def mapped(fd: int, place: Place) -> memoryview:
    """Return the bytes of a place of the pool behind a descriptor."""
    return memoryview(mmap.mmap(fd, place.size, offset=place.offset))
