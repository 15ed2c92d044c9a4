"""Each tensor of a result has memory of its own, however many came together: who keeps or pickles one has that one."""

from __future__ import annotations

import asyncio
import io
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.engine.helpers import WAIT_S, small_engine
from tests.process import models
from tests.process.helpers import start, steps

COUNT = 30

DOORS: dict[str, Callable[[Any, str, list[Any]], list[Any]]] = {
    "submit": lambda engine, model, some: [engine.submit(model, one).result(WAIT_S) for one in some],
    "results of many": lambda engine, model, some: engine.submit_many(model, some).results(WAIT_S),
    "futures of many": lambda engine, model, some: [one.result(WAIT_S) for one in engine.submit_many(model, some)],
    "map": lambda engine, model, some: list(engine.map(model, some)),
    "infer": lambda engine, model, some: asyncio.run(infer_all(engine, model, some)),
    "stream": lambda engine, model, some: [item for one in some[:3] for item in engine.stream(model, one)],
}


async def infer_all(engine: Any, model: str, some: list[Any]) -> list[Any]:
    return await asyncio.gather(*(engine.infer(model, one) for one in some))


@pytest.fixture(scope="module", params=[small_engine, start], ids=["here", "apart"])
def engine(request) -> Iterator[Any]:
    with request.param() as made:
        for model in (models.chain, models.loop, models.half):
            made.register(model, warm_up=False)
        yield made


REQUESTS = {
    "chain": [steps(3)] * COUNT,
    "chain of several lengths": [steps(1 + k % 5) for k in range(COUNT)],
    "loop": [steps(1)[0]] * COUNT,
    "half": [torch.ones(3, dtype=torch.bfloat16)] * COUNT,
}


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("door", DOORS)
def test_a_result_is_alone_in_its_memory(engine, door, requests):
    results = DOORS[door](engine, requests.split()[0], REQUESTS[requests])
    assert results
    for result in results:
        for tensor in result.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
            file = io.BytesIO()
            torch.save(tensor, file)
            assert max(file.tell(), len(pickle.dumps(tensor))) < tensor.nbytes + 2048
