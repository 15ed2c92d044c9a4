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


class Segment(NamedTuple):
    """A part of a pool: its offset and size in bytes. It begins at a memory page."""

    offset: int
    size: int


class SharedPool:
    """An allocator of segments in shared memory, which it maps. Safe from several threads.

    Attributes:
        fd: the file's descriptor, which a started process inherits.
    """

    def __init__(self) -> None:
        self.fd = os.memfd_create("cellrt-worker", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.fd)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._size = 0
        self._lock = threading.Lock()

    def allocate(self, size: int) -> Segment:
        """Return a new segment of zeros. The system allocates its memory when it is written to."""
        with self._lock:
            segment = Segment(self._size, max(1, size))
            self._size += -(-segment.size // mmap.PAGESIZE) * mmap.PAGESIZE
            os.ftruncate(self.fd, self._size)
        return segment

    def map(self, segment: Segment) -> memoryview:
        """Return the bytes of a segment, which stay mapped as long as the view exists."""
        return mapped(self.fd, segment)

    def free(self, segment: Segment) -> None:
        """Free the memory of a segment. Its offset is not used again."""
        with mmap.mmap(self.fd, segment.size, offset=segment.offset) as memory:
            memory.madvise(mmap.MADV_REMOVE)


def mapped(fd: int, segment: Segment) -> memoryview:
    """Return the bytes of a segment, given the descriptor of its pool."""
    return memoryview(mmap.mmap(fd, segment.size, offset=segment.offset))
