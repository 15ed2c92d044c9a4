"""One engine's process for the tests that leave it as they found it; a server of their own for others."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator

import pytest

from cellrt.process import address as addresses
from cellrt.process.client import Client, connect
from cellrt.process.engine_process import EngineProcess
from cellrt.process.host import EngineServer, ServedEngine
from tests.engine.helpers import WAIT_S, small_engine
from tests.process.helpers import MODELS, start


@pytest.fixture(scope="session")
def served() -> Iterator[EngineProcess]:
    engine = start(max_queue=512)
    for model in MODELS:
        engine.register(f"tests.process.models:{model}", warm_up=False)
    with engine:
        yield engine


@pytest.fixture
def client(served: EngineProcess) -> Iterator[Client]:
    with connect(served.address) as made:
        yield made


@pytest.fixture
def server():
    """One in a thread of this process, where a test can look at it."""
    # It takes more than who floods it hands in before it is seen to be behind.
    engine = small_engine(kind=ServedEngine, max_queue=1 << 16)
    address = addresses.new_address()
    ours, theirs = socket.socketpair()
    made = EngineServer(engine, addresses.listen(address), theirs)
    made.address = address
    thread = threading.Thread(target=made.run)
    thread.start()
    yield made
    ours.close()
    thread.join(WAIT_S)
    made.end()
    theirs.close()
