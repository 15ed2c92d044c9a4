"""Twenty modules as users write them, none from the shelf: what ``own_cell`` times, and what the slow tests compare.

The last of them cannot be compiled, each for a reason of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import cellrt
from cellrt import Cell, RaggedRows

WIDTH, TOKENS, SPAN = 128, 500, 8
NUMBERS, STATE, TOKEN = cellrt.rows(WIDTH), cellrt.rows(WIDTH), cellrt.token
MEMORY, CHILDREN = cellrt.ragged(WIDTH), {"h": cellrt.ragged(WIDTH), "c": cellrt.ragged(WIDTH)}


class OwnModule(NamedTuple):
    """A module, the inputs of its cell, and the name of the reason if it stays eager."""

    make: Callable[[], Callable[..., Any]]
    inputs: Mapping[str, Any]
    refused: str | None = None

    def cell(self, name: str) -> Cell:
        """Return the cell, with the same weights each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return cellrt.cell(self.make(), self.inputs, name=name.replace(" ", "-"))


class Gated(nn.Module):
    """A gated step with two states."""

    def __init__(self) -> None:
        super().__init__()
        self.sums = nn.Linear(2 * WIDTH, 2 * WIDTH)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> dict[str, Tensor]:
        """Run one step."""
        gate, new = self.sums(torch.cat([x, h], 1)).chunk(2, 1)
        c = torch.sigmoid(gate) * c + torch.tanh(new)
        return {"h": torch.tanh(c), "c": c}


class SelfAttention(nn.Module):
    """Attention within the span of a row, with a norm and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm = nn.MultiheadAttention(WIDTH, 4, batch_first=True), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``[rows, span, width]``."""
        normed: Tensor = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        return normed


class RaggedAttention(nn.Module):
    """Attention of a row over any number of others."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, memory: RaggedRows) -> Tensor:
        """Return the context ``[rows, width]``; zeros of no memory."""
        counts = memory.offsets.diff()
        owner = torch.repeat_interleave(counts, output_size=memory.values.shape[0])
        weights = (self.query(h)[owner] * memory.values).sum(1).exp()
        total = torch.zeros_like(h[:, 0]).index_add(0, owner, weights)
        return torch.zeros_like(h).index_add(0, owner, (weights / total[owner])[:, None] * memory.values)


class ChildSum(nn.Module):
    """A child-sum TreeLSTM node."""

    def __init__(self) -> None:
        super().__init__()
        self.iou, self.forget = nn.Linear(2 * WIDTH, 3 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, h: RaggedRows, c: RaggedRows) -> dict[str, Tensor]:
        """Return one node from its children."""
        owner = torch.repeat_interleave(h.offsets.diff(), output_size=h.values.shape[0])
        total = torch.zeros_like(x).index_add(0, owner, h.values)
        i, o, u = self.iou(torch.cat([x, total], 1)).chunk(3, 1)
        forget = torch.sigmoid(self.forget(torch.cat([x[owner], h.values], 1)))
        c_new = (torch.sigmoid(i) * torch.tanh(u)).index_add(0, owner, forget * c.values)
        return {"h": torch.sigmoid(o) * torch.tanh(c_new), "c": c_new}


class BinaryTree(nn.Module):
    """A binary TreeLSTM node."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * WIDTH, 5 * WIDTH)

    def forward(self, h_left: Tensor, c_left: Tensor, h_right: Tensor, c_right: Tensor) -> dict[str, Tensor]:
        """Return one node from two."""
        i, left, right, o, u = self.gates(torch.cat([h_left, h_right], 1)).chunk(5, 1)
        c = torch.sigmoid(i) * torch.tanh(u) + torch.sigmoid(left) * c_left + torch.sigmoid(right) * c_right
        return {"h": torch.sigmoid(o) * torch.tanh(c), "c": c}


class GRUStack(nn.Module):
    """Two GRUCells as a decoder: an embedding below, the best token above."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, TOKENS)
        self.layers = nn.ModuleList(nn.GRUCell(WIDTH, WIDTH) for _ in range(2))

    def forward(self, token: Tensor, h: Tensor) -> dict[str, Tensor]:
        """Run one step; ``h`` is ``[rows, 2, width]``."""
        value, states = self.table(token), []
        for k, layer in enumerate(self.layers):
            value = layer(value, h[:, k])
            states.append(value)
        best = self.head(value).argmax(1)
        return {"token": best, "stop": best == 0, "h": torch.stack(states, 1)}


class TwoLSTMs(nn.Module):
    """Two layers of LSTM with a projection."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTMCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> dict[str, Tensor]:
        """Run one step; states are ``[rows, 2, width]``."""
        h0, c0 = self.first(x, (h[:, 0], c[:, 0]))
        h1, c1 = self.second(h0, (h[:, 1], c[:, 1]))
        return {"h": torch.stack([h0, h1], 1), "c": torch.stack([c0, c1], 1), "scores": self.head(h1)}


