"""A decoder as a user writes it, with attention over its source: in cellrt, and padded in torch.

``whole`` and ``parts`` are what an engine finds by import path, with the same weights in every process.

The encoder is a bidirectional GRU of two layers, the decoder two GRUCells, attention and an output layer; a request
asks for so many tokens of so many words. Padded torch drops the rows that are done, and answers them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import cellrt
from benchmarks.compiled_peer import compiled_step, warmed
from benchmarks.own_models import HIDDEN, TOKENS, seeded
from benchmarks.server import Runner
from cellrt import RaggedRows, cells
from cellrt.unfolders import from_torch

GO, MAX_STEPS = 1, 32


class Words(NamedTuple):
    """One request: word numbers, and how many tokens to decode."""

    words: list[int]
    steps: int


class Decoder(nn.Module):
    """One step of the decoder."""

    def __init__(self, table: nn.Embedding, hidden: int) -> None:
        super().__init__()
        self.table = table
        self.first, self.second = nn.GRUCell(hidden, hidden), nn.GRUCell(hidden, hidden)
        self.attention, self.join = cells.DotAttention(hidden, hidden), nn.Linear(2 * hidden, hidden)
        self.head = nn.Linear(hidden, TOKENS)

    def best(self, h: Tensor, context: Tensor) -> Tensor:
        """Return the best token."""
        logits: Tensor = self.head(torch.tanh(self.join(torch.cat([h, context], 1))))
        return logits.argmax(1)

    def forward(self, token: Tensor, left: Tensor, h: Tensor, memory: RaggedRows) -> dict[str, Tensor]:
        """``h`` is ``[rows, 2, hidden]``."""
        first = self.first(self.table(token), h[:, 0])
        second = self.second(first, h[:, 1])
        token = self.best(second, self.attention(second, memory).context)
        return {"token": token, "left": left - 1, "stop": left <= 1, "h": torch.stack([first, second], 1)}


class Start(nn.Module):
    """The decoder's first state, from the mean of the source."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, memory: RaggedRows) -> dict[str, Tensor]:
        """Both layers begin with the same."""
        mean = torch.segment_reduce(memory.values, "mean", offsets=memory.offsets)
        h = torch.tanh(self.linear(mean))
        return {"h": torch.stack([h, h], 1)}


