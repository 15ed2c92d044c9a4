"""The checks for a GPU: completion, kernels against their floors, the LSTM of the paper's section 2.7.

``python -m benchmarks.gpu [--quick] [--only PART] [--dry]`` runs everything, or some parts, on the first GPU and writes
JSON lines and plots to ``benchmarks/results/<device>/``. A part is ``completion``, ``kernels`` (the LSTM's step),
``steps`` (the others), ``lstm``, ``serving`` (``gpu_serving.py``), ``loops`` (``gpu_loops.py``), ``lm``
(``gpu_lm.py``). ``--dry`` runs the same code on the device "dry" with tiny sizes: its numbers mean nothing, and are
kept nowhere. ``python -m benchmarks figures`` makes the paper's figures.

The LSTM: hidden 1024, 24 steps, 512 chains at once, float32 by TF32 and bfloat16. Requests are word numbers, and the
embedding is a cell on the device. Runs are as long as they are by default; one-step tasks are shown apart. *Ideal* is
the same kernel in a bare loop, *cuDNN* is ``torch.nn.LSTM``, both on the same batch, which they embed first; the ideal
is one CUDA graph. "own process": the engine has one, so that no client shares the worker's interpreter lock.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks import gpu_completion
from benchmarks.gpu_busy import busy_share
from benchmarks.gpu_cells import FusedLSTM
from benchmarks.gpu_kernels import measure_floors, measure_kernels
from benchmarks.gpu_lm import measure_lm
from benchmarks.gpu_loops import measure_loops
from benchmarks.gpu_run import folder_of
from benchmarks.gpu_serving import measure_serving
from benchmarks.gpu_timing import time_calls, time_captured, wake
from benchmarks.options import Options, find_treebank
from benchmarks.plots import can_draw
from benchmarks.record import Recorder
from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.definition.spec import RowSpec
from cellrt.engine.engine import Engine
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder
from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.lstm_step import lstm_step
from cellrt.kernels.tuning_cases import OPERATIONS
from cellrt.process.engine_process import EngineProcess
from cellrt.worker.device.cuda_worker import CudaWorker
from cellrt.worker.device.executor import DeviceOptions

PARTS = ("completion", "kernels", "steps", "lstm", "loops", "lm", "serving")
VOCABULARY = 10_000
WAIT_S = 120.0
WARM_UPS = 3


class Size(NamedTuple):
    """The size of the LSTM's workload."""

    hidden: int
    steps: int
    batch: int
    waves: int


LARGE, TINY = Size(1024, 24, 512, 20), Size(8, 5, 4, 2)


def run(recorder: Recorder, options: Options) -> None:
    """Run the parts that the module describes."""
    measure(recorder, options, "cuda:0" if torch.cuda.is_available() else "dry")


def measure(recorder: Recorder, options: Options, device: str) -> None:
    """All parts on a device."""
    if options.has("completion"):
        gpu_completion.measure(recorder, device, 100 if options.quick else 1000)
    on = torch.device(_torch_name(device))
    wake(on)
    for part, operations in (("kernels", OPERATIONS[:1]), ("steps", OPERATIONS[1:])):
        if options.has(part):
            measure_kernels(recorder, on, measure_floors(recorder, on), operations)
    if options.has("lstm"):
        size = TINY if device == "dry" else LARGE._replace(waves=4) if options.quick else LARGE
        for dtype in (torch.float32, torch.bfloat16):
            measure_lstm(recorder, device, size, dtype)
    if options.has("loops"):
        measure_loops(recorder, device, options.quick)
    if options.has("lm"):
        measure_lm(recorder, device, options.quick)
    if options.has("serving"):
        measure_serving(recorder, device, options.treebank, options.quick)
    if options.plot is not None:
        draw(recorder, options.plot)


def measure_lstm(recorder: Recorder, device: str, size: Size, dtype: torch.dtype) -> None:
    """Record steps a second of the fixed-length LSTM by each way, and the host's cost of a task."""
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    module = FusedLSTM(size.hidden, dtype).eval().requires_grad_(False)
    name = "tf32" if dtype == torch.float32 else str(dtype).removeprefix("torch.")
    ideal = _ideal(module, device, size)
    baselines = {"ideal": ideal, "cudnn": _cudnn(device, size, dtype)}
    rows = size.steps * size.batch
    for way, seconds in baselines.items():
        recorder.add(f"lstm {name} {way}", "steps", rows / seconds, "steps/s", batch=size.batch)
    for way, settings in {
        "runs": SchedulerSettings(),
        "step by step": SchedulerSettings(runs=False),
    }.items():
        for is_fused in (True, False):
            _measure_engine(recorder, device, module, size, ideal, settings, is_fused, f"lstm {name}", way)
    _measure_apart(recorder, device, size, dtype, ideal, name)


