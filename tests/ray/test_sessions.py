"""Two replicas' engines in processes of their own: a session's state goes where it is asked for, bit by bit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import torch
from torch import Tensor

pytest.importorskip("msgspec")

from cellrt.errors import EngineClosedError, SessionError
from cellrt.process.address import new_address
from cellrt.ray.directory import Directory, Grant, Order, ReleasedState
from cellrt.ray.moving_sessions import ASKING, Asking, MovingBackend
from cellrt.serve.app import kept_connected
from cellrt.serve.server_settings import Settings
from cellrt.serve.start_engine import start_engine

MODEL = "kept"
KEY = f"{MODEL}/caller"
TIME_S = 100.0


class Here:
    """A replica without Ray: it hears the directory's orders in this process."""

    def __init__(self, name: str, directory: Directory) -> None:
        self.name, self._directory = name, directory
        settings = Settings(models=(f"tests.serve.models:{MODEL}",), workers=1, address=new_address(), timeline=0)
        self.started = start_engine(settings)
        self.backend = MovingBackend(settings, self)

    async def take(self, key: str, *, is_start: bool) -> Grant:
        return await self._directory.take(key, self.name, is_start=is_start)

    async def release(self, key: str, grant: int) -> None:
        self._directory.release(key, grant)

    async def park(self, sessions: Mapping[Order, ReleasedState]) -> None:
        self._directory.park(self.name, sessions)
        while self.backend._coming:  # it takes so long to hear of it that the others are here meanwhile
            await asyncio.sleep(0.001)

    async def hear(self) -> None:
        while True:
            for order in await self._directory.orders(self.name) or ():
                self.giving = asyncio.create_task(self._give(order))

    async def _give(self, order: Order) -> None:
        self._directory.deliver(order, await self.backend.give(order))

    async def ask(self, x: Tensor, *, is_start: bool = False) -> Tensor:
        session = await self.backend.session(MODEL, "caller", is_start=is_start)
        return (await session.infer(x))["h"]


async def _always(_: object) -> bool:
    return True


@asynccontextmanager
async def two() -> AsyncIterator[tuple[Here, Here, Directory]]:
    directory = Directory(_always, lambda: None)
    replicas = Here("one", directory), Here("two", directory)
    async with asyncio.timeout(TIME_S), AsyncExitStack() as stack:
        for replica in replicas:
            stack.callback(replica.started.end)
            await asyncio.to_thread(replica.started.wait)
            await stack.enter_async_context(kept_connected(replica.backend))
            await replica.backend.is_connected.wait()
            await directory.join(replica.name, None, {})
            hearing = asyncio.create_task(replica.hear())
            stack.callback(hearing.cancel)
        yield *replicas, directory


def expected(pieces: list[Tensor]) -> list[Tensor]:
    """``x + h / 2``, row by row."""
    h, made = torch.zeros(2), []
    for piece in pieces:
        rows = []
        for x in piece:
            h = x + 0.5 * h
            rows.append(h)
        made.append(torch.stack(rows))
    return made


@pytest.mark.slow
async def test_a_session_goes_on_bit_by_bit_wherever_it_is_asked_for() -> None:
    pieces = [torch.randn(rows, 2) for rows in (3, 1, 4, 1, 5, 2)]
    async with two() as (one, another, directory):
        places = (one, one, another, one, another, another)
        made = [await place.ask(x, is_start=k == 0) for k, (place, x) in enumerate(zip(places, pieces))]
        assert all(torch.equal(a, b) for a, b in zip(made, expected(pieces)))
        assert directory.counts()["moves"] == 3

        # while requests of it run, and from both sides at once: none is lost, and none is computed twice
        ones = [torch.ones(1, 2)] * 30
        await one.ask(torch.zeros(80, 2), is_start=True)  # what was before has no more weight
        results = await asyncio.gather(*((one, another)[k % 2].ask(x) for k, x in enumerate(ones)))
        lasts = sorted(float(result[-1, 0]) for result in results)
        assert lasts == sorted(float(h[-1, 0]) for h in expected(ones))
        await _ends_are_heard_of(one, another, directory)
        await _states_are_left(one, another, directory)


async def _ends_are_heard_of(one: Here, another: Here, directory: Directory) -> None:
    session = await one.backend.session(MODEL, "caller", is_start=True)
    await one.backend.end_session(MODEL, "caller", session)
    await asyncio.sleep(0)
    assert sum(directory.counts()["sessions"].values()) == 0
    with pytest.raises(SessionError, match="session 'caller' of model 'kept' is on no replica"):
        await another.ask(torch.ones(1, 2))


async def _states_are_left(one: Here, another: Here, directory: Directory) -> None:
    pieces = [torch.randn(2, 2), torch.randn(3, 2), torch.randn(2, 2)]
    asking = Asking("the first")
    ASKING.set(asking)
    made = [await one.ask(pieces[0], is_start=True)]
    ASKING.set(None)
    assert asking.is_begun and await directory.state_lacks(KEY, "the first")  # as long as "one" has it, and lives

    coming = asyncio.create_task(another.ask(pieces[1]))
    while not directory._awaited:
        await asyncio.sleep(0)
    await another.backend.leave()  # what is under way to it is left to others too
    directory.leave(another.name)
    assert not await directory.state_lacks(KEY, "the first") and await directory.state_lacks(KEY, "the second")
    try:
        made.append(await coming)
    except EngineClosedError:  # it had not begun
        del pieces[1]
    with pytest.raises(EngineClosedError, match="leaves its sessions to the others"):
        await another.ask(pieces[1])
    made.append(await one.ask(pieces[-1]))
    assert all(torch.equal(a, b) for a, b in zip(made, expected(pieces), strict=True))
