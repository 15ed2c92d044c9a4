"""The manager runs the engine's turns. It owns the processor, the workers and all requests that have not ended."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TypeVar

from cellrt.core.processor import Processor
from cellrt.core.state.tables import MANY_ARRIVALS, NEVER
from cellrt.core.state.task_layout import TaskView
from cellrt.engine.awaited import Awaited
from cellrt.engine.crash_log import watch_events, write_at_a_crash
from cellrt.engine.crew import Crew
from cellrt.engine.door import Door
from cellrt.engine.fast_path import FastPath, is_built
from cellrt.engine.places import Places, QueueLimit, Room, Size
from cellrt.engine.regions import Regions
from cellrt.engine.registry import Model, Registry
from cellrt.engine.replies import Replies
from cellrt.engine.request_group import RequestGroup, SessionRecord
from cellrt.engine.requests import Requests
from cellrt.engine.session_limits import SessionLimits
from cellrt.engine.sessions import Sessions
from cellrt.engine.statistics import Statistics
from cellrt.engine.trace import Trace
from cellrt.engine.turns import Call, Turns
from cellrt.engine.waiting import Deadlines
from cellrt.errors import CellrtError, DeviceError, EngineClosedError, InternalError, SessionError
from cellrt.native.atomics import added, stored
from cellrt.native.row_types import Rows
from cellrt.view.timeline import Timeline
from cellrt.worker.arenas import Arenas, copy_page
from cellrt.worker.base import Done, Worker
from cellrt.worker.turn_words import ALWAYS, BY_HAND, CALLED, HEARD, NEWS, WHEN_IDLE

T = TypeVar("T")

A_TURN_S = 1.0
"""The most seconds that a call which should not block waits for a turn."""
LOOK_EVERY_S = 0.1
SLACK_NS = 1_000_000
"""The delay with which a session may expire."""


class SessionCall(Call[T]):
    """A call that runs when the earlier requests and calls of its session are over."""

    def __init__(self, record: SessionRecord, function: Callable[[], T]) -> None:
        super().__init__(function)
        self.record = record


class Manager:
    """Runs the turns of the engine: each admits, schedules, launches, completes and replies.

    Args:
        processor, arenas, registry: the engine's own.
        models: the models that take requests, by name.
        queue_depth: the tasks that a worker may have before the next is formed.
        session_limits: see ``SessionLimits``.
        max_queue: the requests and rows that may be unfinished.
        debug: check every invariant whenever nothing runs.
        words: the shared words of the turn and the workers (``worker/turn_words.py``).
        clock_ns: the engine's clock.
    """

    def __init__(
        self,
        processor: Processor,
        arenas: list[Arenas],
        registry: Registry,
        models: Mapping[str, Model],
        queue_depth: int,
        session_limits: SessionLimits,
        max_queue: QueueLimit,
        debug: bool,
        words: Rows[int],
        clock_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.workers: list[Worker] = []
        self.turns = Turns(
            self.workers,
            words,
            self.step,
            self._tell,
            self._has_arrivals,
            self._next_moment_s,
            self._end,
            self.abandon,
        )
        self.places = Places("the engine", max_queue)
        self.is_closing = False
        """True if requests are refused; changed under the gate."""
        self.fast_path: FastPath | None = None
        """The fast path of clients, once workers were started; None where it was not built."""
        self.is_over = False
        """True after the last turn: no request ends any more."""
        self.sessions = Sessions(session_limits, processor, arenas)
        self.statistics = Statistics(processor.tables)
        self.after_turn: Callable[[], None] | None = None
        """A function that is called at each turn's end and after the last, to pass on what ended; it must not raise."""
        self._replies = Replies(processor, arenas, self.places, self.statistics, clock_ns)
        self._late = Deadlines(processor, registry.name_of)
        self.regions = Regions(processor, self.places, self.sessions.of_ids, self)
        self._door = Door(processor, self.sessions.leases, self.regions)
        self.room = Room(self.turns.gate, partial(_note_watched, self._door, self.turns))
        self.requests = Requests(processor, arenas, self.sessions, self._replies, self._late, self._door)
        room = self.sessions.evict_some, self.requests.give_way
        self._crew = Crew(processor, self.workers, queue_depth, partial(copy_page, arenas), *room)
        self._processor, self._clock, self._registry, self._models = processor, processor.clock, registry, models
        self._debug, self._clock_ns = debug, clock_ns
        self._retired: list[Model] = []
        self.num_retired = 0
        """The number of models that were retired so far."""
        self._drains: list[Awaited] = []
        self._next_ns: int | None = None
        """The time at which a turn is due even without news."""

    def start(self, make_worker: Callable[[int], Worker], count: int, trace: Trace | None) -> None:
        """Start workers at locations 1 to ``count``, and the timekeeper."""
        self._replies.trace, self._door.is_shut = trace, trace is not None
        watch_events(self._processor)
        if self._debug:
            write_at_a_crash()
        self._crew.start(make_worker, count)
        if is_built():
            self._door.fast_path = self.fast_path = FastPath(self._models, self, self._crew, self._door)
        self.turns.start()

    @property
    def has_workers(self) -> bool:
        """True if a worker is left."""
        return self._crew.has_workers

    def step(self) -> None:
        """Run one turn: handle what happened, then give the workers tasks."""
        self._clock.set(self._clock_ns())
        for notices in self._crew.take_notices():  # first, so that ends are known before requests ask for them
            self.requests.take_notices(notices)
        if self.turns.has_messages() or self.turns.was_interrupted:
            self._take_messages()
        dead = self._crew.find_dead()  # before the poll, which then finds all that they completed
        for location, done in self._crew.poll():
            self._complete(location, done)
        for location in dead:
            self._handle_dead_worker(location)
        self.requests.expire(self._clock_ns())
        stored(self.turns.words, HEARD, self.turns.words.item(CALLED))
        self.requests.join()
        self.sessions.expire()  # after ``join``, as a request may have come for one in time
        self.requests.admit()
        if self.requests.has_admitted:
            self._crew.launch(self._note_launch)
        self._look_ahead()
        self._tell()
        if self._debug and not self._processor.num_running:
            self.check()
        self.turns.words[BY_HAND] = self._by_hand()

    def _tell(self) -> None:
        """Notify clients of what has ended: the part of a usual turn that compiled code cannot do."""
        self.requests.tell_by_door()
        if self.requests.has_new_deadlines:
            self.requests.has_new_deadlines = False
            self._look_ahead()
        if self.requests.goes_on:
            self.requests.goes_on = False
            self.turns.words[NEWS] = 1
        self._replies.tell()
        self.room.note_place()
        if self._retired or self._drains:
            self._release_retired_models()
        if self.after_turn is not None:
            self.after_turn()

    def catch_up(self) -> bool:
        """Have a turn count what compiled code has answered; return whether there was anything to count.

        Do not call it under the gate.
        """
        if not self._door.has_answers or self.turns.is_held_here:
            return False
        with suppress(EngineClosedError, TimeoutError):
            self.turns.call(self.requests.tell_by_door, A_TURN_S)  # the rest of the turn is behind the call
            return True
        return False

    def _has_arrivals(self) -> bool:
        """Return whether requests came by the door that no turn has seen."""
        words = self.turns.words
        if self._processor.has_arrivals:
            return True
        return not self.regions.is_closed and added(words, CALLED, 0) != words.item(HEARD)

    def _by_hand(self) -> int:
        """Return the reasons why the next turns must be taken in Python (``turn_words.py``)."""
        processor = self._processor
        is_traced = self._replies.trace is not None
        if is_traced or processor.has_pages or processor.must_take_over or self.requests.has_waiting:
            return ALWAYS
        if self._drains or self._retired or not self._crew.is_whole:
            return ALWAYS
        return WHEN_IDLE if self._debug else 0

    def abandon(self) -> None:
        """End all requests and threads soon, without waiting: for an engine that was dropped, and at exit."""
        self.turns.command(self.end_all)
        self.turns.command(lambda: self.turns.stop(EngineClosedError("the engine was dropped")))

    def ask_to_cancel(self, group: RequestGroup, number: int) -> None:
        """End a request early, if it has not ended; from any thread."""
        self.turns.command(lambda: self.requests.cancel(group, number))

    def have_told(self) -> None:
        """Have a turn notify clients of answers of which they were not notified yet; from any thread."""
        if self._door.has_answers:
            self.turns.wake()

    def refuse_in_callback(self) -> None:
        """Raise RequestError in a future's callback, as ``Turns.refuse_in_callback`` does."""
        self.turns.refuse_in_callback()

    def call_in(self, record: SessionRecord, function: Callable[[Sessions], T]) -> T:
        """Call a function in a turn, when the session's earlier requests and calls are over. Raise SessionError."""

        def act() -> T:
            if record.error is not None:
                raise SessionError(str(record.error))
            return function(self.sessions)

        self.turns.refuse_in_callback()
        with self.turns.gate:
            record.num_asked += 1
        return self.turns.ask(SessionCall(record, act))

    def tell_in(self, record: SessionRecord, function: Callable[[Sessions], None]) -> None:
        """Have a function called as ``call_in`` does, without waiting; it must not raise.

        Raise EngineClosedError, SessionError.
        """

        def act() -> None:
            if record.error is None:
                function(self.sessions)

        if record.error is not None:
            raise SessionError(str(record.error))
        with self.turns.gate:
            record.num_asked += 1
            self.turns.hand_in([SessionCall(record, act)], not self.has_workers)

    def note_opened(self, record: SessionRecord) -> None:
        """Note that a session was opened: it is idle from now on; from any thread."""
        self.turns.command(lambda: self.requests.go_on(record))

    def take_sequences(self, count: int) -> int:
        """Reserve ``count`` sequence numbers, which give the order of arrival, and return the first."""
        return self._door.take_sequences(count)

    def hand_in(self, groups: Sequence[RequestGroup], wanted: Sequence[tuple[Places, Size]]) -> None:
        """Hand in requests with the same deadlines, all or none, under the gate; ``wanted``: places in each queue.

        Raise EngineClosedError.
        """
        try:
            for places, size in wanted:
                places.take(size)
            has_deadline = groups[0].has_deadline
            is_hopeless = has_deadline and any(map(self._late.is_hopeless, groups))
            if self.turns.stopped is None and not is_hopeless and self._door.hand_in(groups):
                self.note_handed_in()
                if has_deadline:
                    self._have_due_ended(groups[0])
            else:
                for group in groups:
                    for record in group.sessions or ():
                        record.num_asked += 1
                self.turns.hand_in(groups, has_deadline or not self.has_workers)
        except BaseException:  # a signal's handler raised: a turn counts the requests anew
            self.turns.was_interrupted = True
            self.turns.wake()
            raise

    def note_handed_in(self) -> None:
        """Have a worker look for what was handed in to compiled code, whatever interrupts the client."""
        try:
            if not self.turns.wake_a_worker() and not self.has_workers:
                self.turns.wake()  # its last one has died since the client looked
        except BaseException:
            self.turns.was_interrupted = True
            self.turns.wake()
            raise

    def _have_due_ended(self, group: RequestGroup) -> None:
        """Wake the timekeeper if requests that compiled code has may be late earlier than it knows."""
        due_ns = min(group.deadline_ns or NEVER, group.schedule_by_ns or NEVER)
        if due_ns < NEVER and (self._next_ns is None or due_ns < self._next_ns):
            self.turns.wake()

    def close(self, timeout: float) -> bool:
        """End requests and threads; return False if a thread has not ended after this many seconds."""
        end_s = time.monotonic() + timeout
        workers = list(self.workers)
        with suppress(EngineClosedError, TimeoutError):
            self.turns.call(self.end_all, timeout)
        # Only when nothing can be launched any more may the workers be told to end.
        for worker in workers:
            worker.end()
        has_ended = all([worker.join(max(0.0, end_s - time.monotonic())) for worker in workers])
        stop = partial(self.turns.stop, EngineClosedError("the engine is closed"))
        with suppress(EngineClosedError, TimeoutError):
            # In a turn, whose rest handles what the workers completed last.
            self.turns.call(stop, max(0.0, end_s - time.monotonic()))
        stop()
        has_ended = self.turns.join(max(0.0, end_s - time.monotonic())) and has_ended
        if has_ended:
            self.workers.clear()
        return has_ended

    def drain(self, timeout: float | None) -> bool:
        """Wait until nothing is unfinished; return False after this many seconds, or if the engine failed."""
        drained, end_s = Awaited(), None if timeout is None else time.monotonic() + timeout
        try:
            if self.turns.call(lambda: self._note_drain(drained), A_TURN_S if timeout == 0 else timeout):
                return True
            return drained.wait(None if end_s is None else max(0.0, end_s - time.monotonic())) and not self.has_failed
        except TimeoutError:
            return False
        except EngineClosedError:
            return not self.has_failed and self.places.num_unfinished == 0

    def retire(self, model: Model, error: CellrtError | None) -> None:
        """Retire a model that takes no more requests: it is freed when its last request and session have ended.

        Its sessions end with ``error`` after their earlier requests; None: they go on.
        """
        self._retired.append(model)
        self.num_retired += 1
        self.requests.join()  # so that the sessions' earlier requests are in their queues
        for record in self.sessions if error is not None else ():
            if record.model.name == model.name:  # also sessions of a model that it replaced
                record.is_leaving = True
                self._ask_to_end(record, SessionError(f"{record}: {error}"))

    def end_session(self, record: SessionRecord, error: SessionError) -> None:
        """End a session after its earlier requests, if it has not ended; from any thread, without waiting."""

        def end() -> None:
            self.requests.join()
            self._ask_to_end(record, error)

        self.turns.command(end)

    def _ask_to_end(self, record: SessionRecord, error: SessionError) -> None:
        def end() -> None:
            if record.error is None:
                self.sessions.end(record, error)

        self.requests.ask_session(record, Call(end))

    def end_all(self) -> None:
        """End every request, because the engine closes; called in a turn."""
        self._crew.is_closing = True
        self.requests.end_early_all(EngineClosedError("the engine closed before the request was done"))

    def check(self) -> None:
        """Raise InternalError if a rule of the tables is broken; called in a turn."""
        broken = self._processor.broken_rules()
        if broken:
            raise self._replies.internal_error("; ".join(broken))

    def take_timeline(self) -> Timeline:
        """Return the timeline so far; called in a turn."""
        return (self._replies.trace or Trace()).timeline()

    def _take_messages(self) -> None:
        arrivals_ns: list[int] = []
        for message in self.turns.take_messages():
            if isinstance(message, RequestGroup):
                if message.sessions is not None:
                    self._hear_of(message.sessions)
                arrivals_ns += [message.arrival_ns] * min(message.count, MANY_ARRIVALS)
                self._accept(message)
            elif isinstance(message, SessionCall):
                self._hear_of((message.record,))
                self.requests.ask_session(message.record, message)
            elif isinstance(message, Call):
                message.run()
            elif callable(message):
                message()
        if arrivals_ns:
            self._clock.note_arrivals(arrivals_ns)
        if self.turns.was_interrupted:
            self._heal()

    def _hear_of(self, records: Sequence[SessionRecord]) -> None:
        """Accept what sessions were asked by the door, before the items of the inbox, which follow it."""
        self.requests.join()
        for record in records:
            record.num_heard += 1

    def _accept(self, group: RequestGroup) -> None:
        self.requests.accept(group)
        if self.requests.refused_for is not None:
            self.requests.end_early_all(self.requests.refused_for)

    def _heal(self) -> None:
        """Count anew the requests that came, after a client was interrupted while it handed some in."""
        with self.turns.gate:
            self.turns.was_interrupted = False
            self._take_messages()
            self.requests.join()
            self.requests.tell_by_door()
            self._door.heal()
            of_models = [model.places for model in (*self._models.values(), *self._retired)]
            unseen = {places: [0, 0] for places in (self.places, *of_models)}
            for group in self._door.all():
                count = group.count - group.num_told
                for places in (self.places, group.model.places):
                    unseen[places][0] += count
                    unseen[places][1] += group.num_rows(count)
            for places, size in unseen.items():
                places.heal(Size(*size))

    def _note_launch(self, task: int) -> None:
        if self._replies.trace is not None:
            requests = [request for request, _ in self._processor.rows_in_flight(task)]
            self._replies.trace.launch(task, self.requests.sequences_of(requests))

    def _complete(self, location: int, done: Done) -> None:
        if done.failures:
            whose, failed = self._processor.rows_in_flight(done.task), self._processor.counts_of(done.task)[0]
            for failure in done.failures:
                self.requests.note_failure(*whose[failure.row], self._registry.types[failed], failure.error)
        notices = self._processor.complete(done.task, max(1, done.busy_ns))
        if self._replies.trace is not None:
            row = self._processor.tables.tasks[done.task]
            self._replies.trace.complete(row, location, self._registry.name_of(int(row["cell_type"])), done)
        self.requests.take_notices(notices)

    def _handle_dead_worker(self, location: int) -> None:
        """Fail what a dead worker ran, once; also the rest of its work, unless another worker takes its place."""
        self.requests.tell_by_door()
        cause, begun = self._crew.replace(location)
        error = DeviceError(f"worker {location} died: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        if begun is not None:
            for launch in begun:
                TaskView(launch.buffer).has_failed[:] = 1
                self.requests.take_notices(self._processor.complete(launch.task, 0), error)
            return
        self.requests.take_over_sessions()
        notices = self._processor.lose_worker(location)
        self.sessions.lose_worker(location, error)
        self.requests.take_notices(notices, error)
        if not self._crew.has_workers:
            self.requests.refused_for = EngineClosedError("the engine has no worker left")
            self.requests.end_early_all(error)
            self.turns.wake()  # wakes the timekeeper, which checks regions from now on

    def _release_retired_models(self) -> None:
        """Free retired models that no request or session needs; wake the threads that wait for the last request."""
        if self._processor.num_left_behind:
            return
        for model in [model for model in self._retired if self.sessions.give_up(model)]:
            self._retired.remove(model)
            for made, heir in self._registry.release(model.types):
                self._processor.remove_type(made.id, heir)
                for worker in self.workers:
                    worker.forget(made)
        while self._drains and self._is_drained():
            self._drains.pop().say()

    def _note_drain(self, drained: Awaited) -> bool:
        """Return whether nothing is unfinished; if something is, have the event set when it has ended."""
        if not self._is_drained():
            self._drains.append(drained)
        return self._is_drained()

    def _is_drained(self) -> bool:
        # A client that was interrupted may have taken places for requests that never came: these are counted anew.
        return self.requests.is_empty and not self.turns.has_messages() and not self.turns.was_interrupted

    @property
    def has_failed(self) -> bool:
        """True if a bug ended the engine."""
        return isinstance(self.turns.stopped, InternalError)

    def _look_ahead(self) -> None:
        """Note when the next turn is due, and wake the timekeeper if that is earlier than it knows."""
        next_ns, known_ns = self.requests.next_deadline_ns, self._next_ns
        self._door.note_late_at(next_ns)
        for wait_s in (self.sessions.until_expiry_s(), self._crew.check_every_s):
            if wait_s is not None:
                due_ns = self._clock_ns() + int(1e9 * wait_s)
                if known_ns is not None and abs(due_ns - known_ns) < SLACK_NS:
                    due_ns = known_ns  # the same time, computed again: the timekeeper need not wake
                next_ns = due_ns if next_ns is None else min(next_ns, due_ns)
        self._next_ns = next_ns
        if self._door.due or (next_ns is not None and (known_ns is None or next_ns < known_ns)):
            self.turns.wake()

    def _next_moment_s(self) -> float | None:
        next_ns = self._next_ns
        if not self._crew.has_workers and not self.regions.is_closed:
            return LOOK_EVERY_S  # no worker reads the regions
        return None if next_ns is None else max(0.0, (next_ns - self._clock_ns()) / 1e9)

    def _end(self, error: CellrtError) -> None:
        """Answer all clients that still wait, after the last turn."""
        self._replies.tell()
        for message in self.turns.take_messages():
            if isinstance(message, RequestGroup):
                self.requests.accept(message)
            elif isinstance(message, Call):
                message.fail(EngineClosedError(str(error)))
        self.requests.abandon_all(error)
        self.sessions.fail_calls(EngineClosedError(str(error)))
        self.is_over = True
        self.room.note_place()
        for drained in self._drains:
            drained.say()
        self._crew.end()
        self.fast_path = self._door.fast_path = None  # a cycle of references
        if self.after_turn is not None:
            self.after_turn()


def _note_watched(door: Door, turns: Turns, is_so: bool) -> None:
    """Have answers counted at once while clients wait for places, also those that were not counted yet."""
    door.is_watched(is_so)
    if is_so:
        turns.wake()
