"""Hand-written CPU kernels of the ready-made cells on one core, beside onnxruntime's LSTM and what a compiler makes.

Parts: ``lstm`` (a run of steps: with the table of tokens folded, with inputs, and onnxruntime's, which gets all its
steps in one call too), ``cells`` (one step or one task of an LSTM, a GRU, a node of a tree and the likeliest of 8,000
tokens: the hand-written form, and the one that AOTInductor makes of the same cell in plain torch). Of each:
microseconds a step and GFLOP/s of its products, the pointwise half not counted.

Times are those of the processor for the calling thread, which does all the work, so that others on the machine do not
count; medians of calls that take turns. The lanes are those of the machine; ``NUMBA_CPU_NAME`` and
``NUMBA_CPU_FEATURES`` make the kernels (not onnxruntime's, nor the compiler's) narrower. What is not yet compiled is
compiled first, about half a minute each.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import cellrt
from benchmarks.chain_peers import lstm_to_onnx, new_session
from benchmarks.options import Options
from benchmarks.record import Recorder
from benchmarks.timing import medians_us
from cellrt import Cell, cells
from cellrt.definition.aot.form import compile_cell
from cellrt.definition.aot.refusal import NotCompiledError
from cellrt.definition.aot.store import LibraryStore
from cellrt.definition.compiled_form import DONE, CompiledForm
from cellrt.definition.examples import random_inputs
from cellrt.definition.modes import torch_threads
from cellrt.definition.spec import plain
from cellrt.products.vectors import LANES

PARTS = ("lstm", "cells")
ROWS, QUICK_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512), (1, 8, 64)
TOKENS, CHOICES = 10_000, 8_000
MOST_STEPS, MOST_ROWS = 24, 1024
"""The size of a run: steps, and rows of all its steps."""
MOST_DIFFERENT = 1e-4


class Case(NamedTuple):
    """A cell, and how many numbers of weights each of its rows is multiplied by."""

    cell: Cell
    weights: int


def make_cases(hidden: int) -> dict[str, Case]:
    """Return the cells of this size, each with inputs as wide as its states."""
    state = cellrt.rows(hidden)
    children = dict.fromkeys(("h_left", "c_left", "h_right", "c_right"), state)
    made = {
        "LSTM": (cells.LSTMCell(hidden, hidden), dict(x=state, h=state, c=state), 8),
        "GRU": (cells.GRUCell(hidden, hidden), dict(x=state, h=state), 6),
        "tree node": (cells.BinaryTreeLSTMCell(None, hidden), children, 10),
    }
    cases = {name: Case(cellrt.cell(module, inputs), each * hidden**2) for name, (module, inputs, each) in made.items()}
    choose = cellrt.cell(cells.ProjectionArgmax(hidden, CHOICES), {"h": state})
    return {**cases, "likeliest token": Case(choose, CHOICES * hidden)}


class Call(NamedTuple):
    """A timed call, the steps that it takes, and the floating-point operations of its products in all of them."""

    run: Callable[[], Any]
    steps: int
    work: float


def record(recorder: Recorder, case: str, rows: int, calls: dict[str, Call], seconds: float) -> None:
    """Record times of calls that take turns."""
    times = medians_us({name: call.run for name, call in calls.items()}, seconds, time.thread_time_ns)
    for name, value in times.items():
        recorder.add(case, name, value / calls[name].steps, "us a step", rows=rows, lanes=LANES)
        recorder.add(case, name, calls[name].work / value / 1e3, "GFLOP/s", rows=rows, lanes=LANES)


@torch.inference_mode()
def run_lstm(recorder: Recorder, hidden: int, rows: int, seconds: float) -> None:
    """Measure a run of steps of an LSTM on given inputs, with all rows to the end."""
    lstm, embedding = nn.LSTM(hidden, hidden), nn.Embedding(TOKENS, hidden)
    state, steps = cellrt.rows(hidden), max(1, min(MOST_STEPS, MOST_ROWS // rows))
    states = dict(h=state, c=state)
    folded = cellrt.cell(cells.EmbeddingLSTMCell.from_torch(embedding, lstm), {"token": cellrt.token, **states})
    whole = cellrt.cell(cells.LSTMCell.from_torch(lstm), {"x": state, **states})
    token, zeros = torch.randint(TOKENS, (steps * rows,)), torch.zeros(rows, hidden)
    x, work = embedding(token), 2.0 * 4 * hidden**2 * rows * steps
    calls = {
        "folded": Call(partial(folded.run_steps, [rows] * steps, token, zeros, zeros), steps, work),
        "with inputs": Call(partial(whole.run_steps, [rows] * steps, x, zeros, zeros), steps, 2 * work),
    }
    if all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime")):
        session = new_session(lstm_to_onnx(lstm), 1)
        lengths = torch.full((rows,), steps, dtype=torch.int32).numpy()
        given = {"x": x.view(steps, rows, hidden).numpy(), "lengths": lengths}
        calls["onnxruntime"] = Call(partial(session.run, None, given), steps, 2 * work)
        expected = torch.from_numpy(session.run(None, given)[0][0])
        for name in ("folded", "with inputs"):
            check(name, calls[name].run()[0][-rows:], expected)
    elif rows == 1:
        print("onnxruntime is not measured: pip install onnx onnxruntime")
    record(recorder, f"LSTM {hidden}, run", rows, calls, seconds)


def check(name: str, made: Tensor, expected: Tensor) -> None:
    """Raise AssertionError, which names it, unless a form gives what another one gives."""
    difference = float((made - expected).abs().max())
    if difference > MOST_DIFFERENT:
        raise AssertionError(f"{name} differs by {difference}")


def compiled(name: str, cell: Cell, store: LibraryStore) -> CompiledForm | None:
    """Return the form that AOTInductor makes of a cell; None, with the reason printed, if it makes none."""
    try:
        return compile_cell(cell, store)
    except NotCompiledError as refused:
        print(f"{name} is not compiled: {refused}")
        return None


@torch.inference_mode()
def run_case(
    recorder: Recorder, name: str, case: Case, other: CompiledForm | None, rows: int, seconds: float
) -> None:  # fmt: skip
    """One step of the two forms of a cell."""
    forms = {"hand-written": case.cell.compiled_form, "AOTInductor": other}
    inputs = random_inputs(case.cell.inputs.values(), rows, torch.Generator().manual_seed(rows))
    given = dict(zip(case.cell.inputs, map(plain, inputs)))
    calls: dict[str, Call] = {}
    made: dict[str, dict[str, Tensor]] = {}
    for kind, form in forms.items():
        if form is not None:
            run, made[kind] = form.bind(rows, given)
            if run() != DONE:
                raise AssertionError(f"{kind} form of {name} refuses its inputs")
            calls[kind] = Call(run, 1, 2.0 * case.weights * rows)
    for port in case.cell.outputs if len(made) == 2 and "h" in case.cell.outputs else ():
        check(name, made["AOTInductor"][port], made["hand-written"][port])
    record(recorder, name, rows, calls, seconds)


def run(recorder: Recorder, options: Options) -> None:
    """Measure all parts, or those asked for."""
    store, seconds = LibraryStore(), 0.02 if options.quick else 0.3
    with torch_threads(1):
        for hidden in options.hidden_sizes:
            for rows in QUICK_ROWS if options.quick else ROWS:
                if options.has("lstm"):
                    run_lstm(recorder, hidden, rows, seconds)
            for name, case in make_cases(hidden).items() if options.has("cells") else ():
                form = compiled(name, case.cell, store)
                if form is not None:
                    recorder.add(
                        f"{name} {hidden}", "AOTInductor gives the same bits", form.is_batch_invariant, "yes or no"
                    )
                for rows in QUICK_ROWS if options.quick else ROWS:
                    run_case(recorder, f"{name} {hidden}", case, form, rows, seconds)
