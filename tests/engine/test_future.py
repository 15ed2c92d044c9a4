"""A request's future against what ``concurrent.futures`` promises of one, while an engine's thread ends it."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, as_completed, wait

import pytest
import torch

from cellrt.engine.future import RequestFuture
from cellrt.errors import CancelledError

ROUNDS = 200
OUTCOME = {"h": torch.zeros(1)}


class _Nobody:
    """An engine that does nothing."""

    def ask_to_cancel(self, future: RequestFuture) -> None:
        """Not asked here."""

    def refuse_in_callback(self) -> None:
        """No callback waits here."""


NOBODY = _Nobody()


@pytest.fixture(autouse=True)
def _threads_interleave() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def _ending(futures: list[RequestFuture]) -> threading.Thread:
    thread = threading.Thread(target=lambda: [future.finish(OUTCOME) for future in futures])
    thread.start()
    return thread


def _wait(futures: list[RequestFuture], _: threading.Thread) -> None:
    assert wait(futures, timeout=10).done == set(futures)
    assert all(future.done() for future in futures)


def _as_completed(futures: list[RequestFuture], _: threading.Thread) -> None:
    assert set(as_completed(futures, timeout=10)) == set(futures)


def _results(futures: list[RequestFuture], _: threading.Thread) -> None:
    assert all(future.result(10) is OUTCOME and future.exception(10) is None for future in futures)


def _results_by_many(futures: list[RequestFuture], _: threading.Thread) -> None:
    """Threads that wait for the same futures, some of which lose patience again and again."""
    seen: list[object] = []

    def look(timeout: float) -> None:
        for future in futures:
            while not future.done():
                with contextlib.suppress(TimeoutError):
                    future.result(timeout)
            seen.append(future.result())

    threads = [threading.Thread(target=look, args=(timeout,)) for timeout in (10, 10, 1e-5, 1e-4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert all(one is OUTCOME for one in seen) and len(seen) == len(threads) * len(futures)


def _callbacks(futures: list[RequestFuture], thread: threading.Thread) -> None:
    called: list[Future[dict[str, torch.Tensor]]] = []
    for future in futures:
        future.add_done_callback(called.append)
    thread.join()
    assert sorted(map(id, called)) == sorted(map(id, futures))


@pytest.mark.parametrize("look", [_wait, _as_completed, _results, _results_by_many, _callbacks])
def test_whoever_looks_while_it_ends_sees_it_once(
    look: Callable[[list[RequestFuture], threading.Thread], None],
) -> None:
    for _ in range(ROUNDS):
        futures = [RequestFuture(NOBODY) for _ in range(4)]
        thread = _ending(futures)
        look(futures, thread)
        thread.join()


def test_an_end_that_the_client_set_stands() -> None:
    future = RequestFuture(NOBODY)
    called: list[object] = []
    future.add_done_callback(called.append)
    future.set_result({})
    future.finish(OUTCOME)
    assert future.result() == {}
    assert called == [future]


def test_an_error_is_raised_and_a_callback_that_raises_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    future = RequestFuture(NOBODY)
    called: list[object] = []
    future.add_done_callback(lambda _: 1 / 0)
    future.add_done_callback(called.append)
    future.finish(ValueError("wrong"))
    with pytest.raises(ValueError, match="wrong"):
        future.result()
    assert called == [future]
    assert "ZeroDivisionError" in caplog.text


def test_a_cancelled_future_is_one_to_everybody() -> None:
    future = RequestFuture(NOBODY)
    called: list[object] = []
    future.add_done_callback(called.append)
    assert not future.cancelled()
    assert future.cancel() and future.cancel()
    assert future.cancelled() and future.done() and called == [future]
    assert not future.finish(OUTCOME)
    for kind in (CancelledError, concurrent.futures.CancelledError, asyncio.CancelledError):
        with pytest.raises(kind):
            future.result(1)
        with pytest.raises(kind):
            future.exception(1)
    assert wait([future], timeout=1).done == {future}
    assert type(future.error()) is CancelledError


def test_a_future_that_has_ended_cannot_be_cancelled() -> None:
    future = RequestFuture(NOBODY)
    future.finish(OUTCOME)
    assert not future.cancel() and not future.cancelled()
    assert future.result() is OUTCOME


def _cancelled(futures: list[RequestFuture], thread: threading.Thread) -> None:
    outcomes = [future.cancel() for future in futures]
    thread.join()
    for future, is_cancelled in zip(futures, outcomes, strict=True):
        assert future.cancelled() == is_cancelled
        assert (future.error() is None) != is_cancelled


def test_of_a_cancel_and_an_end_at_once_one_stands() -> None:
    for _ in range(ROUNDS):
        futures = [RequestFuture(NOBODY) for _ in range(4)]
        _cancelled(futures, _ending(futures))


async def test_awaiting_a_cancelled_future_raises_ours() -> None:
    future = RequestFuture(NOBODY)
    future.cancel()
    with pytest.raises(CancelledError, match="by its client"):
        await future


def test_waiting_ends_in_time() -> None:
    with pytest.raises(TimeoutError):
        RequestFuture(NOBODY).result(0.01)


@pytest.mark.parametrize("ask", [RequestFuture.result, RequestFuture.exception])
def test_an_error_that_was_raised_keeps_nothing_of_who_asked_without_a_future(
    ask: Callable[..., object],
) -> None:
    def cancelled() -> RequestFuture:
        future = RequestFuture(NOBODY)
        future.cancel()
        return future

    def asked() -> weakref.ref[object]:
        local = torch.zeros(1)
        with contextlib.suppress(CancelledError):
            ask(cancelled())
        return weakref.ref(local)

    gc.disable()
    try:
        assert asked()() is None
    finally:
        gc.enable()
