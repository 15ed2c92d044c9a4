"""The cost that sampling adds to a language model's step on one core: with no parameter set, and with all of them.

Steps differ by some percent from run to run, so the choice of the tokens is also measured by itself, of logits that are
there: what it takes longer than greedy choice, as a share of the greedy step.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

import cellrt
from benchmarks.record import Recorder
from benchmarks.timing import medians_us
from cellrt.cells.language_models import language_model
from cellrt.cells.llama import Llama, LlamaSizes
from cellrt.cells.row_layers import likeliest
from cellrt.cells.sampling import Asked, SamplingLimits, sample
from cellrt.definition.span_form import SpanForm
from cellrt.definition.spans import PagedRows, Spans
from cellrt.unfolders._sampling import SamplingRequests

SMOLLM = LlamaSizes(
    vocabulary=49_152, hidden=576, inner=1536, layers=30, heads=9, kv_heads=3, rotary_base=100_000.0, is_tied=True
)
"""SmolLM2-135M's, here with random weights."""
ROWS, READ, PAGE_SIZE, NO_END = (1, 8, 32), 255, 16, -1
ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 1.0},
    "top-p": {"temperature": 1.0, "top_p": 0.95},
    "everything": {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.95,
        "min_p": 0.05,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.1,
        "frequency_penalty": 0.1,
        "logit_bias": {token: 1.0 for token in range(10)},
        "min_tokens": 4,
        "stop_tokens": [1, 2, 3],
        "logprobs": 20,
    },
}


@torch.inference_mode()
def run_sampling(recorder: Recorder, seconds: float) -> None:
    """Measure steps of a greedy model, and of one that samples, in the forms in which they are served."""
    torch.manual_seed(0)
    model = Llama(SMOLLM).eval()
    greedy, sampling = (
        language_model(model, NO_END, page_size=PAGE_SIZE, sampling=is_sampling) for is_sampling in (False, True)
    )
    for rows in ROWS:
        inputs = _inputs(sampling, rows)
        calls: dict[str, Callable[[], object]] = {"greedy": _step(greedy, rows, inputs)}
        for name, asked in ASKED.items():
            calls[name] = _step(sampling, rows, inputs | _asked(sampling, rows, asked))
        times = medians_us(calls, seconds, time.thread_time_ns)
        logits = 3 * torch.randn(rows, SMOLLM.vocabulary)
        choices: dict[str, Callable[[], object]] = {"greedy": partial(likeliest, logits)}
        for name, asked in ASKED.items():
            choices[name] = _choice(logits, inputs, _asked(sampling, rows, asked))
        own = medians_us(choices, seconds / 5, time.thread_time_ns)
        for name, value in times.items():
            recorder.add("sampling", f"step, {name}", value, "us", rows=rows)
            if name != "greedy":
                recorder.add("sampling", f"{name} / greedy: time", value / times["greedy"], "ratio", rows=rows)
                share = (own[name] - own["greedy"]) / times["greedy"]
                recorder.add("sampling", f"{name}: longer choice / greedy step", share, "ratio", rows=rows)


def _step(cell: cellrt.Cell, rows: int, inputs: Mapping[str, Any]) -> Callable[[], object]:
    form = cell.compiled_form
    if not isinstance(form, SpanForm):
        raise TypeError(f"{cell!r} has no compiled form")
    return partial(form.run_gathered, rows, {name: inputs[name] for name in form.inputs})


def _choice(logits: torch.Tensor, inputs: Mapping[str, Any], asked: Mapping[str, Any]) -> Callable[[], object]:
    rows, history, spans = torch.arange(len(logits)), inputs["history"], inputs["spans"]
    return partial(sample, logits, rows, Asked(**asked), history, spans, [NO_END], SamplingLimits())


def _inputs(cell: cellrt.Cell, rows: int) -> dict[str, Any]:
    """Return single steps of so many texts of ``READ`` tokens."""
    width, length = READ // PAGE_SIZE + 1, torch.full((rows,), READ + 1, dtype=torch.int32)
    tables = torch.arange(rows * width, dtype=torch.int32).view(rows, width)
    offsets, nodes = torch.arange(rows + 1, dtype=torch.int32), torch.arange(rows, dtype=torch.int32)
    spans = Spans(offsets, length - 1, nodes >= 0)
    kinds = {name: cell.inputs[name].stored for name in ("kv", "history")}
    states = {
        name: PagedRows(
            torch.randint(0, 1000, (rows * width, *spec.shape)).to(spec.dtype) / 1000
            if spec.dtype.is_floating_point
            else torch.randint(0, SMOLLM.vocabulary, (rows * width, *spec.shape), dtype=spec.dtype),
            *(tables, length, offsets, nodes, length - 1, spans.is_read, spec.page_dim),
        )
        for name, spec in kinds.items()
    }
    return {"token": torch.arange(rows), "spans": spans, **states}


def _asked(cell: cellrt.Cell, rows: int, asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of so many requests as the cell's inputs."""
    requests = SamplingRequests("lm", cell)
    each = [requests.read({**asked, "seed": row}, READ // 2, 256)[0] for row in range(rows)]
    return {name: torch.stack([torch.as_tensor(one[name]) for one in each]) for name in each[0]}
