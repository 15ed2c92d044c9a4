"""Places in the queues: how many requests and rows of an engine, or of a model, are unfinished, and may be.

Clients count the requests that they hand in. They do it under the gate, the lock under which they hand in (see
``turns.py``). The thread that has the turn counts the requests that it accepts and those that have ended. So neither
side needs a lock for the numbers of the other. If a client was interrupted between counting and handing in, ``heal``
corrects the number.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_char
from typing import NamedTuple, TypeAlias

from cellrt.core.state.tables import NEVER
from cellrt.engine.awaited import LOOK_EVERY_S
from cellrt.errors import DeadlineError, EngineClosedError, OverloadError, RequestTooLargeError


class Size(NamedTuple):
    """Requests, and the rows of all their nodes; a loop counts as its step limit."""

    requests: int
    rows: int


QUEUE_TAKEN, QUEUE_ROWS_TAKEN, QUEUE_COME, QUEUE_ROWS_COME = range(4)
QUEUE_ENDED, QUEUE_ROWS_ENDED, QUEUE_MOST, QUEUE_MOST_ROWS = range(4, 8)
NUM_COUNTS = 8
"""The number of counts of a queue, each an int64. They may be a row of the core's table ``queues``."""


class QueueLimit(NamedTuple):
    """The requests and rows that may be unfinished; None: any number."""

    requests: int | None = None
    rows: int | None = None


NO_LIMIT = QueueLimit()
OPTIONS = {"requests": "max_queue", "rows": "max_queue_rows"}
"""The option of an engine or of a model that sets each limit."""


class Places:
    """The queue of one engine, or the part of it that one model may fill.

    Requests and rows are counted since the start: those that were taken, those that a turn accepted, and those ended.

    Attributes:
        owner, limit: the name of what it belongs to, for errors; the requests and rows that may be unfinished.
        address: the address of its counts, a row of ``queues``, for compiled code.
    """

    __slots__ = ("_num_accepted", "_row", "_rows_accepted", "address", "limit", "owner")

    def __init__(self, owner: str, limit: QueueLimit) -> None:
        self.owner, self.limit = owner, limit
        self._num_accepted = self._rows_accepted = 0
        self._row = memoryview(b"")
        self.show(memoryview(bytearray(8 * NUM_COUNTS)).cast("q"))

    def show(self, row: memoryview) -> None:
        """Keep the counts in another row from now on; under the gate.

        In a row of ``queues`` compiled code counts, too: the requests that come from other processes.
        """
        row[:] = self._row if self._row else row
        row[QUEUE_MOST] = NEVER if self.limit.requests is None else self.limit.requests
        row[QUEUE_MOST_ROWS] = NEVER if self.limit.rows is None else self.limit.rows
        self._row, self.address = row, addressof(c_char.from_buffer(row))

    @property
    def num_unfinished(self) -> int:
        """The requests handed in that have not ended."""
        row = self._row
        return int(row[QUEUE_TAKEN] + row[QUEUE_COME] - row[QUEUE_ENDED])

    @property
    def num_rows(self) -> int:
        """The rows of requests handed in that have not ended."""
        row = self._row
        return int(row[QUEUE_ROWS_TAKEN] + row[QUEUE_ROWS_COME] - row[QUEUE_ROWS_ENDED])

    def has_room(self, size: Size) -> bool:
        """Return whether this many more may be handed in now."""
        (requests, rows), (most_requests, most_rows) = size, self.limit
        if most_requests is not None and self.num_unfinished + requests > most_requests:
            return False
        return most_rows is None or self.num_rows + rows <= most_rows

    def check(self, size: Size) -> None:
        """Raise OverloadError if this many do not fit now."""
        unfinished = self.num_unfinished, self.num_rows
        for what, wanted, there, limit in zip(Size._fields, size, unfinished, self.limit):
            if limit is not None and there + wanted > limit:
                more = f"; {wanted} more came" if wanted > 1 else ""
                hint = f"(see submit(wait=True) and {OPTIONS[what]})"
                raise OverloadError(f"{there} {what} are unfinished, {self.owner} takes {limit}{more} {hint}")

    def check_ever(self, size: Size) -> None:
        """Raise RequestTooLargeError if this many will never fit."""
        for what, wanted, limit in zip(Size._fields, size, self.limit):
            if limit is not None and wanted > limit:
                mend = f"hand in fewer, or make {OPTIONS[what]} {wanted} or more"
                raise RequestTooLargeError(f"{wanted} {what} at once; {self.owner} takes {limit}: {mend}")

    def take(self, size: Size) -> None:
        """Count requests that are about to be handed in; under the gate."""
        self._row[QUEUE_TAKEN] += size[0]
        self._row[QUEUE_ROWS_TAKEN] += size[1]

    def note_accepted(self, size: Size) -> None:
        """Count requests that a turn has seen."""
        self._num_accepted += size[0]
        self._rows_accepted += size[1]

    def give_back(self, size: Size) -> None:
        """Count requests that have ended; in a turn."""
        self._row[QUEUE_ENDED] += size[0]
        self._row[QUEUE_ROWS_ENDED] += size[1]

    def note_passed(self, size: Size) -> None:
        """Count requests that were accepted and have ended in compiled turns alone."""
        self.note_accepted(size)
        self.give_back(size)

    def heal(self, unseen: Size) -> None:
        """Free the places of requests that were counted and never handed in.

        It is called in a turn, under the gate, when the inbox is empty.

        ``unseen``: the requests that were handed in, and that no turn in Python has seen yet.
        """
        self._row[QUEUE_TAKEN] = self._num_accepted + unseen.requests
        self._row[QUEUE_ROWS_TAKEN] = self._rows_accepted + unseen.rows


