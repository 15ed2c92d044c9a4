"""Live servers for the tests that leave them as they found them, started as an operator does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cellrt.serve.server_settings import MOST_DEPTH
from tests.serve.helpers import KEY, Server, start

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


@pytest.fixture(scope="session")
def language_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Small language models, and trees as deep as may be."""
    path = tmp_path_factory.mktemp("config") / "server.toml"
    path.write_text(f"[limits]\nmax_depth = {MOST_DEPTH}\n")
    models = [f"tests.serve.language_models:{name}" for name in ("decoder", "encoder")]
    with start("chain", "tree", options=["--grpc-port", "0", "--config", str(path), *models]) as made:
        yield made


@pytest.fixture(scope="session")
def guarded_server() -> Iterator[Server]:
    """One model, behind a key (``KEY``)."""
    environment = {"CELLRT_SERVE_API_KEY": KEY["x-api-key"]}
    with start("chain", options=["--grpc-port", "0"], environment=environment) as made:
        yield made


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    """OpenAI's own client of a module's server."""
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made
