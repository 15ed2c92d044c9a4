"""The host's cost of a CUDA worker's task, without a GPU: the worker's own code over a driver that does nothing.

Tasks of 512 rows, one step each, are recorded while an engine serves on the stand-in for ``torch.cuda``
(``stub_cuda.py``). Then each is begun and collected again many times, as the worker's thread does it, with functions
of no effect in place of the driver's. Right before, its numbers are written to a buffer, as the turn does that forms
it. So this is all that the host does for a task but the time inside the driver, which is not known here: 10 calls where
there are inputs and results, 7 without results.

Steps over pages are of 512 loops, each with some 100 rows behind it in pages of 16, whose numbers go to the device.
Steps that attend are of 512 loops, too, which read 24 rows of others each, whose numbers go along.

Ragged runs, of rows of up to 24 steps, are begun once each: none has numbers that a task had before, but what was read
and captured of others of about its size serves it. That of a user's own cell is launched step by step, a call of the
driver each; so is another's until it has recurred often.

``torch's calls`` is the same with ``DeviceOptions(direct=False)``: copies by torch, on memory of the CPU, and graphs
that do nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from numba import cfunc
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.options import Options
from benchmarks.record import Recorder
from benchmarks.stub_cuda import StubCuda
from cellrt.core.state.settings import SchedulerSettings
from cellrt.core.state.task_layout import H_IS_LOOP, H_NOTES, H_NUM_SPANS, H_ROWS, H_STEPS
from cellrt.definition.define import cell
from cellrt.definition.fused import IndexedRows, SpannedRows, reads_ragged, reads_spans
from cellrt.definition.spans import PagedRows
from cellrt.definition.spec import RaggedRows, grows, ragged, rows
from cellrt.engine.engine import Engine
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.base import Launch
from cellrt.worker.device.cuda import CudaDevice
from cellrt.worker.device.cuda_worker import CudaWorker
from cellrt.worker.device.device import Captured
from cellrt.worker.device.executor import DeviceExecutor, DeviceOptions
from cellrt.worker.device.placement import Placements

PARTS = ("direct", "torch")
LAUNCHED = {"direct": "compiled launch", "torch": "torch's calls"}
ROWS, HIDDEN, STEPS, WORDS = 512, 256, 6, 1000
MOST_STEPS = 25
NUM_RAGGED = 60
RAGGED, BY_STEPS, OWN = "a ragged run", "a ragged run by steps", "a ragged run of a user's own cell"
RUNS = (RAGGED, BY_STEPS, OWN)
OVER_PAGES = "steps over pages"
ATTENDING, NUM_READ = "steps that attend", 24
KINDS = ("every token delivered", "nothing delivered", *RUNS, OVER_PAGES, ATTENDING)
READ_BEFORE, MADE, PAGE_SIZE = 100, 50, 16
"""The length of loops: so long that those that began first run beside the last."""
WAIT_S = 120.0


class Made(NamedTuple):
    """Outputs of the cell."""

    h: Tensor
    choice: Tensor


class Taken(NamedTuple):
    """Output of a cell over pages."""

    choice: Tensor


class Own(nn.Module):
    """A cell with the rows of a decoder's step, which computes next to nothing."""

    def forward(self, token: Tensor, h: Tensor) -> Made:
        """Run one step."""
        return Made(h + 1, token)


class Grown(nn.Module):
    """A cell with the words of a language model's step."""

    def forward(self, token: Tensor, kv: PagedRows) -> Taken:
        """Run one step."""
        kv.append(token[:, None].float())
        return Taken(token)


class Decoder(Own):
    """The same with a form of its own for rows of arenas."""

    def forward(self, token: Tensor, h: Tensor) -> Made:
        """Run one step."""
        return Made(h + 1, token)

    def run_rows(self, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]) -> None:
        """One step, rows of arenas to rows of arenas."""
        _copy_rows(inputs, outputs)


class Spanned(Own):
    """The same; it reads on the device how many rows there are."""

    def forward(self, token: Tensor, h: Tensor) -> Made:
        """Run one step."""
        return Made(h + 1, token)

    @reads_spans
    def run_rows(self, inputs: Mapping[str, SpannedRows], outputs: Mapping[str, SpannedRows]) -> None:
        """One step, rows of arenas to rows of arenas."""
        _copy_spanned(inputs, outputs)


