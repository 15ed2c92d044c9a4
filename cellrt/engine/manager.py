"""The manager: owns the processor, the workers and every live request, and takes turns of one loop.

A *turn* takes in what happened, admits, schedules, launches and replies. One thread at a time has the turn
(``_turn_lock``): a worker takes one after each task, so that it launches its own next task and answers its
clients without waking another thread; the timekeeper takes one for deadlines, cancellations and commands.
Clients never do: a turn is not interrupted by their signals. Who finds the turn taken leaves its news; the
holder looks for news after giving the turn back.

Crossings between threads: the inbox (clients to the holder), the workers' queues (holder to worker), their
counters and finished lists (worker to holder), the alarm (anybody to the timekeeper). Everything else belongs
to the holder of the turn.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue

import numpy as np
from numpy.typing import NDArray

from cellrt.core import task_layout as layout
from cellrt.core.finish import NOTICE_DONE, NOTICE_FAILED, NOTICE_RELEASED, NOTICE_STEPS
from cellrt.core.processor import Notice, Processor
from cellrt.core.story import read_story
from cellrt.core.tables import HOST
from cellrt.core.validate import broken_rules
from cellrt.engine.future import RequestFuture, Result
from cellrt.engine.session_store import SessionLimits, SessionRecord, SessionStore
from cellrt.engine.statistics import Statistics
from cellrt.engine.trace import Trace
from cellrt.engine.waiting import LiveRequest, WaitingRequests
from cellrt.errors import (
    CancelledError,
    CellError,
    CellrtError,
    DeadlineError,
    DeviceError,
    EngineClosedError,
    InternalError,
    OverloadError,
    RequestError,
    SessionError,
)
from cellrt.view.timeline import Timeline
from cellrt.worker.arenas import Arenas
from cellrt.worker.base import Done, Worker
from cellrt.worker.cell_type import CellType

IDLE_WAIT_S = 1.0
STORY_LINES = 40


Message = LiveRequest | Callable[[], None]


class Manager:
    """The loop: admit, schedule, launch, complete, reply."""

    def __init__(
        self,
        processor: Processor,
        arenas: list[Arenas],
        types: list[CellType],
        queue_depth: int,
        debug: bool,
        session_limits: SessionLimits,
    ) -> None:
        self.processor = processor
        self.sessions = SessionStore(session_limits, processor, arenas)
        self.inbox: SimpleQueue[Message] = SimpleQueue()
        self.statistics = Statistics()
        self.trace: Trace | None = None
        self.workers: list[Worker] = []
        self.num_ended = 0
        self.num_answered = 0
        self._arenas = arenas
        self._types = types
        self._queue_depth = queue_depth
        self._debug = debug
        self._waiting = WaitingRequests()
        self._live: dict[int, LiveRequest] = {}
        self._by_future: dict[RequestFuture, LiveRequest] = {}
        self._deadlines: list[tuple[int, int, LiveRequest]] = []
        self._lost: set[int] = set()
        self._released: list[LiveRequest] = []
        self._closing = False
        self._stopped: CellrtError | None = None
        self._turn_lock = threading.Lock()
        self._turn_thread = -1
        self._alarm: SimpleQueue[None] = SimpleQueue()

    def keep_time(self) -> None:
        """The timekeeper's thread: takes a turn at each deadline and alarm, until ``stop``; then ends what is left."""
        while self._stopped is None:
            with contextlib.suppress(Empty):
                self._alarm.get(timeout=self._wait_s())
            self.take_turns()
        with self._turn_lock:
            self._turn_thread = threading.get_ident()
            self._end_all(self._stopped)
            self._turn_thread = -1

    def refuse_in_callback(self) -> None:
        """Raises RequestError if the calling thread has the turn: then it is in a future's callback, and would wait for
        itself."""
        if self._turn_thread == threading.get_ident():
            raise RequestError("a future's callback cannot wait for its engine: call this from another thread")

    @property
    def has_workers(self) -> bool:
        """Whether a worker is left."""
        return len(self._lost) < len(self.workers)

    def post(self, requests: Sequence[LiveRequest]) -> None:
        """Hands in requests with one deadline, from any thread; a worker that is idle takes the turn."""
        for request in requests:
            self.inbox.put(request)
        for worker in self.workers:
            if worker.wake():
                return
        # A worker that is busy takes a turn when its task ends. A deadline cannot wait for that.
        if (requests and requests[0].deadline_ns is not None) or not self.has_workers:
            self._alarm.put(None)
        if self._stopped is not None:
            self.take_turns()  # to be told so: nobody else may look any more

    def command(self, message: Callable[[], None]) -> None:
        """Hands in something to be called in a turn, from any thread; the timekeeper takes it."""
        self.inbox.put(message)
        self._alarm.put(None)

    def wake_timekeeper(self) -> None:
        """Has the timekeeper take a turn; from any thread."""
        self._alarm.put(None)

    def has_news(self) -> bool:
        """Whether a turn would find something: safe from any thread."""
        return not self.inbox.empty() or any(worker.has_finished() for worker in self.workers)

    def take_turns(self) -> bool:
        """Takes the turn unless another thread has it (then False); called by workers and the timekeeper.

        A worker stops after two turns in a row, for the sake of its tasks, and leaves further news to the timekeeper.
        """
        for _ in range(2):
            if not self._turn_lock.acquire(blocking=False):
                return False
            self._turn_thread = threading.get_ident()
            try:
                if self._stopped is None:
                    self.turn()
                else:
                    self._end_all(self._stopped)
            except BaseException as error:  # a bug: all requests end rather than hang
                self._stopped = InternalError(f"the manager failed: {type(error).__name__}: {error}")
                self._stopped.__cause__ = error
                self._alarm.put(None)
            finally:
                self._turn_thread = -1
                self._turn_lock.release()
            if not self.has_news():
                return True
        self._alarm.put(None)
        return True

    def turn(self) -> None:
        """One turn: take in what happened, then keep the workers busy."""
        self._take_messages()
        self.processor.set_time(time.perf_counter_ns())
        for location, worker in enumerate(self.workers, start=1):
            # Looked at first: whatever a dead worker completed before is then there to be polled.
            is_dead = worker.error is not None or not (worker.is_alive() or self._closing)
            for done in worker.poll():
                self._complete(location, done)
            if is_dead and location not in self._lost:
                self._lose(location)
        self._expire()
        self._admit()
        for depth in range(self._queue_depth):  # whoever is idle first
            for location, worker in enumerate(self.workers, start=1):
                while location not in self._lost and worker.num_outstanding <= depth:
                    if not self._launch(location, worker):
                        break
        if self._debug and not self.processor.num_running:
            self._check()

    def end_workers(self) -> None:
        """Tells the workers to end, without waiting; called as a message, when nothing runs any more."""
        for worker in self.workers:
            worker.end()

    def stop(self) -> None:
        """Ends the loop after this turn; called as a message."""
        self._stopped = EngineClosedError("the engine is closed")

    def abandon(self) -> None:
        """Ends all requests and threads soon, and waits for nothing: for an engine that was dropped, and at exit."""
        self.command(lambda: self.cancel_all(threading.Event()))
        self.command(self.end_workers)
        self.command(self.stop)

    def ask_to_cancel(self, future: RequestFuture) -> None:
        """Has a request ended early, if it has not ended; from any thread."""
        self.command(lambda: self._cancel(future))

    def _cancel(self, future: RequestFuture) -> None:
        request = self._by_future.get(future)
        if request is not None:
            self._end(request, CancelledError(f"model {request.model!r}: the request was cancelled"))

    def cancel_all(self, is_done: threading.Event) -> None:
        """Cancels whatever has not ended, for good; called as a message."""
        self._closing = True
        for request in list(self._by_future.values()):
            self._end(
                request, EngineClosedError(f"model {request.model!r}: the engine closed before the request was done")
            )
        is_done.set()

    def story(self, request: LiveRequest) -> str:
        """The last events of a request, a line each."""
        events = read_story(self.processor.tables, sequence=request.job.sequence)
        return "\n".join(str(event) for event in events[-STORY_LINES:])

    def _take_messages(self) -> None:
        arrivals_ns: list[int] = []
        while not self.inbox.empty():
            message = self.inbox.get()
            if isinstance(message, LiveRequest):
                arrivals_ns.append(message.arrival_ns)
                self._accept(message)
            else:
                message()
        self.processor.note_arrivals(arrivals_ns)

    def _wait_s(self) -> float:
        try:
            first_ns = self._deadlines[0][0]
        except IndexError:  # none, or a turn of another thread has just taken the last
            return IDLE_WAIT_S
        return min(IDLE_WAIT_S, max(0.0, (first_ns - time.perf_counter_ns()) / 1e9))

    def _accept(self, request: LiveRequest) -> None:
        if not self.has_workers:
            self._answer(request, EngineClosedError("the engine has no worker left"))
            return
        self._by_future[request.future] = request
        if request.session is None:
            self._waiting.add(request)
        else:
            self.act_in_session(request.session, request)
        if request.deadline_ns is not None:
            heapq.heappush(self._deadlines, (request.deadline_ns, request.job.sequence, request))
            if self._deadlines[0][2] is request:
                self._alarm.put(None)

    def _admit(self) -> None:
        while (request := self._waiting.first()) is not None:
            if request.session is not None and request.session.error is not None:
                self._end(request, SessionError(str(request.session.error)))
                continue
            sequence, is_streamed = request.job.sequence, request.channel is not None
            session = request.session.id if request.session is not None else -1
            admitted = self.processor.admit(request.plan.shape, sequence, request.lane, is_streamed, session)
            if admitted is None:
                if not self.processor.has_rows(request.plan.shape) and self.sessions.evict_some():
                    continue
                return
            request.id, rows = admitted
            request.results_at = int(rows[-1])
            self._waiting.count_admitted()
            self._live[request.id] = request
            self._copy_in(request, rows)

    def _copy_in(self, request: LiveRequest, rows: NDArray[np.int32]) -> None:
        """Copies a request's tensors to their host rows."""
        first = 0
        for kind, values in request.plan.externals:
            self._arenas[HOST].put(kind, rows[first : first + len(values)], values)
            first += len(values)
        if request.session is not None:
            for layout, value in zip(request.plan.states, request.session.saved or ()):
                self._arenas[HOST].put(layout.kind, rows[first : first + 1], value[None])
                first += 1
            self.sessions.note_admitted(request.session)

    def act_in_session(self, record: SessionRecord, action: Message) -> None:
        """Runs a request of a session, or calls a function in a turn, when what came before it is done."""
        record.waiting.append(action)
        self._continue_session(record)

    def _continue_session(self, record: SessionRecord) -> None:
        while record.running is None and record.waiting:
            action = record.waiting.popleft()
            if not isinstance(action, LiveRequest):
                action()
            elif record.error is not None:
                self._end(action, SessionError(str(record.error)))
            elif not action.ended:
                try:
                    self.sessions.note_waiting(record)
                except OverloadError as error:
                    self._end(action, error)
                    continue
                record.running = action
                self._waiting.add(action)
        if record.running is None and record.error is None:
            self.sessions.note_idle(record)

    def _end_in_session(self, request: LiveRequest) -> None:
        """Goes on with the session of a request whose rows are released."""
        record = request.session
        if record is not None and record.running is request:
            self.sessions.note_released(record)
            self._continue_session(record)

    def _launch(self, location: int, worker: Worker) -> bool:
        """Forms tasks for a worker and queues them; False if nothing is ready for it."""
        idle = sum(1 for k, other in enumerate(self.workers, 1) if not other.num_outstanding and k not in self._lost)
        tasks = self.processor.schedule(location, idle)
        for task in tasks:
            row = self.processor.tables.tasks[task]
            if self.trace is not None:
                self.trace.launch(task, tuple(self._live[k].job.sequence for k in self._requests_of(task)))
            self.statistics.count_task(int(row["cell_type"]), int(row["rows"]), int(row["positions"]))
            worker.launch(task, int(row["cell_type"]), self.processor.task_buffer(task))
        return bool(tasks)

    def _requests_of(self, task: int) -> list[int]:
        """Request id of each row of a task."""
        tables, buffer = self.processor.tables, self.processor.task_buffer(task)
        nodes = buffer[buffer[layout.H_NODES] :][: buffer[layout.H_ROWS]]
        requests: list[int] = tables.subgraphs["request"][tables.nodes["subgraph"][nodes]].tolist()
        return requests

    def _complete(self, location: int, done: Done) -> None:
        if done.failures:
            requests = self._requests_of(done.task)
            for failure in done.failures:
                live = self._live.get(requests[failure.row])
                if live is not None and live.error is None:
                    live.error = CellError(f"model {live.model!r}: {failure.error}")
                    cause = failure.error.__cause__
                    live.error.__cause__ = failure.error if cause is None else cause
        if self.trace is not None:
            row = self.processor.tables.tasks[done.task]
            self.trace.complete(row, location, self._types[int(row["cell_type"])].cell.name, done)
        self._take_notices(self.processor.complete(done.task, done.busy_ns))
        if self._released:
            released, self._released = self._released, []
            self.processor.release([request.id for request in released])
            for request in released:
                self._end_in_session(request)

    def _take_notices(self, notices: list[Notice], error: CellrtError | None = None) -> None:
        for request_id, what in notices:
            request = self._live[request_id]
            if what == NOTICE_DONE:
                self._finish(request)
            elif what == NOTICE_FAILED:
                self._reply(request, error or request.error or InternalError("a cell failed without an error"))
            elif what == NOTICE_RELEASED:
                del self._live[request_id]
                self._end_in_session(request)
            elif what == NOTICE_STEPS:
                self._stream(request)

    def _finish(self, request: LiveRequest) -> None:
        """Reads the results of a complete request, gives its rows back and replies."""
        if request.channel is not None:
            self._stream(request)
        rows = self.processor.results(request.results_at, request.plan.shape.num_results)
        results: Result = {}
        host = self._arenas[HOST]
        for result in request.plan.results:
            if len(result.positions) == 1 and result.is_single:
                results[result.name] = host.get_row(result.kind, int(rows[result.positions[0]]))
                continue
            wanted = _at(rows, result.positions)
            if result.is_loop:
                wanted = wanted[wanted >= 0]
            results[result.name] = (
                host.get_row(result.kind, int(wanted[-1])) if result.is_single else host.get(result.kind, wanted)
            )
        self._released.append(request)
        del self._live[request.id]
        self._reply(request, results)

    def _stream(self, request: LiveRequest) -> None:
        """Sends the steps that are complete in all results that have steps."""
        if request.channel is None or request.ended:
            return
        rows = self.processor.ready_results(request.results_at, request.plan.shape.num_results)
        stepped = [(result, _at(rows, result.positions)) for result in request.plan.results if not result.is_single]
        ready = min((_num_leading(wanted) for _, wanted in stepped), default=0)
        for step in range(request.num_streamed, ready):
            request.channel.put(
                {r.name: self._arenas[HOST].get(r.kind, wanted[step : step + 1])[0] for r, wanted in stepped}
            )
            request.num_streamed = step + 1

    def _reply(self, request: LiveRequest, outcome: Result | CellrtError) -> None:
        """Ends a request towards its client, exactly once."""
        if request.ended:
            return
        request.ended = True
        del self._by_future[request.future]
        now_ns = time.perf_counter_ns()
        self.statistics.count_end(outcome if isinstance(outcome, CellrtError) else None, now_ns - request.arrival_ns)
        if self.trace is not None:
            self.trace.end(request, now_ns)
        self._answer(request, outcome)

    def _answer(self, request: LiveRequest, outcome: Result | CellrtError) -> None:
        """Frees the request's place in the queue, then tells the client and runs its callbacks."""
        self.num_ended += 1
        request.future.finish(outcome)
        self.num_answered += 1

    def _end(self, request: LiveRequest, error: CellrtError) -> None:
        """Ends a request early; its rows come back when nothing of it is in flight."""
        if request.ended:
            return
        is_released = request.id < 0
        if request.id >= 0 and self.processor.cancel(request.id):
            del self._live[request.id]
            is_released = True
        self._reply(request, error)
        if is_released:
            self._end_in_session(request)

    def _expire(self) -> None:
        now_ns = time.perf_counter_ns()
        while self._deadlines and (self._deadlines[0][0] <= now_ns or self._deadlines[0][2].ended):
            _, _, request = heapq.heappop(self._deadlines)
            if not request.ended:
                allowed = request.job.deadline_s
                self._end(request, DeadlineError(f"model {request.model!r}: not done within {allowed} s"))
        self.sessions.expire()

    def _lose(self, location: int) -> None:
        """A worker died: what was on it fails, the others go on."""
        self._lost.add(location)
        cause = self.workers[location - 1].error
        error = DeviceError(f"worker {location} died: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        notices = self.processor.lose_worker(location)
        self.sessions.lose_worker(location, error)
        self._take_notices(notices, error)
        if not self.has_workers:
            for request in list(self._by_future.values()):
                self._end(request, error)

    def _end_all(self, error: CellrtError) -> None:
        """After the loop: whoever still waits gets an answer."""
        while not self.inbox.empty():
            message = self.inbox.get()
            if isinstance(message, LiveRequest):
                self._answer(message, error)
            else:
                message()
        for request in list(self._by_future.values()):
            self._reply(request, error)

    def _check(self) -> None:
        broken = broken_rules(self.processor.tables)
        if broken:
            raise InternalError("; ".join(broken))

    def take_timeline(self) -> Timeline:
        """The trace so far; called as a message."""
        return (self.trace or Trace()).timeline()


def _at(rows: NDArray[np.int32], positions: Sequence[int]) -> NDArray[np.int32]:
    """Result rows at these positions."""
    if isinstance(positions, range):
        return rows[positions.start : positions.stop]
    return rows[list(positions)]


def _num_leading(rows: NDArray[np.int32]) -> int:
    """How many results are there before the first that is not."""
    missing = np.flatnonzero(rows < 0)
    return int(missing[0]) if missing.size else len(rows)
