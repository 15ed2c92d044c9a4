"""The peers of the paper's figures: batches of whole requests, by torch (and cuDNN) on the same device.

==================== ================================================================================================
padded               ``nn.LSTM``, a batch in order of arrival, padded to its longest sentence
bucketed             the paper's baseline: only sentences of similar length together, buckets of width 10 in turn
packed               ``nn.LSTM`` on a packed sequence, in order of arrival: no padding is computed
packed, folded       on a CPU: the table folded in, packed weights, and batches that shrink (``packed.py``)
padded decoder       an encoder (packed) and a decoder in torch, in order of arrival; rows leave as they end
bucketed decoder     the same in buckets by the source's length, all rows to the end of the last: the paper's baseline
level-batched        TensorFlow Fold's way: the nodes of one level and type of a batch of trees at once, in torch
ideal                complete trees of 16 leaves hard-wired: 31 cells one after the other (section 2.7.5)
==================== ================================================================================================

Each does what a careful engineer would. Weights and embeddings lie on the device; a request is word numbers. A thread,
one for each worker of cellrt's, has one stream: the numbers of a batch travel in one copy from pinned memory, its
answers come back in one (the padded decoder's as rows end), and the thread waits for that alone. Decoders and trees are
eager torch.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from benchmarks.packed import PackedLSTM
from benchmarks.seq2seq_peers import GO, Model, Pair
from benchmarks.server import Backlog, BatchServer, Buckets, Runner, Waiting
from benchmarks.tree_peers import Levels, Weights, by_level, inner_cell, leaf_cell, root_states
from benchmarks.trees import Tree

BUCKET_WIDTH = 10
Numbers = NDArray[np.int64]


@dataclass(slots=True)
class Stamped:
    """A request, and when its batch began on the clock of ``time.perf_counter``."""

    request: Any
    begun_s: float = 0.0


class Peer:
    """Serves batches with one thread for each of ``runs``.

    Args:
        runs: each computes a batch.
        max_batch: most requests of a batch.
        length: of a request, for buckets; None: in order of arrival.
        width: of a bucket.
        trace: keep when requests begin, for ``starts``.
    """

    def __init__(
        self,
        *runs: Runner,
        max_batch: int,
        length: Callable[[Any], int] | None = None,
        width: int = BUCKET_WIDTH,
        trace: bool = False,
    ) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # weights were copied on another stream
        self._seen: list[Stamped] | None = [] if trace else None
        backlog: Backlog[Waiting] | None = None
        if length is not None:
            backlog = Buckets(width, lambda stamped: length(stamped.request))
        left = iter(runs)
        self._server = BatchServer(
            lambda threads: partial(_run_stamped, next(left)), max_batch=max_batch, backlog=backlog, threads=len(runs)
        )

    def submit(self, request: Any) -> Future[Any]:
        """Submit a request; the future's result is its answer, on the host."""
        stamped = Stamped(request)
        if self._seen is not None:
            self._seen.append(stamped)
        return self._server.submit(stamped)

    def starts(self) -> list[float]:
        """Return when the requests since the last call began, in order of submission. None may be unfinished."""
        begun = [stamped.begun_s for stamped in self._seen or ()]
        if self._seen is not None:
            self._seen.clear()
        return begun

    def close(self) -> None:
        """End the threads."""
        self._server.close()


def _run_stamped(run: Runner, batch: Sequence[Stamped]) -> Iterable[tuple[int, Any]]:
    now_s = time.perf_counter()
    for stamped in batch:
        stamped.begun_s = now_s
    return run([stamped.request for stamped in batch])


class Arriving(NamedTuple):
    """Values on their way to the host."""

    values: Tensor
    is_there: torch.cuda.Event | None

    def wait(self) -> Tensor:
        """Return the values, once they are there."""
        if self.is_there is not None:
            self.is_there.synchronize()
        return self.values


