"""The cost of the runtime where cells cost nothing: the scheduler's time and memory by node, task and request.

The core part drives the request processor as the engine does, with tasks that end at once: chains of one cell type with
one carried state, a step at a time (no runs). Times hold everything between two tasks, the calls from Python too.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

import cellrt
from benchmarks.core_cases import run_cases
from benchmarks.live import run_live
from benchmarks.options import Options
from benchmarks.record import Recorder
from benchmarks.session_steps import run_sessions
from cellrt.core.processor import Processor, SizedTemplate
from cellrt.core.state.ports import Port
from cellrt.core.state.settings import Limits, SchedulerSettings
from cellrt.core.templates.program import CARRY, OP_CHAIN, OP_EXTERNAL, OP_RESULT, STEP

PARTS = ("core", "engine", "sessions", "turn", "streams", "live")
LENGTH = 24
MIXED_LENGTHS = random.Random(0).sample(range(5, 44), 39)
"""The lengths of mixed requests: on average ``LENGTH`` nodes."""
MANY = 250
TOGETHER = 1_000
TURN_ROWS = 512
SMALL_ROWS = 8
STREAMS, STREAMED_STEPS = 8, 200
BATCHES = (8, 64, 512, 4096)
GROWTH_BATCHES = (64, 512)
LIVE_NODES = (1_000, 10_000, 100_000, 1_000_000)


@dataclass(frozen=True)
class Bench:
    """A processor with one cell type, and the shape of one chain."""

    processor: Processor
    template: SizedTemplate


def make_bench(batch: int, num_requests: int) -> Bench:
    """Return a processor with room for that many chains, all live at once."""
    limits = Limits(
        max_requests=num_requests,
        max_nodes=32 * num_requests,
        max_values=64 * num_requests,
        max_links=128 * num_requests,
        max_subgraphs=8 * num_requests,
        max_events=0,
    )
    processor = Processor(1, limits, SchedulerSettings(runs=False))
    kind = processor.add_kind(4 * num_requests, (LENGTH + 4) * num_requests)
    cell = processor.add_type([Port(kind), Port(kind, carry=0)], [Port(kind)], max_batch=batch)
    program = [OP_EXTERNAL, kind, LENGTH + 1, OP_CHAIN, cell, LENGTH, STEP, 0, 1, CARRY, LENGTH]
    program += [OP_RESULT, 2 * LENGTH, 1, 1]
    return Bench(processor, processor.compile(np.array(program, np.int32)))


def admit(bench: Bench, num_requests: int) -> float:
    """Admit chains; return seconds."""
    processor, template = bench.processor, bench.template
    start = time.perf_counter()
    for sequence in range(num_requests):
        processor.admit(template, sequence)
    seconds = time.perf_counter() - start
    if processor.num_live != num_requests:
        raise RuntimeError(f"the tables hold {processor.num_live} chains, not {num_requests}")
    return seconds


def drain(bench: Bench) -> tuple[float, int, list[int]]:
    """Schedule and complete until nothing is left; return (seconds, tasks, requests that are done)."""
    processor, num_tasks = bench.processor, 0
    done: list[int] = []
    start = time.perf_counter()
    while tasks := processor.schedule(1):
        num_tasks += len(tasks)
        for task in tasks:
            done += processor.complete(task, 0).done()
    return time.perf_counter() - start, num_tasks, done


def admit_together(num_requests: int, rounds: int) -> float:
    """Return the median over rounds: microseconds a request of admission and release, of many of one template in two
    calls.
    """
    bench = make_bench(512, num_requests)
    times = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        ids, _ = bench.processor.admit_many(bench.template, np.arange(num_requests))
        seconds = time.perf_counter() - start
        if len(ids) != num_requests:
            raise RuntimeError(f"the tables hold {len(ids)} chains, not {num_requests}")
        _, _, done = drain(bench)
        start = time.perf_counter()
        bench.processor.release(done)
        times.append(1e6 * (seconds + time.perf_counter() - start) / num_requests)
    return statistics.median(times[1:])


def release(bench: Bench, requests: list[int]) -> float:
    """Release requests; return seconds."""
    start = time.perf_counter()
    for request in requests:
        bench.processor.release([request])
    return time.perf_counter() - start


@dataclass(frozen=True)
class Cost:
    """Medians of several rounds."""

    node_ns: float
    task_us: float
    request_us: float


def measure(batch: int, num_requests: int, rounds: int) -> Cost:
    """Run whole rounds of chains that arrive together: the first is to warm up and do not count."""
    bench = make_bench(batch, num_requests)
    costs: list[tuple[float, float, float]] = []
    gc.disable()
    try:
        for _ in range(rounds + 1):
            around_s = admit(bench, num_requests)
            seconds, num_tasks, done = drain(bench)
            around_s += release(bench, done)
            num_nodes = num_requests * LENGTH
            costs.append((1e9 * seconds / num_nodes, 1e6 * seconds / num_tasks, 1e6 * around_s / num_requests))
    finally:
        gc.enable()
    return Cost(*(statistics.median(column) for column in zip(*costs[1:])))


def table_bytes(bench: Bench) -> tuple[float, int]:
    """Return bytes of tables (bytes per step of a live chain with all that comes with it, bytes per request
    besides).
    """
    tables, arrays = bench.processor.tables, bench.template.arrays
    rows: list[tuple[int, NDArray[Any]]] = [
        (arrays.nodes.size, tables.nodes),
        (arrays.values.size, tables.values),
        (bench.template.num_places, tables.places),
    ]
    step_bytes = sum(count * table.dtype.itemsize for count, table in rows) / LENGTH
    links = arrays.links.size + arrays.lists.size + arrays.states.size + arrays.needs.size
    request_bytes = tables.requests.dtype.itemsize + arrays.subgraphs.size * tables.subgraphs.dtype.itemsize
    return step_bytes, request_bytes + links * tables.links.dtype.itemsize


def growth_requests(batch: int) -> list[int]:
    """Return the numbers of live chains, one for each of ``LIVE_NODES`` as far as they differ: at least a batch."""
    return sorted({max(batch, live_nodes // LENGTH) for live_nodes in LIVE_NODES})


def run_core(recorder: Recorder, quick: bool) -> None:
    """Measure the scheduler alone."""
    rounds = 3 if quick else 7
    for batch in BATCHES:
        num_requests = max(2 * batch, 1024)
        cost = measure(batch, num_requests, rounds)
        recorder.add("core", "scheduling and completion", cost.node_ns, "ns/node", batch=batch)
        recorder.add("core", "scheduling and completion", cost.task_us, "us/task", batch=batch)
        if batch == BATCHES[-1]:
            recorder.add("core", "admission and release", cost.request_us, "us/request", batch=batch)
    run_cases(recorder, rounds)
    value = admit_together(TOGETHER, 10 * rounds)
    recorder.add("core", f"admission and release, {TOGETHER} together", value, "us/request")
    node_bytes, request_bytes = table_bytes(make_bench(8, 1))
    recorder.add("core", "memory", node_bytes, "bytes/node")
    recorder.add("core", "memory besides nodes", request_bytes, "bytes/request")
    for batch in GROWTH_BATCHES:
        for num_requests in growth_requests(batch):
            cost = measure(batch, num_requests, rounds if num_requests < 10_000 else 3)
            extra = {"batch": batch, "live_nodes": num_requests * LENGTH}
            recorder.add("growth", "scheduling and completion", cost.node_ns, "ns/node", **extra)
            recorder.add("growth", "admission and release", cost.request_us, "us/request", **extra)


def make_models(**options: Any) -> list[cellrt.Unfolder]:
    """Return chains of a cell that does nothing: unfolded each time, and known by their length."""

    def nothing(x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": h}

    cell = cellrt.cell(nothing, {"x": cellrt.rows(dtype=torch.int64), "h": (1,)}, **options)

    def chain(graph: cellrt.Graph, request: list[int]) -> dict[str, object]:
        return {"h": graph.chain(cell, x=request).last.h}

    words = list(range(LENGTH))
    return [cellrt.Unfolder("chain", chain, words), cellrt.Unfolder("known", chain, words, key=len)]


class RequestTimes(NamedTuple):
    """Microseconds of a request: alone, one of many that are submitted each, and one of many in bulk whose results are
    asked for one by one, or all at once."""

    alone: float
    each: float
    bulk: float
    at_once: float


def request_times(engine: cellrt.Engine, model: str, count: int, lengths: Sequence[int]) -> RequestTimes:
    """Return the times of requests of these lengths."""
    requests = [list(range(lengths[k % len(lengths)])) for k in range(count)]
    start = time.perf_counter()
    for request in requests[: count // 20]:
        engine.submit(model, request).result()
    alone = 20e6 * (time.perf_counter() - start) / count
    start = time.perf_counter()
    for future in [engine.submit(model, request) for request in requests]:
        future.result()
    each = 1e6 * (time.perf_counter() - start) / count
    start = time.perf_counter()
    for futures in [engine.submit_many(model, requests[k : k + MANY]) for k in range(0, count, MANY)]:
        for future in futures:
            future.result()
    bulk = 1e6 * (time.perf_counter() - start) / count
    start = time.perf_counter()
    for futures in [engine.submit_many(model, requests[k : k + MANY]) for k in range(0, count, MANY)]:
        futures.results()
    return RequestTimes(alone, each, bulk, 1e6 * (time.perf_counter() - start) / count)


def run_engine(recorder: Recorder, quick: bool) -> None:
    """Measure requests of 24 nodes, and of 5 to 43, of a cell that does nothing, through one engine.

    A time runs from ``submit`` to the result.
    """
    count, rounds = (4_000, 3) if quick else (20_000, 5)
    cases = [(model, lengths) for model in make_models() for lengths in ([LENGTH], MIXED_LENGTHS)]
    with cellrt.Engine(1, max_queue=1 << 20) as engine:
        times: dict[tuple[str, int], list[RequestTimes]] = {}
        for model, lengths in cases:
            if len(lengths) == 1:
                engine.register(model)
            times[model.name, len(lengths)] = []
            request_times(engine, model.name, 1_000, lengths)
        gc.collect()
        gc.freeze()
        for _ in range(rounds):
            for model, lengths in cases:
                times[model.name, len(lengths)].append(request_times(engine, model.name, count, lengths))
        gc.unfreeze()
    for model, lengths in cases:
        alone, each, bulk, at_once = map(statistics.median, zip(*times[model.name, len(lengths)]))
        nodes = f"{LENGTH}" if len(lengths) == 1 else f"{min(lengths)} to {max(lengths)}"
        case = {"key": "len" if model.key is not None else "none", "nodes": nodes}
        recorder.add("engine", "submit to result, one at a time", alone, "us/request", **case)
        recorder.add("engine", "submit to result, many at once", each, "us/request", **case)
        recorder.add("engine", "throughput", 1e6 / each, "requests/s", **case)
        recorder.add("engine", f"throughput, submit_many of {MANY}", 1e6 / bulk, "requests/s", **case)
        recorder.add(
            "engine", f"throughput, submit_many of {MANY}, results at once", 1e6 / at_once, "requests/s", **case
        )


def run_turn(recorder: Recorder, quick: bool) -> None:
    """Measure a turn between two tasks of 512 rows of one step each, while some 21 chains leave and as many join.

    All were submitted before, and the tables hold 512; their results are read later. Of the first half of the turns no
    time counts: they touch tables for the first time, and the machine makes their pages.
    """
    _, known = make_models(max_batch=TURN_ROWS)
    limits, settings = Limits(max_requests=TURN_ROWS), SchedulerSettings(runs=False, max_tasks_to_submit=1)
    with cellrt.Engine(1, max_queue=1 << 20, limits=limits, settings=settings) as engine:
        engine.register(known)
        manager, times = engine._manager, list[float]()
        step = manager.turns._step

        def timed_step() -> None:
            before, start = manager.statistics.every.num_done, time.perf_counter()
            step()
            if manager.statistics.every.num_done > before:
                times.append(1e6 * (time.perf_counter() - start))

        manager.turns._step = timed_step
        first = [list(range(1 + k % LENGTH)) for k in range(TURN_ROWS)]  # so that they do not end together
        rest = [list(range(LENGTH))] * ((150 if quick else 400) * TURN_ROWS // LENGTH)
        futures = engine.submit_many("known", first + rest)
        engine.drain()  # a client that waits for each is woken by each turn
        manager.turns._step = step
        futures.results()
    recorder.add(
        "turn", "between tasks of 512 rows, 21 join and leave", statistics.median(times[len(times) // 2 :]), "us/turn"
    )


class Busy(threading.Thread):
    """A thread that never waits for anything."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._is_over = False

    def run(self) -> None:
        """Count."""
        count = 0
        while not self._is_over:
            count += 1

    def end(self) -> None:
        """End it."""
        self._is_over = True
        self.join()


