"""A client's connection to an engine elsewhere: what was sent and is not answered, and the thread that hears answers.

Crossings between threads: whoever sends holds ``_lock``, but not while the engine's process reads nothing. The one
reader thread alone takes answers in, and never waits for that process to read, so that an answer always gets through;
what a callback submits is sent when there is room. What must be sent from where the lock cannot be waited for (a future
that is dropped, the reader) is left as news, and the holder of the lock sends it after giving the lock back.
"""

from __future__ import annotations

import json
import os
import select
import struct
import threading
import time
import weakref
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cellrt.engine.future import Owner, RequestFuture, finish_together
from cellrt.engine.stream import Channel
from cellrt.errors import CellrtError, DeviceError, EngineClosedError, InternalError, OverloadError, RequestError
from cellrt.graph.known import Alike
from cellrt.process.awaited import Awaited
from cellrt.process.binding import Binding, RowFormat
from cellrt.process.blame import heard
from cellrt.process.numbering import Numbering
from cellrt.process.outcomes import Arrived, read_outcomes
from cellrt.process.pending import Kindred, Pending, RemoteFuture
from cellrt.process.recorded import LENGTH, Template, template_of
from cellrt.process.submissions import NO_DEADLINE, Submission, submission_parts
from cellrt.process.wire import BrokenWireError, Kind, Message, Wire
from cellrt.worker.service_thread import ServiceThread

STALL_S = 30.0
"""How long the engine's process may read nothing before it counts as gone."""
LAST_WORDS_S = 1.0
"""How long who cannot send waits for the reader to hear why."""