class Lane:
    """A stream of a device, and copies between it and pinned memory; on a CPU there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def entered(self) -> AbstractContextManager[object]:
        """Send this thread's operations to the stream, inside the context."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def upload(self, *arrays: Numbers) -> list[Tensor]:
        """Return these arrays on the device, copied at once without waiting."""
        whole = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
        if self.stream is not None:
            whole = whole.pin_memory().to(self.device, non_blocking=True)
        parts = whole.split([array.size for array in arrays])
        return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]

    def download(self, values: Tensor) -> Arriving:
        """Begin to copy values to the host."""
        if self.stream is None:
            return Arriving(values, None)
        host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        host.copy_(values, non_blocking=True)
        event = torch.cuda.Event()
        event.record(self.stream)
        return Arriving(host, event)


def pad(sentences: Sequence[Sequence[int]]) -> tuple[Numbers, NDArray[np.bool_]]:
    """Return word numbers ``[longest, sentences]``, and which of them are no padding."""
    lengths = np.array([len(words) for words in sentences])
    is_word = np.arange(lengths.max())[:, None] < lengths
    numbers = np.zeros(is_word.shape, np.int64)
    numbers.T[is_word.T] = np.concatenate(sentences)
    return numbers, is_word


# LSTM over sentences: requests are word numbers, answers the last h [hidden].


def padded_lstm(lstm: nn.LSTM, table: Tensor, device: torch.device) -> Runner:
    """``nn.LSTM`` on sentences padded to the longest; ``table`` is the embedding ``[words, input]``."""
    lane, lstm, table = Lane(device), copy.deepcopy(lstm).to(device).eval(), table.to(device)

    def run(sentences: Sequence[Sequence[int]]) -> Iterable[tuple[int, Tensor]]:
        numbers, is_word = pad(sentences)
        with lane.entered():
            words, last, rows = lane.upload(numbers, is_word.sum(0) - 1, np.arange(len(sentences)))
            outputs: Tensor = lstm(table[words])[0]
            return enumerate(lane.download(outputs[last, rows]).wait().unbind())

    return run


def packed_lstm(lstm: nn.LSTM, table: Tensor, device: torch.device) -> Runner:
    """``nn.LSTM`` on packed sentences: no step past a sentence's end."""
    lane, lstm, table = Lane(device), copy.deepcopy(lstm).to(device).eval(), table.to(device)

    def run(sentences: Sequence[Sequence[int]]) -> Iterable[tuple[int, Tensor]]:
        with lane.entered():
            h, _ = _last_states(lane, lstm, table, sentences)
            return enumerate(lane.download(h).wait().unbind())

    return run


def folded_lstm(lstm: nn.LSTM, table: Tensor, device: torch.device) -> Runner:
    """Return the strongest simple form for a CPU: one table of the embedding and the input half, packed weights."""
    step = PackedLSTM(nn.Embedding.from_pretrained(table.to(device)), lstm)
    return lambda sentences: enumerate(step.run(sentences)[0].unbind())


