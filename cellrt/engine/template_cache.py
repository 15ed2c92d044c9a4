"""The templates of a model's requests by their programs, so that equal graphs are compiled once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Generic, Protocol, TypeVar

MAX_CACHED_BYTES = 1 << 20
MAX_ASKED = 1 << 10
"""The number of remembered programs that came once. When it is reached all are forgotten."""
OVERHEAD_BYTES = 2048
"""The bytes of a template besides its rows: Python objects, and the allocator's rounding."""


class Kept(Protocol):
    """A template, or an object that has one."""

    @property
    def num_bytes(self) -> int:
        """The bytes of its rows."""


T = TypeVar("T", bound=Kept)


class TemplateCache(Generic[T]):
    """Templates by their programs. Safe from any thread: a lost race only compiles twice.

    Args:
        max_bytes: memory of all templates with their programs; the oldest are dropped when it is exceeded.
    """

    def __init__(self, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._max_bytes = max_bytes
        self._templates: OrderedDict[bytes, T] = OrderedDict()
        self._num_bytes = 0
        self._is_crowded = False
        self._asked: dict[int, None] = {}
        """Hashes of the programs that came once since the cache was full."""
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._templates)

    @property
    def num_bytes(self) -> int:
        """The bytes of the kept templates and programs."""
        return self._num_bytes

    def get(self, program: bytes) -> T | None:
        """Return the template of a program, if it is kept."""
        return self._templates.get(program)

    def is_worth(self, program: bytes) -> bool:
        """Return whether to keep the template of a program that is not kept.

        It is not if the program comes for the first time and the cache is full. So programs that come only once, as
        most trees do, push out no program that comes again.
        """
        if not self._is_crowded:
            return True
        name, asked = hash(program), self._asked
        if name in asked:
            return True
        if len(asked) >= MAX_ASKED:
            self._asked = asked = {}
        asked[name] = None
        return False

    def add(self, program: bytes, template: T) -> None:
        """Keep a template, unless it alone is larger than the cache."""
        size = _size(program, template)
        with self._lock:
            if program in self._templates or size > self._max_bytes:
                return
            self._templates[program] = template
            self._num_bytes += size
            while self._num_bytes > self._max_bytes:
                self._is_crowded = True
                self._num_bytes -= _size(*self._templates.popitem(last=False))


def _size(program: bytes, template: Kept) -> int:
    return len(program) + template.num_bytes + OVERHEAD_BYTES
