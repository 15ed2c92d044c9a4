"""The engine: what a user talks to. Safe from many threads and from asyncio; several engines live in one process."""

from __future__ import annotations

import itertools
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from cellrt.core.policy import BatchMakerPolicy, Job, lane_of
from cellrt.core.processor import Limits, Processor, SchedulerSettings
from cellrt.core.tables import NUM_PRIORITIES
from cellrt.core.warm_up import warm_up
from cellrt.engine.future import Channel, RequestFuture, Result, Stream, as_awaitable
from cellrt.engine.manager import Manager
from cellrt.engine.options import check_instance, check_numbers, check_workers
from cellrt.engine.patience import announced
from cellrt.engine.registration import Registrar
from cellrt.engine.registry import Model, Plan, Registry
from cellrt.engine.session import Session
from cellrt.engine.session_store import SessionLimits, SessionRecord, SessionStore
from cellrt.engine.trace import Trace
from cellrt.engine.waiting import LiveRequest
from cellrt.errors import (
    DefinitionError,
    EngineClosedError,
    OverloadError,
    RequestError,
    SessionError,
    UnknownModelError,
)
from cellrt.graph.unfolder import Unfolder
from cellrt.view.cell_graph import CellGraph
from cellrt.view.timeline import Timeline
from cellrt.worker.arenas import Arenas
from cellrt.worker.device.executor import DeviceOptions
from cellrt.worker.make import DEVICE_QUEUE_DEPTH, arenas_on, device_names, make_worker, open_device

T = TypeVar("T")


