"""The engine's process ends, killed or closed: clients are told at once, each request ends once, nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch

from cellrt.errors import CellrtError, DeviceError, EngineClosedError
from cellrt.process.client import Client, connect
from tests.engine.helpers import WAIT_S
from tests.process import models
from tests.process.helpers import held, holdings, start, steps
from tests.waiting import is_running, until

AT_ONCE_S = 2.0
"""Long for what takes a millisecond, short beside any time limit."""


class Waiters:
    """Threads that wait for an engine in every way there is, again and again, and what each met in the end."""

    def __init__(self, client) -> None:
        self.outcomes: dict[str, BaseException] = {}
        session = client.session("kept")
        ways = {
            "result": lambda: client.submit("chain", held(9), wait=True).result(WAIT_S),
            "stream": lambda: list(client.stream("chain", held(9), wait=True)),
            "map": lambda: list(client.map("chain", [held(9)] * 3)),
            "place": lambda: client.submit_many("chain", [held()] * 8, wait=True),
            "coroutine": lambda: asyncio.run(client.infer("chain", held(9), wait=True)),
            "session": lambda: session.submit(held(9), wait=True).result(WAIT_S),
            "export": lambda: session.export(),
            "drain": lambda: (
                client.submit("chain", held(9), wait=True) and client.drain(WAIT_S) and client.statistics()
            ),
        }
        self._threads = [threading.Thread(target=self._wait, args=way) for way in ways.items()]
        for thread in self._threads:
            thread.start()

    def _wait(self, name, way) -> None:
        try:
            while True:  # until the engine is gone
                way()
        except BaseException as error:
            self.outcomes[name] = error

    def join(self, seconds: float) -> None:
        end_s = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, end_s - time.monotonic()))
        assert not [thread for thread in self._threads if thread.is_alive()]


@pytest.mark.parametrize(
    "end", ["kill", *(pytest.param(end, marks=pytest.mark.slow) for end in ("close", "terminate"))]
)
def test_everybody_hears_of_the_end_at_once(end):
    before = holdings()
    end_and_look(end)
    until(lambda: holdings() == before, "descriptors and memory are given back")


def end_and_look(end: str) -> None:
    engine = start(max_queue=16)
    engine.register(models.chain, warm_up=False)
    engine.register(models.kept, warm_up=False)
    clients = [connect(engine.address) for _ in range(3)]
    futures = [client.submit("chain", held(9)) for client in clients for _ in range(2)]
    ends = [0] * len(futures)
    for place, future in enumerate(futures):
        future.add_done_callback(lambda _, place=place: ends.__setitem__(place, ends[place] + 1))
    waiters = Waiters(clients[0])
    until(lambda: clients[1].statistics()["unfinished"] > len(futures), "what they ask for has come")
    expected = DeviceError if end == "kill" else EngineClosedError
    if end == "close":
        engine.close()
    else:
        os.kill(engine.pid, signal.SIGKILL if end == "kill" else signal.SIGTERM)
    waiters.join(AT_ONCE_S if end == "kill" else WAIT_S)
    for future in futures:
        assert isinstance(future.exception(WAIT_S), expected)
    assert ends == [1] * len(futures)
    assert {type(outcome) for outcome in waiters.outcomes.values()} == {expected}
    for client in (engine, *clients):
        assert_lost(client, expected)
        client.close()
    engine.close()
    with pytest.raises(DeviceError):
        connect(engine.address)
    waiters.outcomes.clear()  # they hold each other with their tracebacks


def assert_lost(client: Client, expected: type[CellrtError]) -> None:
    until(lambda: client._link.lost is not None, "the client knows")
    for use in (lambda: client.submit("chain", steps(1)), client.statistics, lambda: client.session("kept")):
        with pytest.raises(expected):
            use()


@pytest.mark.slow
def test_the_engine_ends_with_whoever_started_it(tmp_path):
    """Killed, so that nothing of its own is run any more."""
    script = (
        "import time; from tests.process.helpers import start\n"
        "engine = start()\nprint(engine.pid, engine.address, flush=True)\ntime.sleep(60)"
    )
    starter = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    pid, address = starter.stdout.readline().split()
    client = connect(address)
    starter.kill()
    starter.wait()
    starter.stdout.close()
    until(lambda: not is_running(int(pid)), "the engine's process ends")
    with pytest.raises(CellrtError):
        client.submit("chain", torch.zeros(1, 2))
    client.close()