class Attending(nn.Module):
    """The same with a ragged input."""

    def forward(self, token: Tensor, h: Tensor, memory: RaggedRows) -> Made:
        """Run one step."""
        return Made(h + 1, token)

    @reads_spans
    @reads_ragged
    def run_rows(self, inputs: Mapping[str, SpannedRows], outputs: Mapping[str, SpannedRows]) -> None:
        """One step, rows of arenas to rows of arenas."""
        _copy_spanned({name: inputs[name] for name in ("token", "h")}, outputs)


def _copy_spanned(inputs: Mapping[str, SpannedRows], outputs: Mapping[str, SpannedRows]) -> None:
    given, made = ({name: _taken(rows) for name, rows in named.items()} for named in (inputs, outputs))
    _copy_rows({name: IndexedRows(values, rows.clamp(min=0)) for name, (values, rows) in given.items()}, made)


def _copy_rows(inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]) -> None:
    for name, other in (("h", "h"), ("choice", "token")):
        given, made = inputs[other], outputs[name]
        to = torch.where(made.rows < 0, len(made.values) - 1, made.rows)
        made.values.index_copy_(0, to, given.values.index_select(0, given.rows))


def _taken(given: SpannedRows) -> IndexedRows:
    """Return a step's rows, and -1 behind them."""
    numbers = torch.arange(given.most)
    index = given.rows[(given.span[0] + numbers).clamp(max=len(given.rows) - 1)]
    return IndexedRows(given.values, torch.where(numbers < given.span[1], index, -1))


@cfunc("int32(int64, int64)")
def _do_nothing(first: int, second: int) -> int:
    return 0


def run(recorder: Recorder, options: Options) -> None:
    """Measure tasks that deliver every token, tasks that deliver nothing, and ragged runs."""
    repeats = 300 if options.quick else 3000
    for kind in KINDS:
        for part in PARTS:
            if options.has(part) and (kind not in RUNS or part == "direct"):
                for what, seconds in measure(kind, part == "direct", repeats).items():
                    recorder.add(f"{ROWS} rows, {kind}, {LAUNCHED[part]}", what, 1e6 * seconds, "us/task")


def measure(kind: str, is_direct: bool, repeats: int) -> dict[str, float]:
    """Return the median seconds of a task's beginning and collection, and of both."""
    with serving(kind, is_direct) as (executor, launches):
        if executor.device.direct is not None:
            executor.device.direct[:5] = _do_nothing.address
        begins, collects = [], []
        if kind in RUNS:
            executor._plans.forget(launches[0].type_id)
            repeats = len(launches)
        buffer = np.zeros(max(len(launch.buffer) for launch in launches), np.int32)
        with torch.inference_mode():
            for k in range(repeats):
                launch = _written(launches[k % len(launches)], buffer)
                start = time.perf_counter()
                begun = executor.begin(launch)
                middle = time.perf_counter()
                if begun is None:
                    raise RuntimeError("the rings are full")
                executor.collect(begun)
                begins.append(middle - start)
                collects.append(time.perf_counter() - middle)
    both = [begin + collect for begin, collect in zip(begins, collects)]
    named = {"begin": begins, "collect": collects, "begin and collect": both}
    skipped = repeats // 4  # what was not there before is read and captured meanwhile
    return {name: statistics.median(samples[skipped:]) for name, samples in named.items()}


def _written(launch: Launch, buffer: NDArray[np.int32]) -> Launch:
    """Return a recorded task in this buffer."""
    end = launch.buffer[H_NOTES]
    buffer[:end] = launch.buffer[:end]
    return launch._replace(buffer=buffer)


@contextmanager
def serving(kind: str, is_direct: bool) -> Iterator[tuple[DeviceExecutor, list[Launch]]]:
    """On the stand-in, an idle engine's executor that has captured its tasks, and some of those."""
    stub = StubCuda()
    stub.note = lambda *accesses: None  # type: ignore[method-assign]  # it looks for no races here
    with stub.installed(), _engine(kind, is_direct) as made:
        yield made