class Engine:
    """Serves models: ``register`` them, then ``submit`` requests.

    The first engine ever made on a machine compiles the scheduler, which takes a minute or two; it is kept on disk.

    Args:
        workers: number of CPU workers, or a list of devices: ["cuda:0", "cuda:1"]. Default: one CPU worker a core.
        threads_per_worker: torch threads of each worker. One is best unless there is a single worker.
        policy: order of requests; default BatchMaker's.
        settings: of the scheduler, with a switch for each of its optimisations.
        limits: sizes of the tables.
        sessions: how many sessions are kept, where, and for how long.
        arena_bytes: memory for the rows of one kind (shape and dtype) at each worker; the host, which holds inputs and
            results, gets four times that.
        max_queue: requests that may be unfinished at once; ``submit`` raises OverloadError beyond.
        max_nodes: most nodes of one request's graph.
        queue_depth: tasks a worker may have before the next is formed. A CPU worker forms its own next task, so one is
            enough, and leaves most time to join; a GPU has four, so that it never runs dry.
        device_options: sizes and switches of GPU workers.
        trace: keep a timeline (see ``timeline``); costs memory for every task.
        debug: check every invariant whenever nothing runs (slow).
    """

    def __init__(
        self,
        workers: int | Sequence[str] | None = None,
        *,
        threads_per_worker: int = 1,
        policy: BatchMakerPolicy | None = None,
        settings: SchedulerSettings | None = None,
        limits: Limits | None = None,
        sessions: SessionLimits | None = None,
        arena_bytes: int = 64 << 20,
        max_queue: int = 8192,
        max_nodes: int = 65_535,
        queue_depth: int | None = None,
        device_options: DeviceOptions | None = None,
        trace: bool = False,
        debug: bool = False,
    ) -> None:
        check_workers(workers)
        check_numbers(
            threads_per_worker=threads_per_worker,
            arena_bytes=arena_bytes,
            max_queue=max_queue,
            max_nodes=max_nodes,
            queue_depth=1 if queue_depth is None else queue_depth,
        )
        check_instance("policy", policy, BatchMakerPolicy)
        check_instance("settings", settings, SchedulerSettings)
        check_instance("limits", limits, Limits)
        check_instance("sessions", sessions, SessionLimits)
        check_instance("device_options", device_options, DeviceOptions)
        with announced("cellrt compiles its scheduler, once for this machine: a minute or two"):
            warm_up()
        names, options = device_names(workers), device_options or DeviceOptions()
        count = len(names)
        self._devices = [open_device(name, options) for name in names]
        if queue_depth is None:
            queue_depth = 1 if names[:1] == ["cpu"] else DEVICE_QUEUE_DEPTH
        policy = policy or BatchMakerPolicy()
        settings = replace(settings or SchedulerSettings(), order_by_arrival=policy.order_by_arrival)
        self._processor = Processor(count, limits, settings)
        self._registry = Registry(self._processor, max_nodes)
        self._arenas = [Arenas(), *map(arenas_on, self._devices)]
        self._max_queue, self._policy = max_queue, policy
        self._manager = Manager(
            self._processor, self._arenas, self._registry.types, queue_depth, debug, sessions or SessionLimits()
        )
        if trace:
            self._manager.trace = Trace()
        self._registrar = Registrar(
            self._registry,
            self._processor,
            self._arenas,
            arena_bytes,
            self._devices[0],
            threads_per_worker,
            self._on_manager,
        )
        for location in range(1, count + 1):
            worker = make_worker(
                self._devices[location - 1],
                options,
                location,
                self._arenas,
                self._registry.types,
                self._manager.take_turns,
                self._manager.has_news,
                self._manager.wake_timekeeper,
                threads_per_worker,
            )
            self._manager.workers.append(worker)
        self._thread = threading.Thread(target=self._manager.keep_time, name="cellrt-timekeeper", daemon=True)
        self._num_submitted = 0
        self._register_lock = threading.Lock()
        self._submit_lock = threading.RLock()  # a callback may submit again
        self._sequence = itertools.count(1)
        self._closed = False
        for worker in self._manager.workers:
            worker.start()
        self._thread.start()
        # Futures and sessions hold their engine: nobody waits for one that is dropped.
        weakref.finalize(self, _abandon, self._manager).atexit = False

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.drain()
        self.close()

    def __repr__(self) -> str:
        return f"Engine({len(self._manager.workers)} workers, models {list(self._registry.models)})"

    def register(self, unfolder: Unfolder, *, priorities: dict[str, int] | None = None, warm_up: bool = True) -> None:
        """Registers a model: unfolds its example, adds its cells, allocates arenas, measures its cells.

        Args:
            unfolder: as made by ``cellrt.unfold``.
            priorities: cell priorities by cell name, over the cells' own and the default from the type graph.
            warm_up: run each new cell at a few batch sizes, so that the scheduler knows its step time; a RuntimeWarning
                tells of one whose rows influence each other (see ``Cell.check_row_wise``).

        Raises DefinitionError if the example does not unfold or ``priorities`` names no cell of it; EngineClosedError.
        """
        with self._register_lock:
            self._registrar.register(unfolder, priorities or {}, warm_up)

    def submit(self, model: str, request: Any, *, deadline: float | None = None, priority: int = 1) -> RequestFuture:
        """Submits a request; returns at once with a future of its results (a dict of tensors on the CPU).

        Args:
            model: name of a registered model.
            request: what the model's unfolder takes; unfolded and checked here, in the caller's thread.
            deadline: seconds from now; the request ends with DeadlineError if it is not done by then.
            priority: 0 (lowest) to 3.

        Raises UnknownModelError, RequestError, RequestTooLargeError, OverloadError, EngineClosedError.
        """
        return self._submit(model, request, deadline, priority, None)

    def submit_many(
        self, model: str, requests: Iterable[Any], *, deadline: float | None = None, priority: int = 1
    ) -> list[RequestFuture]:
        """Submits several requests, all or none: raises as ``submit`` does, before any is submitted."""
        known = self._model(model)
        plans = [known.plan(request) for request in requests]
        return self._enqueue(model, plans, deadline, priority, None)

    async def infer(self, model: str, request: Any, *, deadline: float | None = None, priority: int = 1) -> Result:
        """Submits a request and awaits its results; cancelling the task cancels the request."""
        result: Result = await as_awaitable(self.submit(model, request, deadline=deadline, priority=priority))
        return result

    def stream(self, model: str, request: Any, *, deadline: float | None = None, priority: int = 1) -> Stream:
        """Submits a request and returns its steps as they complete: for every result with steps, one row a step."""
        channel = Channel()
        return Stream(self._submit(model, request, deadline, priority, channel), channel)

    def session(self, model: str, id: str | None = None, *, state: bytes | None = None) -> Session:
        """The open session of a model with that id, or a new one (with a random id if none is given).

        Args:
            model: name of a registered model that keeps state: see ``Graph.chain(keep=True)``.
            id: chosen by the client; ids of different models have nothing to do with each other.
            state: what ``Session.export`` gave; the session goes on from there.

        Raises UnknownModelError, OverloadError if too many sessions are open, RequestError if the model keeps no state,
        SessionError if ``state`` is not one of this model's cells.
        """
        if self._closed:
            raise EngineClosedError("the engine is closed")
        states = self._model(model).states
        if not states:
            raise RequestError(f"model {model!r} keeps no state: its unfolder uses no keep=True, and no graph.keep")
        record, is_new = self._manager.sessions.open(model, id, states)
        made = Session(
            record,
            [self._registry.kinds[layout.kind] for layout in states],
            lambda request, deadline, priority, streamed: self._submit_in(
                record, request, deadline, priority, streamed
            ),
            lambda action: self._act_in(record, action),
        )
        if is_new:
            self._manager.command(lambda: self._manager.act_in_session(record, lambda: None))
        if state is not None:
            try:
                made.restore(state)
            except BaseException:
                if is_new:
                    made.close()
                raise
        return made

    def cancel(self, future: RequestFuture) -> bool:
        """Asks to cancel a request, at any moment; False if it has ended."""
        return future.cancel()

    def graph(self, model: str, request: Any) -> CellGraph:
        """The cell graph of a request, to look at; nothing is run."""
        shape = self._model(model).plan(request).shape
        return CellGraph(shape, [made.cell for made in self._registry.types])

    def drain(self, timeout: float | None = None) -> bool:
        """Waits until every submitted request has ended and its callbacks have run; False on a time-out, in seconds."""
        self._manager.refuse_in_callback()
        end = None if timeout is None else time.monotonic() + timeout
        while self._manager.num_answered < self._num_submitted and self._thread.is_alive():
            if end is not None and time.monotonic() >= end:
                return False
            time.sleep(0.001)
        return True

    def close(self, timeout: float = 30.0) -> None:
        """Ends the engine: requests that are not done end with EngineClosedError; threads end. May be called twice."""
        self._manager.refuse_in_callback()
        with self._submit_lock:
            if self._closed:
                return
            self._closed = True
        # Only when nothing can be launched any more may the workers be told to end.
        is_cancelled = threading.Event()
        self._manager.command(lambda: self._manager.cancel_all(is_cancelled))
        end = time.monotonic() + timeout
        while not is_cancelled.wait(0.1) and self._thread.is_alive() and time.monotonic() < end:
            pass
        for worker in self._manager.workers:
            worker.close(timeout)
        self._manager.command(self._manager.stop)
        self._thread.join(timeout)

    def statistics(self) -> dict[str, Any]:
        """Counts so far: requests by end, tasks and mean batch by cell, sessions, latency of the last requests.

        ``retried``: tasks of a cell that failed and were tried again in halves, to find the rows to blame.

        Cells of one name are told apart by the beginning of their identity.
        """
        sessions = self._manager.sessions
        return {
            "unfinished": self._num_unfinished,
            **self._manager.statistics.snapshot(self._registry.types),
            "sessions": {
                "open": len(sessions),
                "resident": sessions.num_resident,
                "evictions": sessions.num_evictions,
            },
        }

    def timeline(self) -> Timeline:
        """What ran when, since the start; needs ``trace=True``."""
        if self._manager.trace is None:
            raise DefinitionError("timeline: make the engine with trace=True")
        return self._on_manager(self._manager.take_timeline)

    def check(self) -> None:
        """Checks every invariant of the scheduler's state; raises InternalError naming the broken ones."""
        self._on_manager(self._manager._check)

    def _model(self, name: object) -> Model:
        if not isinstance(name, str):
            given = f"{name!r}; its name is {name.name!r}" if isinstance(name, Unfolder) else type(name).__name__
            raise UnknownModelError(f"expected the name of a registered model, got {given}")
        model = self._registry.models.get(name)
        if model is None:
            raise UnknownModelError(f"model {name!r} is not registered; registered are {sorted(self._registry.models)}")
        return model

    def _submit(
        self, name: str, request: Any, deadline: float | None, priority: int, channel: Channel | None
    ) -> RequestFuture:
        return self._enqueue(name, [self._model(name).plan(request)], deadline, priority, channel)[0]

    def _submit_in(
        self, session: SessionRecord, request: Any, deadline: float | None, priority: int, streamed: bool
    ) -> RequestFuture | Stream:
        """Submits a request of a session."""
        if session.error is not None:
            raise SessionError(str(session.error))
        plan = self._model(session.model).plan(request)
        if plan.states != session.states:
            kept, wanted = ([layout.name for layout in states] for states in (plan.states, session.states))
            raise RequestError(f"{session}: expected a request that keeps {wanted}, got one that keeps {kept}")
        channel = Channel() if streamed else None
        future = self._enqueue(session.model, [plan], deadline, priority, channel, session)[0]
        return future if channel is None else Stream(future, channel)

    def _act_in(self, session: SessionRecord, action: Callable[[SessionStore], T]) -> T:
        """Calls a function of the session store when what the session was asked before is done."""

        def act() -> T:
            if session.error is not None:
                raise SessionError(str(session.error))
            return action(self._manager.sessions)

        return self._on_manager(act, session)

    def _enqueue(
        self,
        name: str,
        plans: Sequence[Plan],
        deadline: float | None,
        priority: int,
        channel: Channel | None,
        session: SessionRecord | None = None,
    ) -> list[RequestFuture]:
        """Hands in requests, all or none."""
        if not isinstance(priority, int) or not 0 <= priority < NUM_PRIORITIES:
            raise RequestError(f"priority: expected 0 to {NUM_PRIORITIES - 1}, got {priority!r}")
        if deadline is not None and not (isinstance(deadline, int | float) and 0 < deadline < math.inf):
            raise RequestError(f"deadline: expected seconds from now, more than 0, got {deadline!r}")
        now_ns = time.perf_counter_ns()
        deadline_ns = None if deadline is None else now_ns + int(deadline * 1e9)
        requests: list[LiveRequest] = []
        with self._submit_lock:
            if self._closed or not self._thread.is_alive():
                raise EngineClosedError("the engine is closed")
            if not self._manager.has_workers:
                raise EngineClosedError("the engine has no worker left")
            if self._num_unfinished + len(plans) > self._max_queue:
                more = f"; {len(plans)} more came" if len(plans) > 1 else ""
                raise OverloadError(
                    f"{self._num_unfinished} requests are unfinished, the engine takes {self._max_queue}{more}"
                )
            for plan in plans:
                job = Job(next(self._sequence), plan.num_nodes, priority, deadline)
                order, lane = float(self._policy.admission_key(job)), lane_of(self._policy, job)
                future = RequestFuture(self._manager)
                requests.append(
                    LiveRequest(future, plan, name, job, now_ns, deadline_ns, channel, order, lane, session)
                )
            self._num_submitted += len(plans)
            self._manager.post(requests)
        return [request.future for request in requests]

    @property
    def _num_unfinished(self) -> int:
        return self._num_submitted - self._manager.num_ended

    def _on_manager(self, function: Callable[[], T], session: SessionRecord | None = None) -> T:
        """Runs a function in a turn of the manager, or in its place in a session, and returns its result."""
        self._manager.refuse_in_callback()
        if self._closed or not self._thread.is_alive():
            raise EngineClosedError("the engine is closed")
        done = threading.Event()
        results: list[T] = []
        errors: list[BaseException] = []

        def message() -> None:
            try:
                results.append(function())
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        if session is None:
            self._manager.command(message)
        else:
            self._manager.command(lambda: self._manager.act_in_session(session, message))
        while not done.wait(1.0):
            if not self._thread.is_alive() and not done.is_set():
                raise EngineClosedError("the engine closed meanwhile")
        if errors:
            raise errors[0]
        return results[0]


def _abandon(manager: Manager) -> None:
    """Ends the threads of an engine that was dropped without ``close``; waits for nothing."""
    manager.command(lambda: manager.cancel_all(threading.Event()))
    manager.command(manager.end_workers)
    manager.command(manager.stop)