class Positions(nn.Module):
    """Embeddings of a token and of its place, which goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)
        self.register_buffer("places", torch.randn(64, WIDTH))

    def forward(self, token: Tensor, place: Tensor) -> dict[str, Tensor]:
        """Run one step."""
        places: Any = self.places
        return {"x": self.table(token) + places[place % 64], "place": place + 1}


class Summary(nn.Module):
    """Several outputs of several dtypes."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sizes, the largest, and whether it is positive."""
        return x.norm(dim=1), x.argmax(1), x.sum(1) > 0


class ByValues(nn.Module):
    """Asks for the values of its rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Clamp large rows."""
        return x.clamp(max=1.0) if bool((x > 1).any()) else x


class Noisy(nn.Module):
    """Draws random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        """Add noise."""
        return x + 0.01 * torch.randn_like(x)


class OverSpan(nn.Module):
    """A recurrent module over a ragged span."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH)

    def forward(self, memory: RaggedRows) -> Tensor:
        """Return the last state of each."""
        parts = [self.gru(part)[1][0] for part in memory.values.tensor_split(memory.offsets[1:-1].tolist())]
        return torch.stack(parts)


class Counted(nn.Module):
    """Counts its calls in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Scale by the number of the call."""
        self.calls += 1
        return x * min(self.calls, 1)


def ragged_mean(memory: RaggedRows) -> Tensor:
    """Return the mean of each node's rows, by a function."""
    counts = memory.offsets.diff()
    owner = torch.repeat_interleave(counts, output_size=memory.values.shape[0])
    sums = torch.zeros(counts.shape[0], WIDTH).index_add(0, owner, memory.values)
    return sums / counts.clamp(min=1)[:, None]


def _scaled() -> Callable[[Tensor], Tensor]:
    """Return a function that encloses a weight."""
    weight = torch.randn(WIDTH, WIDTH) / WIDTH**0.5

    def scaled(x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x @ weight)

    return scaled


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def _convolution() -> nn.Module:
    return nn.Sequential(nn.Conv1d(16, 32, 3, padding=1), nn.ReLU(), nn.Flatten(1), nn.Linear(32 * SPAN, WIDTH))


def _normalised() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.LayerNorm(WIDTH))


MODULES: Mapping[str, OwnModule] = {
    "MLP": OwnModule(_mlp, {"x": NUMBERS}),
    "gated": OwnModule(Gated, {"x": NUMBERS, "h": STATE, "c": STATE}),
    "convolution": OwnModule(_convolution, {"x": cellrt.rows(16, SPAN)}),
    "attention in a row": OwnModule(SelfAttention, {"x": cellrt.rows(SPAN, WIDTH)}),
    "normalised": OwnModule(_normalised, {"x": NUMBERS}),
    "embedding": OwnModule(Positions, {"token": TOKEN, "place": TOKEN}),
    "ragged mean": OwnModule(lambda: ragged_mean, {"memory": MEMORY}),
    "ragged attention": OwnModule(RaggedAttention, {"h": STATE, "memory": MEMORY}),
    "several outputs": OwnModule(Summary, {"x": NUMBERS}),
    "integers": OwnModule(lambda: lambda token: (31 * token + 7) % 1009, {"token": TOKEN}),
    "bfloat16": OwnModule(
        lambda: nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), {"input": cellrt.rows(WIDTH, dtype=torch.bfloat16)}
    ),
    "function": OwnModule(_scaled, {"x": NUMBERS}),
    "GRU stack": OwnModule(GRUStack, {"token": TOKEN, "h": cellrt.rows(2, WIDTH)}),
    "LSTM stack": OwnModule(TwoLSTMs, {"x": NUMBERS, "h": cellrt.rows(2, WIDTH), "c": cellrt.rows(2, WIDTH)}),
    "child-sum tree": OwnModule(ChildSum, {"x": NUMBERS, **CHILDREN}),
    "binary tree": OwnModule(BinaryTree, {f"{state}_{side}": STATE for side in ("left", "right") for state in "hc"}),
    "by values": OwnModule(ByValues, {"x": NUMBERS}, "BY_VALUES"),
    "random": OwnModule(Noisy, {"x": NUMBERS}, "RANDOM"),
    "recurrent over a span": OwnModule(OverSpan, {"memory": MEMORY}, "RECURRENT"),
    "counter": OwnModule(Counted, {"x": NUMBERS}, "MEMORY"),
}
