"""Small cells with rows of four numbers: enough kinds to build any shape of graph."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor, nn

from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, ragged, rows

WIDTH = 4
TOKENS = 11
INTEGER = rows(dtype=torch.int64)


class Hidden(NamedTuple):
    h: Tensor


class Pair(NamedTuple):
    h: Tensor
    c: Tensor


class Halves(NamedTuple):
    left: Tensor
    right: Tensor


class Decoded(NamedTuple):
    token: Tensor
    h: Tensor
    stop: Tensor


class Simple(nn.Module):
    """A plain recurrent cell: one step at a time only."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, h: Tensor) -> Hidden:
        return Hidden(torch.tanh(self.mix(torch.cat([x, h], 1))))


class Gated(nn.Module):
    """Two carried states, and a form for several steps at once."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> Pair:
        keep, new = self.mix(torch.cat([x, h], 1)).chunk(2, 1)
        c = torch.sigmoid(keep) * c + torch.tanh(new)
        return Pair(torch.tanh(c), c)

    def steps(self, batch_sizes: list[int], x: Tensor, h: Tensor, c: Tensor) -> Pair:
        """``x`` is packed by step; step s has the first ``batch_sizes[s]`` rows."""
        taken, states = 0, []
        for size in batch_sizes:
            h, c = self(x[taken : taken + size], h[:size], c[:size])
            states.append((h, c))
            taken += size
        return Pair(torch.cat([h for h, _ in states]), torch.cat([c for _, c in states]))


class Embed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)

    def forward(self, token: Tensor) -> Tensor:
        return self.table(token)


def average(a: Tensor, b: Tensor) -> Tensor:
    return torch.sin(a) * 0.7 + b * 0.3


def fork(x: Tensor) -> Halves:
    return Halves(torch.cos(x), x * 0.5 - 0.1)


def leaf(x: Tensor) -> Pair:
    return Pair(torch.tanh(x), x * 0.5)


def children_of(values: RaggedRows) -> Tensor:
    """Which node each row of a ragged input belongs to."""
    counts = values.offsets.diff()
    return torch.repeat_interleave(torch.arange(len(counts)), counts)


class ChildSum(nn.Module):
    """A node of a tree with any number of children: sums their states through a gate for each."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: RaggedRows, c: RaggedRows) -> Pair:
        empty = torch.zeros(len(h.offsets) - 1, WIDTH)
        kept = torch.sigmoid(self.gate(h.values)) * c.values
        total = empty.index_add(0, children_of(h), h.values)
        state = empty.index_add(0, children_of(c), kept) + torch.tanh(total)
        return Pair(torch.tanh(state), state)


def join(h_left: Tensor, h_right: Tensor) -> Hidden:
    return Hidden(torch.tanh(h_left - 0.5 * h_right))


class Decoder(nn.Module):
    """Counts through tokens by exact arithmetic and stops at 0; its state depends on them and on a fixed mood."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)

    def forward(self, token: Tensor, h: Tensor, mood: Tensor) -> Decoded:
        token = (token * 7 + 3) % TOKENS
        h = torch.tanh(h + self.table(token) + 0.1 * mood)
        return Decoded(token, h, token == 0)


class Zoo(NamedTuple):
    """The cells a random graph is made of."""

    simple: Cell
    gated: Cell
    embed: Cell
    average: Cell
    fork: Cell
    leaf: Cell
    child_sum: Cell
    join: Cell
    decoder: Cell


@functools.cache
def make_zoo(max_batch: int, padded: bool = False) -> Zoo:
    """The cells with that maximum batch; ``padded``: some of them support a few batch sizes only."""
    with torch.random.fork_rng():
        torch.manual_seed(5)
        row = (WIDTH,)
        sizes = sorted({max(1, max_batch // 2), max_batch}) if padded else None
        return Zoo(
            cell(Simple(), {"x": row, "h": row}, max_batch=max_batch, batch_sizes=sizes),
            cell(Gated(), {"x": row, "h": row, "c": row}, max_batch=2 * max_batch, finite=["h"]),
            cell(Embed(), {"token": INTEGER}, max_batch=3 * max_batch),
            cell(average, {"a": row, "b": row}, max_batch=max_batch, min_batch=min(2, max_batch), batch_sizes=sizes),
            cell(fork, {"x": row}, max_batch=max_batch),
            cell(leaf, {"x": row}, max_batch=max_batch),
            cell(
                ChildSum(), {"h": ragged(WIDTH), "c": ragged(WIDTH)}, max_batch=max_batch, carry={}, batch_sizes=sizes
            ),
            cell(join, {"h_left": row, "h_right": row}, max_batch=max_batch),
            cell(Decoder(), {"token": INTEGER, "h": row, "mood": row}, max_batch=2 * max_batch, batch_sizes=None),
        )