Wanted: TypeAlias = Sequence[tuple[Places, Size]]
"""The places that requests need in each queue: the engine's, then their models'."""


def check_places(wanted: Wanted) -> None:
    """Raise an error if requests do not have the places that they need in each queue.

    Raise RequestTooLargeError if they never will, else OverloadError if they have not now.
    """
    for places, size in wanted:
        if not places.has_room(size):
            for each, its in wanted:  # all, before any OverloadError: what never fits is not tried again
                each.check_ever(its)
            places.check(size)


class InLine:
    """The places that a waiting call needs; it lives as long as the call."""

    __slots__ = ("__weakref__", "wanted")

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted


class Room:
    """The line of clients that wait for places, instead of being refused: first come, first served.

    Only threads are in line. A coroutine that waits for a place is not. A thread behind it would wait until its event
    loop goes on, and that thread may be the one that blocks the loop.

    Args:
        gate: the lock that is held while places are counted, and by every caller of this class.
        note_watched: called with whether any client waits, when that changes.
    """

    def __init__(self, gate: threading.RLock, note_watched: Callable[[bool], object] = bool) -> None:
        self._note_watched = note_watched
        self._changed = threading.Condition(gate)
        self.line: list[weakref.ref[InLine]] = []
        """The places that waiting calls need, by arrival."""
        self._wakes: list[Callable[[], object]] = []

    @contextmanager
    def watched(self, wake: Callable[[], object]) -> Iterator[None]:
        """Have ``wake`` called in a turn whenever a place may have become free, within the block."""
        self._wakes.append(wake)
        try:
            self._say_who_waits()
            yield
        finally:
            self._wakes.remove(wake)
            self._say_who_waits()

    def _say_who_waits(self) -> None:
        """Report whether any client waits. It takes no lock: in a forked process the gate may be held for ever."""
        is_said = None
        while is_said is not (is_watched := bool(self._wakes or self.line)):  # others may change it meanwhile
            self._note_watched(is_watched)
            is_said = is_watched

    def must_wait(self, wanted: Wanted) -> bool:
        """Return whether there is no room for requests, or others come first.

        A call that is earlier in line comes first if it waits for the engine's queue, or for the queue of a model for
        which ``wanted`` has places, too.
        """
        for ref in self.line:
            before = ref()
            if before is None:  # it was interrupted on the way in or out
                continue
            if before.wanted is wanted:
                break
            (engine, size), *models = before.wanted
            is_of_model = any(places is its for places, _ in models for its, _ in wanted[1:])
            if is_of_model or not engine.has_room(size):
                return True
        return not all([places.has_room(size) for places, size in wanted])

    def wait(self, wanted: Wanted, end_s: float | None, is_over: Callable[[], bool]) -> None:
        """Wait, holding the gate, until it is the turn and there are as many places in each queue as are needed there.

        Args:
            wanted: the queues in which places are needed, with how many: the engine's first, then those of models.
            end_s: when to give up, on the monotonic clock; None: never.
            is_over: returns whether no request ends any more.

        Raise RequestTooLargeError, DeadlineError, EngineClosedError.
        """
        me = InLine(wanted)  # in the line as long as this call has it, whatever interrupts it
        try:
            self.line.append(weakref.ref(me))
            self._say_who_waits()
            while self.must_wait(wanted):
                for places, size in wanted:
                    places.check_ever(size)
                if is_over():
                    raise EngineClosedError("the engine closed while a request waited for a place in its queue")
                left_s = None if end_s is None else end_s - time.monotonic()
                if left_s is not None and left_s <= 0:
                    raise DeadlineError("the deadline passed while the request waited for a place in the queue")
                self._changed.wait(LOOK_EVERY_S if left_s is None else min(left_s, LOOK_EVERY_S))
        finally:
            del me
            self.line = [other for other in self.line if other() is not None]
            self._say_who_waits()
            self._changed.notify_all()  # those behind: it may be their turn

    def note_place(self) -> None:
        """Note that a place may have become free; in a turn."""
        for wake in tuple(self._wakes):
            wake()
        if self.line:
            with self._changed:
                self._changed.notify_all()
