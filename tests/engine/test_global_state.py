"""What belongs to the process or the caller's thread is as it was: generators, defaults, modes, the collector.

And what others have set there changes no answer.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cellrt
from cellrt import cells, unfolders
from cellrt.cells.llama_weights import LAYER_NAMES, NAMES, llama_from_transformers
from cellrt.cells.transformer import TransformerLayer
from cellrt.cells.transformer_stack import encoder_decoder_cells, sentence_encoder
from cellrt.engine.engine import Engine
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.cells.every_cell import CASES, MADE, random_row, seeded, specs_of
from tests.engine.helpers import SMALL, WAIT_S
from tests.unfolders.attention_reference import CELLS, END, REFERENCE, START, draw
from tests.unfolders.language_models import draw_prompt, small_cell, small_llama
from tests.unfolders.translator import Translator

Act = Callable[[], object]
TOKEN = cellrt.rows(dtype=torch.int64)
LSTM, GRU, TABLE = nn.LSTM(5, 6), nn.GRU(5, 6), nn.Embedding(9, 5)
PROJECTION, LINEAR = nn.Linear(6, 9), nn.Linear(6, 5)
X = torch.linspace(-1, 1, 15).view(3, 5)


def state() -> dict[str, object]:
    """What belongs to the process or to this thread, as others may have set it."""
    algorithm, keys, *rest = np.random.get_state()
    in_a_new_thread: list[int] = []
    thread = threading.Thread(target=lambda: in_a_new_thread.append(torch.get_num_threads()))
    thread.start()
    thread.join(WAIT_S)
    return {
        "torch's generator": torch.random.get_rng_state().tolist(),
        "NumPy's generator": (algorithm, keys.tolist(), *rest),
        "Python's generator": random.getstate(),
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "modes": (torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()),
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "torch's threads": (torch.get_num_threads(), torch.get_num_interop_threads(), in_a_new_thread),
        "precision": (torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()),
        "the collector": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()),
        "warnings": list(warnings.filters),
        "NumPy's errors": np.geterr(),
        "the interpreter": (sys.getswitchinterval(), sys.getrecursionlimit(), sys.excepthook, list(sys.path)),
        "threads' errors": threading.excepthook,
        "signals": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "the environment": (dict(os.environ), os.getcwd()),
        "logging": (logging.root.level, list(logging.root.handlers)),
    }


def assert_same_values(found: Any, wanted: Any) -> None:
    """Whether the same came out, but for what another number of threads rounds."""
    if isinstance(wanted, nn.Module):
        found, wanted = found.state_dict(), wanted.state_dict()
    if isinstance(wanted, Tensor):
        torch.testing.assert_close(found, wanted)
        return
    assert len(found) == len(wanted)
    for name in wanted if isinstance(wanted, Mapping) else range(len(wanted)):
        assert_same_values(found[name], wanted[name])


def served(model: Unfolder, request: Any) -> object:
    """One request of a model, through an engine of its own."""
    with Engine(1, limits=SMALL, arena_bytes=1 << 16) as engine:
        engine.register(model, warm_up=False)
        return engine.submit(model.name, request).result(WAIT_S)


def cell_of(name: str) -> Act:
    """Defines a ready-made cell, tries it, and runs one node."""
    specs = specs_of(CASES[name], MADE[name])
    row = random_row(specs, torch.float32, seeded(0))

    def act() -> object:
        made = cellrt.cell(MADE[name], specs, name=name)
        made.check_row_wise()
        return run_one_by_one(Unfolder(name, lambda graph, request: vars_of(made, made(**request)), row), row)

    return act


def vars_of(made: Any, node: Any) -> dict[str, object]:
    return {output: getattr(node, output) for output in made.outputs}


def weights_from_torch() -> dict[str, Act]:
    """All that copies the weights of modules of torch."""
    llama, state = small_llama(), {}
    for name, weight in llama.state_dict().items():
        part, _, kind = name.rpartition(".")
        if part.startswith("layers."):
            _, number, part = part.split(".", 2)
            state[f"model.layers.{number}.{LAYER_NAMES[part][0]}.{kind}"] = weight
        else:
            state[f"{NAMES[part][0]}.{kind}"] = weight
    encoder, decoder = nn.TransformerEncoderLayer(8, 2, 12).eval(), nn.TransformerDecoderLayer(8, 2, 12).eval()
    keys = nn.Linear(5, 6), nn.Linear(6, 6), nn.Linear(6, 1)
    reader, combine = nn.GRU(5 + 6, 6), nn.Linear(12, 6)
    return {
        **{kind.__name__: lambda kind=kind: kind.from_torch(LSTM) for kind in (cells.LSTMCell, cells.LSTMInput)},
        **{kind.__name__: lambda kind=kind: kind.from_torch(GRU) for kind in (cells.GRUCell, cells.GRURecurrent)},
        "EmbeddingLSTMCell": lambda: cells.EmbeddingLSTMCell.from_torch(TABLE, LSTM),
        "EmbeddingGRUDecoder": lambda: cells.EmbeddingGRUDecoder.from_torch(TABLE, GRU, PROJECTION, 0),
        "AttentionGRUDecoder": lambda: cells.AttentionGRUDecoder.from_torch(TABLE, reader, combine, PROJECTION, 0),
        "DotAttention": lambda: cells.DotAttention.from_torch(LINEAR),
        "AdditiveAttention": lambda: cells.AdditiveAttention.from_torch(*keys[:2][::-1], keys[2]),
        "Projection": lambda: cells.Projection.from_torch(LINEAR),
        "ProjectionArgmax": lambda: cells.ProjectionArgmax.from_torch(LINEAR),
        "TransformerLayer": lambda: [TransformerLayer.from_torch(layer) for layer in (encoder, decoder)],
        "Llama": lambda: llama_from_transformers(state, llama.sizes),
    }


def ready_made() -> dict[str, Act]:
    """Ready-made models, made and served."""
    translator, deep, language = Translator(nn.LSTM, 1, False), nn.LSTM(5, 6, 2, bidirectional=True), small_cell()
    sentence, words, prompt = draw(0, 5), torch.tensor([3, 1, 4]), draw_prompt(0, 5)
    source = {"source": words}
    leaf = cells.TreeLSTMLeaf(5, 6)
    inner, summed = cells.BinaryTreeLSTMCell(None, 6), cells.ChildSumTreeLSTMCell(5, 6)
    pair = dict.fromkeys(("h_left", "c_left", "h_right", "c_right"), (6,))
    children = {"h": cellrt.ragged(6), "c": cellrt.ragged(6)}

    def decoder() -> Any:
        return cells.EmbeddingLSTMDecoder.from_torch(translator.target, translator.decoder, translator.projection, 2)

    def encoder() -> Any:
        return unfolders.from_torch(translator.encoder, embedding=translator.source)

    def decoding() -> Any:
        return cellrt.cell(decoder(), {"token": TOKEN, "h": (8,), "c": (8,)})

    return {
        "chain": lambda: served(unfolders.chain("chain", LSTM), X),
        "chain of tokens": lambda: served(unfolders.chain("chain", unfolders.from_torch(deep, embedding=TABLE)), words),
        "tree": lambda: served(
            unfolders.tree("tree", leaf=cellrt.cell(leaf, {"x": (5,)}), inner=cellrt.cell(inner, pair)), (X[0], X[1])
        ),
        "parent_tree": lambda: served(
            unfolders.parent_tree("tree", leaf=cellrt.cell(summed, {"x": (5,), **children})),
            {"parents": [-1, 0, 0], "inputs": {"x": X}},
        ),
        "generate": lambda: served(unfolders.generate("model", decoding(), max_steps=4, prompt=encoder()), words),
        "encoder_decoder": lambda: served(
            unfolders.encoder_decoder("model", encoder=encoder(), decoder=decoding(), start=0, max_steps=4), source
        ),
        "beam_search": lambda: served(
            unfolders.beam_search("model", encoder=encoder(), decoder=decoder(), start=0, end=2, max_steps=4, beams=2),
            source,
        ),
        "embed": lambda: served(unfolders.embed("model", sentence_encoder(REFERENCE.encoder)), sentence),
        "transduce": lambda: served(unfolders.transduce("model", new_cells(), start=START, max_steps=4), sentence),
        "transduce_with_beams": lambda: served(
            unfolders.transduce_with_beams("model", CELLS, start=START, max_steps=4, beams=2), sentence
        ),
        "complete": lambda: served(unfolders.complete("model", language, max_tokens=4), prompt),
    }


def new_cells() -> Any:
    return encoder_decoder_cells(REFERENCE.encoder, REFERENCE.decoder, REFERENCE.head, END)


def draws(x: Tensor, h: Tensor) -> dict[str, Tensor]:
    """A cell that draws, wherever one may, and needs none of it."""
    drawn = torch.rand(()).item() + random.random() + float(np.random.rand())
    dropped = nn.functional.dropout(x, 0.5, training=True)
    return {"h": x + h + 0 * drawn + 0 * dropped}


def definition_of_one_that_draws() -> object:
    made = cellrt.cell(draws, {"x": (5,), "h": (5,)})
    with Engine(1, limits=SMALL, arena_bytes=1 << 16) as engine:
        engine.register(Unfolder("draws", lambda graph, x: {"h": graph.chain(made, x=x).h}, X))
    return made.check_row_wise()


def every_door() -> object:
    cell = cellrt.cell(lambda x, h: {"h": x + h / 2}, {"x": (5,), "h": (5,)})
    model = Unfolder("model", lambda graph, x: {"h": graph.chain(cell, x=x, keep=True).h}, X)
    with Engine(1, limits=SMALL, arena_bytes=1 << 16, trace=True) as engine:
        engine.register(model)
        session = engine.session("model")
        found = [
            engine.submit("model", X).result(WAIT_S),
            engine.submit("model", X.numpy()).result(WAIT_S),
            engine.submit("model", X.tolist()).result(WAIT_S),
            engine.submit_many("model", [X, X]).results(WAIT_S),
            list(engine.map("model", iter([X, X]))),
            list(engine.stream("model", X)),
            [session.submit(X).result(WAIT_S), session.submit(X).result(WAIT_S)],
            engine.session("model", state=session.export()).submit(X).result(WAIT_S),
            run_one_by_one(model, X),
        ]
        engine.timeline()
        engine.statistics()
        engine.drain()
    return found


ACTS: dict[str, Act] = {
    **{f"cell {name}": cell_of(name) for name in CASES},
    **{f"weights {name}": act for name, act in weights_from_torch().items()},
    **{f"model {name}": act for name, act in ready_made().items()},
    "every door": every_door,
}
EXPECTED: dict[str, object] = {}


@contextmanager
def default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def default_dtype() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextmanager
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        yield
    finally:
        torch.set_num_threads(before)


SETTINGS = [default_device, default_dtype, threads, torch.no_grad, torch.inference_mode]


def expected(name: str) -> object:
    """What an act comes to where nobody has set anything."""
    if name not in EXPECTED:
        EXPECTED[name] = ACTS[name]()
    return EXPECTED[name]


def differences(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, object]:
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("name", [*ACTS, "one that draws"])
def test_all_is_left_as_it_was(name):
    act = ACTS.get(name, definition_of_one_that_draws)
    act()  # what is imported and compiled at first
    gc.unfreeze()  # what another test had frozen may go in between
    before = state()
    act()
    assert not differences(before, state())


@pytest.mark.one_in(13)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", ACTS)
def test_what_others_have_set_is_left_and_changes_no_answer(name, setting):
    wanted = expected(name)
    with setting():
        before = state()
        found = ACTS[name]()
        changed = differences(before, state())
    assert_same_values(found, wanted)
    assert not changed
