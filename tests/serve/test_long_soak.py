"""Twenty minutes of everything at once, and workers that die: nothing is held in the end, all is accounted for.

``CELLRT_SOAK_S`` says how many seconds; a quarter of it comes before what is measured.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.serve.helpers import Server
from tests.serve.soak_models import KILL
from tests.serve.test_soak import descriptors, resident_kb
from tests.serve.test_watching import samples
from tests.steps import HOLD, RAISE
from tests.waiting import until

aiohttp = pytest.importorskip("aiohttp")
SOAK_S = float(os.environ.get("CELLRT_SOAK_S", "1200"))
CLIENTS = 24
MODELS = ("chain", "mortal", "text")
OUTCOMES = {"200": "done", "500": "CellError", "503": "DeviceError", "504": "DeadlineError"}
MOST_GROWTH_KB = 50_000
MOST_DESCRIPTORS = 2
"""Connections of the test's own, which either front end may have."""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    paths = ["tests.serve.models:chain", "tests.serve.soak_models:mortal", "tests.serve.soak_models:text"]
    with Server(["--port", "0", "--device", "cpu:2", "--front-ends", "2", *paths]) as made:
        yield made


class Client:
    """One that does something else each time; ``met``: how many requests of each model ended how, for it."""

    def __init__(self, session: Any, seed: int, met: Counter[tuple[str, str]]) -> None:
        self._session, self._random, self._met = session, random.Random(seed), met
        acts = {self._plain: 8, self._late: 4, self._raising: 2, self._leave: 6, self._text: 4, self._talk: 3}
        self._acts = [
            act for act, weight in {**acts, self._stream: 4, self._sequence: 4}.items() for _ in range(weight)
        ]

    async def act(self) -> None:
        """Does one thing; now and then it kills a worker."""
        await (self._kill() if self._random.random() < 0.002 else self._random.choice(self._acts)())

    async def _send(self, model: str, request: Any, expected: str, **more: Any) -> str:
        """Sends a request; its status must be one that is expected, or a worker died."""
        try:
            async with self._session.post(f"/v1/models/{model}/infer", json={"request": request, **more}) as answer:
                said = await answer.read()
                status = str(answer.status)
        except BaseException:
            self._met[model, "left"] += 1
            raise
        self._met[model, status] += 1
        assert status in (*expected.split(), "503"), (model, status, said)
        return status

    def _rows(self, most: int = 30) -> list[list[float]]:
        return [[1, 2]] * self._random.randint(1, most)

    async def _plain(self) -> None:
        await self._send(self._random.choice(["chain", "mortal"]), self._rows(), "200")

    async def _late(self) -> None:
        deadline_s = self._random.choice([1e-6, 1e-3, 1e-2])
        await self._send("chain", self._rows(50), "200 504", deadline_s=deadline_s)

    async def _raising(self) -> None:
        await self._send("chain", [*self._rows(5), [RAISE, 0]], "500")

    async def _kill(self) -> None:
        await self._send("mortal", [[KILL, 0]], "503")

    async def _leave(self) -> None:
        model, request = self._random.choice([("chain", [[HOLD, 0]] * 3), ("text", {"prompt": [1, 2, 3]})])
        with suppress(TimeoutError):
            async with asyncio.timeout(self._random.uniform(0.001, 0.05)):
                await self._send(model, request, "200")

    async def _text(self) -> None:
        prompt = [self._random.randrange(39) for _ in range(self._random.randint(1, 12))]
        await self._send("text", {"prompt": prompt, "max_tokens": self._random.randint(1, 24)}, "200")

    async def _stream(self) -> None:
        """Reads some of a stream, or all of it."""
        body = {"request": {"prompt": [1, 2]}, "stream": True}
        async with self._session.post("/v1/models/text/infer", json=body) as answer:
            for _ in range(self._random.randint(0, 30)):
                if not await answer.content.readline():
                    break
            self._met["text", "left"] += 1  # whether it had ended, the client does not know
            answer.close()

    async def _sequence(self) -> None:
        await self._converse("mortal", lambda: [[1, 1]])

    async def _talk(self) -> None:
        await self._converse("text", lambda: {"prompt": [self._random.randrange(39)], "max_tokens": 5})

    async def _converse(self, model: str, request: Any) -> None:
        id = str(self._random.getrandbits(60))
        count = self._random.randint(1, 4)
        for place in range(count):
            how = {"session": id, "start": place == 0, "end": place == count - 1}
            if await self._send(model, request(), "200 410", **how) == "410":
                return


async def soak(url: str, seconds: float) -> Counter[tuple[str, str]]:
    """Many of them for a while."""
    met: Counter[tuple[str, str]] = Counter()
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        end_s = asyncio.get_running_loop().time() + seconds

        async def run(seed: int) -> None:
            client = Client(session, seed, met)
            while asyncio.get_running_loop().time() < end_s:
                await client.act()

        async with asyncio.TaskGroup() as tasks:
            for seed in range(CLIENTS):
                tasks.create_task(run(seed))
    return met


def used(server: Server) -> dict[str, int]:
    """Rows and pages in use, by place."""
    rows = server.statistics()["rows"].items()
    return {place: counts["used_rows"] + counts["used_pages"] for place, counts in rows}


def settled(server: Server) -> dict[int, int]:
    """Open files by process, once connections that were left are closed."""
    seen = [descriptors(server)]

    def is_settled() -> bool:
        time.sleep(1.0)
        seen.append(descriptors(server))
        return seen[-1] == seen[-2]

    until(is_settled, "connections that were left are closed")
    return seen[-1]


def ended(server: Server) -> Counter[tuple[str, str]]:
    """Requests by model and outcome."""
    found = samples(server)["cellrt_requests_total"]
    return Counter({(dict(labels)["model"], dict(labels)["outcome"]): int(value) for labels, value in found.items()})


@pytest.mark.slow
@pytest.mark.timeout(SOAK_S + 400)
def test_a_long_soak_leaves_nothing_behind_and_loses_no_request(server: Server) -> None:
    idle = used(server)
    asyncio.run(soak(server.url, SOAK_S / 4))
    until(lambda: server.unfinished() == 0, "nothing is unfinished")
    held = settled(server)
    memory, before = {pid: resident_kb(pid) for pid in held}, ended(server)

    met = asyncio.run(soak(server.url, SOAK_S * 3 / 4))
    until(lambda: server.unfinished() == 0, "nothing is unfinished")
    until(lambda: server.statistics()["sessions"]["open"] == 0, "no session is open")
    until(lambda: used(server) == idle, f"every row and page is back: {idle}")
    now = settled(server)
    assert now.keys() == held.keys(), "a process died"
    assert all(now[pid] <= held[pid] + MOST_DESCRIPTORS for pid in held), (held, now)
    grown = {pid: resident_kb(pid) - size for pid, size in memory.items()}
    assert max(grown.values()) < MOST_GROWTH_KB, grown

    assert met["mortal", "503"] > 0, "no worker died"
    counted = ended(server) - before
    for model in MODELS:
        left = met[model, "left"]
        known = sum(count for (name, status), count in met.items() if name == model and status != "left")
        total = sum(count for (name, _), count in counted.items() if name == model)
        assert known - met[model, "410"] <= total <= known + left, (model, known, left, total)
        for status, outcome in OUTCOMES.items():
            assert met[model, status] <= counted[model, outcome] <= met[model, status] + left, (model, outcome)
    assert server.http.get("/v2/health/ready").status_code == 200
    assert not [line for line in server.lines if "Traceback" in line], "\n".join(server.lines[-60:])
