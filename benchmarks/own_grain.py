"""A character model whose every output reads the last 40 characters again: as nodes of two LSTMs, and as one cell.

As nodes its graph has 81 nodes a character. It depends on the number of characters alone, so with a key it is unfolded
once for each; without, at every request. Beside both are padded batches of the same torch modules, and one at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import cellrt
from benchmarks.compare import Makers
from benchmarks.server import BatchServer, Runner
from cellrt.cells import EmbeddingLSTMCell, LSTMCell, ProjectionArgmax

SYMBOLS, EMBEDDED, HIDDEN, WINDOW = 465, 100, 128, 40
LENGTHS, NUM_REQUESTS, MAX_BATCH = (3, 30), 300, 64
KEYED, COARSE = "cellrt, nodes with a key", "cellrt, one coarse cell"


class Next(nn.Module):
    """The next character, and the window that ends with it: a coarse cell."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(SYMBOLS, EMBEDDED), nn.LSTM(EMBEDDED, HIDDEN)
        self.second, self.out = nn.LSTM(HIDDEN, HIDDEN), nn.Linear(HIDDEN, SYMBOLS)

    def forward(self, window: Tensor) -> dict[str, Tensor]:
        """Return the next token and window of windows ``[rows, 40]``."""
        read = self.second(self.first(self.embedding(window.T))[0])[0][-1]
        token = self.out(read).argmax(1)
        return {"token": token, "window": torch.cat([window[:, 1:], token[:, None]], 1)}


def draw_model() -> Next:
    """Return random weights."""
    torch.manual_seed(0)
    return Next().eval()


def draw_requests() -> list[int]:
    """Return how many characters each request makes."""
    return [int(count) for count in np.random.default_rng(0).integers(*LENGTHS, NUM_REQUESTS)]


def coarse(model: Next) -> cellrt.Unfolder:
    """Return a loop of one cell."""
    cell = cellrt.cell(model, {"window": cellrt.rows(WINDOW, dtype=torch.int64)}, name="next")
    return cellrt.Unfolder("model", lambda graph, count: {"token": graph.loop(cell, max_steps=count).token}, 2)


def fine(model: Next, key: Callable[[int], int] | None) -> cellrt.Unfolder:
    """Node by node."""
    state, token = {"h": (HIDDEN,), "c": (HIDDEN,)}, cellrt.rows(dtype=torch.int64)
    first = cellrt.cell(EmbeddingLSTMCell.from_torch(model.embedding, model.first), {"token": token, **state})
    second = cellrt.cell(LSTMCell.from_torch(model.second), {"x": (HIDDEN,), **state})
    pick = cellrt.cell(ProjectionArgmax.from_torch(model.out), {"h": (HIDDEN,)})

    def unfold(graph: cellrt.Graph, count: int) -> dict[str, Any]:
        tokens: list[Any] = [graph.constant(0, token)] * WINDOW
        for _ in range(count):
            low: Any = graph.zeros(first)
            high: Any = graph.zeros(second)
            for one in tokens[-WINDOW:]:
                low = first(token=one, h=low.h, c=low.c)
                high = second(x=low.h, h=high.h, c=high.c)
            tokens.append(pick(h=high.h).token)
        return {"token": tokens[WINDOW:]}

    return cellrt.Unfolder("model", unfold, 2, key=key)


def padded(model: Next, _threads: int) -> Runner:
    """Return batches whose requests that have all their characters are dropped."""

    @torch.inference_mode()
    def run(counts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        order = sorted(range(len(counts)), key=lambda place: -counts[place])
        window = torch.zeros(len(counts), WINDOW, dtype=torch.int64)
        made: list[list[int]] = [[] for _ in counts]
        for step in range(max(counts)):
            left = sum(count > step for count in counts)
            result = model(window[:left])
            window = result["window"]
            for place, token in zip(order, result["token"].tolist()):
                made[place].append(token)
        for place, tokens in enumerate(made):
            yield place, torch.tensor(tokens)

    return run


class Cellrt:
    """An engine with one worker that serves one of the two."""

    def __init__(self, model: cellrt.Unfolder) -> None:
        self._engine = cellrt.Engine(1)
        self._engine.register(model)
        self.close = self._engine.close

    def submit(self, count: int) -> Any:
        """Submit a request for so many characters."""
        return self._engine.submit("model", count)


def servers() -> Makers:
    """Return the makers of servers by name."""
    model = draw_model()
    return {
        KEYED: lambda: Cellrt(fine(model, int)),
        "cellrt, nodes": lambda: Cellrt(fine(model, None)),
        COARSE: lambda: Cellrt(coarse(model)),
        "padded": lambda: BatchServer(partial(padded, model), max_batch=MAX_BATCH, workers=1, threads=1),
        "one at a time": lambda: BatchServer(partial(padded, model), max_batch=1, workers=1, threads=1),
    }


def check(counts: Sequence[int], name: str, answers: Sequence[Any]) -> None:
    """Raise AssertionError where characters are not those of each request alone; one may be, where two are as good."""
    run = padded(draw_model(), 1)
    different = 0
    for count, answer in zip(counts, answers):
        ((_, expected),) = run([count])
        made = answer["token"] if isinstance(answer, dict) else answer
        different += [int(token) for token in made] != expected.tolist()
    if different > 1:
        raise AssertionError(f"{name}: {different} of {len(answers)} answers differ from those to a request alone")
