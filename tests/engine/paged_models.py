"""Cells with pages and spans, and models of them: sums over all rows so far, and rows less the mean of their span."""

from __future__ import annotations

import time
from collections.abc import Sequence, Set
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import grows, pages, span
from cellrt.engine.engine import Engine
from cellrt.errors import CancelledError, CellError, RequestTooLargeError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import assert_same, close_and_check, error_of

WIDTH = 4
POISON = 1000.0
"""A row that starts with it makes its cell raise."""


class Summed(NamedTuple):
    x: Tensor
    stop: Tensor


def sum_to(state: PagedRows, node: int, end: int) -> Tensor:
    """The sum of a node's first rows, page by page."""
    rows = state.by_row
    total = torch.zeros(rows.shape[2:])
    for row in range(end):
        total += rows[state.tables[node, row // state.page_size], row % state.page_size]
    return total


class SumSoFar(nn.Module):
    """Appends ``x / 2``; returns x + the sum of all appended so far, halved each time so that it stays small."""

    def forward(self, x: Tensor, total: PagedRows) -> Summed:
        total.append(0.5 * x)
        refuse_poison(x)
        places = zip(total.nodes.tolist(), total.positions.tolist())
        sums = torch.stack([sum_to(total, node, position + 1) for node, position in places])
        out = torch.tanh(0.3 * sums + 0.1 * x)
        return Summed(out, out[:, 0] > 0.4)


class SumWithMemory(nn.Module):
    """As ``SumSoFar``, with the sum of all that another cell appended beside it."""

    def forward(self, x: Tensor, total: PagedRows, memory: PagedRows) -> Summed:
        total.append(0.5 * x)
        places = zip(total.nodes.tolist(), total.positions.tolist())
        sums = torch.stack(
            [
                sum_to(total, node, position + 1) + 0.2 * sum_to(memory, node, int(memory.lengths[node]))
                for node, position in places
            ]
        )
        out = torch.tanh(0.3 * sums + 0.1 * x)
        return Summed(out, out[:, 0] > 0.4)


def centre(x: Tensor, spans: Spans) -> Tensor:
    """Each row less the mean of its span, plus a little of its position."""
    refuse_poison(x)
    count = spans.offsets.diff()[:, None]
    totals = torch.zeros(len(count), x.shape[1]).index_add(0, spans.nodes, x)
    return x - (totals / count)[spans.nodes] + 0.01 * spans.positions[:, None]


def refuse_poison(x: Tensor) -> None:
    """Raises if a row starts with POISON."""
    if x.device.type != "meta" and bool((x[:, 0] == POISON).any()):
        raise ValueError("poisoned")


class PagedCells(NamedTuple):
    """Cells that share no pages of other shapes."""

    centre: Cell
    memorise: Cell
    generate: Cell


def make_cells(page_size: int = 3, max_batch_rows: int = 64, max_batch: int = 8) -> PagedCells:
    """The cells of ``sums``."""
    limits = {"max_batch_rows": max_batch_rows, "max_batch": max_batch}
    total, memory = grows(WIDTH, page_size=page_size), pages(WIDTH, page_size=page_size)
    return PagedCells(
        cell(centre, {"x": (WIDTH,), "spans": span(whole=True)}, name="centre", max_batch=max_batch, max_batch_rows=64),
        cell(SumSoFar(), {"x": (WIDTH,), "total": total}, name="memorise", **limits),
        cell(SumWithMemory(), {"x": (WIDTH,), "total": total, "memory": memory}, name="generate", **limits),
    )


def sums(cells: PagedCells, *, keep: bool = False) -> Unfolder:
    """A model like an encoder and a decoder: rows are centred together and memorised, then others read and generated.

    Of what is read, the ``leading`` rows at its end are those of the loop's first step.

    ``keep``: a session keeps what was read and generated.
    """

    def unfold(graph, request):
        encoded = graph.chain(cells.centre, x=request["source"])
        memory = graph.pages(cells.memorise)
        graph.chain(cells.memorise, x=encoded.output, total=memory)
        total = graph.pages(cells.generate, keep=keep)
        leading, results = request["leading"], {}
        prompt, first = request["prompt"][: len(request["prompt"]) - leading], request["prompt"][-leading:]
        if len(prompt):
            read = graph.chain(cells.generate, x=prompt, total=total, memory=memory)
            results["read"] = read.x
            first = first if leading else read.last.x
        made = graph.loop(cells.generate, x=first, total=total, memory=memory, until="stop", max_steps=request["steps"])
        return {**results, "made": made.x, "last": made.last.x}

    example = {"source": torch.zeros(2, WIDTH), "prompt": torch.zeros(2, WIDTH), "steps": 2, "leading": 0}
    return Unfolder("sums", unfold, example)


def make_request(seed: int, source: int, prompt: int, steps: int, leading: int = 0) -> dict[str, object]:
    """Random rows; at most all of the prompt leads."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "source": torch.randn(source, WIDTH, generator=generator),
        "prompt": torch.randn(prompt, WIDTH, generator=generator),
        "steps": steps,
        "leading": min(leading, prompt),
    }


def nap(left: Tensor) -> dict[str, Tensor]:
    """Counts down, and takes its time."""
    if left.device.type != "meta":
        time.sleep(0.002)
    return {"left": left - 1, "stop": left <= 1}


NAPS = cell(nap, {"left": ()}, name="nap")
"""In a loop it keeps a worker busy, without any page."""
NAPPING = Unfolder(
    "naps", lambda graph, count: {"left": graph.loop(NAPS, left=float(count), until="stop", max_steps=10_000).left}, 1
)


def serve_in_company(
    engine: Engine, model: Unfolder, requests: Sequence[tuple[int, ...]], poisoned: Set[int], cancelled: Set[int]
) -> None:
    """Serves requests of ``sums`` all at once, some with a row that no cell takes and some cancelled, and closes the
    engine: each of the others has what it has alone."""
    try:
        engine.register(model, warm_up=False)
        made = [make_request(*drawn) for drawn in requests]
        for k in poisoned.intersection(range(len(made))):
            made[k]["source"][-1, 0] = POISON
        futures = []
        for k, request in enumerate(made):
            try:
                futures.append(engine.submit("sums", request))
            except RequestTooLargeError:
                futures.append(None)
            if futures[k] is not None and k in cancelled:
                futures[k].cancel()
        for k, (request, future) in enumerate(zip(made, futures)):
            if future is None:
                continue
            error = error_of(future)
            if k in cancelled and isinstance(error, CancelledError):
                continue
            if k in poisoned:
                assert isinstance(error, CellError), error
            else:
                assert error is None, error
                assert_same(future.result(), run_one_by_one(model, request))
    finally:
        close_and_check(engine)
