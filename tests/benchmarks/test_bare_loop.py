"""A bare loop answers each request once, counts latencies from arrival, and its peers give the references' answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks import chain, tree, workloads
from benchmarks.bare_loop import BareLoop, Batches, Numbered, fastest
from benchmarks.packed import PackedLinear, PackedLSTM
from benchmarks.seq2seq_loops import PackedModel, Slots, make_loop
from benchmarks.seq2seq_peers import Model, Pair, dropping
from benchmarks.server import Buckets, InOrder
from benchmarks.tree_peers import random_weights, recursion
from benchmarks.trees import parse_like_trees

WORDS, HIDDEN = 40, 16


class Clock:
    """Time goes on where somebody works, and a little whenever somebody looks."""

    def __init__(self, look_s: float = 1e-6) -> None:
        self.now, self.look_s = 100.0, look_s

    def __call__(self) -> float:
        self.now += self.look_s
        return self.now


class Counting:
    """Answers the first ``at_once`` requests that wait with their squares, ``cost_s`` after it began."""

    def __init__(self, clock: Clock, cost_s: float, at_once: int) -> None:
        self._clock, self._cost_s, self._at_once = clock, cost_s, at_once
        self._waiting: deque[tuple[int, int]] = deque()
        self.most = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, index: int, request: int) -> None:
        self._waiting.append((index, request))
        self.most = max(self.most, len(self))

    def advance(self) -> Iterator[tuple[int, int]]:
        self._clock.now += self._cost_s
        for _ in range(min(self._at_once, len(self))):
            index, request = self._waiting.popleft()
            yield index, request**2


@given(st.lists(st.integers(0, 99), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 9))
def test_requests_that_come_at_once_are_answered_in_their_order(
    requests: list[int], at_once: int, concurrency: int
) -> None:
    clock = Clock()
    work = Counting(clock, 0.5, at_once)
    loop = BareLoop(work, 1, clock)
    assert loop.answers(requests) == [request**2 for request in requests]
    work.most = 0
    load = loop.closed_loop(requests, 2 * len(requests), concurrency)
    assert load.latencies_s.shape == (2 * len(requests),)
    assert (load.latencies_s >= 0.5).all()
    assert work.most == min(concurrency, 2 * len(requests))
    assert len(work) == 0


@given(st.lists(st.floats(0.0, 3.0), min_size=1, max_size=15), st.floats(0.2, 1.0))
def test_a_latency_runs_from_arrival_to_answer(gaps: list[float], cost_s: float) -> None:
    arrivals, clock = np.cumsum(gaps), Clock(look_s=1e-3)
    load = BareLoop(Counting(clock, cost_s, 1), 1, clock).open_loop([3], arrivals)
    free, expected = 0.0, []
    for arrival in arrivals:
        free = max(free, arrival) + cost_s
        expected.append(free - arrival)
    np.testing.assert_allclose(load.latencies_s, expected, atol=5e-3 * len(gaps))  # a few looks a request


def test_what_is_answered_twice_or_never_is_refused() -> None:
    class Repeating(Counting):
        def advance(self) -> Iterator[tuple[int, int]]:
            found = list(super().advance())
            self._waiting.clear()
            yield from found * self.times

    work = Repeating(clock := Clock(), 0.0, 1)
    for work.times, message in ((2, "twice"), (0, "2 of 2 requests were never")):
        with pytest.raises(RuntimeError, match=message):
            BareLoop(work, 1, clock).answers([1, 2])


def test_the_concurrency_is_positive() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BareLoop(Counting(Clock(), 0.0, 1), 1).closed_loop([1], 1, concurrency=0)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 8))
def test_batches_are_of_one_bucket_and_answer_all(lengths: list[int], max_batch: int) -> None:
    seen: list[list[int]] = []

    def run(batch: Sequence[list[int]]) -> Iterator[tuple[int, int]]:
        seen.append([len(request) for request in batch])
        return reversed(list(enumerate(seen[-1])))

    backlog: Buckets[Numbered] = Buckets(width=10)
    loop = BareLoop(Batches(run, backlog, max_batch), threads=1)
    assert loop.answers([[0] * length for length in lengths]) == lengths
    assert all(len({(length - 1) // 10 for length in batch}) == 1 and len(batch) <= max_batch for batch in seen)


def test_the_faster_of_the_numbers_of_threads_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)

    def make(threads: int) -> BareLoop:
        clock = Clock()
        return BareLoop(Counting(clock, cost_s[threads], 1), threads, clock)

    for cost_s in ({1: 1.0, 2: 0.5}, {1: 0.5, 2: 1.0}):
        assert cost_s[fastest(make, [1, 2]).threads] == 0.5


def test_the_threads_are_those_of_the_loop_and_the_caller_has_his_back() -> None:
    seen, before = [], torch.get_num_threads()

    def run(batch: Sequence[int]) -> Iterator[tuple[int, int]]:
        seen.append(torch.get_num_threads())
        return iter(enumerate(batch))

    BareLoop(Batches(run, InOrder(), 1), threads=before + 1).answers([1])
    assert (seen, torch.get_num_threads()) == ([before + 1], before)


@given(st.integers(1, 70), st.integers(1, 40), st.integers(1, 40), st.booleans())
def test_a_packed_layer_is_a_linear_one(rows: int, inputs: int, outputs: int, has_bias: bool) -> None:
    linear, x = nn.Linear(inputs, outputs, bias=has_bias), torch.randn(rows, inputs)
    with torch.inference_mode():
        torch.testing.assert_close(PackedLinear(linear.weight, linear.bias)(x), linear(x), rtol=1e-4, atol=1e-5)


def test_a_packed_lstm_steps_as_torchs() -> None:
    embedding, lstm = nn.Embedding(WORDS, 8), nn.LSTMCell(8, HIDDEN)
    token, h, c = torch.randint(WORDS, (5,)), torch.randn(5, HIDDEN), torch.randn(5, HIDDEN)
    with torch.inference_mode():
        expected = lstm(embedding(token), (h, c))
        torch.testing.assert_close(PackedLSTM(embedding, lstm)(token, h, c), expected)


@pytest.mark.parametrize("is_packed", [True, False])
def test_the_chains_loops_equal_torch(is_packed: bool) -> None:
    if not is_packed:
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
    lstm, table = nn.LSTM(8, HIDDEN), torch.randn(WORDS, 8)
    sentences = chain.draw_sentences(workloads.europarl_lengths(30, seed=5, longest=60), table, seed=6)
    loop = chain.packed_loop(lstm, table, 1) if is_packed else chain.onnx_loop(lstm, 1)
    with torch.inference_mode():
        expected = [lstm(sentence.x)[1][0][0] for sentence in sentences]
    torch.testing.assert_close(loop.answers(sentences), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("fold", [True, False])
def test_the_trees_loop_equals_recursion(fold: bool) -> None:
    weights, trees = random_weights(WORDS, 6, HIDDEN), parse_like_trees(150, WORDS, seed=3)
    answers = tree.bare_loop(weights, fold, 1).answers(trees)
    with torch.inference_mode():
        expected = dict(recursion(weights, 1)(trees))
    torch.testing.assert_close(answers, [expected[k] for k in range(len(trees))], rtol=1e-4, atol=1e-5)


pairs = st.lists(
    st.builds(Pair, st.lists(st.integers(0, WORDS - 1), min_size=1, max_size=9), st.integers(1, 9)),
    min_size=1,
    max_size=12,
)


def alone(model: Model, given_pairs: Sequence[Pair]) -> list[list[int]]:
    """Each pair decoded alone, with torch's own modules."""
    decode = dropping(model, 1)
    with torch.inference_mode():
        return [answer.tolist() for pair in given_pairs for _, answer in decode([pair])]


def tokens(answers: Sequence[Any]) -> list[list[int]]:
    return [answer.tolist() for answer in answers]


@pytest.fixture(scope="module")
def model() -> Model:
    torch.manual_seed(5)
    return Model(WORDS, HIDDEN).eval().requires_grad_(False)


@given(pairs, st.integers(1, 4))
def test_slots_decode_as_alone_however_few_they_are(model: Model, given_pairs: list[Pair], num_rows: int) -> None:
    loop = BareLoop(Slots(PackedModel(model), num_rows, longest=9), threads=1)
    for _ in range(2):  # rows are used again
        assert tokens(loop.answers(given_pairs)) == alone(model, given_pairs)


@given(pairs)
def test_dropping_batches_decode_as_alone(model: Model, given_pairs: list[Pair]) -> None:
    loop = make_loop("dropped, packed, bare loop", model, threads=1)
    assert tokens(loop.answers(given_pairs)) == alone(model, given_pairs)