def small_tasks(engine: cellrt.Engine, steps: int) -> tuple[float, float]:
    """Return microseconds that a task of 8 rows and one step takes with its turn: that pass, and the worker's own."""
    worker = time.pthread_getcpuclockid(engine._manager.workers[0]._thread.ident or 0)
    start, start_ns = time.perf_counter(), time.clock_gettime_ns(worker)
    engine.submit_many("known", [list(range(steps))] * SMALL_ROWS).results()
    spent_ns = time.clock_gettime_ns(worker) - start_ns
    return 1e6 * (time.perf_counter() - start) / steps, spent_ns / 1e3 / steps


def run_small_tasks(recorder: Recorder, quick: bool) -> None:
    """Such tasks one after the other, while nobody joins or leaves: of a compiled cell and of one that runs as its
    module does, by itself and beside a busy thread of the same process."""
    steps, settings = 500 if quick else 2_000, SchedulerSettings(runs=False, max_tasks_to_submit=1)
    for form in ("compiled", "module"):
        with cellrt.Engine(1, settings=settings, compile="wait" if form == "compiled" else "off") as engine:
            engine.register(make_models(max_batch=SMALL_ROWS)[1])
            small_tasks(engine, steps)
            gc.collect()
            for beside in ("nothing", "a busy thread"):
                busy = Busy()
                if beside != "nothing":
                    busy.start()
                passed, processor = map(statistics.median, zip(*[small_tasks(engine, steps) for _ in range(5)]))
                if beside != "nothing":
                    busy.end()
                case = {"form": form, "beside": beside}
                recorder.add("turn", f"task of {SMALL_ROWS} rows and its turn, passed", passed, "us/task", **case)
                recorder.add("turn", f"task of {SMALL_ROWS} rows and its turn, processor", processor, "us/task", **case)


