"""The usual servers of an LSTM encoder-decoder (BatchMaker 2.7.4): whole-request batching in torch.

Every peer is a server: ``submit(pair)`` gives a future of the chosen tokens ``[steps]``.

================= ====================================================================================
one at a time     no batching
padded            a batch in order of arrival; finished rows are dropped, and answered, as they end
bucketed          the paper's baseline: sources of similar length together; every row decodes to the last one's end
bucketed, dropped as bucketed, with finished rows dropped as in padded
================= ====================================================================================

The encoder runs on packed sequences, so that it computes no padding. No peer uses what it knows of the decoded
lengths for deciding who is batched with whom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from benchmarks.server import Backlog, BatchServer, Buckets, InOrder, Runner, Waiting

GO = 0
BUCKET_WIDTH = 10


class Pair(NamedTuple):
    """One request: the source's word numbers, and how many tokens to decode."""

    tokens: list[int]
    steps: int


class Model(nn.Module):
    """An encoder and a feed-previous decoder that do not share weights, one LSTM layer each.

    Embeddings have the hidden size. The decoder starts with token ``GO`` and the encoder's last state; each step's
    token is the argmax of a projection to the vocabulary.
    """

    def __init__(self, num_words: int, hidden: int) -> None:
        super().__init__()
        self.source = nn.Embedding(num_words, hidden)
        self.encoder = nn.LSTM(hidden, hidden)
        self.target = nn.Embedding(num_words, hidden)
        self.decoder = nn.LSTMCell(hidden, hidden)
        self.projection = nn.Linear(hidden, num_words)

    def encode(self, sources: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return the last h and c ``[batch, hidden]`` of each source."""
        rows = [self.source(torch.tensor(tokens)) for tokens in sources]
        h, c = self.encoder(pack_sequence(rows, enforce_sorted=False))[1]
        return h[0], c[0]

    def step(self, token: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next token ``[batch]``, h and c."""
        h, c = self.decoder(self.target(token), (h, c))
        return self.projection(h).argmax(dim=1), h, c


class Decodes(Protocol):
    """The interface of what encodes and decodes as ``Model`` does."""

    def encode(self, sources: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return the last h and c ``[batch, hidden]`` of each source."""

    def step(self, token: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next token ``[batch]``, h and c."""


def make_peer(name: str, model: Model, **options: Any) -> BatchServer:
    """Return the server of that name; ``options`` go to ``BatchServer``. Raise KeyError for another name."""
    make_runner, max_batch, is_bucketed = PEERS[name]
    backlog: Backlog[Waiting] = Buckets(BUCKET_WIDTH, lambda pair: len(pair.tokens)) if is_bucketed else InOrder()
    return BatchServer(partial(make_runner, model), backlog=backlog, **{"max_batch": max_batch, **options})


def to_the_last(model: Model, threads: int) -> Runner:
    """Decode every row until the longest has its length."""

    def run(pairs: Sequence[Pair]) -> Iterable[tuple[int, Tensor]]:
        h, c = model.encode([pair.tokens for pair in pairs])
        token = torch.full((len(pairs),), GO)
        chosen = []
        for _ in range(max(pair.steps for pair in pairs)):
            token, h, c = model.step(token, h, c)
            chosen.append(token)
        rows = torch.stack(chosen, dim=1)
        return ((k, rows[k, : pair.steps]) for k, pair in enumerate(pairs))

    return run


def dropping(model: Decodes, threads: int) -> Runner:
    """Drop and answer rows as they end."""

    def run(pairs: Sequence[Pair]) -> Iterable[tuple[int, Tensor]]:
        order = sorted(range(len(pairs)), key=lambda k: -pairs[k].steps)
        h, c = model.encode([pairs[k].tokens for k in order])
        token = torch.full((len(pairs),), GO)
        chosen = torch.empty((len(pairs), pairs[order[0]].steps), dtype=torch.int64)
        live = len(pairs)
        for step in range(pairs[order[0]].steps):
            token, h, c = model.step(token[:live], h[:live], c[:live])
            chosen[:live, step] = token
            while live and pairs[order[live - 1]].steps == step + 1:
                live -= 1
                yield order[live], chosen[live, : step + 1]

    return run


PEERS: dict[str, tuple[Callable[[Model, int], Runner], int, bool]] = {
    "one at a time": (dropping, 1, False),
    "padded": (dropping, 256, False),
    "bucketed": (to_the_last, 256, True),
    "bucketed, dropped": (dropping, 256, True),
}
"""The peers by name: what a worker runs its batches with, the largest batch, and whether there are buckets.

A largest batch of 256 is what the paper found best.
"""
