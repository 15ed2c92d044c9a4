"""A client's connection to an engine elsewhere: its unanswered calls and requests, and the thread that reads answers.

Threads: a thread that sends holds ``_lock``, but not while the engine's process reads nothing. Only the one reader
thread receives answers. It never waits for the engine's process to read, so that an answer always gets through;
requests that a callback submits are sent when there is room. News from places that cannot wait for the lock (a future
that is dropped, the reader) is left in queues, and the holder of the lock sends it after releasing the lock. News that
finds no room then is sent by the reader when there is some.

An exception out of a signal's handler may come between any two steps of a caller. So the lock is taken by ``with`` on
the lock itself, where nothing comes between taking it and the block that releases it. The next holder completes or
undoes what an interrupted one began.
"""

from __future__ import annotations

import json
import os
import select
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.region_layout import how_of
from cellrt.engine.awaited import Awaited, Bell
from cellrt.engine.due import Due
from cellrt.engine.future import Owner, RequestFuture
from cellrt.engine.mailbox import WakingAtTheEnd
from cellrt.engine.stream import Channel
from cellrt.errors import CellrtError, DeviceError, EngineClosedError, InternalError, OverloadError, RequestError
from cellrt.graph.known import Alike
from cellrt.process import shared_memory
from cellrt.process.model_binding import Binding
from cellrt.process.numbering import Numbering
from cellrt.process.pending import UNKNOWN, Line, Pending, RemoteFuture, SentRequests, Tell, Unanswered, copied
from cellrt.process.recorded import LENGTH, PLAN, template_of
from cellrt.process.region import Region, SlotPlan
from cellrt.process.submissions import Submission, submission_parts
from cellrt.process.wire import BrokenWireError, Kind, Message, Wire
from cellrt.process.wire_errors import decode_error
from cellrt.worker.service_thread import ServiceThread

STALL_S = 30.0
"""The seconds without reading after which the engine's process counts as gone."""
NO_BYTES = memoryview(b"")
LAST_WORDS_S = 1.0
"""The seconds that a thread that cannot send waits for the reader to receive the reason."""


