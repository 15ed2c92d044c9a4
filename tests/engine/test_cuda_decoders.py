"""Loops of the ready-made decoders run by their kernels on a device, in few launches a step."""

from __future__ import annotations

import functools
import importlib.util
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from cellrt.cells import (
    AdditiveAttention,
    AttentionGRUDecoder,
    AttentionLSTMDecoder,
    DotAttention,
    EmbeddingGRUDecoder,
    EmbeddingLSTMDecoder,
    Sample,
    SamplingDecoder,
)
from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.fused import IndexedRows
from cellrt.definition.spec import RaggedRows
from cellrt.graph.unfolder import Unfolder
from cellrt.kernels.loop_rows import LoopTask, begin, go_on
from cellrt.worker.device.executor import DeviceOptions
from cellrt.worker.device.signature import NOWHERE
from tests.engine.helpers import close_and_check
from tests.engine.test_cuda_fused_loops import LONG_RUNS, serving
from tests.engine.test_cuda_loops import MOST_STEPS, ahead
from tests.engine.test_cuda_worker import device_engine, serve
from tests.kernels.ahead import launches_for_the_host, needs_compiler
from tests.kernels.interpreter import set_up

WORDS, HIDDEN, END = 7, 16, 3


def drawn(kind: Callable[..., nn.Module], **sampling: Any) -> Callable[..., nn.Module]:
    """Such a decoder, drawing its tokens."""
    return lambda *sizes, **options: SamplingDecoder(kind(*sizes, **options), Sample(END, **sampling))


KINDS: dict[str, Callable[..., nn.Module]] = {
    "LSTM": EmbeddingLSTMDecoder,
    "GRU": EmbeddingGRUDecoder,
    "LSTM drawn": drawn(EmbeddingLSTMDecoder, temperature=2.0),
    "GRU drawn": drawn(EmbeddingGRUDecoder, top_k=5, top_p=0.9),
    "GRU attends": AttentionGRUDecoder,
    "LSTM is fed": functools.partial(AttentionLSTMDecoder, input_feeding=True),
    "GRU attends, general": lambda *sizes, **options: AttentionGRUDecoder(
        *sizes, attention=DotAttention(HIDDEN, 5), memory_size=5, **options
    ),
    "LSTM attends, additive": lambda *sizes, **options: AttentionLSTMDecoder(
        *sizes, attention=AdditiveAttention(HIDDEN, 5, 6, bias=True), memory_size=5, **options
    ),
    "LSTM tells": functools.partial(EmbeddingLSTMDecoder, return_logits=True, return_logprobs=True),
    "GRU is drawn and tells": drawn(functools.partial(EmbeddingGRUDecoder, return_logprobs=True), temperature=2.0),
    "GRU attends and tells": functools.partial(AttentionGRUDecoder, return_logprobs=True),
    "LSTM attends and is drawn": drawn(functools.partial(AttentionLSTMDecoder, input_feeding=True), top_p=0.9),
}
DECODERS = [("LSTM", 1), ("LSTM", 2), ("GRU", 1), ("LSTM drawn", 1), ("GRU drawn", 2)]
DECODERS += [("GRU attends", 1), ("GRU attends", 2), ("LSTM is fed", 1), ("GRU attends, general", 1)]
DECODERS += [("LSTM attends, additive", 1), ("LSTM attends and is drawn", 2)]
DECODERS += [("LSTM tells", 2), ("GRU is drawn and tells", 1), ("GRU attends and tells", 1)]
INTERPRETED = [("LSTM", 2), ("GRU", 1), ("LSTM drawn", 1), ("LSTM attends, additive", 1), ("LSTM tells", 1)]
INTERPRETED += [("GRU is drawn and tells", 1)]
every_decoder = pytest.mark.parametrize(("kind", "num_layers"), DECODERS)


def decoder_model(kind: str, num_layers: int = 1) -> tuple[Cell, Unfolder]:
    """A decoder whose requests are its first token and a number that its states begin with. The token also seeds what
    it draws, and is how many rows it attends to."""
    torch.manual_seed(num_layers)
    module = KINDS[kind](WORDS, 4, HIDDEN, END, num_layers=num_layers)
    made = cell(module, module.input_specs(), max_batch=8)

    def unfold(graph, request):
        token, number = request
        given = {name: torch.full(made.inputs[name].shape, number) for name in module.states}
        if "seed" in made.inputs:
            given["seed"] = 77 * token
        for name in {"memory", "keys"} & made.inputs.keys():
            given[name] = torch.linspace(-1, 1, token * made.inputs[name].shape[0]).view(
                token, *made.inputs[name].shape
            )
        loop = graph.loop(made, until="stop", max_steps=MOST_STEPS, token=token, **given)
        told = {name: getattr(loop, name) for name in ("logits", "logprob") if name in made.outputs}
        return {"tokens": loop.token, **told, **{name: getattr(loop.last, name) for name in module.states}}

    return made, Unfolder("decode", unfold, (0, 0.0))


