"""What is handed in may be changed as soon as the call has returned, or the iterator goes on: by any door."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from cellrt.errors import RequestError
from tests.engine.helpers import WAIT_S, small_engine
from tests.process import models
from tests.process.helpers import start
from tests.process.models import Packet
from tests.steps import WIDTH

COUNT, QUEUE = 24, 64
TWO = 2, WIDTH

Fill = Callable[[Any, int], None]
FORMS: dict[str, tuple[Callable[[], Any], Fill]] = {
    "tensor": (lambda: torch.zeros(TWO), lambda it, k: it.fill_(k)),
    "array": (lambda: np.zeros(TWO, np.float32), lambda it, k: it.fill(k)),
    "list": (lambda: [[0.0] * WIDTH] * 2, lambda it, k: it.__setitem__(0, [float(k)] * WIDTH)),
    "list in a list": (lambda: [[0.0] * WIDTH, [0.0] * WIDTH], lambda it, k: it[0].__setitem__(0, float(k))),
    "dict": (lambda: {"x": np.zeros(TWO, np.float32)}, lambda it, k: it["x"].fill(k)),
    "tuple": (lambda: (torch.zeros(TWO),), lambda it, k: it[0].fill_(k)),
    "dataclass": (lambda: Packet(torch.zeros(TWO)), lambda it, k: it.x.fill_(k)),
    "tree": (lambda: {"x": Packet(np.zeros(TWO, np.float32))}, lambda it, k: it["x"].x.fill(k)),
}
"""What a request may be: how it is made, and how its owner fills it again."""


class Owner:
    """Who hands in one buffer again and again."""

    def __init__(self, engine: Any, model: str, form: str) -> None:
        self.engine, self.model = engine, model
        make, self._fill = FORMS[form]
        self._buffer = make()
        self._sessions: list[Any] = []

    def session(self) -> Any:
        self._sessions.append(self.engine.session(self.model))
        return self._sessions[-1]

    def close(self) -> None:
        for session in self._sessions:
            session.close()

    def filled(self, number: int) -> Any:
        self._fill(self._buffer, number)
        return self._buffer

    def all(self) -> Iterator[Any]:
        for number in range(1, COUNT + 1):
            yield self.filled(number)
        self.filled(-1)

    async def all_slowly(self) -> AsyncIterator[Any]:
        for request in self.all():
            yield request
            await asyncio.sleep(0)


async def by_submit(owner: Owner) -> list[Any]:
    futures = [owner.engine.submit(owner.model, request) for request in owner.all()]
    return [future.result(WAIT_S) for future in futures]


async def by_submit_many(owner: Owner) -> list[Any]:
    futures = [owner.engine.submit_many(owner.model, [request]) for request in owner.all()]
    return [its.results(WAIT_S)[0] for its in futures]


async def by_submit_many_of_a_generator(owner: Owner) -> list[Any]:
    return list(owner.engine.submit_many(owner.model, owner.all()).results(WAIT_S))


async def by_submit_many_of_sessions(owner: Owner) -> list[Any]:
    sessions = [owner.session() for _ in range(COUNT)]
    return list(owner.engine.submit_many(owner.model, owner.all(), sessions=sessions).results(WAIT_S))


async def by_stream(owner: Owner) -> list[Any]:
    streams = [owner.engine.stream(owner.model, request) for request in owner.all()]
    return [stream.result(WAIT_S) for stream in streams]


async def by_infer(owner: Owner) -> list[Any]:
    async def one(number: int) -> Any:
        return await owner.engine.infer(owner.model, owner.filled(number))

    return await asyncio.gather(*(one(number) for number in range(1, COUNT + 1)))


async def by_infer_of_tasks(owner: Owner) -> list[Any]:
    return await asyncio.gather(*[owner.engine.infer(owner.model, request) for request in owner.all()])


async def by_infer_that_waits(owner: Owner) -> list[Any]:
    before = [owner.engine.submit("chain", torch.zeros(TWO)) for _ in range(QUEUE - 2)]  # leaves two places
    made = await asyncio.gather(*[owner.engine.infer(owner.model, request, wait=True) for request in owner.all()])
    for future in before:
        future.result(WAIT_S)
    return made


async def by_submit_of_a_session(owner: Owner) -> list[Any]:
    futures = [owner.session().submit(request) for request in owner.all()]
    return [future.result(WAIT_S) for future in futures]


async def by_stream_of_a_session(owner: Owner) -> list[Any]:
    streams = [owner.session().stream(request) for request in owner.all()]
    return [stream.result(WAIT_S) for stream in streams]


async def by_infer_of_a_session(owner: Owner) -> list[Any]:
    return await asyncio.gather(*[owner.session().infer(request) for request in owner.all()])


async def by_infer_of_a_session_that_waits(owner: Owner) -> list[Any]:
    infers = [owner.session().infer(request, wait=True) for request in owner.all()]
    return await asyncio.gather(*infers)


async def by_map(owner: Owner) -> list[Any]:
    return list(owner.engine.map(owner.model, owner.all()))


async def by_map_async(owner: Owner) -> list[Any]:
    return [result async for result in owner.engine.map_async(owner.model, owner.all())]


async def by_map_async_of_a_generator(owner: Owner) -> list[Any]:
    return [result async for result in owner.engine.map_async(owner.model, owner.all_slowly())]


DOORS: list[Callable[[Owner], Awaitable[list[Any]]]] = [made for name, made in vars().items() if name.startswith("by_")]


@pytest.fixture(scope="module", params=[small_engine, start], ids=["here", "apart"])
def engine(request) -> Iterator[Any]:
    with request.param(max_queue=QUEUE) as made:
        for model in (models.chain, models.anything, models.known):
            made.register(model, warm_up=False)
        yield made


@pytest.mark.one_in(7)
@pytest.mark.parametrize("model", ["anything", "known"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("door", DOORS)
async def test_what_is_handed_in_is_what_it_was_then(engine, door, form, model):
    owner = Owner(engine, model, form)
    results = await asyncio.wait_for(door(owner), WAIT_S)
    owner.close()
    assert [result["every"][0, 0].item() for result in results] == list(range(1, COUNT + 1))


class Uncopyable(Packet):
    def __deepcopy__(self, memo: object) -> Any:
        raise TypeError("no copies")


async def test_what_cannot_be_copied_is_refused_where_it_would_be_read_later(engine):
    packet = Uncopyable(torch.ones(TWO))
    assert (await engine.infer("anything", packet))["every"][0, 0] == 1  # submitted by the call
    for door in (
        lambda: engine.submit_many("anything", iter([packet])),
        lambda: engine.infer("anything", packet, wait=True),
        lambda: engine.session("anything").infer(packet, wait=True),
    ):
        with pytest.raises(RequestError, match="Uncopyable cannot be: TypeError: no copies"):
            door()


async def test_errors_of_a_request_that_the_call_submits_come_when_it_is_awaited(engine):
    with_nothing = engine.infer("anything", Packet(None))
    with pytest.raises(RequestError, match="None"):
        await with_nothing


async def test_a_part_that_is_in_a_request_twice_is_one_in_its_copy(engine):
    part = torch.ones(TWO)
    seen: list[Any] = []
    models.SEEN.append(seen.append)
    try:
        await asyncio.gather(engine.infer("anything", {"x": part, "y": [part]}), engine.infer("anything", part))
    finally:
        models.SEEN.clear()
    assert seen[0]["x"] is seen[0]["y"][0] and seen[0]["x"] is not part
