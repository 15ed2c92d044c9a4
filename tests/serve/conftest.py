"""One live server for the tests that leave it as they found it, started as an operator does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serve.helpers import Server, start

MODELS = ("chain", "kept", "count", "letters", "two", "half", "tree", "pair", "network")


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with start(*MODELS, options=["--grpc-port", "0"]) as made:
        yield made
