"""The sessions of an engine: where each one's state lies, its queued requests in order, and how long it has been idle.

A session's requests run one after the other; those of different sessions in any order. Between requests its state lies
in rows of the worker that made it; rows that several sessions have in common, in pages that they share. When rows run
short, or more sessions have state at workers than may, the state of those idle longest is copied to host memory, and
comes back with the session's next request. When these copies take more bytes than they may, the sessions idle longest
are closed, or nothing more is copied.

``open``, ``pin``, ``unpin`` and ``forget`` may be called from any thread; everything else belongs to the holder of the
turn.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellrt.core.processor import Processor
from cellrt.core.state.moves import SessionState
from cellrt.core.state.tables import HOST, LOCATION_SHIFT, NUM_PERMANENT, ROW_MASK
from cellrt.core.state.views import SessionPages, bring_pages, request_pages, session_pages, sessions_at, take_copies
from cellrt.engine.leases import Leases
from cellrt.engine.registry import Model
from cellrt.engine.request_group import Asked, SessionRecord
from cellrt.engine.saved_states import SavedStates, size_of
from cellrt.engine.session_limits import CLOSE, REFUSE, SessionLimits
from cellrt.engine.turns import Call
from cellrt.errors import DeviceError, OverloadError, RequestError, SessionError
from cellrt.graph.results import StateLayout
from cellrt.worker.arenas import Arenas, copy_page
from cellrt.worker.free_memory import free_bytes

EVICTED_TOGETHER = 64
SAVED_PART = 4
"""The divisor of the free memory that gives the most that saved states take by default."""
UNKNOWN_BYTES = 1 << 30
"""The most bytes of saved states if the system does not say how much memory is free."""


class Sessions:
    """The sessions of one engine."""

    def __init__(self, limits: SessionLimits, processor: Processor, arenas: list[Arenas]) -> None:
        self.limits = limits
        self.num_evictions = self.num_closed = 0
        """The states that were moved to host memory, and the sessions that were closed for lack of room there."""
        free = free_bytes() if limits.max_saved_bytes is None else None
        self.max_saved_bytes = limits.max_saved_bytes or (UNKNOWN_BYTES if free is None else max(1, free // SAVED_PART))
        self._saved, self.leases = SavedStates(), Leases(processor)
        self._processor, self._arenas = processor, arenas
        self._lock = threading.Lock()
        self._open: dict[SessionRecord, None] = {}
        self._by_id: dict[tuple[str, str], SessionRecord] = {}
        """The sessions by the name of their model and their own id, also those of a model that another has replaced."""
        self._by_number: dict[int, SessionRecord] = {}
        """The sessions by their id in the processor."""
        self._idle: OrderedDict[SessionRecord, None] = OrderedDict()
        self._resident: OrderedDict[SessionRecord, None] = OrderedDict()
        self._lost: dict[int, DeviceError] = {}

    def __len__(self) -> int:
        return len(self._open)

    def __iter__(self) -> Iterator[SessionRecord]:
        with self._lock:
            return iter(list(self._open))

    @property
    def num_resident(self) -> int:
        """The sessions without a running request that have state at a worker."""
        return len(self._resident)

    def counts(self) -> dict[str, int]:
        """Return how many sessions are open, are resident, and were evicted or closed for lack of memory.

        A resident session has its state at a worker. Any thread may call it.
        """
        return {
            "open": len(self),
            "resident": self.num_resident,
            "evictions": self.num_evictions,
            "closed_for_memory": self.num_closed,
        }

    @property
    def saved_bytes(self) -> int:
        """The bytes of the states that are in host memory, besides the arenas; any thread may ask."""
        return self._saved.num_bytes

    def open(self, model: Model, key: str | None, *, must_be_open: bool = False) -> tuple[SessionRecord, bool]:
        """Return the session of an id, and whether it is new.

        It is made if there is none, with a random id if None is given. An open session goes on with the model that it
        was opened with, whichever model has that name now.

        Raise OverloadError, RequestError, and SessionError if it would be new and ``must_be_open``.
        """
        if not isinstance(key, str | None) or key == "":
            raise RequestError(f"session of model {model.name!r}: expected a str as id, got {key!r}")
        with self._lock:
            known = self._by_id.get((model.name, key)) if key is not None else None
            if known is not None and not known.is_leaving:
                return known, False
            if must_be_open:
                raise SessionError(
                    f"session {key!r} of model {model.name!r} is not open: it expired, was closed, or never was"
                )
            if len(self._open) >= self.limits.max_sessions:
                raise OverloadError(f"{len(self._open)} sessions are open, the engine takes {self.limits.max_sessions}")
            made = SessionRecord(model, key if key is not None else uuid.uuid4().hex, model.states)
            made.last_used_s = time.monotonic()
            self._open[made] = None
            self._by_id[model.name, made.key] = made
            model.num_sessions += 1
            return made, True

    def pin(self, model: Model) -> bool:
        """Keep a model, for which another process unfolds, as an open session would; return False if it is given up."""
        with self._lock:
            if model.is_given_up:
                return False
            model.num_sessions += 1
            return True

    def unpin(self, model: Model) -> None:
        """Note that a client that pinned a model unfolds for it no more."""
        with self._lock:
            model.num_sessions -= 1

    def give_up(self, model: Model) -> bool:
        """Give up a model that takes no requests any more; return False if it is still in use."""
        with self._lock:  # else it could be pinned in between
            model.is_given_up = model.is_idle
            return model.is_given_up

    def forget(self, record: SessionRecord) -> None:
        """Make the session's id free for a new one."""
        with self._lock:
            if record in self._open:
                del self._open[record]
                record.model.num_sessions -= 1
                if self._by_id.get((record.model.name, record.key)) is record:
                    del self._by_id[record.model.name, record.key]

    def next_request(self, record: SessionRecord) -> Asked | None:
        """Run the session's queued calls up to its next request, and return that; None if there is none to begin."""
        while record.running is None and record.queue and self.leases.recall(record):
            item, _ = record.queue.popitem(last=False)
            if not isinstance(item, Call):
                return item
            item.run()
        if record.running is None and record.state is SessionState.IDLE:
            self._note_used(record, time.monotonic())
            self._grant(record)
        return None

    def _note_used(self, record: SessionRecord, used_s: float) -> None:
        record.last_used_s = used_s
        self._idle[record] = None
        self._idle.move_to_end(record)

    def _grant(self, record: SessionRecord) -> None:
        if not self._lost:
            self.leases.grant(record)

    def note_answered(self, records: Sequence[SessionRecord]) -> None:
        """Note that compiled code has answered a request of each of these sessions, which were leased."""
        used_s = time.monotonic()
        for record in records:
            if record.running is None and record.state is SessionState.IDLE:
                self._note_used(record, used_s)
                if not self.leases.is_in_use(record):
                    self._settle(record)

    def note_given_back(self, session: int) -> None:
        """Note that the last task of an answered request has ended, by its session's id in the processor."""
        record = self._by_number.get(session)
        if record is not None and record.running is None and record.state is SessionState.IDLE:
            self._settle(record)

    def of_ids(self, sessions: Iterable[int]) -> list[SessionRecord]:
        """Return the sessions that have these ids in the processor; those that have ended are left out."""
        return [record for session in sessions if (record := self._by_number.get(session)) is not None]

    def _number(self, record: SessionRecord, session: int) -> None:
        """Give a session an id in the processor; -1: none."""
        if record.id >= 0:
            del self._by_number[record.id]
        record.id = session
        if session >= 0:
            self._by_number[session] = record

    def take_over(self, record: SessionRecord, request: Asked) -> None:
        """Note that Python goes on with a request of a session that was leased."""
        self.leases.take_over(record)
        self._idle.pop(record, None)
        self._resident.pop(record, None)
        record.running = request
        record.move(SessionState.WAITING)
        record.move(SessionState.RUNNING)

    def begin(self, record: SessionRecord, request: Asked) -> None:
        """Note that a session's request waits for its admission; open the session in the processor.

        Raise SessionError if the session has ended, OverloadError if the processor has no more.
        """
        if record.error is not None:
            raise SessionError(str(record.error))
        if record.id < 0:
            opened = self._processor.open_session()
            if opened is None:
                raise OverloadError(f"{record}: no session is left in the tables (see Limits.max_sessions)")
            self._number(record, opened)
            if record.saved is not None:
                self._bring(record, record.saved)
        self._idle.pop(record, None)
        record.running = request
        record.move(SessionState.WAITING)

    def note_admitted(self, record: SessionRecord) -> None:
        """Note that the request has the state now."""
        self._saved.set(record, None)
        record.move(SessionState.RUNNING)
        self._resident.pop(record, None)

    def note_over(self, record: SessionRecord) -> None:
        """Note that its request has ended; the session ends if the request left the state at a lost worker."""
        record.running = None
        if record.state is SessionState.ENDED:  # while its request waited
            return
        was_running = record.state is SessionState.RUNNING
        record.move(SessionState.IDLE)
        self._saved.note_used(record)
        if was_running:
            self._settle(record)

    def _settle(self, record: SessionRecord) -> None:
        """Find out where a request has left the state."""
        handles = self._handles(record) if self._lost else ()
        lost = [location for location in self._lost if location in (handle >> LOCATION_SHIFT for handle in handles)]
        if lost:
            self._end_lost(record, self._lost[lost[0]])
        elif record in self._resident or self._processor.has_state(record.id, len(record.states)):
            self._resident[record] = None
            self._resident.move_to_end(record)
            if self.limits.max_resident is not None and len(self._resident) > self.limits.max_resident:
                for oldest in self._oldest(1):
                    self.evict(oldest)

    def _oldest(self, most: int) -> list[SessionRecord]:
        """Return the sessions idle longest that have state at a worker, at most this many."""
        return list(islice((record for record in self._resident if not self.leases.is_in_use(record)), most))

    def evict(self, record: SessionRecord) -> bool:
        """Free an idle session's rows: copy its state to host memory, or close it if there is no room for that.

        Return False, with nothing changed, if there is none and sessions are not to be closed for that.
        """
        self.leases.recall(record)
        num_bytes = self._num_bytes(record)
        if not self._has_room_for(num_bytes, record):
            if self.limits.when_full == REFUSE:
                return False
            self._close_for_memory(record, num_bytes)
            return True
        saved = self.read(record)
        self._saved.set(record, saved)
        if saved is not None:
            self._bring(record, saved)
        self._resident.pop(record, None)
        self.num_evictions += 1
        return True

    def _num_bytes(self, record: SessionRecord) -> int:
        """Return the bytes of an idle session's state in the arenas."""
        row_bytes: list[int] = [self._arenas[HOST].bytes_of(layout.kind).shape[1] for layout in record.states]
        rows, pages = record.states[: record.num_rows], self._pages(record)
        grown = zip(record.states[len(rows) :], row_bytes[len(rows) :], pages)
        return int(sum(row_bytes[: len(rows)]) + sum(its.length * size // one.page_size for one, size, its in grown))

    def _has_room_for(self, num_bytes: int, record: SessionRecord) -> bool:
        """Return whether this many bytes of a session may be saved; close sessions idle longest to make room."""
        most = self.max_saved_bytes - num_bytes + self._saved.bytes_of(record)
        while 0 <= most < self.saved_bytes and self.limits.when_full == CLOSE:
            oldest = self._saved.longest_idle(record)
            if oldest is None:
                break
            self._close_for_memory(oldest, num_bytes)
        return self.saved_bytes <= most

    def _close_for_memory(self, record: SessionRecord, num_bytes: int) -> None:
        self.num_closed += 1
        self.end(record, SessionError(f"{record} has expired: {self.why_full(num_bytes)}, and it was idle longest"))

    def why_full(self, num_bytes: int | None = None) -> str:
        """Return which limit the saved states have reached, when one of this many bytes was to be saved."""
        wanted = "more" if num_bytes is None else f"{num_bytes:,} more"
        return (
            f"states of idle sessions take {self.saved_bytes:,} bytes of host memory, {wanted} were to go there, and "
            f"they may take {self.max_saved_bytes:,} (see SessionLimits.max_saved_bytes)"
        )

    def _bring(self, record: SessionRecord, saved: list[NDArray[Any]]) -> None:
        """Free a session's rows and pages; its state comes with its next request."""
        self._processor.drop_states(record.id, bring=True)
        for slot, (layout, value) in enumerate(zip(record.states, saved)):
            if layout.page_size:
                bring_pages(self._processor.tables, record.id, slot, len(value))

    def copy_in(self, record: SessionRecord, request: int, rows: NDArray[np.int32]) -> None:
        """Copy a session's state, if it is saved, to the host rows and pages of its request."""
        if record.saved is None:
            return
        host, pages = self._arenas[HOST], request_pages(self._processor.tables, request)
        for slot, (layout, value) in enumerate(zip(record.states, record.saved)):
            if not layout.page_size:
                host.put(layout.kind, rows[slot : slot + 1], value[None])
            elif len(value):
                filled = np.zeros((len(pages[slot]), layout.page_size, *value.shape[1:]), value.dtype)
                filled.reshape(-1, *value.shape[1:])[: len(value)] = value
                by_page = np.moveaxis(filled, 1, 1 + layout.page_dim)
                host.put(layout.kind, np.array(pages[slot], np.int32), by_page)

    def evict_some(self) -> bool:
        """Evict the sessions idle longest, a few together; return False if there is none, or none may be evicted."""
        return any([self.evict(record) for record in self._oldest(EVICTED_TOGETHER)])

    def read(self, record: SessionRecord) -> list[NDArray[Any]] | None:
        """Return a copy of an idle session's states as bits (``as_bits``), or None if it is new.

        Each is ``[*shape]``, a growing one ``[rows, *shape]``.
        """
        if record.saved is not None:
            return [value.copy() for value in record.saved]
        if record.id < 0 or not self._handles(record):
            return None
        rows = self._processor.session_rows(record.id, record.num_rows)
        read = [self._read_row(kind, handle) for handle, kind in rows]
        for layout, pages in zip(record.states[record.num_rows :], self._pages(record)):
            read.append(self._read_pages(layout, pages))
        return read

    def _pages(self, record: SessionRecord) -> list[SessionPages]:
        return session_pages(self._processor.tables, record.id, record.num_rows, len(record.states) - record.num_rows)

    def _read_pages(self, layout: StateLayout, pages: SessionPages) -> NDArray[Any]:
        kind = layout.kind
        locations = [self._arenas[handle >> LOCATION_SHIFT] for handle in pages.handles]
        empty = self._arenas[HOST].get_bits(kind, np.empty(0, np.int32))
        read = [
            arenas.get_bits(kind, np.array([handle & ROW_MASK], np.int32))
            for arenas, handle in zip(locations, pages.handles)
        ]
        together = np.moveaxis(np.concatenate([empty, *read]), 1 + layout.page_dim, 1)
        return together.reshape(-1, *together.shape[2:])[: pages.length].copy()

    def _read_row(self, kind: int, handle: int) -> NDArray[Any]:
        location = handle >> LOCATION_SHIFT if handle >= NUM_PERMANENT else 1
        bits = self._arenas[location].get_bits(kind, np.array([handle & ROW_MASK], np.int32))
        return bits.reshape(bits.shape[1:])

    def replace(self, record: SessionRecord, saved: list[NDArray[Any]] | None) -> None:
        """Give an idle session another state; None makes it new. Raise OverloadError if there is no room for it."""
        if saved is not None and not self._has_room_for(size_of(saved), record):
            raise OverloadError(f"{record}: {self.why_full(size_of(saved))}")
        self._saved.set(record, saved)
        if record.id >= 0 and saved is not None:
            self._bring(record, saved)
        elif record.id >= 0:
            self._processor.drop_states(record.id)
        self._resident.pop(record, None)

    def copy(
        self, record: SessionRecord, others: Sequence[SessionRecord]
    ) -> tuple[list[SessionRecord], list[NDArray[Any]] | None]:
        """Give sessions the state of an idle one: those with nothing to do share its pages, where there is room.

        Return the other ones, and a copy of the state for them, as ``read`` does. Raise SessionError if a session has
        ended, or ends as others take the memory for its state.
        """
        left = []
        for other in others:
            for each in (record, other):
                if each.error is not None:
                    raise SessionError(str(each.error))
            if not other.is_free or not self.leases.recall(other) or not self._share(record, other):
                left.append(other)
        if record.error is not None:
            raise SessionError(str(record.error))
        return left, self.read(record) if left else None

    def _share(self, record: SessionRecord, other: SessionRecord) -> bool:
        """Give a session with nothing to do the state of an idle one, whose pages it shares.

        Return False, with nothing changed, if that is not possible.
        """
        if record.saved is not None or record.id < 0:
            return False
        made = self._processor.copy_session(record.id, len(record.states))
        if made is None:
            return False
        self._copy_pages()
        if other.id >= 0:
            self._processor.close_session(other.id)
        self._saved.set(other, None)
        self._resident.pop(other, None)
        self._number(other, made)
        self._settle(other)
        return True

    def _copy_pages(self) -> None:
        """Make the copies of pages that the processor has written down: no task uses any of these pages."""
        for copied in take_copies(self._processor.tables):
            copy_page(self._arenas, *copied)

    def cut_back(self, record: SessionRecord, rows: int) -> None:
        """Cut an idle session back to this many rows of its growing states; end one that has fewer, or other states.

        Only a page that it shares with others, and that its next row goes to, is copied. If there is no room for that,
        the remaining rows go to host memory.
        """
        if rows == 0:
            self.replace(record, None)
            return
        grown = record.states[record.num_rows :]
        lengths = self._lengths(record)
        if record.num_rows or not grown or min(lengths) < rows:
            what = "has states of a fixed size" if record.num_rows or not grown else f"has {min(lengths)} rows"
            self.end(record, SessionError(f"{record} could not be cut back to {rows} rows: it {what}"))
            return
        if record.saved is None:
            is_cut = self._processor.cut_back(record.id, len(grown), rows)
            self._copy_pages()
            if is_cut:
                return
        try:
            self.replace(record, [value[:rows].copy() for value in self.read(record) or ()])
        except OverloadError as error:
            self.end(record, SessionError(f"{record} could not be cut back to {rows} rows: {error}"))

    def _lengths(self, record: SessionRecord) -> list[int]:
        """Return the rows of an idle session's growing states."""
        if record.saved is not None:
            return [len(value) for value in record.saved[record.num_rows :]]
        if record.id < 0:
            return [0] * (len(record.states) - record.num_rows)
        return [pages.length for pages in self._pages(record)]

    def end(self, record: SessionRecord, error: SessionError) -> None:
        """End a session that has no running request, for good: later requests on it get ``error``."""
        record.error = error
        self.leases.take_over(record)
        self.leases.clear_seats(record)
        self._saved.set(record, None)
        record.move(SessionState.ENDED)
        if record.id >= 0:
            self._processor.close_session(record.id)
            self._number(record, -1)
        self._idle.pop(record, None)
        self._resident.pop(record, None)
        self.forget(record)

    def until_expiry_s(self) -> float | None:
        """Return the seconds until the session that is idle longest has been so too long; None: never."""
        allowed = self.limits.idle_timeout_s
        if allowed is None or not self._idle:
            return None
        return max(0.0, next(iter(self._idle)).last_used_s + allowed - time.monotonic())

    def expire(self) -> None:
        """End the sessions that have been idle too long."""
        for _ in range(len(self._idle)):
            if self.until_expiry_s() != 0.0:
                break
            oldest = next(iter(self._idle))
            allowed = self.limits.idle_timeout_s
            if self.leases.is_in_use(oldest):
                self._note_used(oldest, time.monotonic())
                continue
            self.end(oldest, SessionError(f"{oldest} has expired: it was idle for {allowed} s"))

    def lose_worker(self, location: int, cause: DeviceError) -> None:
        """End the sessions whose state is at a lost worker: now, or when their request has given it back."""
        self._lost[location] = cause
        for record in self:
            self.leases.recall(record)
        lost = set(sessions_at(self._processor.tables, location))
        for record in [record for record in self._resident if record.id in lost]:
            self._end_lost(record, cause)

    def _end_lost(self, record: SessionRecord, cause: DeviceError) -> None:
        error = SessionError(f"{record} has lost its state: {cause}")
        error.__cause__ = cause
        self.end(record, error)

    def _handles(self, record: SessionRecord) -> list[int]:
        """Return the rows of a session's state; none if it is new."""
        rows = self._processor.session_rows(record.id, record.num_rows)
        handles = [handle for handle, _ in rows if handle >= NUM_PERMANENT]
        return handles + [handle for pages in self._pages(record) for handle in pages.handles]

    def fail_calls(self, error: Exception) -> None:
        """Fail the calls that clients wait for in sessions' queues; at the end of the engine."""
        for record in self:
            for item in list(record.queue):
                if isinstance(item, Call):
                    item.fail(error)
