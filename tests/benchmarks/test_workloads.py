"""The workloads have the facts of their sources, and the drivers time what they say they time."""

from __future__ import annotations

from concurrent.futures import CancelledError, Future

import numpy as np
import pytest

from benchmarks import workloads


class Clock:
    """Stands for the module ``time``: moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now

    monotonic = perf_counter

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(workloads, "time", made)
    return made


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


def test_open_loop_times_from_the_scheduled_arrival(clock: Clock) -> None:
    def slow_submit(index: int) -> Future[int]:
        clock.sleep(0.5)
        return _completed(index)

    load = workloads.open_loop(slow_submit, np.zeros(4))
    np.testing.assert_allclose(load.latencies_s, [0.5, 1.0, 1.5, 2.0])
    assert load.max_send_delay_s == pytest.approx(1.5)
    assert load.throughput == pytest.approx(2.0)


def test_open_loop_waits_until_a_request_is_due(clock: Clock) -> None:
    sent: list[float] = []

    def submit(index: int) -> Future[int]:
        sent.append(clock.now)
        return _completed(index)

    load = workloads.open_loop(submit, np.array([0.0, 1.0, 5.0]))
    np.testing.assert_allclose(sent, [100.0, 101.0, 105.0])
    assert load.max_send_delay_s == 0.0


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