def _model(kind: str) -> Unfolder:
    """Return the model that is served."""
    token = rows(dtype=torch.int64)
    embed = cell(nn.Embedding(WORDS, 1), {"input": token}, max_batch=ROWS)
    if kind == OVER_PAGES:
        made = cell(Grown(), {"token": token, "kv": grows(1, page_size=PAGE_SIZE)}, max_batch=ROWS, max_batch_rows=4096)
    else:
        module = {RAGGED: Spanned, BY_STEPS: Spanned, OWN: Own, ATTENDING: Attending}.get(kind, Decoder)()
        inputs, carry = {"token": token, "h": rows(HIDDEN)}, {"h": "h"}
        if kind == ATTENDING:
            inputs["memory"], carry["token"] = ragged(1), "choice"
        made = cell(module, inputs, carry=carry, max_batch=ROWS)

    def unfold(graph: Graph, request: list[int]) -> dict[str, object]:
        if kind == OVER_PAGES:
            kv = graph.pages(made)
            graph.chain(made, token=request * READ_BEFORE, kv=kv)
            return {"tokens": graph.loop(made, token=0, kv=kv, max_steps=MADE, carry={"token": "choice"}).choice}
        if kind == ATTENDING:
            memory = graph.chain(embed, input=request[:1] * NUM_READ).output
            return {"tokens": graph.loop(made, token=0, memory=memory, max_steps=STEPS).choice}
        chain = graph.chain(made, token=request)
        return {"tokens": chain.choice} if kind != KINDS[1] else {"h": chain.last.h}

    return Unfolder("decoder", unfold, [0, 0])


@contextmanager
def _engine(kind: str, is_direct: bool) -> Iterator[tuple[DeviceExecutor, list[Launch]]]:
    """Yield the executor of an idle engine that has captured its tasks, and some of those."""
    is_ragged, delivers, grows_pages, attends = kind in RUNS, kind != KINDS[1], kind == OVER_PAGES, kind == ATTENDING

    def open_device(name: str, options: DeviceOptions) -> CudaDevice:
        device = CudaDevice("cpu", "copy", options.direct)
        device.placements = Placements(device.torch_device, options.forms)
        return device

    launches: list[Launch] = []
    begin = DeviceExecutor.begin

    def note(executor: DeviceExecutor, launch: Launch) -> Any:
        is_like_others = launch.buffer[H_NUM_SPANS] == (ROWS if grows_pages else 0)
        is_like_others &= not attends or launch.buffer[H_IS_LOOP] != 0
        if launch.buffer[H_ROWS] == ROWS and (launch.buffer[H_STEPS] > 1) == is_ragged and is_like_others:
            launches.append(Launch(launch.task, launch.type_id, launch.buffer.copy()))
        return begin(executor, launch)

    options = DeviceOptions(capture_after=1, whole_runs_after=0 if kind == RAGGED else 1 << 30, direct=is_direct)
    with patch("cellrt.engine.engine.open_device", open_device), patch.object(DeviceExecutor, "begin", note):
        settings = SchedulerSettings(runs=is_ragged, join_budget_s=60.0, min_run_s=60.0)
        engine = Engine(["dry"], settings=settings, device_options=options, arena_bytes=64 << 20, max_queue=1 << 14)
    with engine:
        engine.register(_model(kind), warm_up=False)
        draw = np.random.default_rng(1)
        if is_ragged:  # so that the scheduler knows how long a step takes
            engine.submit("decoder", [0]).result(WAIT_S)
        with patch.object(DeviceExecutor, "begin", note):
            for _ in range(NUM_RAGGED if is_ragged else 2):
                if not is_ragged:
                    launches.clear()
                usual = [1 if grows_pages or attends else STEPS] * ROWS
                lengths = draw.integers(2, MOST_STEPS, size=ROWS) if is_ragged else usual
                requests = [draw.integers(WORDS, size=length).tolist() for length in lengths]
                for future in engine.submit_many("decoder", requests):
                    future.result(WAIT_S)
        worker = engine._manager.workers[0]
        if not isinstance(worker, CudaWorker):
            raise TypeError("the stand-in has no device worker")
        executor = worker._executor
        for capture in executor._captures._known.values():
            for side in getattr(capture, "sides", []):
                side.captured = Captured(lambda: None)
        yield executor, launches if delivers else launches[:-1]