class Link:
    """See the module. ``sock``: connected, with what ``WELCOME`` brought."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._lock = threading.Lock()
        self._pending: dict[int, Pending] = {}
        self._awaited: dict[int, Awaited] = {}
        """Calls by their number, and requests that wait for places by the number of their first; all from ``_next``."""
        self._next = 1
        self._numbering = Numbering()
        self._cancelled: deque[int] = deque()
        self._outdated: deque[Binding] = deque()
        self._unused: deque[Binding] = deque()
        """Bindings, once for each who has done with them."""
        self._postponed: list[Message] = []
        """News for which there was no memory; they go with the next."""
        self._empty = threading.Condition()
        self._closing: CellrtError | None = None
        self._lost: CellrtError | None = None
        self._heard_end = threading.Event()
        self.on_rebind: Callable[[str, list[int]], Binding | None] = lambda name, versions: None
        """Takes a model's binding out, if there is one, because the engine has another model or none."""
        self._reader = ServiceThread(self._read, "cellrt-client", self.leave)
        _OPEN.add(self)
        self._reader.start()

    @property
    def lost(self) -> CellrtError | None:
        """Why nothing can be sent any more; None as long as it can."""
        return self._lost

    def refuse_in_callback(self) -> None:
        """Raises RequestError in a future's callback: nobody else would hear what one waits for there."""
        if threading.current_thread() is self._reader:
            raise RequestError("a future's callback cannot wait for its engine: call this from another thread")

    def refuse_if_lost(self) -> None:
        """Raises what ended the connection, if it has ended."""
        if self._lost is not None:
            raise type(self._lost)(str(self._lost))

    def cancel(self, future: RequestFuture) -> None:
        """Has a request ended early that its client gave up; from anywhere, waits for nothing."""
        self._give_up([future])

    def _give_up(self, futures: Iterable[RequestFuture]) -> None:
        ids = [future.id for future in futures if isinstance(future, RemoteFuture)]
        gone = [id for id in ids if self._pending.pop(id, None) is not None]
        if gone:
            self._cancelled.extend(gone)
            self._note_gone()
            self._send_news()

    def reset(self, session: int) -> None:
        """Makes a session new, after the requests submitted so far; waits for nothing."""
        with self._sending():
            self._wire.send([Message(Kind.RESET, (LENGTH.pack(session),))])

    def call(self, name: str, blob: bytes = b"", **arguments: Any) -> Awaited:
        """Calls a function of the engine's process (``calls.py``); returns what it does, or raises."""
        self.refuse_in_callback()
        answer = Awaited()
        number = 0
        try:
            with self._sending():
                number = self._take_number(answer)
                text = json.dumps({"call": number, "name": name, "arguments": arguments}).encode()
                self._wire.send([Message(Kind.CALL, (LENGTH.pack(len(text)), text, blob))])
        except BaseException as error:
            self._awaited.pop(number, None)
            if isinstance(error, TypeError | ValueError):
                raise RequestError(f"{name}: expected arguments that JSON has, got {arguments!r:.200}") from error
            raise
        answer.wait()
        if answer.error is not None:
            raise answer.error
        return answer

    def submit(
        self,
        owner: Owner,
        binding: Binding,
        groups: Sequence[Alike],
        deadline: float | None,
        priority: int,
        channel: Channel | None,
        sessions: Sequence[int],
        accepted: Awaited | None,
    ) -> list[RequestFuture]:
        """Hands in requests, by their graphs, with the number of each one's session, or none; returns at once.

        ``accepted``: they may wait for places, and it hears when they have them. Raises what ended the connection.
        """
        templates = [template_of(binding.number, alike) for alike in groups]
        count = sum([len(alike.places) for alike in groups])
        asked = [sessions[place] for alike in groups for place in alike.places] if sessions else ()
        deadline_s = NO_DEADLINE if deadline is None else float(deadline)
        futures: dict[int, RequestFuture] = {}
        first = 0
        try:
            with self._sending():
                first = self._take_number(accepted, max(1, count))
                how = deadline_s, priority, channel is not None, accepted is not None
                head = Submission(first, count, asked, time.perf_counter_ns(), *how)
                id = first
                for template, alike in zip(templates, groups):
                    kindred = Kindred(template, binding.formats, channel)
                    for place in alike.places:
                        future = futures[place] = RemoteFuture(owner, id)
                        self._pending[id] = future, kindred
                        id += 1
                self._send_submission(head, templates, groups)
        except BaseException:  # it may have been sent: whatever comes of it finds nobody
            self._awaited.pop(first, None)
            self._give_up(futures.values())
            raise
        return [futures[place] for place in range(count)]

    def _send_submission(self, head: Submission, templates: Sequence[Template], groups: Sequence[Alike]) -> None:
        try:
            messages, numbers = self._numbering.number(templates)
            messages.append(Message(Kind.SUBMIT, submission_parts(head, numbers, groups)))
            self._wire.send(messages)
        except BaseException:
            self._numbering.doubt()
            raise

    def begin(self, binding: Binding) -> bool:
        """Counts one who unfolds for a binding; False if that was given up. Raises what ended the connection."""
        self.refuse_if_lost()
        with self._lock:
            binding.num_users += not binding.is_released
        self._send_news()
        return not binding.is_released

    def end(self, binding: Binding) -> None:
        """Counts one less; a binding that is outdated is given up after its last user; from anywhere."""
        if not binding.is_outdated and self._lock.acquire(blocking=False):
            binding.num_users -= 1
            self._lock.release()
        else:
            self._unused.append(binding)
        self._send_news()  # also: that it is outdated, if that was heard just now

    def give_up(self, binding: Binding) -> None:
        """Has a binding given up after its last user, because the engine has another model or none."""
        binding.is_outdated = True
        self._outdated.append(binding)
        self._send_news()

    def drain(self, timeout: float | None) -> bool:
        """Waits until all requests have ended; False after so many seconds."""
        with self._empty:
            return self._empty.wait_for(lambda: not self._pending, timeout)

    def leave(self) -> None:
        """Has the connection end soon; from anywhere, waits for nothing."""
        self._closing = self._closing or EngineClosedError("the client was dropped")
        self._wire.end()

    def expect_end(self, reason: CellrtError) -> None:
        """Has what has not ended when the connection ends end with this error."""
        self._closing = self._closing or reason

    def close(self, reason: CellrtError, timeout: float) -> None:
        """Ends the connection; what has not ended ends with this error. Waits so long for a callback that runs."""
        self.expect_end(reason)
        self._lost = self._lost or reason
        self._wire.end()
        if threading.current_thread() is not self._reader:
            self._reader.join(timeout)

    def forget_fork(self) -> None:
        """In a forked process: leaves the connection to the parent."""
        self._lost = EngineClosedError("this connection is the parent's: connect anew in the forked process")
        self._wire.leave()

    @contextmanager
    def _sending(self) -> Iterator[None]:
        """Holds the lock to send; then waits without it until the engine's process reads."""
        self.refuse_if_lost()  # before the lock: in a forked process nobody may give it back
        try:
            with self._lock:
                self.refuse_if_lost()
                yield
            if self._wire.is_behind and threading.current_thread() is not self._reader:  # which reads, and then sends
                self._wire.flush_within(STALL_S, self._lock)
        except BrokenWireError as error:
            if threading.current_thread() is not self._reader:
                self._heard_end.wait(LAST_WORDS_S)  # it may have said why
            self.refuse_if_lost()
            self._closing = self._closing or DeviceError(f"the engine's process is gone: {error}")
            self._wire.end()  # what was not read is not sent later
            raise _copy(self._closing) from None
        self._send_news()

    def _send_news(self) -> None:
        """Sends what was left as news; whoever holds the lock does so after giving it back."""
        while (self._cancelled or self._outdated or self._unused) and self._lock.acquire(blocking=False):
            try:
                messages, self._postponed = self._postponed, []
                cancelled = array("Q", _taken(self._cancelled))
                if cancelled:
                    messages.append(Message(Kind.CANCEL, (cancelled.tobytes(),)))
                unused = _taken(self._unused)
                for binding in unused:
                    binding.num_users -= 1
                for binding in {*unused, *_taken(self._outdated)}:
                    if binding.is_outdated and not binding.num_users and not binding.is_released:
                        binding.is_released = True
                        messages.append(Message(Kind.RELEASE, (LENGTH.pack(binding.number),)))
                if self._lost is None and messages:
                    self._wire.send(messages)
            except BrokenWireError:
                pass  # the reader hears of it
            except OverloadError:
                self._postponed = messages
            finally:
                self._lock.release()

    def _take_number(self, awaited: Awaited | None, count: int = 1) -> int:
        """The first of so many numbers, under which somebody may wait."""
        number, self._next = self._next, self._next + count
        if awaited is not None:
            self._awaited[number] = awaited
        return number

    def _read(self) -> None:
        """The reader thread: hears answers until the connection ends, then ends what is left."""
        poll = select.poll()
        error: CellrtError
        try:
            poll.register(self._wire.fileno(), select.POLLIN)
            while True:
                poll.modify(self._wire.fileno(), select.POLLIN | (select.POLLOUT if self._wire.is_behind else 0))
                poll.poll()
                for kind, body in self._wire.receive():
                    self._take(kind, body)
                if (self._wire.owes_word or self._wire.is_behind) and self._lock.acquire(blocking=False):
                    try:
                        if self._wire.owes_word:
                            self._wire.send(())
                        self._wire.flush()
                    finally:
                        self._lock.release()
                    self._send_news()
        except BrokenWireError as broken:
            error = self._closing or DeviceError(f"the engine's process is gone: {broken}")
        except BaseException as bug:
            error = InternalError(f"the client failed: {type(bug).__name__}: {bug}")
            error.__cause__ = bug
        self._end(error)

    def _end(self, error: CellrtError) -> None:
        """Ends everything that waits for an answer. Who submits now is refused, or seen here."""
        self._lost = self._lost or error
        self._heard_end.set()  # before the lock: its holder may wait for this
        with self._lock:
            pending, self._pending = list(self._pending.values()), {}
            awaited, self._awaited = list(self._awaited.values()), {}
            self._wire.close()
        for one in awaited:
            one.say(error=_copy(error))
        for future, _ in pending:
            future.finish(_copy(error))
        self._note_gone()

    def _take(self, kind: int, body: memoryview) -> None:
        """Takes in one message."""
        if kind == Kind.OUTCOMES:
            self._take_outcomes(body)
        elif kind == Kind.ERRORS:
            for id, told in json.loads(bytes(body)):
                self._take_error(id, heard(told))
            self._note_gone()
        elif kind == Kind.ACCEPTED:
            self._say(*struct.unpack("<Q", body))
        elif kind == Kind.ANSWER:
            self._take_answer(body)
        elif kind == Kind.REBIND:
            told = json.loads(bytes(body))
            binding = self.on_rebind(told["model"], told["versions"])
            if binding is not None:
                self.give_up(binding)
        elif kind == Kind.CLOSING:
            self._closing = self._closing or heard(json.loads(bytes(body)))

    def _known(self, id: int) -> tuple[Template, Sequence[RowFormat]] | None:
        pending = self._pending.get(id)
        return None if pending is None else (pending[1].template, pending[1].formats)

    def _take_outcomes(self, body: memoryview) -> None:
        """Hands streams their steps, then ends all that has ended."""
        ended: list[RequestFuture] = []
        arrived, steps = Arrived(), Arrived()
        stepped: dict[Channel, None] = {}
        for id, is_end, outcome in read_outcomes(body, self._known):
            if is_end:
                if (pending := self._pending.pop(id, None)) is not None:
                    ended.append(pending[0])
                    arrived.add(outcome)
            elif (waiting := self._pending.get(id)) is not None and (channel := waiting[1].channel) is not None:
                channel.put(steps, steps.add(outcome))
                stepped[channel] = None
        for channel in stepped:
            channel.wake()
        finish_together(enumerate(ended), arrived)
        self._note_gone()

    def _take_error(self, id: int, error: CellrtError) -> None:
        self._say(id, error)
        if (pending := self._pending.pop(id, None)) is not None:
            pending[0].finish(error)

    def _say(self, number: int, error: CellrtError | None = None) -> None:
        if (awaited := self._awaited.pop(number, None)) is not None:
            awaited.say(error=error)

    def _take_answer(self, body: memoryview) -> None:
        (size,) = LENGTH.unpack_from(body)
        head = json.loads(bytes(body[LENGTH.size : LENGTH.size + size]))
        if (awaited := self._awaited.pop(head["call"], None)) is not None:
            error = heard(head["error"]) if head["error"] is not None else None
            awaited.say(head["value"], bytes(body[LENGTH.size + size :]), error)

    def _note_gone(self) -> None:
        """Takes in that requests have ended."""
        if not self._pending:
            with self._empty:
                self._empty.notify_all()


def _taken(news: deque[Any]) -> list[Any]:
    """Takes out what others left."""
    return [news.popleft() for _ in range(len(news))]


def _copy(error: CellrtError) -> CellrtError:
    """An error for each who gets it: whoever raises one adds to it."""
    copied = type(error)(str(error))
    copied.__cause__ = error.__cause__
    return copied


_OPEN: weakref.WeakSet[Link] = weakref.WeakSet()
"""The connections of this process: a forked one must not keep the parent's open."""


def _forget_all() -> None:
    for link in list(_OPEN):
        link.forget_fork()


os.register_at_fork(after_in_child=_forget_all)
