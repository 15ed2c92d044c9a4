"""A decoder's loops on a GPU: its fused form beside its plain one, waiting for what says stop and going ahead of it.

256 requests at once, of 64 tokens each, by an LSTM of 1024 units and a vocabulary of 10,000, TF32: greedy; drawn with
top-k and top-p, and with attention to 24 embedded words, going ahead. Nothing stops before, so that each way computes
the same.
``python -m benchmarks.gpu --only loops``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.gpu_busy import busy_share
from benchmarks.record import Recorder
from cellrt.cells.attention_decoder import AttentionLSTMDecoder
from cellrt.cells.decoder import EmbeddingLSTMDecoder, SamplingDecoder
from cellrt.cells.output import NEVER, Sample
from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.definition.spec import RowSpec
from cellrt.engine.engine import Engine
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.cuda_worker import CudaWorker
from cellrt.worker.device.executor import DeviceOptions

WAIT_S = 120.0
NUM_READ = 24
Decoding = EmbeddingLSTMDecoder | SamplingDecoder | AttentionLSTMDecoder


class Size(NamedTuple):
    """The size of the workload."""

    hidden: int
    vocabulary: int
    steps: int
    batch: int
    waves: int


def measure_loops(recorder: Recorder, device: str, quick: bool) -> None:
    """Tokens a second by each way, how busy the device is, and what a task costs the host."""
    size = Size(8, 50, 6, 4, 2) if device == "dry" else Size(1024, 10_000, 64, 256, 4 if quick else 20)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    greedy = EmbeddingLSTMDecoder(size.vocabulary, size.hidden, size.hidden, NEVER)
    drawn = SamplingDecoder(greedy, Sample(top_k=40, top_p=0.9))
    attends = AttentionLSTMDecoder(size.vocabulary, size.hidden, size.hidden, NEVER, input_feeding=True)
    ways: list[tuple[str, Decoding, int]] = [("decoder", greedy, 0), ("decoder", greedy, 1)]
    ways += [("drawing decoder", drawn, 1), ("attending decoder", attends, 1)]
    for is_fused in (True, False):
        for name, module, ahead in ways:
            with _serving(device, size, module, is_fused, ahead) as engine:
                case = f"{name} {'fused' if is_fused else 'plain'}, {'ahead' if ahead else 'waiting'}"
                _measure(recorder, device, engine, size, case)


@contextmanager
def _serving(device: str, size: Size, module: Decoding, is_fused: bool, ahead: int) -> Iterator[Engine]:
    module = module.eval().requires_grad_(False)
    made = cell(module, module.input_specs(), max_batch=size.batch, name="decoder")
    words = nn.Embedding(size.vocabulary, size.hidden)
    embed = cell(words, {"input": RowSpec((), torch.int64)}, max_batch=size.batch * NUM_READ, name="embedding")

    def unfold(graph: Graph, token: int) -> dict[str, object]:
        inputs: dict[str, Any] = {"token": token}
        if isinstance(module, SamplingDecoder):
            inputs["seed"] = token
        if isinstance(module, AttentionLSTMDecoder):
            inputs["memory"] = graph.chain(embed, input=[token] * NUM_READ).output
        return {"tokens": graph.loop(made, until="stop", max_steps=size.steps, **inputs).token}

    options = DeviceOptions(ring_bytes=16 << 20, fused=is_fused)
    rows = 8 * size.batch * (size.steps + NUM_READ + 4)
    settings = SchedulerSettings(loops_ahead=ahead)
    with Engine([device], settings=settings, device_options=options, arena_bytes=rows * 4 * size.hidden) as engine:
        engine.register(Unfolder("decode", unfold, 1))
        yield engine


def _measure(recorder: Recorder, device: str, engine: Engine, size: Size, case: str) -> None:
    requests = torch.randint(size.vocabulary, (size.batch,)).tolist()
    (worker,) = engine._manager.workers
    if not isinstance(worker, CudaWorker):
        raise TypeError(f"{device} has no device worker")

    def wave() -> None:
        for future in engine.submit_many("decode", requests):
            future.result(WAIT_S)

    for _ in range(3):  # step times, captures
        wave()
    tasks, host_ns, start = worker.num_tasks, worker.host_ns, time.perf_counter()
    for _ in range(size.waves):
        wave()
    seconds = (time.perf_counter() - start) / size.waves
    tasks, host_ns = worker.num_tasks - tasks, worker.host_ns - host_ns
    recorder.add(case, "tokens", size.steps * size.batch / seconds, "tokens/s", batch=size.batch)
    recorder.add(case, "a step", seconds / size.steps * 1e6, "us", batch=size.batch)
    recorder.add(case, "host time, turns included", host_ns / max(1, tasks) / 1e3, "us/task", batch=size.batch)
    if device != "dry":
        recorder.add(case, "device busy", busy_share(wave, torch.device(device)), "ratio", batch=size.batch)
