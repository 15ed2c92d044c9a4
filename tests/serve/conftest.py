"""One live server for the tests that leave it as they found it, started as an operator does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.helpers import Server, start

ALLOWED_ORIGIN = "https://app.example"
MODELS = ("chain", "kept", "count", "limited", "letters", "two", "half", "tree", "pair", "network", "scaled", "summed")


@pytest.fixture(scope="session")
def weight_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The weight of the models ``scaled`` and ``summed``."""
    path = tmp_path_factory.mktemp("weights") / "weight.txt"
    path.write_text("2")
    return path


@pytest.fixture(scope="session")
def server(weight_file: Path) -> Iterator[Server]:
    options = ["--grpc-port", "0", "--allowed-origin", "https://b.example", "--allowed-origin", ALLOWED_ORIGIN]
    with start(*MODELS, options=options, environment={"CELLRT_TEST_WEIGHT": str(weight_file)}) as made:
        yield made