def run_streams(recorder: Recorder, quick: bool) -> None:
    """Measure the processor time of streaming a token within one process, beyond that of whole answers.

    Eight loops of a cell that counts, a step a task; read by tasks of one event loop, or by one thread in turn.
    """

    def count(left: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"left": left - 1, "stop": left <= 1}

    cell = cellrt.cell(count, {"left": cellrt.token}, name="count")

    def unfold(graph: cellrt.Graph, steps: int) -> dict[str, object]:
        return {"left": graph.loop(cell, left=steps, until="stop", max_steps=STREAMED_STEPS).left}

    async def read(stream: cellrt.Stream) -> None:
        async for step in stream:
            int(step["left"])

    async def read_all() -> None:
        await asyncio.gather(*(read(engine.stream("count", STREAMED_STEPS)) for _ in range(STREAMS)))

    def iterate() -> None:
        for stream in [engine.stream("count", STREAMED_STEPS) for _ in range(STREAMS)]:
            for step in stream:
                int(step["left"])

    ways: dict[str, Callable[[], object]] = {
        "whole": lambda: engine.submit_many("count", [STREAMED_STEPS] * STREAMS).results(),
        "async for": lambda: asyncio.run(read_all()),
        "for": iterate,
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    with cellrt.Engine(1, settings=SchedulerSettings(runs=False)) as engine:
        engine.register(cellrt.Unfolder("count", unfold, STREAMED_STEPS))
        for _ in range(7 if quick else 31):
            for name, call in ways.items():
                start = time.process_time()
                call()
                times[name].append(1e6 * (time.process_time() - start) / STREAMS / STREAMED_STEPS)
    whole = statistics.median(times.pop("whole"))
    recorder.add("streams", f"a task of one step of {STREAMS} loops, not streamed", STREAMS * whole, "us/task")
    for name, values in times.items():
        recorder.add("streams", f"a streamed step, read with {name}", statistics.median(values) - whole, "us/step")


def run(recorder: Recorder, options: Options) -> None:
    """Measure the core, then a whole engine, then one with many that are live."""
    if options.has("core"):
        run_core(recorder, options.quick)
    if options.has("engine"):
        run_engine(recorder, options.quick)
    if options.has("sessions"):
        run_sessions(recorder, 5 if options.quick else 15)
    if options.has("turn"):
        run_turn(recorder, options.quick)
        run_small_tasks(recorder, options.quick)
    if options.has("streams"):
        run_streams(recorder, options.quick)
    if options.has("live"):
        run_live(recorder, options.quick)
