"""2,000 streams at once, as events over HTTP and as sessions over websockets: each gets all of its own, none is left.

``CELLRT_STREAMS`` says how many of each.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.helpers import Server
from tests.serve.soak_models import GATE, LAST, MOST_STEPS
from tests.serve.test_long_soak import settled, used
from tests.serve.test_soak import resident_kb
from tests.serve.test_watching import samples
from tests.waiting import until

aiohttp = pytest.importorskip("aiohttp")
COUNT = int(os.environ.get("CELLRT_STREAMS", "2000"))
FRAMES = 5
LIMIT_S = 500.0
MOST_GROWTH_KB = 50_000
MOST_DESCRIPTORS = 2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gate") / "open"


@pytest.fixture(scope="module")
def server(gate: Path) -> Iterator[Server]:
    paths = ["tests.serve.soak_models:gated", "tests.serve.models:kept"]
    options = ["--port", "0", "--device", "cpu:2", "--max-queued-requests", str(2 * COUNT)]
    with Server([*options, *paths], {GATE: str(gate)}) as made:
        yield made


def is_open(server: Server) -> int:
    """How many streams the server has open."""
    return int(sum(samples(server)["cellrt_streams_open"].values()))


def clients(url: str) -> Any:
    timeout = aiohttp.ClientTimeout(total=LIMIT_S)
    return aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


async def _read(http: Any, first: int) -> list[int]:
    """The numbers that a stream has."""
    async with http.post("/v1/models/gated/infer", json={"request": first, "stream": True}) as answer:
        assert answer.status == 200, await answer.text()
        events = [json.loads(line[6:]) async for line in answer.content if line.strip()]
    assert events.pop() == {"done": True}
    return [event["step"]["n"] for event in events]


async def read_all(server: Server, gate: Path) -> tuple[float, float]:
    """Opens all streams, then the gate, and reads them: how long both took."""
    begin_s = time.monotonic()
    firsts = [LAST - MOST_STEPS + 1 + k % (MOST_STEPS - 10) for k in range(COUNT)]
    async with clients(server.url) as http:
        reading = [asyncio.create_task(_read(http, first)) for first in firsts]
        while await asyncio.to_thread(is_open, server) < COUNT:
            assert time.monotonic() < begin_s + LIMIT_S, "they are never open together"
            assert not any(task.done() for task in reading)
            await asyncio.sleep(0.1)
        open_s = time.monotonic()
        gate.touch()
        for first, numbers in zip(firsts, await asyncio.gather(*reading)):
            assert numbers == list(range(first + 1, LAST + 2))
    return open_s - begin_s, time.monotonic() - open_s


async def _talk(http: Any, number: int, all_are_open: asyncio.Barrier) -> None:
    """A session: ``h = x + h / 2``, of a one and its number."""
    async with http.ws_connect("/v1/models/kept/session") as socket:
        h = 0.0
        for frame in range(FRAMES):
            await socket.send_json({"request": [[1, number]]})
            h = number + h / 2
            assert await socket.receive_json() == {"number": frame, "results": {"h": [[2 - 0.5**frame, h]]}}
            if frame == 0:
                await all_are_open.wait()


async def talk_all(server: Server) -> tuple[float, float]:
    """Begins all sessions, then goes on with them: how long both took."""
    begin_s = time.monotonic()
    barrier = asyncio.Barrier(COUNT + 1)
    async with clients(server.url) as http, asyncio.TaskGroup() as tasks, asyncio.timeout(LIMIT_S):
        for number in range(COUNT):
            tasks.create_task(_talk(http, number, barrier))
        while barrier.n_waiting < COUNT:
            await asyncio.sleep(0.1)
        assert (await asyncio.to_thread(server.statistics))["sessions"]["open"] == COUNT
        open_s = time.monotonic()
        await barrier.wait()
    return open_s - begin_s, time.monotonic() - open_s


def is_left_nothing(server: Server, idle: dict[str, int]) -> bool:
    found = server.statistics()
    return found["unfinished"] == found["sessions"]["open"] == is_open(server) == 0 and used(server) == idle


def test_as_many_streams_at_once_all_end_and_leave_nothing(server: Server, gate: Path) -> None:
    idle, grown, held = used(server), [], {}
    for turn in range(3):  # the first has every buffer grow
        gate.unlink(missing_ok=True)
        before = {pid: resident_kb(pid) for pid in settled(server)}
        opened_s, read_s = asyncio.run(read_all(server, gate))
        until(lambda: is_left_nothing(server, idle), "nothing is left of the streams")
        began_s, talked_s = asyncio.run(talk_all(server))
        until(lambda: is_left_nothing(server, idle), "nothing is left of the sessions")
        now = settled(server)
        assert turn == 0 or all(now[pid] <= held[pid] + MOST_DESCRIPTORS for pid in now), (held, now)
        held = now
        grown.append(max(resident_kb(pid) - before[pid] for pid in now))
        print(
            f"{COUNT} streams of events: open after {opened_s:.1f} s, read in {read_s:.1f} s; {COUNT} websockets: open "
            f"after {began_s:.1f} s, {FRAMES - 1} more frames of each in {talked_s:.1f} s; memory {grown[-1]} kB more"
        )
    assert grown[-1] < MOST_GROWTH_KB, grown
    counts = samples(server)["cellrt_requests_total"]
    done = {dict(labels)["model"]: int(n) for labels, n in counts.items() if dict(labels)["outcome"] == "done"}
    assert done == {"gated": 3 * COUNT, "kept": 3 * COUNT * FRAMES}
