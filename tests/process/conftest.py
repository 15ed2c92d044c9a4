"""One engine's process for the tests that leave it as they found it; a server of their own for others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cellrt.process.client import Client, connect
from cellrt.process.engine_process import EngineProcess
from tests.process.helpers import MODELS, serving, start


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
    with serving(max_queue=1 << 16) as made:
        yield made