class Link:
    """A client's connection. It owns the wire. Raises DeviceError if there is no descriptor for epoll.

    Args:
        wire: the client's end.
        fds: the descriptors of a shared region, if the engine's process sent one. They are closed.
        num_workers: the number of the engine's workers.
    """

    def __init__(self, wire: Wire, fds: Sequence[int] = (), num_workers: int = 0) -> None:
        self._wire = wire
        self._lock = threading.Lock()
        self._unanswered = Unanswered()
        self._region = region_of(fds, num_workers, self._unanswered)
        self._next = 1
        """The next number of a call or request."""
        self._begun = range(0)
        """The requests that the holder of the lock submits; without a holder, those of one that was interrupted."""
        self._lines: WeakValueDictionary[int, Line] = WeakValueDictionary()
        """The lines of sessions that somebody has, by their numbers."""
        self._numbering = Numbering()
        self._cancelled: deque[int] = deque()
        self._outdated: set[Binding] = set()
        """Bindings to release when they have no users."""
        self._closing: CellrtError | None = None
        self._lost: CellrtError | None = None
        self.is_parents = False
        """True in a process that was forked from the connection's."""
        self._heard_end = Bell()
        self.on_rebind: Callable[[dict[str, Any]], Binding | None] = lambda news: None
        """A function that gets news of a model, registered or removed, and returns the binding that is outdated."""
        self._poll = _poll_of(wire, self._region)
        self._reader = ServiceThread(self._read, "cellrt-client", self.leave)
        _OPEN.add(self)
        self._reader.start()

    @property
    def lost(self) -> CellrtError | None:
        """The error for which nothing can be sent any more; None as long as the connection works."""
        return self._lost

    def line_of(self, session: int) -> Line:
        """Return the line of a session, which is kept as long as somebody has it."""
        return self._lines.setdefault(session, Line())

    def refuse_in_callback(self) -> None:
        """Raise RequestError in a future's callback, where waiting would block the thread that reads answers.

        In a forked process, which reads no answers, raise EngineClosedError.
        """
        if self.is_parents:
            self.refuse_if_lost()
        if threading.current_thread() is self._reader:
            raise RequestError("a future's callback cannot wait for its engine: call this from another thread")

    def refuse_if_lost(self) -> None:
        """Raise the error that ended the connection, if it has ended."""
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))

    def cancel(self, future: RequestFuture) -> None:
        """Cancel a request that its client has dropped; from any thread, without waiting."""
        if isinstance(future, RemoteFuture):
            future.note_in_line()
            self._give_up([future.id])

    def _give_up(self, ids: Iterable[int]) -> None:
        self._cancelled.extend(self._unanswered.forget(ids))
        self.send_news()

    def cut_back(self, session: int, rows: int) -> None:
        """Cut a session back to this many rows, after the requests submitted so far, without waiting."""
        self._have_followed([session])
        self._send(lambda: self._wire.send([Message(Kind.CUT_BACK, (LENGTH.pack(session), LENGTH.pack(rows)))]))

    def call(
        self, name: str, blob: bytes = b"", undo: Callable[[Awaited], object] | None = None, **arguments: Any
    ) -> Awaited:
        """Call a function of the engine's process (``calls.py``); return its result, or raise its error.

        ``undo``: called by the reader with the answer, if the caller was interrupted while it waited.
        """
        self.refuse_in_callback()
        answer = Awaited()
        number = 0
        self._have_followed([arguments.get("session"), *arguments.get("others", ())])  # whatever becomes of it

        def write() -> None:
            nonlocal number
            number = self._take_number(answer)
            text = json.dumps({"call": number, "name": name, "arguments": arguments}).encode()
            self._wire.send([Message(Kind.CALL, (LENGTH.pack(len(text)), text, blob))])

        try:
            self._send(write)
        except BaseException as error:
            self._unanswered.awaited.pop(number, None)
            if isinstance(error, TypeError | ValueError):
                raise RequestError(f"{name}: expected arguments that JSON has, got {arguments!r:.200}") from error
            raise
        try:
            answer.wait()
        except BaseException:
            if undo is not None:
                answer.when_said(lambda: undo(answer))
            raise
        if answer.error is not None:
            raise answer.error
        return answer

    def tell(self, name: str, **arguments: Any) -> None:
        """Call a function without waiting for its answer; from any thread. Do nothing if the connection has ended."""
        self._have_followed([arguments.get("session")])
        text = json.dumps({"call": 0, "name": name, "arguments": arguments}).encode()
        with suppress(CellrtError):
            self._send(lambda: self._wire.send([Message(Kind.CALL, (LENGTH.pack(len(text)), text))]))

    def submit(
        self,
        owner: Owner,
        asked: Sequence[tuple[Binding, Alike]],
        due: Due,
        priority: int,
        channel: Channel | None,
        sessions: Sequence[int],
        accepted: Awaited | None,
        *,
        is_each: bool = False,
        tell: Tell | None = None,
    ) -> list[RemoteFuture]:
        """Submit requests, all or none, by their graphs, without waiting; return their futures.

        Args:
            owner: the engine or connection that the futures belong to.
            asked: groups of requests of one graph, with their bindings.
            due, priority: the deadlines and the priority of all requests.
            channel: gets the steps of a stream.
            sessions: the number of each request's session, or nothing.
            accepted: allows them to wait for room in the queue, and is set when they have it.
            is_each: whether the engine refuses requests one by one.
            tell: is called with requests that have ended.

        Raise the error that ended the connection.
        """
        groups = [alike for _, alike in asked]
        templates = [template_of(binding.number, alike) for binding, alike in asked]
        count = sum([len(alike.indices) for alike in groups])
        session_numbers = [sessions[index] for alike in groups for index in alike.indices] if sessions else ()
        futures: dict[int, RemoteFuture] = {}
        first = 0

        def write() -> None:
            nonlocal first
            first = id = self._take_number(accepted, max(1, count))
            how = due, priority, channel is not None, accepted is not None, is_each, self._follows(sessions)
            head = Submission(first, count, session_numbers, time.perf_counter_ns(), *how)
            pending: dict[int, Pending] = {}
            for template, (binding, alike) in zip(templates, asked):
                group = SentRequests(template, binding.formats, channel, tell)
                for index in alike.indices:
                    future = futures[index] = RemoteFuture(owner, id)
                    pending[id] = future, group
                    id += 1
            messages, numbers = self._numbering.number(templates)
            if self._region is not None and messages and messages[0].kind == Kind.FORGET:
                self._region.forget_plans()
            messages.append(Message(Kind.SUBMIT, submission_parts(head, numbers, groups)))
            self._begun = range(first, id)
            self._unanswered.pending.update(pending)
            for index, session in enumerate(sessions):
                self._line_up(session, futures[index], 0)
            self._wire.send(messages)
            self._numbering.note_sent()
            self._begun = range(0)

        try:
            self._send(write)
        except BaseException:  # it may have been sent: its answer is ignored
            self._have_followed(sessions)
            self._unanswered.awaited.pop(first, None)
            self._give_up([future.id for future in futures.values()])
            raise
        return [futures[index] for index in range(count)]

    def _may_go_by_region(self, sessions: Sequence[int]) -> bool:
        """Return whether requests of sessions would not overtake what these were asked before, nor each other."""
        if len(set(sessions)) < len(sessions):
            return False
        for session in sessions:
            line = self._lines.get(session)
            if line is None or line.last == UNKNOWN or line.last in self._unanswered.pending:
                return False
        return True

    def _follows(self, sessions: Sequence[int]) -> bool:
        """Return whether the engine may not be done with what a session was asked by the region."""
        pending = self._unanswered.pending
        lines = [line for line in map(self._lines.get, sessions) if line is not None and line.in_region]
        return any(line.in_region in pending or line.last == UNKNOWN for line in lines)

    def _line_up(self, session: int, future: RemoteFuture, in_region: int) -> None:
        """Note the last request of a session; ``in_region``: its number again, if it goes by the region."""
        if (line := self._lines.get(session)) is not None:
            future.line, line.last = line, future.id
            line.in_region = in_region or line.in_region

    def _have_followed(self, sessions: Iterable[int | None]) -> None:
        """Have the next request of each session go by a message, behind what was just asked."""
        for session in sessions:
            if session is not None and (line := self._lines.get(session)) is not None:
                line.last = UNKNOWN

    def submit_by_region(
        self,
        owner: Owner,
        asked: Sequence[tuple[Binding, Alike]],
        priority: int,
        sessions: Sequence[int] = (),
        tell: Tell | None = None,
    ) -> list[RemoteFuture] | None:
        """Hand requests in by the region, each to be refused by itself; return their futures, or None if they must go
        by a message: the engine has not named what runs for them, there is no slot for each, or a session has not
        answered what it was asked before.

        ``sessions``, ``tell``: as of ``submit``. Raise the error that ended the connection.
        """
        region = self._region
        if region is None or not region.has_plans:
            return None
        templates = [template_of(binding.number, alike) for binding, alike in asked]
        futures: dict[int, RemoteFuture] = {}

        def write() -> None:
            plans = list[SlotPlan]()
            for template, (binding, _) in zip(templates, asked):  # here, as another thread may have them forgotten
                plan = region.plan_of(template, binding.formats)
                if plan is None:
                    return
                plans.append(plan)
            if not self._may_go_by_region(sessions):
                return
            count, now_ns = sum([len(alike.indices) for _, alike in asked]), time.perf_counter_ns()
            slots = region.take_slots(count)
            if not slots:
                return
            id, left = self._take_number(None, count), iter(slots)
            self._begun = range(id, id + count)
            for plan, (binding, alike) in zip(plans, asked):
                group = SentRequests(plan.template, binding.formats, None, tell)
                tensors = [_bytes_of(rows) for _, rows in alike.recorded.externals]
                for number, index in enumerate(alike.indices):
                    future = futures[index] = RemoteFuture(owner, id)
                    self._unanswered.pending[id] = future, group
                    session = sessions[index] if sessions else 0
                    if session:
                        self._line_up(session, future, id)
                    how = how_of(priority, session)
                    region.write(next(left), plan, future, tensors, number, now_ns, how, is_told=tell is not None)
                    id += 1
            region.hand_in()
            self._begun = range(0)

        self.refuse_if_lost()
        try:
            with self._lock:
                self.refuse_if_lost()
                self._make_good()
                write()
        except BaseException:  # it may have been handed in: its answer is ignored
            self._have_followed(sessions)
            self._give_up([future.id for future in futures.values()])
            raise
        if self._has_news():
            self.send_news()
        return [futures[index] for index in range(len(futures))]

    def begin(self, binding: Binding, user: object) -> bool:
        """Add a user to a binding; return False if the binding was released. Raise the error that ended the connection.

        The caller removes the user from the binding's users afterwards, and calls ``send_news``.
        """
        self.refuse_if_lost()
        with self._lock:
            if not binding.is_released:
                binding.users.add(user)
        return not binding.is_released

    def give_up(self, binding: Binding) -> None:
        """Release a binding after its last user, because the engine has another model or none."""
        binding.is_outdated = True
        if not binding.is_released:
            self._outdated.add(binding)
        self.send_news()

    def drain(self, timeout: float | None) -> bool:
        """Wait until all requests have ended; return False after this many seconds."""
        if not self.is_parents:
            self.send_news()  # and makes good what was interrupted
            if (region := self._region) is not None:
                return self._drain_region(region, timeout)
        return self._unanswered.drain(timeout)

    def _drain_region(self, region: Region, timeout: float | None) -> bool:
        """Wait until all requests have ended, while the reader is told of each that comes by the region."""
        with self._lock:
            region.num_drains += 1
        try:
            region.have_all_told()
            return self._unanswered.drain(timeout)
        finally:
            region.num_drains -= 1

    def leave(self) -> None:
        """End the connection soon; from any thread, without waiting."""
        self._closing = self._closing or EngineClosedError("the client was dropped")
        self._wire.end()

    def expect_end(self, reason: CellrtError) -> None:
        """Set the error with which requests end that have not ended when the connection ends."""
        self._closing = self._closing or reason

    def close(self, reason: CellrtError, timeout: float) -> None:
        """End the connection; unfinished requests end with this error. Wait so long for a callback that runs."""
        self.expect_end(reason)
        self._lost = self._lost or reason
        self._wire.end()
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout)

    def forget_fork(self) -> None:
        """Leave the connection to the parent, in a forked process."""
        self._lost = EngineClosedError("this connection is the parent's: connect anew in the forked process")
        self.is_parents = True
        if self._region is not None:
            self._region.forget()
        self._wire.leave()
        self._poll.close()

    def _send(self, write: Callable[[], None]) -> None:
        """Call a function that sends, with the lock; then wait without it until the engine's process reads."""
        self.refuse_if_lost()  # before the lock, which may stay locked in a forked process
        try:
            with self._lock:
                self.refuse_if_lost()
                self._make_good()
                write()
            if self._wire.is_behind and threading.current_thread() is not self._reader:  # which reads, and then sends
                self._wire.flush_within(STALL_S, self._lock)
        except BrokenWireError as error:
            if threading.current_thread() is not self._reader:
                self._heard_end.wait_for(lambda: self._lost is not None, LAST_WORDS_S)  # it may have said why
            self.refuse_if_lost()
            self._closing = self._closing or DeviceError(f"the engine's process is gone: {error}")
            self._wire.end()  # unread messages are not sent later
            raise copied(self._closing) from None
        finally:
            self.send_news()

    def send_news(self) -> None:
        """Send the queued news, unless another thread has the lock, which does so after releasing it.

        It may be called from any place: a holder of the lock waits for no thread, and the lock is only taken if it is
        free.
        News that finds no room is sent by the reader.
        """
        while self._has_news() and not self._lock.locked():
            with self._lock:
                self._make_good()
                if not self._tell_news():
                    break
        if self._wire.is_behind and not self._lock.locked():  # a sender looks itself after it sent
            self._watch(select.EPOLLIN | select.EPOLLOUT)

    def _watch(self, what: int) -> None:
        """Set the events that the reader waits for, also while it waits; from any thread."""
        with suppress(OSError, ValueError):  # the connection is closed
            self._poll.modify(self._wire.fileno(), what)

    def _has_news(self) -> bool:
        is_unused = self._outdated and any(not binding.users for binding in list(self._outdated))
        return bool(self._cancelled or self._begun or is_unused)

    def _make_good(self) -> None:
        """Cancel the requests that an interrupted holder of the lock had begun to submit. Call it under the lock."""
        if self._begun:
            self._cancelled.extend(self._unanswered.forget(self._begun))
            self._begun = range(0)

    def _tell_news(self) -> bool:
        """Send the queued news and clear it; return False if there is no memory for it now. Call it under the lock."""
        cancelled = array("Q", list(self._cancelled))
        released = [binding for binding in list(self._outdated) if not binding.users]
        messages = [Message(Kind.CANCEL, (cancelled.tobytes(),))] if cancelled else []
        for binding in released:
            binding.is_released = True  # new users ask for another
            if self._region is not None:
                self._region.forget_plans(binding.number)
            messages.append(Message(Kind.RELEASE, (LENGTH.pack(binding.number),)))
        try:
            if self._lost is None:
                self._wire.send(messages)
        except BrokenWireError:
            pass  # the reader hears of it
        except OverloadError:
            return False
        self._outdated.difference_update(released)
        for _ in cancelled:
            self._cancelled.popleft()
        return True

    def _take_number(self, awaited: Awaited | None, count: int = 1) -> int:
        """Return the first of this many new numbers, and register a waiting call under it."""
        number, self._next = self._next, self._next + count
        if awaited is not None:
            self._unanswered.awaited[number] = awaited
        return number

    def _read(self) -> None:
        """Receive answers until the connection ends, then end what is unanswered. This is the reader thread."""
        error: CellrtError
        try:
            while True:
                region = self._region
                is_there = region is not None and region.rest()
                events = self._poll.poll(0 if is_there else None)
                if any(what & select.EPOLLOUT for _, what in events):
                    self._watch(select.EPOLLIN)  # before it is looked whether anything waits, which others see to after
                with WakingAtTheEnd():
                    if region is not None:
                        region.wake(any(fd == region.bell for fd, _ in events))
                        self._unanswered.take_region(region)
                    for kind, body in self._wire.receive():
                        self._take(kind, body)
                if (self._wire.owes_word or self._wire.is_behind) and not self._lock.locked():
                    with self._lock:
                        if self._wire.owes_word:
                            self._wire.send(())
                        self._wire.flush()
                self.send_news()
        except BrokenWireError as broken:
            error = self._closing or DeviceError(f"the engine's process is gone: {broken}")
        except BaseException as bug:
            error = InternalError(f"the client failed: {type(bug).__name__}: {bug}")
            error.__cause__ = bug
        self._end(error)

    def _end(self, error: CellrtError) -> None:
        """End everything that waits for an answer. A request that is submitted now is refused, or ended here."""
        self._lost = self._lost or error
        self._heard_end.ring()  # before the lock: its holder may wait for this
        with self._lock:
            self._wire.close()
            self._poll.close()
            region, self._region = self._region, None
        self._unanswered.end(error)
        if region is not None:
            region.forget()

    def _take_plan(self, generation: int, template: int, plan: int) -> None:
        """Record how the engine names what runs for requests of a template, by its number."""
        region = self._region
        if region is None:
            return
        with self._lock:
            its = self._numbering.template_of(generation, template)
            if its is not None:
                region.add_plan(its, plan)

    def _take(self, kind: int, body: memoryview) -> None:
        """Handle one message."""
        if kind == Kind.REBIND:
            binding = self.on_rebind(json.loads(bytes(body)))
            if binding is not None:
                self.give_up(binding)
        elif kind == Kind.PLAN:
            self._take_plan(*PLAN.unpack(body))
        elif kind == Kind.CLOSING:
            self._closing = self._closing or decode_error(json.loads(bytes(body)))
        else:
            self._unanswered.take(kind, body)


def _bytes_of(rows: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data if rows.size else NO_BYTES


def region_of(fds: Sequence[int], num_workers: int, unanswered: Unanswered) -> Region | None:
    """Return the region whose memory, words and bell are behind descriptors, which belong to it; None without any."""
    if not fds:
        return None
    memory, words, bell = fds
    return Region(
        shared_memory.view(memory, writable=True),
        shared_memory.view(words, writable=True),
        bell,
        num_workers,
        unanswered,
    )


def _poll_of(wire: Wire, region: Region | None) -> select.epoll:
    """Return an epoll for reading a wire and the bell of a region; its events may be changed while a thread waits."""
    try:
        poll = select.epoll()
    except OSError as error:
        wire.close()
        raise DeviceError(f"no descriptor to wait for the engine's process with: {error}") from None
    poll.register(wire.fileno(), select.EPOLLIN)
    if region is not None:
        poll.register(region.bell, select.EPOLLIN)
    return poll


_OPEN: weakref.WeakSet[Link] = weakref.WeakSet()
"""The connections of this process: a forked one must not keep the parent's open."""


def _forget_all() -> None:
    for link in list(_OPEN):
        link.forget_fork()


os.register_at_fork(after_in_child=_forget_all)
