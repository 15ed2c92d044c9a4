"""Memory that two processes share: one writes bodies of messages there, the other reads them.

It has no name: it is freed with the last process that has it, however that ends. Its size is sealed, so that no process
can truncate it under a reader.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Sequence

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
Part = bytes | bytearray | memoryview
"""A part of a body; a memoryview is one of bytes."""
TOGETHER_BYTES = 1 << 12
"""The size up to which parts are joined first: writing a part takes as long as copying this many bytes."""
ALIGNMENT = 8
"""The alignment, in bytes, of bodies and of the tensors in them."""


def padded(size: int) -> int:
    """Return a size rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def make(size: int) -> int:
    """Return the descriptor of new memory of ``size`` bytes, which the caller closes."""
    fd = os.memfd_create("cellrt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def view(fd: int, *, writable: bool) -> memoryview:
    """Return the memory behind a descriptor, and close the descriptor; it stays mapped as long as the view exists.

    Raise ValueError if its size may still change.
    """
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError("memory whose size is not sealed")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, access=access))
    finally:
        os.close(fd)


def write(memory: memoryview, offset: int, parts: Sequence[Part]) -> None:
    """Write parts one after the other."""
    if sum(map(len, parts)) <= TOGETHER_BYTES:
        parts = (b"".join(parts),)
    for part in parts:
        memory[offset : offset + len(part)] = part
        offset += len(part)


class Ring:
    """An allocator of memory of a fixed size: places are allocated in turn, and freed in the same order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: deque[tuple[int, int]] = deque()
        """The (begin, end) of allocated places, oldest first."""
        self._num_freed = 0

    @property
    def num_held(self) -> int:
        """The number of allocated places."""
        return len(self._held)

    def free_up_to(self, count: int) -> None:
        """Free places so that the first ``count`` of all ever allocated are free."""
        while self._num_freed < count and self._held:
            self._num_freed += 1  # first: one that is interrupted in between keeps a place, and gives none twice
            self._held.popleft()

    def take_back(self, count: int) -> None:
        """Undo the last ``count`` allocations, which the other side never hears of."""
        for _ in range(count):
            self._held.pop()

    def take(self, size: int) -> int:
        """Allocate ``size`` bytes. Return where they begin, or -1 if there is no room now."""
        size = padded(max(size, 1))
        begin = 0
        if self._held:
            oldest, newest = self._held[0][0], self._held[-1][1]
            if newest > oldest:
                begin = newest if size <= self._size - newest else 0 if size < oldest else -1
            else:
                begin = newest if size < oldest - newest else -1
        elif size > self._size:
            begin = -1
        if begin >= 0:
            self._held.append((begin, begin + size))
        return begin
