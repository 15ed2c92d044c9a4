"""The peers give what ``nn.LSTM`` gives, and the drivers time what they say they time."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, Future

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks import workloads
from benchmarks.peers import (
    Bucketed,
    Buckets,
    OneAtATime,
    OnnxBucketed,
    OnnxPadded,
    Packed,
    Padded,
    Peer,
    Waiting,
    ideal,
)

PEERS = [OneAtATime, Padded, Bucketed, Packed, OnnxPadded, OnnxBucketed]
INPUT, HIDDEN = 12, 16


@pytest.fixture(autouse=True)
def thread_count() -> Iterator[None]:
    """Workers set torch's thread count: give the tests that follow theirs back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def lstm() -> nn.LSTM:
    torch.manual_seed(3)
    return nn.LSTM(INPUT, HIDDEN)


def sentences(count: int) -> list[Tensor]:
    lengths = workloads.europarl_lengths(count, seed=5, longest=60)
    return workloads.sentences(lengths, INPUT, seed=6)


def needs_onnx(peer: type[Peer]) -> None:
    if issubclass(peer, OnnxPadded):
        pytest.importorskip("onnx")
        pytest.importorskip("onnxruntime")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("peer", PEERS)
def test_peer_equals_torch(peer: type[Peer], workers: int, lstm: nn.LSTM) -> None:
    needs_onnx(peer)
    inputs = sentences(30)
    with torch.inference_mode():
        expected = [lstm(x)[1][0][0] for x in inputs]
    server = peer(lstm, threads=2, workers=workers)
    try:
        futures = [server.submit(x) for x in inputs]
        results = [future.result(timeout=30) for future in futures]
    finally:
        server.close()
    torch.testing.assert_close(torch.stack(results), torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_buckets_take_turns_and_never_mix() -> None:
    buckets = Buckets(width=10)
    for length in (1, 10, 11, 20, 21, 5, 300):
        buckets.add(Waiting(torch.zeros(length, 1), Future()))
    batches = []
    while len(buckets):
        batches.append([len(waiting.x) for waiting in buckets.take(2)])
    assert batches == [[1, 10], [11, 20], [21], [300], [5]]
    assert buckets.take(2) == []


class Gated(Peer):
    """A peer that notes the size of every batch and holds each back until the test lets it go."""

    def __init__(self, lstm: nn.LSTM, gate: threading.Semaphore, max_batch: int = 512) -> None:
        self.sizes: list[int] = []
        self.gate = gate
        super().__init__(lstm, max_batch=max_batch, threads=1, workers=1)

    def _new_runner(self, lstm: nn.LSTM, threads: int):  # type: ignore[no-untyped-def]
        def run(batch: list[Tensor]) -> Tensor:
            self.sizes.append(len(batch))
            if not self.gate.acquire(timeout=30):
                raise TimeoutError("the test did not open the gate")
            if any(torch.isnan(x).any() for x in batch):
                raise ArithmeticError("not a number")
            return torch.zeros(len(batch), HIDDEN)

        return run


def test_a_batch_is_what_waits_when_the_worker_is_free(lstm: nn.LSTM) -> None:
    gate = threading.Semaphore(0)
    server = Gated(lstm, gate, max_batch=4)
    try:
        futures = [server.submit(torch.zeros(3, INPUT))]
        _wait_until(lambda: server.sizes == [1])
        futures += [server.submit(torch.zeros(3, INPUT)) for _ in range(6)]
        gate.release(3)
        for future in futures:
            future.result(timeout=30)
    finally:
        server.close()
    assert server.sizes == [1, 4, 2]


def test_a_failed_batch_fails_its_sentences_only(lstm: nn.LSTM) -> None:
    server = Gated(lstm, threading.Semaphore(2), max_batch=1)
    try:
        bad = server.submit(torch.full((2, INPUT), torch.nan))
        good = server.submit(torch.zeros(2, INPUT))
        with pytest.raises(ArithmeticError):
            bad.result(timeout=30)
        assert good.result(timeout=30).shape == (HIDDEN,)
    finally:
        server.close()


def test_close_cancels_what_waits_and_finishes_what_runs(lstm: nn.LSTM) -> None:
    gate = threading.Semaphore(0)
    server = Gated(lstm, gate)
    running = server.submit(torch.zeros(3, INPUT))
    _wait_until(lambda: server.sizes == [1])
    waiting = server.submit(torch.zeros(3, INPUT))
    with pytest.raises(TimeoutError, match="still busy"):
        server.close(timeout_s=0.0)
    assert waiting.cancelled()
    gate.release()
    server.close()
    assert running.result(timeout=0).shape == (HIDDEN,)
    with pytest.raises(RuntimeError, match="closed"):
        server.submit(torch.zeros(3, INPUT))


def test_wrong_shapes_and_models_are_refused(lstm: nn.LSTM) -> None:
    server = Padded(lstm)
    try:
        for shape in ((INPUT,), (0, INPUT), (3, INPUT + 1)):
            with pytest.raises(ValueError, match="a sentence must be"):
                server.submit(torch.zeros(shape))
    finally:
        server.close()
    with pytest.raises(ValueError, match="one plain LSTM layer"):
        Padded(nn.LSTM(INPUT, HIDDEN, num_layers=2))
    with pytest.raises(ValueError, match="positive"):
        Padded(lstm, workers=-1)


def test_ideal_counts_full_batches() -> None:
    def cell_step(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        time.sleep(0.002)
        return h, c

    assert 0 < ideal(cell_step, 10, 5, input_size=INPUT, hidden_size=HIDDEN) <= 10 / (5 * 0.002)


def test_europarl_lengths_have_the_facts_of_the_paper() -> None:
    lengths = workloads.europarl_lengths(100_000, seed=1)
    assert abs(lengths.mean() - 24) < 0.3
    assert abs(np.mean(lengths < 100) - 0.99) < 0.002
    assert lengths.min() >= 1
    assert lengths.max() == 330
    np.testing.assert_array_equal(lengths, workloads.europarl_lengths(100_000, seed=1))
    assert workloads.europarl_lengths(1000, seed=1, longest=50).max() == 50


def test_brown_lengths_have_the_facts_of_the_corpus() -> None:
    lengths = workloads.brown_lengths(100_000, seed=1)
    assert abs(lengths.mean() - 20.25) < 0.2
    assert lengths.min() >= 1
    assert lengths.max() <= 180


def test_sentences_have_their_lengths() -> None:
    lengths = workloads.fixed_lengths(3)
    assert [tuple(x.shape) for x in workloads.sentences(lengths, 7, seed=0)] == [(24, 7)] * 3
    assert workloads.sentences(workloads.fixed_lengths(0), 7, seed=0) == []


def test_poisson_arrivals_have_their_rate() -> None:
    gaps = np.diff(workloads.poisson_arrivals(50.0, 20_000, seed=2), prepend=0.0)
    assert gaps.min() >= 0
    assert abs(gaps.mean() - 1 / 50) < 0.001
    assert abs(gaps.std() - 1 / 50) < 0.001
    with pytest.raises(ValueError, match="positive"):
        workloads.poisson_arrivals(0.0, 1, seed=2)


def test_open_loop_times_from_the_scheduled_arrival() -> None:
    def slow_submit(index: int) -> Future[int]:
        time.sleep(0.02)
        return _completed(index)

    load = workloads.open_loop(slow_submit, np.zeros(5))
    assert (np.diff(load.latencies_s) > 0.015).all()
    assert load.latencies_s[-1] >= 0.1
    assert load.max_send_delay_s >= 0.08
    assert load.duration_s >= 0.1


def test_open_loop_waits_until_a_request_is_due() -> None:
    sent: list[float] = []

    def submit(index: int) -> Future[int]:
        sent.append(time.perf_counter())
        return _completed(index)

    start = time.perf_counter()
    workloads.open_loop(submit, np.array([0.0, 0.05, 0.1]))
    assert (np.array(sent) - start >= [0.0, 0.05, 0.1]).all()


def test_closed_loop_keeps_its_concurrency() -> None:
    pending: list[Future[int]] = []
    most = 0

    def submit(index: int) -> Future[int]:
        nonlocal most
        future: Future[int] = Future()
        pending.append(future)
        most = max(most, len(pending))
        if len(pending) == 3 or index == 9:
            for done in [pending.pop() for _ in range(len(pending))]:
                done.set_result(0)
        return future

    load = workloads.closed_loop(submit, count=10, concurrency=3)
    assert most == 3
    assert load.latencies_s.shape == (10,)
    assert load.throughput > 0
    with pytest.raises(ValueError, match="at least 1"):
        workloads.closed_loop(submit, count=1, concurrency=0)


def test_drivers_end_when_requests_do_not() -> None:
    with pytest.raises(TimeoutError, match="2 of 2 requests"):
        workloads.open_loop(lambda _: Future(), np.zeros(2), timeout_s=0.05)
    with pytest.raises(TimeoutError, match="2 of 2 requests"):
        workloads.closed_loop(lambda _: Future(), count=2, concurrency=1, timeout_s=0.05)


def test_drivers_raise_the_error_of_a_request() -> None:
    failed: Future[int] = Future()
    failed.set_exception(ArithmeticError("not a number"))
    with pytest.raises(ArithmeticError):
        workloads.open_loop(lambda _: failed, np.zeros(2))
    cancelled: Future[int] = Future()
    cancelled.cancel()
    with pytest.raises(CancelledError):
        workloads.closed_loop(lambda _: cancelled, count=2, concurrency=1)


def _completed(index: int) -> Future[int]:
    future: Future[int] = Future()
    future.set_result(index)
    return future


def _wait_until(condition, timeout_s: float = 30.0) -> None:  # type: ignore[no-untyped-def]
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("the condition did not come true")
        time.sleep(0.001)
