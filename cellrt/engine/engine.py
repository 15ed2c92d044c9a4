"""The engine, which a user calls. It is safe from threads and asyncio; a process may have several engines."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from cellrt.core.processor import Processor
from cellrt.core.scheduling.policies import POLICIES
from cellrt.core.scheduling.policy import Policy, policy_of
from cellrt.core.state.settings import Limits, SchedulerSettings
from cellrt.engine.arena_sizes import ArenaBytes, ArenaSizes
from cellrt.engine.cell_compiler import CellCompiler, CompileMode
from cellrt.engine.compilation import warm_up_told
from cellrt.engine.due import Due
from cellrt.engine.explanation import explain, explain_request
from cellrt.engine.frozen import HEAP
from cellrt.engine.future import RequestFuture
from cellrt.engine.manager import Manager
from cellrt.engine.occupancy import ready_nodes, rows_by_place, session_bytes_by_place
from cellrt.engine.option_checks import check_instance, check_number_or_none, check_numbers, check_workers
from cellrt.engine.places import QueueLimit
from cellrt.engine.registration import Registrar
from cellrt.engine.registry import Model, Registry
from cellrt.engine.request_group import RequestGroup
from cellrt.engine.serving import CLOSE_S, Serving, check_registration, check_timeout
from cellrt.engine.session import Session, records_of
from cellrt.engine.session_limits import SessionLimits
from cellrt.engine.statistics import forms_told
from cellrt.engine.stream import Channel
from cellrt.engine.submission import Submission
from cellrt.engine.trace import Trace
from cellrt.errors import DefinitionError, EngineClosedError, RequestError, UnknownModelError
from cellrt.graph.unfolder import Unfolder
from cellrt.native.row_types import Rows
from cellrt.view.cell_graph import CellGraph
from cellrt.view.timeline import Timeline
from cellrt.worker.device.executor import DeviceOptions
from cellrt.worker.make import (
    CPU,
    CPU_QUEUE_DEPTH,
    DEVICE_QUEUE_DEPTH,
    device_names,
    loops_ahead,
    make_arenas,
    memory_of,
    open_device,
    worker_maker,
)
from cellrt.worker.turn_words import make_words

T = TypeVar("T")


class Engine(Serving):
    """Serves models: ``register`` them, then ``submit`` requests.

    The first engine of an installation compiles the scheduler, which takes some minutes; it is kept on disk.

    Args:
        workers: number of CPU workers, or a list of devices: ["cuda:0", "cuda:1"]. Default: one CPU worker a core.
        threads_per_worker: torch threads of each worker. One is best unless there is a single worker.
        policy: order of requests: a ``Policy``, the name of one that is there, or "module:attribute"; default
            "batchmaker".
        settings: the scheduler's settings, with a switch for each of its optimisations.
        limits: sizes of the tables.
        sessions: how many sessions are kept, where, and for how long.
        arena_bytes: memory for the rows of one kind (shape and dtype) at each worker; the host, which holds inputs and
            results, gets four times that. Default: up to 64 MB, of little free memory less, and more where four full
            batches need it.
        page_bytes: the same for the pages of states that grow (``cellrt.grows``). Default: at all places together a
            third of the memory that is free (control groups count), on a GPU a quarter of its own; of each further
            model that brings kinds of pages, of what is left. A CPU's memory is taken as it is first used.
        max_queue, max_queue_rows: requests, and rows of all their nodes (a loop's: up to its limit), that may be
            unfinished at once; ``submit`` raises OverloadError beyond.
        max_nodes: most nodes of one request's graph.
        queue_depth: tasks a worker may have before the next is formed. A CPU worker forms its own next task, so one is
            enough, and leaves most time to join; a GPU has four, so that it never runs dry.
        device_options: sizes and switches of GPU workers.
        compile: whether cells without a compiled form of their own get one from AOTInductor, on CPU workers:
            "background": they are served as they are until it is there; "wait": ``register`` waits for it; "off".
            Default: what the environment's ``CELLRT_COMPILE`` says, or "background". It takes 10 to 60 seconds a cell,
            once for a machine, in a process of its own that ends with this one, and needs a C++ compiler.
            ``statistics`` says which form runs, and why one is eager.
        freeze: after each registration collect garbage and freeze what is left (``gc.freeze``), so that no collection
            stops all threads while serving. It holds for the whole process, until the last such engine is closed, and
            so is off unless asked for; processes of cellrt's own do it (``EngineProcess``, ``cellrt serve``).
        trace: keep a timeline (see ``timeline``); costs memory for every task. A number: only of this many of the
            last tasks and requests.
        debug: check every invariant whenever nothing runs (slow), and write the last events to standard error if the
            process crashes.
    """

    def __init__(
        self,
        workers: int | Sequence[str] | None = None,
        *,
        threads_per_worker: int = 1,
        policy: Policy | str | None = None,
        settings: SchedulerSettings | None = None,
        limits: Limits | None = None,
        sessions: SessionLimits | None = None,
        arena_bytes: int | None = None,
        page_bytes: int | None = None,
        max_queue: int = 8192,
        max_queue_rows: int | None = None,
        max_nodes: int = 65_535,
        queue_depth: int | None = None,
        device_options: DeviceOptions | None = None,
        compile: CompileMode | None = None,
        freeze: bool = False,
        trace: bool | int = False,
        debug: bool = False,
    ) -> None:
        workers = check_workers(workers)
        threads_per_worker, max_queue, max_nodes = check_numbers(
            threads_per_worker=threads_per_worker, max_queue=max_queue, max_nodes=max_nodes
        )
        arena_bytes = check_number_or_none("arena_bytes", arena_bytes)
        page_bytes = check_number_or_none("page_bytes", page_bytes)
        max_queue_rows = check_number_or_none("max_queue_rows", max_queue_rows)
        queue_depth = check_number_or_none("queue_depth", queue_depth)
        chosen = policy_of(policy, POLICIES)
        check_instance("settings", settings, SchedulerSettings)
        check_instance("limits", limits, Limits)
        check_instance("sessions", sessions, SessionLimits)
        check_instance("device_options", device_options, DeviceOptions)
        warm_up_told()
        names, options = device_names(workers), device_options or DeviceOptions()
        devices = [open_device(name, options) for name in names]
        queue_depth = queue_depth or (CPU_QUEUE_DEPTH if names[0] == CPU else DEVICE_QUEUE_DEPTH)
        settings = settings or SchedulerSettings()
        ahead = loops_ahead(names[0], settings.loops_ahead, queue_depth)
        self._processor = Processor(len(names), limits, replace(settings, loops_ahead=ahead), chosen)
        self._registry = registry = Registry(self._processor, max_nodes)
        self._models: dict[str, Model] = {}
        self._arenas = arenas = make_arenas(devices)
        self._manager = manager = Manager(
            self._processor,
            arenas,
            registry,
            self._models,
            queue_depth,
            sessions or SessionLimits(),
            QueueLimit(max_queue, max_queue_rows),
            debug,
            self._make_words(self._processor.num_workers),
        )
        self._compiler = CellCompiler(compile, weakref.WeakMethod(self._adopt_forms))
        self._registrar = Registrar(
            registry,
            self._processor,
            arenas,
            self._compiler,
            ArenaSizes(ArenaBytes(arena_bytes, page_bytes), len(names), memory_of(devices)),
            devices[0],
            threads_per_worker,
            manager.turns.call,
            lambda model: manager.retire(model, None),
        )
        turns = manager.turns
        # Methods of the manager would make a cycle of references.
        ring = self._processor, turns.words, queue_depth, turns.take, turns.has_news, turns.note_end
        make = worker_maker(devices, options, arenas, registry.types, *ring, threads_per_worker)
        self._trace, self._freeze = _trace_of(trace), freeze
        manager.start(make, len(names), self._trace)
        self._register_lock, self._submission = threading.Lock(), Submission(manager, self._models, chosen.admit_by)
        self._hand_in_fast = self._submission.hand_in
        # Futures and sessions refer to their engine: no client waits for one that is dropped.
        weakref.finalize(self, _abandon, manager, self._compiler).atexit = False
        weakref.finalize(self, HEAP.release, id(self)).atexit = False

    def __repr__(self) -> str:
        forms = forms_told(dict(self._registry.types), self._compiler.why_eager)
        return f"Engine({self._processor.num_workers} workers, models {list(self._models)}, {forms})"

    def register(
        self,
        model: Unfolder,
        *,
        priorities: dict[str, int] | None = None,
        warm_up: bool = True,
        max_queue: int | None = None,
        max_queue_rows: int | None = None,
        max_batch: dict[str, int] | None = None,
        replace: bool = False,
    ) -> None:
        """Register a model: unfold its example, add its cells, allocate arenas, measure its cells.

        Args:
            model: as made by ``cellrt.unfold``.
            priorities: cell priorities by cell name, over the cells' own and the default from the type graph.
            warm_up: run each new cell at a few batch sizes, so that the scheduler knows its step time; one whose rows
                influence each other is refused (see ``Cell.check_row_wise``).
            max_queue, max_queue_rows: requests of this model, and their rows, that may be unfinished at once, within
                what the engine takes.
            max_batch: most rows of a task by cell name, for new cells, at most what the cell takes. Default: what pays.
            replace: take the place of the model of that name, to serve new weights, say: requests from now on go to
                this one; those before, and sessions that are open, go on with the old one to their end. None is lost.

        Raise DefinitionError if the example does not unfold, if ``priorities`` or ``max_batch`` name no cell of it, if
        an option has no valid value, or if rows of a cell influence each other, unless it was made with
        ``row_wise=False``; RequestError in a future's callback; EngineClosedError.
        """
        if not isinstance(model, Unfolder):
            raise DefinitionError(f"register: expected what @cellrt.unfold makes, got {type(model).__name__}")
        how = check_registration(priorities, warm_up, max_queue, max_queue_rows, max_batch, replace)
        limit = QueueLimit(how.max_queue, how.max_queue_rows)
        self._manager.refuse_in_callback()  # before the lock, whose holder waits for a turn
        with self._register_lock:
            known = self._models.get(model.name)
            if known is not None and not replace:
                raise DefinitionError(f"a model {model.name!r} is registered already (see replace=True)")
            made = self._registrar.prepare(model, how.priorities, warm_up, limit, how.max_batch)
            with self._manager.turns.gate:
                self._models[model.name] = made
            if known is not None:
                self._manager.turns.call(lambda: self._manager.retire(known, None))
            if self._freeze:
                HEAP.freeze(id(self), self._manager.num_retired)

    def _adopt_forms(self) -> None:
        """Have new requests use the forms that were made meanwhile; earlier requests keep the forms they began with.

        Called by the compiler's thread.
        """
        with self._register_lock, suppress(EngineClosedError):
            for name, model in list(self._models.items()):
                renewed = self._registrar.renew(model)
                if renewed is not None:
                    with self._manager.turns.gate:
                        self._models[name] = renewed
                    self._manager.turns.call(partial(self._manager.retire, model, None))
                    self._registrar.on_renewed(name)

    def unregister(self, model: str) -> None:
        """Take a model out: its name is unknown from now on.

        Requests submitted before run to their end, then its sessions end with SessionError, and cells that no other
        model uses are freed. The call does not wait for that. Raise UnknownModelError, EngineClosedError, and
        RequestError in a future's callback.
        """
        self._manager.refuse_in_callback()
        with self._register_lock:
            known = self._submission.model(model)
            with self._manager.turns.gate:
                self._submission.refuse_if_closed()
                del self._models[model]
            error = UnknownModelError(f"model {model!r} was unregistered")
            self._manager.turns.call(lambda: self._manager.retire(known, error))

    def _submit(
        self,
        model: str,
        requests: Sequence[Any],
        due: Due,
        priority: int,
        wait: bool,
        channel: Channel | None = None,
    ) -> Sequence[RequestFuture]:
        return self._submission.submit(model, requests, due, priority, wait, channel)

    def _submit_in(
        self,
        model: str,
        sessions: Sequence[Any],
        requests: Sequence[Any],
        due: Due,
        priority: int,
        wait: bool,
    ) -> Sequence[RequestFuture]:
        with self._manager.turns.gate:
            self._submission.model(model)
        records = records_of(sessions, self, model)
        return self._submission.submit_in(records, requests, due, priority, wait) if records else []

    def _refuse_in_callback(self) -> None:
        self._manager.refuse_in_callback()

    async def _submit_when_room(
        self, model: str, requests: Sequence[Any], due: Due, priority: int
    ) -> Sequence[RequestFuture]:
        return await self._submission.submit_when_room(model, requests, due, priority)

    def session(
        self, model: str, id: str | None = None, *, state: bytes | None = None, must_be_open: bool = False
    ) -> Session:
        """Return the open session of a model with that id, or a new one (with a random id if none is given).

        Args:
            model: name of a registered model that keeps state: see ``Graph.chain(keep=True)``.
            id: chosen by the client; ids of different models have nothing to do with each other.
            state: the bytes that ``Session.export`` returned; the session goes on from there.
            must_be_open: raise SessionError instead of opening a new one.

        Raise UnknownModelError, OverloadError if too many sessions are open or ``state`` finds no room, RequestError
        if the model keeps no state, SessionError if ``state`` is not one of this model's cells, and RequestError if
        ``state`` is given in a future's callback.
        """
        if state is not None:
            self._manager.refuse_in_callback()
        with self._manager.turns.gate:
            self._submission.refuse_if_closed()
            known = self._submission.model(model)
            if not known.states:
                raise RequestError(f"model {model!r} keeps no state: its unfolder uses no keep=True, and no graph.keep")
            record, is_new = self._manager.sessions.open(known, id, must_be_open=must_be_open)
        specs = [self._registry.kinds[layout.kind] for layout in record.states]
        made = Session(self, self._submission, self._manager, record, specs)
        if is_new:
            self._manager.note_opened(record)
        if state is not None:
            try:
                made.restore(state)
            except BaseException:
                if is_new:
                    made.close()
                raise
        return made

    def graph(self, model: str, request: Any) -> CellGraph:
        """Return the cell graph of a request, to look at; nothing is run."""
        bound = self._submission.model(model)
        recorded = bound.unfolder.record(bound, request)
        bound.plan_of(recorded)
        return CellGraph(recorded.program, {made.id: made.cell for made in list(self._registry.types.values())})

    def drain(self, timeout: float | None = None) -> bool:
        """Wait until every submitted request has ended, its tasks too, and its callbacks have run.

        Return False after ``timeout`` seconds, or if the engine failed. In a forked process it does not wait. Raise
        RequestError in a future's callback. The end of a ``with`` block waits in this way without a limit; if a cell
        hangs, use ``close(timeout)``.
        """
        self._collector.flush()
        return self._manager.drain(None if timeout is None else check_timeout(timeout))

    def close(self, timeout: float = CLOSE_S) -> None:
        """End the engine: requests that are not done end with EngineClosedError; threads end. It may be called twice.

        Wait at most ``timeout`` seconds in all for cells that run; a cell that runs longer keeps its thread until it is
        done. In a forked process nothing ends: the engine is the parent's.
        """
        if self._manager.turns.is_parents:
            return
        self._manager.refuse_in_callback()
        timeout = check_timeout(timeout)
        with self._manager.turns.gate:
            self._manager.is_closing = True
        self._compiler.close()
        if self._manager.close(timeout):
            self._arenas.clear()
        HEAP.release(id(self))

    def statistics(self) -> dict[str, Any]:
        """Return counts since the start: requests by end, in all and by model, with times of the last requests.

        There are the latency, queueing and computation time of requests; the tasks, nodes and mean batch of each cell.
        Cells of one name are told apart by the beginning of their identity.

        - ``form``: the form that runs a cell's tasks on a CPU, or "eager" and why the module itself runs.
        - ``retried``: the tasks of a cell that failed and were tried again in halves, to find the rows to blame.
        - ``workers``: by location, the seconds busy and the counts of the device (``CudaWorker.counts``).
        - ``policy_errors``: how often a function of the policy raised, and the order of arrival was taken instead.
        - ``rows``: the rows of arenas, by place.
        - ``ready``: the nodes of a cell that could run now.
        - ``sessions``: the number of open sessions; of those without a request that runs, how many have their state at
          a worker, and the bytes of the states by place. "saved" are those in host memory beside the arenas, of which
          ``SessionLimits.max_saved_bytes`` are allowed.
        """
        self._manager.catch_up()
        sessions, unfinished = self._manager.sessions, self._manager.places.num_unfinished
        by_model = {name: model.places.num_unfinished for name, model in list(self._models.items())}
        return {
            "unfinished": unfinished,
            "unfinished_rows": self._manager.places.num_rows,
            "policy_errors": self._processor.num_policy_errors,
            **self._manager.statistics.snapshot(
                dict(self._registry.types),
                by_model,
                self._compiler.why_eager,
                partial(ready_nodes, self._processor),
                {location: worker.counts() for location, worker in enumerate(list(self._manager.workers), 1)},
            ),
            "rows": rows_by_place(self._processor, self._registry.kinds),
            "sessions": {
                **sessions.counts(),
                "bytes": {
                    **session_bytes_by_place(self._processor, self._registry.kinds, [one.id for one in sessions]),
                    "saved": sessions.saved_bytes,
                },
                "max_saved_bytes": sessions.max_saved_bytes,
            },
        }

    def timeline(self) -> Timeline:
        """Return the tasks and requests since the start, with their times; needs ``trace=True``."""
        if self._trace is None:
            raise DefinitionError("timeline: make the engine with trace=True")
        return self._manager.turns.call(self._manager.take_timeline)

    def has_workers(self) -> bool:
        """Return whether the engine and a worker live; else no requests are taken. False in a forked process."""
        return self._manager.has_workers and self._manager.turns.stopped is None and not self._manager.is_closing

    def _make_words(self, num_workers: int) -> Rows[int]:
        """Return the words of the turn and the workers; other processes may share them."""
        return make_words(num_workers)

    @property
    def has_timeline(self) -> bool:
        """True if the engine was made with ``trace``."""
        return self._trace is not None

    def explain(self, future: RequestFuture) -> str:
        """Return in words what a request waits for: which part of it, which step, which worker.

        Raise RequestError for a future that is not of this engine in this process, EngineClosedError.
        """
        return explain(self._manager.turns, self._manager.requests, self._processor, self._registry.name_of, future)

    def _explain(self, group: RequestGroup, number: int) -> str:
        return explain_request(
            self._manager.turns, self._manager.requests, self._processor, self._registry.name_of, group, number
        )

    def check(self) -> None:
        """Check every invariant of the scheduler's state. Raise InternalError that names the broken ones."""
        self._manager.turns.call(self._manager.check)


def _abandon(manager: Manager, compiler: CellCompiler) -> None:
    compiler.close()
    manager.abandon()


def _trace_of(wanted: bool | int) -> Trace | None:
    if isinstance(wanted, bool):
        return Trace() if wanted else None
    return Trace(*check_numbers(trace=wanted))
