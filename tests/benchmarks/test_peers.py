"""The chain's peers give what ``nn.LSTM`` gives, and the batching server batches as it says."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import pytest
import torch
from torch import nn

from benchmarks import workloads
from benchmarks.chain_peers import PEERS, make_peer
from benchmarks.server import BatchServer, Buckets, Waiting

INPUT, HIDDEN = 12, 16
TIMEOUT_S = 60


@pytest.fixture
def lstm() -> nn.LSTM:
    torch.manual_seed(3)
    return nn.LSTM(INPUT, HIDDEN)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", PEERS)
def test_peer_equals_torch(name: str, workers: int, lstm: nn.LSTM) -> None:
    if name.startswith("onnxruntime"):
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")
    inputs = workloads.sentences(workloads.europarl_lengths(30, seed=5, longest=60), INPUT, seed=6)
    with torch.inference_mode():
        expected = [lstm(x)[1][0][0] for x in inputs]
    server = make_peer(name, lstm, threads=2, workers=workers)
    try:
        futures = [server.submit(x) for x in inputs]
        results = [future.result(TIMEOUT_S) for future in futures]
    finally:
        server.close()
    torch.testing.assert_close(torch.stack(results), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="one plain LSTM layer"):
        make_peer("padded", nn.LSTM(INPUT, HIDDEN, num_layers=2))


def test_buckets_take_turns_and_never_mix() -> None:
    buckets = Buckets(width=10)
    for length in (1, 10, 11, 20, 21, 5, 300):
        buckets.add(Waiting([0] * length))
    batches = []
    while len(buckets):
        batches.append([len(waiting.request) for waiting in buckets.take(2)])
    assert batches == [[1, 10], [11, 20], [21], [300], [5]]
    assert buckets.take(2) == []


def test_a_server_uses_the_buckets_that_it_is_given() -> None:
    seen: list[list[int]] = []

    def run(batch: Sequence[list[int]]) -> Iterable[tuple[int, int]]:
        seen.append([len(request) for request in batch])
        return enumerate(seen[-1])

    server = BatchServer(lambda threads: run, max_batch=8, backlog=Buckets(width=10), threads=1)
    try:
        futures = [server.submit([0] * length) for length in (3, 35, 4, 36) * 10]
        assert [future.result(TIMEOUT_S) for future in futures] == [3, 35, 4, 36] * 10
    finally:
        server.close()
    assert all(max(lengths) - min(lengths) < 10 for lengths in seen)


class Gate:
    """A server of numbers: notes the size of every batch and holds each back until the test lets it go."""

    def __init__(self, max_batch: int = 512) -> None:
        self.sizes: list[int] = []
        self.began, self.may_end = threading.Semaphore(0), threading.Semaphore(0)
        self.server = BatchServer(lambda threads: self.run, max_batch=max_batch, threads=1)

    def run(self, batch: Sequence[int]) -> Iterable[tuple[int, int]]:
        self.sizes.append(len(batch))
        self.began.release()
        if not self.may_end.acquire(timeout=TIMEOUT_S):
            raise TimeoutError("the test did not open the gate")
        return ((k, 100 // number) for k, number in enumerate(batch))


def test_a_batch_is_what_waits_when_the_worker_is_free() -> None:
    gate = Gate(max_batch=4)
    try:
        futures = [gate.server.submit(1)]
        assert gate.began.acquire(timeout=TIMEOUT_S)
        futures += [gate.server.submit(2) for _ in range(6)]
        gate.may_end.release(3)
        assert [future.result(TIMEOUT_S) for future in futures] == [100] + [50] * 6
    finally:
        gate.server.close()
    assert gate.sizes == [1, 4, 2]


def test_an_answer_that_is_known_early_is_given_early() -> None:
    began, may_end = threading.Semaphore(0), threading.Semaphore(0)

    def run(batch: Sequence[str]) -> Iterable[tuple[int, str]]:
        yield len(batch) - 1, batch[-1].upper()
        began.release()
        may_end.acquire(timeout=TIMEOUT_S)
        yield from ((k, text.upper()) for k, text in enumerate(batch[:-1]))

    server = BatchServer(lambda threads: run, max_batch=2, threads=1)
    try:
        server.submit("first")
        assert began.acquire(timeout=TIMEOUT_S)
        late, early = server.submit("late"), server.submit("early")
        may_end.release()
        assert early.result(TIMEOUT_S) == "EARLY"
        assert not late.done()
        may_end.release()
        assert late.result(TIMEOUT_S) == "LATE"
    finally:
        may_end.release()
        server.close()


def test_a_failed_batch_fails_its_requests_only() -> None:
    gate = Gate(max_batch=1)
    gate.may_end.release(2)
    try:
        bad, good = gate.server.submit(0), gate.server.submit(5)
        with pytest.raises(ZeroDivisionError):
            bad.result(TIMEOUT_S)
        assert good.result(TIMEOUT_S) == 20
    finally:
        gate.server.close()


def test_close_cancels_what_waits_and_finishes_what_runs() -> None:
    gate = Gate()
    running = gate.server.submit(1)
    assert gate.began.acquire(timeout=TIMEOUT_S)
    waiting = gate.server.submit(1)
    with pytest.raises(TimeoutError, match="still busy"):
        gate.server.close(timeout_s=0.0)
    assert waiting.cancelled()
    gate.may_end.release()
    gate.server.close()
    assert running.result(timeout=0) == 100
    with pytest.raises(RuntimeError, match="closed"):
        gate.server.submit(1)


def test_numbers_must_be_positive() -> None:
    with pytest.raises(ValueError, match="positive"):
        BatchServer(lambda threads: enumerate, max_batch=1, workers=-1)


@pytest.mark.slow
def test_batches_may_run_in_a_process_of_their_own(lstm: nn.LSTM) -> None:
    x = torch.randn(5, INPUT)
    with torch.inference_mode():
        expected = lstm(x)[1][0][0]
    server = make_peer("packed", lstm, max_batch=1, threads=1, processes=True)
    try:
        good, bad = server.submit(x), server.submit(torch.zeros(0, INPUT))
        torch.testing.assert_close(good.result(TIMEOUT_S), expected)
        with pytest.raises(RuntimeError, match="empty"):
            bad.result(TIMEOUT_S)
        torch.testing.assert_close(server.submit(x).result(TIMEOUT_S), expected)
    finally:
        server.close()