def model_of(module: FusedLSTM, size: Size) -> Unfolder:
    """Return the model: requests are word numbers, whose embedding is a cell on the device; the result is the last
    state.
    """
    dtype = module.weight_hh.dtype
    row = RowSpec((size.hidden,), dtype)
    made = cell(module, {"x": row, "h": row, "c": row}, max_batch=size.batch, name="lstm")
    words = nn.Embedding(VOCABULARY, size.hidden, dtype=dtype)
    embed = cell(words, {"input": RowSpec((), torch.int64)}, max_batch=size.batch * size.steps, name="embedding")

    def unfold(graph: Graph, request: list[int]) -> dict[str, object]:
        return {"h": graph.chain(made, x=graph.chain(embed, input=request).output).last.h}

    return Unfolder("chain", unfold, [0, 0], key=len)


def served(size: Size, dtype: torch.dtype) -> Unfolder:
    """Return the same with weights of its own, for an engine in a process of its own."""
    torch.manual_seed(0)
    return model_of(FusedLSTM(size.hidden, dtype).eval().requires_grad_(False), size)


def served_tf32() -> Unfolder:
    """Return the model in TF32; see ``served``."""
    return served(LARGE, torch.float32)


def served_bfloat16() -> Unfolder:
    """Return the model in bfloat16; see ``served``."""
    return served(LARGE, torch.bfloat16)


def served_dry() -> Unfolder:
    """Return the tiny model of a dry run; see ``served``."""
    return served(TINY, torch.float32)


def engine_options(size: Size, dtype: torch.dtype, is_fused: bool = True) -> dict[str, Any]:
    """Return the options of an engine that serves the LSTM."""
    rows = 4 * size.batch * (size.steps + 4)
    return {
        "device_options": DeviceOptions(ring_bytes=64 << 20, fused=is_fused),
        "arena_bytes": max(1 << 20, rows * size.hidden * dtype.itemsize),
        "max_queue": 1 << 16,
    }


def time_waves(engine: Engine | EngineProcess, requests: list[list[int]], waves: int) -> float:
    """Return seconds a wave, of so many that are handed in together."""
    start = time.perf_counter()
    for futures in [engine.submit_many("chain", requests) for _ in range(waves)]:
        futures.results(WAIT_S)
    return (time.perf_counter() - start) / waves


def _measure_apart(recorder: Recorder, device: str, size: Size, dtype: torch.dtype, ideal_s: float, name: str) -> None:
    """Measure the engine in a process of its own, where no client shares the worker's interpreter lock."""
    requests = torch.randint(VOCABULARY, (size.batch, size.steps)).tolist()
    with EngineProcess([device], **engine_options(size, dtype)) as engine:
        engine.register(f"benchmarks.gpu:served_{'dry' if device == 'dry' else name}")
        for _ in range(WARM_UPS):
            time_waves(engine, requests, size.waves)
        seconds = time_waves(engine, requests, size.waves)
    case = f"lstm {name} cellrt, runs, own process"
    recorder.add(case, "steps", size.steps * size.batch / seconds, "steps/s", batch=size.batch)
    recorder.add(case, "of the ideal, requests included", ideal_s / seconds, "ratio", batch=size.batch)


def _measure_engine(
    recorder: Recorder,
    device: str,
    module: FusedLSTM,
    size: Size,
    ideal_s: float,
    settings: SchedulerSettings,
    is_fused: bool,
    case: str,
    way: str,
) -> None:
    options = engine_options(size, module.weight_hh.dtype, is_fused)
    with Engine([device], settings=settings, **options) as engine:
        engine.register(model_of(module, size))
        requests = torch.randint(VOCABULARY, (size.batch, size.steps)).tolist()
        worker = engine._manager.workers[0]
        if not isinstance(worker, CudaWorker):
            raise TypeError(f"{device} has no device worker")
        for _ in range(WARM_UPS):  # kernels, captures of all runs that so many waves make
            time_waves(engine, requests, size.waves)
        tasks, host_ns, busy_ns = worker.num_tasks, worker.host_ns, worker.busy_ns
        seconds = time_waves(engine, requests, size.waves)
        tasks, host_ns = worker.num_tasks - tasks, worker.host_ns - host_ns
        busy_s = (worker.busy_ns - busy_ns) / 1e9 / size.waves

        def wave() -> None:
            engine.submit_many("chain", requests).results(WAIT_S)

        busy = None if device == "dry" else busy_share(wave, torch.device(device))
    name = f"{case} cellrt, {way}{'' if is_fused else ', plain cell'}"
    recorder.add(name, "steps", size.steps * size.batch / seconds, "steps/s", batch=size.batch)
    recorder.add(name, "of the ideal, requests included", ideal_s / seconds, "ratio", batch=size.batch)
    recorder.add(name, "of the ideal, while tasks are there", ideal_s / busy_s, "ratio", batch=size.batch)
    recorder.add(name, "device has tasks", busy_s / seconds, "ratio", batch=size.batch)
    if busy is not None:
        recorder.add(name, "device busy", busy, "ratio", batch=size.batch)
    recorder.add(name, "host time, turns included", host_ns / max(1, tasks) / 1e3, "us/task", batch=size.batch)


