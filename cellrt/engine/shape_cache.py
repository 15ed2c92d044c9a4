"""The compiled shapes of a model's requests, so that equal graphs are compiled once."""

from __future__ import annotations

import threading
from collections import OrderedDict

from cellrt.core.shape import Shape

OVERHEAD_BYTES = 2048
"""What a shape costs beside its rows: Python objects, and what the allocator rounds up."""


class ShapeCache:
    """Shapes by their programs. Safe from any thread: a lost race only compiles twice.

    Args:
        max_bytes: memory of all shapes with their programs; the oldest leave when it is exceeded.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._shapes: OrderedDict[bytes, Shape] = OrderedDict()
        self._num_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._shapes)

    @property
    def num_bytes(self) -> int:
        """Memory of what it keeps."""
        return self._num_bytes

    def get(self, program: bytes) -> Shape | None:
        """The shape of a program, if it is kept."""
        return self._shapes.get(program)

    def add(self, program: bytes, shape: Shape) -> None:
        """Keeps a shape, unless it alone is larger than the cache."""
        size = _size(program, shape)
        with self._lock:
            if program in self._shapes or size > self._max_bytes:
                return
            self._shapes[program] = shape
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size(*self._shapes.popitem(last=False))


def _size(program: bytes, shape: Shape) -> int:
    return len(program) + shape.num_bytes + OVERHEAD_BYTES
