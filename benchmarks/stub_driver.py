"""Stand-ins in ``stub_cuda.py`` for the driver's functions and for the count of completed tasks."""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable
from typing import Any

from cellrt.worker.device.driver import Driver

ASKED_UNTIL_SHOWN = 3
"""The number of times that a counter is asked until it shows one more."""


class StubCounter:
    """Counts what a stream has reached, and shows it late: so several tasks are in flight. Once the host has seen that
    a task is done, what it queues comes after it."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._reached: list[dict[int, int]] = []
        self._num_shown, self._num_asked = 0, 0

    def send(self) -> None:
        """Add one to the counter, now or when a captured graph runs."""
        if self._stub.is_capturing:
            self._stub.local.capture.operations.append(self._count)
        else:
            self._count()

    def completed(self) -> int:
        """Return the count, one more every few times that it is asked."""
        self._num_asked += 1
        if self._num_asked % ASKED_UNTIL_SHOWN == 0 and self._num_shown < len(self._reached):
            self._num_shown += 1
            self._stub.host_waits(self._reached[self._num_shown - 1])
        return self._num_shown

    def _count(self) -> None:
        self._reached.append(dict(self._stub.current_stream().clock))


class StubDriver:
    """The driver's functions, as C functions that compiled code may call: they do what they are asked for at once."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._kept: list[object] = []
        word, flags = ctypes.c_int64, ctypes.c_uint32
        self.driver = Driver(
            self._function(self._copy, word, word, word, word),
            self._function(self._copy, word, word, word, word),
            self._function(self._launch, word, word),
            self._function(self._record, word, word),
            self._function(self._wait, word, word, flags),
        )

    def _function(self, call: Callable[..., None], *kinds: Any) -> int:
        """Return the address of a C function that returns 0, or 999 (unknown error) if the call raises."""

        def checked(*arguments: int) -> int:
            try:
                call(*arguments)
            except Exception as error:
                self._stub.races.append("".join(traceback.format_exception(error)))
                return 999
            return 0

        made = ctypes.CFUNCTYPE(ctypes.c_int32, *kinds)(checked)
        self._kept.append(made)
        return ctypes.cast(made, ctypes.c_void_p).value or 0

    def _copy(self, target: int, source: int, num_bytes: int, stream: int) -> None:
        with self._stub.stream(self._stub.stream_of(stream)):
            reads, writes = self._stub.memory_at(source, num_bytes), self._stub.memory_at(target, num_bytes)
            self._stub.note([reads], [writes], "copy")
        ctypes.memmove(target, source, num_bytes)

    def _launch(self, graph: int, stream: int) -> None:
        with self._stub.stream(self._stub.stream_of(stream)):
            self._stub.num_launched += 1
            self._stub.of_handle(graph).replay()

    def _record(self, event: int, stream: int) -> None:
        self._stub.of_handle(event).record(self._stub.stream_of(stream))

    def _wait(self, stream: int, event: int, flags: int) -> None:
        self._stub.stream_of(stream).wait_event(self._stub.of_handle(event))
