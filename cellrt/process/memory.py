"""Memory that two processes share: one writes bodies of messages there, the other reads them.

It has no name: it is gone with the last process that has it, however that ends. Its size is sealed, so that nobody can
take it away from under a reader.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from collections import deque
from collections.abc import Sequence

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
Part = bytes | bytearray | memoryview
"""Of a body; a memoryview is one of bytes."""
TOGETHER_BYTES = 1 << 12
"""Parts of no more are put together first: to write one takes as long as to copy so many bytes."""
ALIGNMENT = 8
"""Bytes: where bodies and the tensors in them begin."""


def padded(size: int) -> int:
    """A size up to where the next thing may begin."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def make(size: int) -> int:
    """New memory of ``size`` bytes; returns its descriptor, which the caller closes."""
    fd = os.memfd_create("cellrt", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd


def view(fd: int, *, writable: bool) -> memoryview:
    """The memory behind a descriptor, which is closed; mapped as long as somebody has the view.

    Raises ValueError if its size may still change.
    """
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS != SEALS:
            raise ValueError("memory whose size is not sealed")
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return memoryview(mmap.mmap(fd, os.fstat(fd).st_size, access=access))
    finally:
        os.close(fd)


def write(memory: memoryview, offset: int, parts: Sequence[Part]) -> None:
    """Writes parts one behind the other."""
    if sum(map(len, parts)) <= TOGETHER_BYTES:
        parts = (b"".join(parts),)
    for part in parts:
        memory[offset : offset + len(part)] = part
        offset += len(part)


class Ring:
    """Places for bodies in memory of a fixed size: given in turn, and free again in the same order."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: deque[tuple[int, int]] = deque()
        """(begin, end) of places that are not free, oldest first."""
        self._num_freed = 0

    @property
    def num_held(self) -> int:
        """How many places are not free."""
        return len(self._held)

    def free_up_to(self, count: int) -> None:
        """Takes in that of all places ever given the first ``count`` are free."""
        while self._num_freed < count and self._held:
            self._num_freed += 1  # first: one that is interrupted in between keeps a place, and gives none twice
            self._held.popleft()

    def take_back(self, count: int) -> None:
        """The last ``count`` places were not used: the other side never hears of them."""
        for _ in range(count):
            self._held.pop()

    def take(self, size: int) -> int:
        """The begin of a place of ``size`` bytes, or -1 if there is none now."""
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