def serve_decoder(kind: str, num_layers: int, settings: SchedulerSettings = LONG_RUNS) -> None:
    """Twice, so that the second time what was captured is repeated; counts that the fused form did all of it."""
    made, model = decoder_model(kind, num_layers)
    with serving(model, settings) as engine:
        for _ in range(2):
            serve(engine, model, [(k % WORDS, 0.3 * k) for k in range(6)])
        counts = engine.statistics()["workers"][1]
        assert engine._manager.workers[0]._device.placements.of(made).run_rows is not None
    assert counts["unfused"] == counts["plain_faster"] == 0


@pytest.mark.one_in(2)
@every_decoder
@pytest.mark.parametrize("settings", [LONG_RUNS, ahead(2, runs=False)])
def test_decoders_give_what_running_one_by_one_gives(kind, num_layers, settings, monkeypatch):
    """By the kernels' references."""
    monkeypatch.setattr("cellrt.cells._fused.uses_triton", lambda weight: True)
    serve_decoder(kind, num_layers, settings)


@pytest.mark.parametrize("kind", ["GRU attends", "LSTM is fed", "LSTM attends, additive", "LSTM attends and is drawn"])
def test_single_steps_of_decoders_that_attend_run_by_kernels(kind, monkeypatch):
    monkeypatch.setattr("cellrt.cells._fused.uses_triton", lambda weight: True)
    made, _ = decoder_model(kind)

    def unfold(graph, count):
        given = {name: torch.full(spec.shape, count).to(spec.dtype) for name, spec in made.inputs.items()}
        for name in {"memory", "keys"} & given.keys():
            size = made.inputs[name].shape[0]
            given[name] = torch.linspace(-1, 1, count * size).view(count, size)
        first = made(**given)
        second = made(**given | {name: getattr(first, name) for name in made.outputs if name in made.inputs})
        return {"tokens": second.token, "h": second.h}

    model = Unfolder("two", unfold, 2)
    with serving(model, LONG_RUNS) as engine:
        for _ in range(2):
            serve(engine, model, [k % WORDS for k in range(6)])
        counts = engine.statistics()["workers"][1]
    assert counts["unfused"] == counts["plain_faster"] == 0


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_interpreted_kernels_decode_the_same():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton: pip install triton")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=set_up) as interpreter:
        for done in [interpreter.submit(serve_decoder, *each) for each in INTERPRETED]:
            done.result(280)


@pytest.mark.gpu
@every_decoder
def test_decoders_on_a_gpu(kind, num_layers):
    _, model = decoder_model(kind, num_layers)
    engine = device_engine("cuda:0", 1, DeviceOptions(ring_bytes=1 << 16, capture_after=1, fused=True))
    engine.register(model, warm_up=False)
    for _ in range(3):
        serve(engine, model, [(k % WORDS, 0.3 * k) for k in range(6)])
    assert engine.statistics()["workers"][1]["unfused"] == 0
    close_and_check(engine)


EMPTY = torch.ops.aten.empty, torch.ops.aten.new_empty, torch.ops.aten.empty_like


class Launched(TorchDispatchMode):
    """Counts what torch launches: all but views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += not function.is_view and function.overloadpacket not in EMPTY
        return function(*args, **(kwargs or {}))


LAUNCHES = {"LSTM": 5, "LSTM drawn": 5, "GRU drawn": 5, "GRU attends": 8, "LSTM is fed": 7, "GRU attends, general": 9}
LAUNCHES |= {"LSTM attends, additive": 9, "LSTM attends and is drawn": 7}
LAUNCHES |= {"LSTM tells": 5, "GRU is drawn and tells": 6, "GRU attends and tells": 8}


@needs_compiler
@pytest.mark.parametrize("kind", LAUNCHES)
def test_a_step_of_a_decoders_loop_is_few_launches(kind):
    """In plain torch, with gather, scatter and masks, a greedy one takes some 40, one that draws 90, and attention 25
    more."""
    made, _ = decoder_model(kind)
    numbers, words = torch.arange(3), torch.ones(40, dtype=torch.int64)
    inputs, outputs = (
        {name: IndexedRows(torch.zeros(9, *spec.shape, dtype=spec.dtype), numbers) for name, spec in specs.items()}
        for specs in (made.inputs, made.outputs)
    )
    ragged = [name for name, spec in made.inputs.items() if spec.ragged]
    inputs |= {name: RaggedRows(inputs[name].values, torch.tensor([0, 2, 2, 5])) for name in ragged}
    flags = torch.zeros(3, dtype=torch.bool)
    task = LoopTask(words, 3, 3, 4, 0, 29, NOWHERE, 1)
    found = begin(task, flags, flags)
    with torch.inference_mode(), launches_for_the_host() as launches:
        made.module.run_rows(inputs, outputs)  # the first packs weights
        launches.clear()
        with Launched() as launched:
            made.module.run_rows(inputs, outputs)
            go_on(task, found, 0, flags, flags)
    assert len(launches) + launched.count <= LAUNCHES[kind]
