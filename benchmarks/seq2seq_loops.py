"""The encoder-decoder in bare loops, its weights packed: whole batches that drop what is finished, and hand-made slots.

Both have what a competent engineer would do by hand: tables that fold the embeddings and the input halves of both
LSTMs, and weights packed once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from benchmarks.bare_loop import BareLoop, Batches, Numbered, Work
from benchmarks.packed import PackedLinear, PackedLSTM
from benchmarks.seq2seq_peers import GO, Model, Pair, dropping
from benchmarks.server import InOrder
from benchmarks.workloads import EUROPARL_LONGEST

NUM_ROWS = 256


class PackedModel:
    """``Model`` with packed weights; no gradients."""

    def __init__(self, model: Model) -> None:
        self.encoder = PackedLSTM(model.source, model.encoder)
        self.decoder = PackedLSTM(model.target, model.decoder)
        self._projection = PackedLinear(model.projection.weight, model.projection.bias)

    def encode(self, sources: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        """Return the last states, as ``Model.encode`` does."""
        return self.encoder.run(sources)

    def step(self, token: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the next token and states, as ``Model.step`` does."""
        h, c = self.decoder(token, h, c)
        return self._projection(h).argmax(dim=1), h, c


class Slots:
    """A fixed number of rows, each with a request of its own; one step of all of them at a time.

    A row reads a word of its source or decodes a token; when it has all its tokens, the next request takes it before
    the next step. ``place`` counts a row's steps: below 0 it reads, from 0 on it decodes until ``end``.
    """

    def __init__(self, model: PackedModel, num_rows: int = NUM_ROWS, longest: int = EUROPARL_LONGEST) -> None:
        """``longest`` is that of a source and of a target."""
        self._model = model
        self._h, self._c = torch.zeros(2, num_rows, model.encoder.hidden).unbind()
        self._token = torch.zeros(num_rows, dtype=torch.int64)
        self._words, self._chosen = np.zeros((2, num_rows, longest), np.int64)
        self._place, self._end, self._index = np.zeros((3, num_rows), np.int64)
        self._free = list(range(num_rows))
        self._waiting: deque[Numbered] = deque()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._place) - len(self._free)

    def add(self, index: int, request: Pair) -> None:
        """Let the request wait for a row."""
        self._waiting.append(Numbered(index, request))

    def advance(self) -> Iterator[tuple[int, Tensor]]:
        """Take one step of every row, and yield each answer with its index."""
        while self._waiting and self._free:
            self._take(self._free.pop(), self._waiting.popleft())
        reading = np.flatnonzero(self._place < 0)
        decoding = np.flatnonzero((self._place >= 0) & (self._place < self._end))
        if len(reading):
            rows, words = torch.from_numpy(reading), torch.from_numpy(self._words[reading, self._place[reading]])
            self._h[rows], self._c[rows] = self._model.encoder(words, self._h[rows], self._c[rows])
            self._place[reading] += 1
        if len(decoding):
            rows = torch.from_numpy(decoding)
            token, self._h[rows], self._c[rows] = self._model.step(self._token[rows], self._h[rows], self._c[rows])
            self._token[rows] = token
            self._chosen[decoding, self._place[decoding]] = token.numpy()
            self._place[decoding] += 1
        for row in decoding[self._place[decoding] == self._end[decoding]].tolist():
            self._free.append(row)
            yield int(self._index[row]), torch.from_numpy(self._chosen[row, : self._end[row]].copy())

    def _take(self, row: int, numbered: Numbered) -> None:
        """Give the row to a request; its words lie at the end of their array, where ``place`` finds them."""
        pair: Pair = numbered.request
        self._words[row, -len(pair.tokens) :] = pair.tokens
        self._place[row], self._end[row], self._index[row] = -len(pair.tokens), pair.steps, numbered.number
        self._h[row], self._c[row], self._token[row] = 0.0, 0.0, GO


def dropping_batches(model: Model) -> Work:
    """Return whole batches in order of arrival; finished rows are dropped, and answered, as they end."""
    return Batches(dropping(PackedModel(model), 1), InOrder(), NUM_ROWS)


def slots(model: Model) -> Work:
    """Return rows that are taken anew as soon as they are free."""
    return Slots(PackedModel(model))


LOOPS: dict[str, Callable[[Model], Work]] = {
    "dropped, packed, bare loop": dropping_batches,
    "slots, packed, bare loop": slots,
}


def make_loop(name: str, model: Model, threads: int) -> BareLoop:
    """Return the bare loop of that name. Raise KeyError for another."""
    return BareLoop(LOOPS[name](model), threads)