def _last_states(lane: Lane, lstm: nn.LSTM, table: Tensor, sentences: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return the last h and c ``[sentences, hidden]``, on the device."""
    order = sorted(range(len(sentences)), key=lambda k: -len(sentences[k]))
    numbers, is_word = pad([sentences[k] for k in order])
    words, places = lane.upload(numbers[is_word], np.argsort(order))
    packed = PackedSequence(table[words], torch.from_numpy(is_word.sum(1)))
    h, c = lstm(packed)[1]
    return h[0][places], c[0][places]


# Encoder and decoder: requests are ``seq2seq_peers.Pair``, answers the chosen tokens [steps].


class Translator:
    """``seq2seq_peers.Model`` on a device. ``run_to_the_last`` and ``run_dropping`` are runners."""

    def __init__(self, model: Model, device: torch.device) -> None:
        self._lane, self._model = Lane(device), copy.deepcopy(model).to(device).eval()

    def run_to_the_last(self, pairs: Sequence[Pair]) -> Iterable[tuple[int, Tensor]]:
        """Decode every row until the longest has its length."""
        with self._lane.entered():
            token, h, c = self._encode([pair.tokens for pair in pairs])
            chosen = []
            for _ in range(max(pair.steps for pair in pairs)):
                token, h, c = self._model.step(token, h, c)
                chosen.append(token)
            rows = self._lane.download(torch.stack(chosen, dim=1)).wait()
        return ((k, rows[k, : pair.steps]) for k, pair in enumerate(pairs))

    def run_dropping(self, pairs: Sequence[Pair]) -> Iterable[tuple[int, Tensor]]:
        """Drop and answer rows as they end; all steps are launched before the first answer is waited for."""
        order = sorted(range(len(pairs)), key=lambda k: -pairs[k].steps)
        live, num_steps = len(pairs), pairs[order[0]].steps
        ended: list[tuple[list[int], Arriving]] = []
        with self._lane.entered():
            token, h, c = self._encode([pairs[k].tokens for k in order])
            chosen = torch.empty((live, num_steps), dtype=torch.int64, device=self._lane.device)
            for step in range(num_steps):
                token, h, c = self._model.step(token[:live], h[:live], c[:live])
                chosen[:live, step] = token
                before = live
                while live and pairs[order[live - 1]].steps == step + 1:
                    live -= 1
                if live < before:
                    rows = chosen[live:before, : step + 1].contiguous()
                    ended.append((order[live:before], self._lane.download(rows)))
        return ((k, row) for places, rows in ended for k, row in zip(places, rows.wait(), strict=True))

    def _encode(self, sources: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        """Return the first token, h and c of every row."""
        h, c = _last_states(self._lane, self._model.encoder, self._model.source.weight, sources)
        return torch.full((len(sources),), GO, device=self._lane.device), h, c


# Trees: requests are ``trees.Tree``, answers the root's h [hidden].


def level_batched(weights: Weights, device: torch.device) -> Runner:
    """Return all nodes of one level and type of the whole batch at once."""
    lane, weights = Lane(device), Weights(*(value.to(device) for value in weights))

    def run(trees: Sequence[Tree]) -> Iterable[tuple[int, Tensor]]:
        levels = by_level(trees)
        with lane.entered():
            given = lane.upload(levels.children.numpy(), levels.roots.numpy(), levels.tokens.numpy())
            on_device = Levels(levels.sizes, *given)
            inner = partial(inner_cell, weights)
            h = root_states(
                weights.hidden, on_device, lambda words: leaf_cell(weights, weights.embedding[words]), inner
            )
            return enumerate(lane.download(h).wait().unbind())

    return run


class HardWired:
    """A complete tree's cells, each for a row of every tree of a batch, one cell after the other; a runner.

    On a GPU they are one captured CUDA graph, so every batch computes ``batch`` rows.
    """

    def __init__(self, weights: Weights, leaves: int, batch: int, device: torch.device) -> None:
        self._lane, self._weights = Lane(device), Weights(*(value.to(device) for value in weights))
        self._tokens = torch.zeros((leaves, batch), dtype=torch.int64, device=device)
        self._replay: Callable[[], None] | None = None
        self._roots = torch.empty(0)
        if self._lane.stream is not None:
            self._capture(self._lane.stream)

    def __call__(self, trees: Sequence[Tree]) -> Iterable[tuple[int, Tensor]]:
        """Run a batch. Raise ValueError for a tree of another size."""
        tokens = np.stack([tree.tokens for tree in trees], axis=1)
        if len(tokens) != len(self._tokens):
            raise ValueError(f"a tree has {len(tokens)} leaves, not {len(self._tokens)}")
        with self._lane.entered():
            (given,) = self._lane.upload(tokens)
            self._tokens[:, : len(trees)] = given
            if self._replay is None:
                self._roots = self._compute()
            else:
                self._replay()
            return enumerate(self._lane.download(self._roots[: len(trees)]).wait().unbind())

    def _compute(self) -> Tensor:
        weights = self._weights
        states = [leaf_cell(weights, weights.embedding[words]) for words in self._tokens]
        while len(states) > 1:
            pairs = zip(states[::2], states[1::2], strict=True)
            states = [
                inner_cell(weights, torch.cat([left[0], right[0]], 1), torch.cat([left[1], right[1]], 1))
                for left, right in pairs
            ]
        return states[0][0]

    @torch.inference_mode()
    def _capture(self, stream: torch.cuda.Stream) -> None:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            self._compute()
            stream.synchronize()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self._roots = self._compute()
        stream.synchronize()
        self._replay = graph.replay
