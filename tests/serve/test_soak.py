"""A server that is treated badly for a while: in the end nothing is held, and every request is accounted for.

``CELLRT_SOAK_S=1200`` makes it 20 minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.serve.helpers import Server
from tests.serve.test_under_fire import children
from tests.serve.test_watching import samples
from tests.steps import HOLD, RAISE
from tests.waiting import until

aiohttp = pytest.importorskip("aiohttp")
SOAK_S = float(os.environ.get("CELLRT_SOAK_S", "15"))
CLIENTS = 24


class Client:
    """One that does something else each time; ``seen``: what it met."""

    def __init__(self, session: Any, seed: int, seen: Counter[str]) -> None:
        self._session, self._random, self._seen = session, random.Random(seed), seen

    async def act(self) -> None:
        """Does one thing."""
        name = self._random.choice(
            [
                "plain",
                "plain",
                "plain",
                "late",
                "wrong",
                "raising",
                "left",
                "stream",
                "left stream",
                "socket",
                "sequence",
            ]
        )
        self._seen[name] += 1
        await getattr(self, "_" + name.replace(" ", "_"))()

    async def _send(self, model: str, expected: set[int], **body: Any) -> None:
        async with self._session.post(f"/v1/models/{model}/infer", json=body) as answer:
            await answer.read()
            assert answer.status in expected, (answer.status, await answer.text())

    async def _plain(self) -> None:
        await self._send("chain", {200}, request=[[1, 2]] * self._random.randint(1, 50))

    async def _late(self) -> None:
        await self._send("chain", {200, 504}, request=[[1, 2]] * 50, deadline_s=self._random.choice([1e-6, 1e-3, 1e-2]))

    async def _wrong(self) -> None:
        await self._send("chain", {400}, request=[[1, 2, 3]])

    async def _raising(self) -> None:
        await self._send("chain", {500}, request=[[1, 2]] * self._random.randint(0, 5) + [[RAISE, 0]])

    async def _left(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._random.uniform(0.001, 0.05)):
                await self._send("chain", {200}, request=[[HOLD, 0]] * 3)

    async def _stream(self) -> None:
        body = {"request": "abcdefgh", "stream": True}
        async with self._session.post("/v1/models/letters/infer", json=body) as answer:
            assert (await answer.text()).count("data: ") == 9

    async def _left_stream(self) -> None:
        async with self._session.post("/v1/models/count/infer", json={"request": 4, "stream": True}) as answer:
            for _ in range(self._random.randint(0, 5)):
                await answer.content.readline()
            answer.close()

    async def _socket(self) -> None:
        async with self._session.ws_connect("/v1/models/kept/session") as socket:
            count = self._random.randint(1, 5)
            for _ in range(count):
                await socket.send_str(json.dumps({"request": [[1, 1]]}))
            for _ in range(self._random.randint(0, count)):  # perhaps not all of them
                await socket.receive_str()

    async def _sequence(self) -> None:
        id = str(self._random.getrandbits(60))
        for place in range(3):
            await self._send("kept", {200}, request=[[1, 1]], session=id, start=place == 0, end=place == 2)


async def soak(url: str) -> Counter[str]:
    """Many of them for a while."""
    seen: Counter[str] = Counter()
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        end_s = asyncio.get_running_loop().time() + SOAK_S

        async def run(seed: int) -> None:
            client = Client(session, seed, seen)
            while asyncio.get_running_loop().time() < end_s:
                await client.act()

        async with asyncio.TaskGroup() as tasks:
            for seed in range(CLIENTS):
                tasks.create_task(run(seed))
    return seen


def descriptors(server: Server) -> dict[int, int]:
    """Open files of each of the server's processes."""
    return {pid: len(os.listdir(f"/proc/{pid}/fd")) for pid in [server.process.pid, *children(server, "cellrt")]}


def resident_kb(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 300)
def test_nothing_is_held_and_every_request_is_accounted_for(server: Server) -> None:
    asyncio.run(soak(server.url))  # what is made once
    held, rows = descriptors(server), server.statistics()["rows"]
    memory = {pid: resident_kb(pid) for pid in held}
    before = samples(server)
    seen = asyncio.run(soak(server.url))
    assert min(seen.values()) > 0 and len(seen) == 9
    until(lambda: server.unfinished() == 0, "nothing is unfinished")
    until(lambda: server.statistics()["sessions"]["open"] == 0, "no session is open")
    until(lambda: server.statistics()["rows"] == rows, "every row is back")
    until(lambda: descriptors(server) == held, f"descriptors are given back: {held}, {descriptors(server)}")
    grown = {pid: resident_kb(pid) - size for pid, size in memory.items()}
    assert max(grown.values()) < 50_000, grown
    after = samples(server)

    def ended(name: str, labels: tuple[tuple[str, str], ...]) -> float:
        return after[name].get(labels, 0.0) - before[name].get(labels, 0.0)

    def of_chain(outcome: str) -> float:
        return ended("cellrt_requests_total", (("model", "chain"), ("outcome", outcome)))

    assert of_chain("CellError") == seen["raising"]
    in_time_or_late = of_chain("done") + of_chain("DeadlineError") + of_chain("CancelledError")
    assert seen["plain"] <= of_chain("done")
    assert in_time_or_late <= seen["plain"] + seen["late"] + seen["left"]
    assert ended("cellrt_http_requests_total", (("code", "400"), ("handler", "native_infer"))) == seen["wrong"]
    assert server.http.get("/v2/health/ready").status_code == 200
    assert not [line for line in server.lines if "Traceback" in line], "\n".join(server.lines[-60:])