class Model(nn.Module):
    """All of it."""

    def __init__(self, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.table = nn.Embedding(TOKENS, hidden)
        self.encoder = nn.GRU(hidden, hidden // 2, num_layers=2, bidirectional=True, batch_first=True)
        self.decoder, self.start = Decoder(self.table, hidden), Start(hidden)


def _lengths(request: Words) -> tuple[int, int]:
    """Return the key of a request: the lengths that its graph depends on."""
    return len(request.words), request.steps


def unfolder(model: Model) -> cellrt.Unfolder:
    """Return the model in cellrt."""
    hidden = model.table.embedding_dim
    half = (hidden // 2,)
    encode = from_torch(model.encoder, embedding=model.table)
    join = cellrt.cell(cells.Joined(nn.Identity()), {"left": half, "right": half}, name="join")
    start = cellrt.cell(model.start, {"memory": cellrt.ragged(hidden)}, name="start")
    inputs = {"token": cellrt.token, "left": cellrt.token, "h": (2, hidden), "memory": cellrt.ragged(hidden)}
    decoder = cellrt.cell(model.decoder, inputs, name="decoder")

    @cellrt.unfold("decode", example=Words([1, 2, 3], 4), key=_lengths)
    def decode(graph: cellrt.Graph, request: Words) -> dict[str, object]:
        encoded = encode(graph, request.words)
        memory = graph.chain(join, left=encoded.steps[0], right=encoded.steps[1]).output
        h = start(memory=memory).h
        loop = graph.loop(
            decoder, until="stop", max_steps=MAX_STEPS, token=graph.constant(GO), left=request.steps, h=h, memory=memory
        )
        return {"tokens": loop.token}

    return decode


class FirstLayer(nn.Module):
    """The decoder's first layer, with the embedding."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.table, self.cell = decoder.table, decoder.first

    def forward(self, token: Tensor, h: Tensor) -> dict[str, Tensor]:
        """Return the layer's state."""
        return {"h": self.cell(self.table(token), h)}


class Choice(nn.Module):
    """The decoder's attention and output layer."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, left: Tensor, h: Tensor, memory: RaggedRows) -> dict[str, Tensor]:
        """Return the best token."""
        token = self.decoder.best(h, self.decoder.attention(h, memory).context)
        return {"token": token, "left": left - 1, "stop": left <= 1}


class StartOfEach(nn.Module):
    """``Start``, with an output for each layer."""

    def __init__(self, start: Start) -> None:
        super().__init__()
        self.start = start

    def forward(self, memory: RaggedRows) -> dict[str, Tensor]:
        """Both layers begin with the same."""
        first, second = self.start(memory)["h"].unbind(1)
        return {"first": first, "second": second}


def unfolder_in_parts(model: Model) -> cellrt.Unfolder:
    """Return the same model, with a decoder of three cells in one loop."""
    hidden = model.table.embedding_dim
    half = (hidden // 2,)
    encode = from_torch(model.encoder, embedding=model.table)
    join = cellrt.cell(cells.Joined(nn.Identity()), {"left": half, "right": half}, name="join")
    start = cellrt.cell(StartOfEach(model.start), {"memory": cellrt.ragged(hidden)}, name="start")
    first = cellrt.cell(FirstLayer(model.decoder), {"token": cellrt.token, "h": (hidden,)}, name="first")
    second = cellrt.cell(model.decoder.second, {"input": (hidden,), "hx": (hidden,)}, name="second")
    inputs = {"left": cellrt.token, "h": (hidden,), "memory": cellrt.ragged(hidden)}
    choice = cellrt.cell(Choice(model.decoder), inputs, name="choice")

    @cellrt.unfold("decode", example=Words([1, 2, 3], 4), key=_lengths)
    def decode(graph: cellrt.Graph, request: Words) -> dict[str, object]:
        encoded = encode(graph, request.words)
        memory = graph.chain(join, left=encoded.steps[0], right=encoded.steps[1]).output
        begin = start(memory=memory)

        def step(body: object, state: Any) -> dict[str, object]:
            below = first(token=state.token, h=state.first).h
            above = second(input=below, hx=state.second).output
            chosen = choice(left=state.left, h=above, memory=memory)
            return {"first": below, "second": above, "token": chosen.token, "left": chosen.left, "stop": chosen.stop}

        state = {"token": graph.constant(GO), "left": request.steps, "first": begin.first, "second": begin.second}
        return {"tokens": graph.loop(step, until="stop", max_steps=MAX_STEPS, **state).token}

    return decode


def whole() -> cellrt.Unfolder:
    """Return the model with the decoder in one cell."""
    return unfolder(seeded(Model))


def parts() -> cellrt.Unfolder:
    """Return the model with the decoder in three cells."""
    return unfolder_in_parts(seeded(Model))


class PaddedStep(nn.Module):
    """A step of the decoder over padded memories."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(
        self, token: Tensor, first: Tensor, second: Tensor, memory: Tensor, keys: Tensor, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next token and states; ``memory`` and ``keys`` are ``[rows, words, hidden]``, ``mask`` is true
        past the words.
        """
        first = self.decoder.first(self.decoder.table(token), first)
        second = self.decoder.second(first, second)
        scores = torch.bmm(keys, second[:, :, None])[:, :, 0].masked_fill(mask, -1e30)
        context = torch.bmm(torch.softmax(scores, 1)[:, None], memory)[:, 0]
        return self.decoder.best(second, context), first, second


def padded(compiled: bool, threads: int) -> Runner:
    """Return whole requests in padded batches; rows are dropped and answered as they end. ``compiled``: the
    decoder's step.
    """
    model = seeded(Model)
    step: Any = PaddedStep(model.decoder)
    if not compiled:
        return padded_runner(model, step)
    return warmed(padded_runner(model, compiled_step(step)), draw_requests(64, seed=1))


def padded_runner(model: Model, decode: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Runner:
    """Run padded batches with this step of the decoder."""
    weight: Any = model.decoder.attention.weight

    def run(requests: Sequence[Words]) -> Iterable[tuple[int, Tensor]]:
        lengths = torch.tensor([len(request.words) for request in requests])
        words = pad_sequence([torch.tensor(request.words) for request in requests], batch_first=True)
        packed = pack_padded_sequence(model.table(words), lengths, batch_first=True, enforce_sorted=False)
        memory, _ = pad_packed_sequence(model.encoder(packed)[0], batch_first=True)
        mask = torch.arange(memory.shape[1])[None] >= lengths[:, None]
        first = second = torch.tanh(model.start.linear(memory.sum(1) / lengths[:, None]))
        keys = memory @ weight.T
        steps = torch.tensor([request.steps for request in requests])
        alive, token = torch.arange(len(requests)), torch.full((len(requests),), GO)
        chosen = torch.empty((len(requests), int(steps.max())), dtype=torch.int64)
        for step in range(chosen.shape[1]):
            token, first, second = decode(token, first, second, memory, keys, mask)
            chosen[alive, step] = token
            is_done = steps[alive] == step + 1
            if is_done.any():
                yield from ((k, chosen[k, : step + 1]) for k in alive[is_done].tolist())
                on = (~is_done).nonzero()[:, 0]
                alive, token, first, second = alive[on], token[on], first[on], second[on]
                memory, mask, keys = memory[on], mask[on], keys[on]

    return run


def draw_requests(count: int, seed: int) -> list[Words]:
    """Return random words: 6 to 12 of them, and 5 to 12 tokens."""
    random = np.random.default_rng(seed)
    sizes = zip(random.integers(6, 13, count), random.integers(5, 13, count))
    return [Words(random.integers(0, TOKENS, int(words)).tolist(), int(steps)) for words, steps in sizes]
