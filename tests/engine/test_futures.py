"""Futures of requests that were submitted together: made when somebody asks, before or after the end or meanwhile."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Sequence

import pytest
import torch

from cellrt.engine.future import RequestFuture, Result
from cellrt.engine.futures import Futures, Outcomes, finish_all
from cellrt.errors import CancelledError, RequestError

COUNT = 12
ROUNDS = 200


class _Owner:
    """An engine that only notes who is cancelled."""

    def __init__(self) -> None:
        self.cancelled: list[int] = []

    def ask_to_cancel(self, future: RequestFuture) -> None:
        """Notes it."""
        self.cancelled.append(future.place)

    def refuse_in_callback(self) -> None:
        """No callback waits here."""


class _InCallback(_Owner):
    def refuse_in_callback(self) -> None:
        raise RequestError("in a callback")


class _Numbered:
    """The results of requests that ended together: their numbers."""

    def of(self, number: int) -> Result:
        """Those of one."""
        return {"n": torch.tensor(number)}

    def of_many(self, numbers: Sequence[int]) -> list[Result]:
        """Those of some."""
        return [self.of(number) for number in numbers]

    def bytes_of(self, number: int) -> list[tuple[int, int, memoryview]]:
        """Nobody asks."""
        raise NotImplementedError


@pytest.fixture(autouse=True)
def _hurried_threads() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_a_future_is_the_same_whenever_it_is_asked_for() -> None:
    outcomes = Outcomes(_Owner(), 100, COUNT)
    futures = Futures(outcomes.future, COUNT)
    early = futures[2]
    finish_all([(outcomes, range(COUNT), _Numbered(), 0)])
    assert futures[2] is early and early.done()
    assert futures[-1] is list(futures)[COUNT - 1] is futures[COUNT - 1 :][0]
    assert [future.number for future in futures] == list(range(100, 100 + COUNT))
    assert [int(result["n"]) for result in futures.results()] == list(range(COUNT))
    assert sum(([early], futures, [early]), futures) == [*futures, early, *futures, early]
    with pytest.raises(IndexError):
        futures[COUNT]


def test_each_has_the_outcome_that_was_its_own() -> None:
    owner = _Owner()
    outcomes = Outcomes(owner, 0, COUNT)
    other = Outcomes(owner, COUNT, 2)
    cancelled = outcomes.future(0)
    assert cancelled.cancel() and owner.cancelled == [0]
    outcomes.fail(0, ValueError("too late"))
    outcomes.fail(1, ValueError("wrong"))
    results = _Numbered()
    finish_all([(outcomes, range(2, 6), results, 0), (other, (1, 0), results, 4), (outcomes, [6, 8], results, 6)])
    with pytest.raises(CancelledError):
        outcomes.future(0).result()
    with pytest.raises(ValueError, match="wrong"):
        outcomes.future(1).result()
    found = [int(one.future(number).result()["n"]) for one, number in ((outcomes, 5), (other, 1), (other, 0))]
    assert found == [3, 4, 5]
    assert int(outcomes.future(8).result()["n"]) == 7
    assert not outcomes.future(7).done()


def test_whoever_asks_while_they_end_sees_each_end_once() -> None:
    for _ in range(ROUNDS):
        outcomes = Outcomes(_Owner(), 0, COUNT)
        called: list[RequestFuture] = []

        def end(outcomes: Outcomes = outcomes) -> None:
            for first in range(0, COUNT, 3):
                finish_all([(outcomes, range(first, first + 3), _Numbered(), 0)])

        thread = threading.Thread(target=end)
        thread.start()
        futures = list(Futures(outcomes.future, COUNT))
        for future in futures:
            future.add_done_callback(called.append)  # type: ignore[arg-type]
        assert [int(future.result(10)["n"]) for future in futures] == [0, 1, 2] * (COUNT // 3)
        thread.join()
        assert sorted(map(id, called)) == sorted(map(id, futures))


def _together(*all_: Outcomes) -> Futures:
    """The futures of several, of which the first's requests have even places."""
    where = {place: (outcomes, number) for number in range(COUNT) for place, outcomes in enumerate(all_, 2 * number)}
    parts = [(outcomes, range(first, 2 * COUNT, 2)) for first, outcomes in enumerate(all_)]
    return Futures(lambda place: where[place][0].future(where[place][1]), 2 * COUNT, parts)


def test_results_of_all_are_those_of_each_future_whoever_asked_before() -> None:
    for _ in range(ROUNDS):
        one, other = Outcomes(_Owner(), 0, COUNT), Outcomes(_Owner(), COUNT, COUNT)
        futures = _together(one, other)
        early = futures[2], futures[7]

        def end(one: Outcomes = one, other: Outcomes = other) -> None:
            for first in range(0, COUNT, 3):
                its = _Numbered()
                finish_all([(other, range(first, first + 3), its, 0), (one, [first, first + 1, first + 2], its, 3)])

        thread = threading.Thread(target=end)
        thread.start()
        results = futures.results(10)
        thread.join()
        for place, result in enumerate(results):
            assert futures[place].result() is result is futures.results()[place]
            assert int(result["n"]) == (place // 2) % 3 + 3 * (1 - place % 2)
        assert [future.result() for future in early] == [results[2], results[7]]


def test_results_of_all_end_with_the_first_error_and_wait_no_longer_than_told() -> None:
    one, other = Outcomes(_Owner(), 0, COUNT), Outcomes(_Owner(), COUNT, COUNT)
    futures = _together(one, other)
    finish_all([(one, range(COUNT), _Numbered(), 0)])
    with pytest.raises(TimeoutError, match="within 0.01 s"):
        futures.results(0.01)
    other.fail(0, ValueError("the first"))
    other.fail(1, ValueError("the second"))
    finish_all([(other, range(2, COUNT), _Numbered(), 0)])
    with pytest.raises(ValueError, match="the first"):
        futures.results(1)
    assert int(futures[0].result()["n"]) == 0 and int(futures[2 * COUNT - 1].result()["n"]) == COUNT - 3


def test_who_waits_for_all_in_a_callback_is_refused() -> None:
    outcomes = Outcomes(_InCallback(), 0, COUNT)
    with pytest.raises(RequestError, match="in a callback"):
        Futures(outcomes.future, COUNT, [(outcomes, range(COUNT))]).results()