def _ideal(module: FusedLSTM, device: str, size: Size) -> float:
    """Return seconds of the words of one batch, embedded, and all its steps in a bare loop of the kernel: a
    captured graph on a GPU.
    """
    on = torch.device(_torch_name(device))
    module = _copy(module).to(on)
    dtype = module.weight_hh.dtype
    table, words = _words(size, on, dtype)
    x = torch.empty(size.steps * size.batch, size.hidden, dtype=dtype, device=on)
    h, c = (torch.zeros(2 * size.batch, size.hidden, dtype=dtype, device=on) for _ in range(2))
    packed = module.packed()
    halves = torch.arange(2 * size.batch, device=on).view(2, -1)
    positions = torch.arange(size.steps * size.batch, device=on).view(size.steps, -1)

    def steps() -> None:
        torch.index_select(table, 0, words, out=x)
        for step in range(size.steps):
            read, write = halves[step % 2], halves[1 - step % 2]
            lstm_step(
                packed,
                x=ArenaRows(x, positions[step]),
                h=ArenaRows(h, read),
                c=ArenaRows(c, read),
                h_out=ArenaRows(h, write),
                c_out=ArenaRows(c, write),
                precision=module.precision,
            )

    with torch.inference_mode():
        return time_captured(steps, on)


def _words(size: Size, on: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an embedding's table, and a batch's words, step by step."""
    table = torch.randn(VOCABULARY, size.hidden, device=on).to(dtype)
    return table, torch.randint(VOCABULARY, (size.steps * size.batch,), device=on)


@torch.inference_mode()
def _cudnn(device: str, size: Size, dtype: torch.dtype) -> float:
    on = torch.device(_torch_name(device))
    layer = nn.LSTM(size.hidden, size.hidden).to(on, dtype).eval()
    table, words = _words(size, on, dtype)
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    try:
        return time_calls(lambda: layer(table.index_select(0, words).view(size.steps, size.batch, -1)), on)
    finally:
        torch.backends.cudnn.allow_tf32 = before


def _copy(module: FusedLSTM) -> FusedLSTM:
    copy = FusedLSTM(module.weight_hh.shape[1], module.weight_hh.dtype, module.precision)
    copy.load_state_dict(module.state_dict())
    return copy.eval().requires_grad_(False)


def _torch_name(device: str) -> str:
    return "cpu" if device == "dry" else device


def draw(recorder: Recorder, path: Path) -> None:
    """Bars of the LSTM's throughput, where it was measured and matplotlib is there."""
    shown = [row for row in recorder.rows if row["metric"] == "steps"]
    if not shown or not can_draw():
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.4 * len(shown) + 1), layout="constrained")
    axes = figure.subplots()
    axes.barh([str(row["case"]) for row in shown], [float(str(row["value"])) for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel("steps a second")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def measure_and_write(options: Options, device: str, folder: Path, name: str) -> None:
    """Measure, print the table and write ``name``.json; also what there is if a part fails."""
    recorder = Recorder("gpu")
    if device != "dry":
        recorder.machine["gpu"] = torch.cuda.get_device_name(device)
    try:
        measure(recorder, options, device)
    finally:
        recorder.write(folder / f"{name}.json")
        recorder.table()


def main() -> None:
    """Run all parts and write the results beside those of other devices."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a short run")
    parser.add_argument("--dry", action="store_true", help="run without a GPU, to see that it works")
    parser.add_argument("--only", action="append", choices=PARTS, help="run this part; may be given several times")
    parser.add_argument("--treebank", type=Path, help="trees in Penn brackets, for serving")
    parser.add_argument("--out", type=Path, help="folder of the results; default: benchmarks/results/<device>")
    arguments = parser.parse_args()
    try:
        treebank = find_treebank(arguments.treebank)
    except FileNotFoundError as error:
        parser.error(str(error))
    only = tuple(arguments.only or ())
    name = "-".join(("gpu", *only))
    if arguments.dry:
        with tempfile.TemporaryDirectory() as folder:
            options = Options(True, Path(folder) / f"{name}.png", only, (), treebank)
            measure_and_write(options, "dry", Path(folder), name)
        return
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device; --dry runs without one")
    results = arguments.out or folder_of(torch.cuda.get_device_name(0))
    options = Options(arguments.quick, results / f"{name}.png", only, (), treebank)
    measure_and_write(options, "cuda:0", results, name)


if __name__ == "__main__":
    main()
