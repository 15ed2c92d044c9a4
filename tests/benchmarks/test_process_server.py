"""A peer behind processes answers each request once, and says so where a worker ends."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.process_server import ProcessServer
from benchmarks.server import Runner

WAIT_S = 60


def doubling(threads: int) -> Runner:
    """Doubles lists of numbers, the last of a batch first; ends with its process at a 99."""

    def run(batch: Sequence[list[int]]) -> Iterable[tuple[int, torch.Tensor]]:
        if [99] in batch:
            os._exit(1)
        return [(k, torch.tensor(batch[k], dtype=torch.int64) * 2) for k in reversed(range(len(batch)))]

    return run


def refusing(threads: int) -> Runner:
    raise ArithmeticError("no model")


@pytest.fixture(scope="module")
def server() -> Iterator[ProcessServer]:
    made = ProcessServer(doubling, max_batch=4, workers=2)
    yield made
    made.close()


@given(st.lists(st.lists(st.integers(0, 50), max_size=5), max_size=40))
@pytest.mark.slow
def test_each_request_gets_its_own_answer(server: ProcessServer, requests: list[list[int]]) -> None:
    futures = [server.submit(request) for request in requests]
    answers = [future.result(WAIT_S).tolist() for future in futures]
    assert answers == [(2 * np.array(request, np.int64)).tolist() for request in requests]


@pytest.mark.slow
def test_what_a_lost_worker_had_fails() -> None:
    server = ProcessServer(doubling, max_batch=4, workers=1)
    assert server.submit([1]).result(WAIT_S).tolist() == [2]
    with pytest.raises(RuntimeError, match="has ended"):
        server.submit([99]).result(WAIT_S)
    server.close()
    server.close()


@pytest.mark.slow
def test_what_making_a_model_raised_is_raised() -> None:
    with pytest.raises(ArithmeticError, match="no model"):
        ProcessServer(refusing, max_batch=4, workers=1)
