"""What the tests of the engine's process share: small engines, and what is left behind of clients and engines."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from cellrt.process import address as addresses
from cellrt.process.client import Client
from cellrt.process.engine_process import EngineProcess
from cellrt.process.host import EngineServer, ServedEngine
from tests.engine.helpers import SMALL, WAIT_S, small_engine
from tests.steps import HOLD_LONG, WIDTH
from tests.waiting import until

MODELS = ("chain", "loop", "layers", "shapes", "kept", "grown", "half")


def start(workers: int = 1, **options: Any) -> EngineProcess:
    """An engine's process with small tables."""
    options.setdefault("limits", SMALL)
    options.setdefault("arena_bytes", 1 << 16)
    return EngineProcess(workers, **options)


@contextmanager
def serving(*workers: int, **options: Any) -> Iterator[EngineServer]:
    """A server with a small engine in a thread of this process, where a test can look at it."""
    address = addresses.new_address()
    ours, theirs = socket.socketpair()
    made = EngineServer(small_engine(*workers, kind=ServedEngine, **options), addresses.listen(address), theirs)
    made.address = address
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    ours.close()
    thread.join(WAIT_S)
    made.end()
    theirs.close()


def steps(count: int, first: float = 1.0) -> torch.Tensor:
    return torch.full((count, WIDTH), first)


def held(count: int = 1) -> torch.Tensor:
    """A request whose first step takes long."""
    return torch.cat([torch.full((1, WIDTH), HOLD_LONG), steps(count)])


def holdings(pid: int | str = "self") -> tuple[int, int]:
    """Descriptors of a process, and pieces of memory without a name that it has mapped."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return len(os.listdir(f"/proc/{pid}/fd")), sum("memfd:cellrt" in line for line in maps)


def assert_as_before(watcher: Client, before: dict[str, Any], held_before: tuple[int, int], pid: int) -> None:
    """What clients had that are gone was given back: requests, places, sessions, descriptors, memory."""
    until(lambda: watcher.statistics()["unfinished"] == 0, "nothing is unfinished")
    until(lambda: watcher.statistics()["clients"] == before["clients"], "as many clients as before")
    until(lambda: watcher.statistics()["sessions"]["open"] == before["sessions"]["open"], "as many sessions")
    until(lambda: holdings(pid) == held_before, "descriptors and memory are given back")
    watcher.check()
