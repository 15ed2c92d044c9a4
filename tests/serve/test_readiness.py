"""A server is ready as long as every model that it has loaded can be served: over HTTP and gRPC."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cellrt import EngineProcess
from cellrt.serve import backend
from cellrt.serve.app import kept_connected
from cellrt.serve.backend import Backend
from cellrt.serve.server_settings import Settings
from tests.serve.helpers import KEY, Server, start
from tests.serve.test_under_fire import children
from tests.waiting import EVERY_S, until

tritongrpc = pytest.importorskip("tritonclient.grpc")
ASK = {"request": [[1, 0]]}
PATH = "/v1/models/scaled/infer"


@pytest.fixture
def weight_file(tmp_path: Path) -> Path:
    path = tmp_path / "weight"
    path.write_text("2")
    return path


@pytest.fixture
def server(weight_file: Path) -> Iterator[Server]:
    environment = {"CELLRT_TEST_WEIGHT": str(weight_file)}
    with start("scaled", options=["--grpc-port", "0"], environment=environment) as made:
        yield made


def said(server: Server, model: str = "scaled") -> tuple[bool, bool, bool, bool]:
    """Whether the server and its model are ready, as both protocols have it."""
    paths = ("/v2/health/ready", f"/v2/models/{model}/ready")
    http = [server.http.get(path, headers=KEY).status_code for path in paths]
    assert set(http) <= {200, 404, 503}
    with tritongrpc.InferenceServerClient(server.grpc_address) as client:
        grpc = client.is_server_ready(headers=KEY), client.is_model_ready(model, headers=KEY)
    return http[0] == 200, http[1] == 200, *grpc


def entry(server: Server) -> dict[str, Any]:
    return server.post("/v2/repository/index", {}, headers=KEY).json()[0]


def load(server: Server, model: str = "scaled") -> int:
    return server.post(f"/v2/repository/models/{model}/load", {}, headers=KEY).status_code


@pytest.mark.slow
def test_a_server_whose_only_model_cannot_be_served_is_not_ready(server: Server, weight_file: Path) -> None:
    assert said(server) == (True,) * 4 and entry(server)["state"] == "READY"

    weight_file.write_text("no number")  # the engine refuses it, and the version before goes on
    assert load(server) >= 400 and server.post(PATH, ASK).json()["results"]["y"] == [[2, 0]]

    weight_file.write_text("random")  # the engine takes it, and no other process has the same
    assert load(server) == 500 and server.post(PATH, ASK).status_code == 500
    until(lambda: said(server) == (False,) * 4, "it is not ready")
    assert entry(server)["state"] == "UNAVAILABLE" and "from files or a seed" in entry(server)["reason"]
    assert server.post("/v2/repository/index", {"ready": True}).json() == []

    (pid,) = children(server, "process.host")
    os.kill(pid, signal.SIGKILL)
    until(lambda: children(server, "process.host") not in ([pid], []), "there is a successor")
    until(lambda: server.post(PATH, ASK).status_code == 500, "it has the same fault")
    assert said(server) == (False,) * 4

    weight_file.write_text("3")
    assert load(server) == 200 and server.post(PATH, ASK).json()["results"]["y"] == [[3, 0]]
    until(lambda: said(server) == (True,) * 4, "it is ready")


def test_a_server_is_not_ready_while_no_model_is_loaded(guarded_server: Server) -> None:
    assert guarded_server.post("/v2/repository/models/chain/unload", {}, headers=KEY).status_code == 200
    assert said(guarded_server, "chain") == (False, False, False, False), "it says so at once"
    assert entry(guarded_server)["reason"] == "unloaded" and load(guarded_server, "chain") == 200
    assert said(guarded_server, "chain") == (True,) * 4, "and that it is ready again"


@pytest.mark.slow
def test_a_front_end_hears_at_once_what_another_loads_and_unloads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "ASK_EVERY_S", 1000.0)

    async def is_ready(front_end: Backend, *, ready: bool) -> None:
        async with asyncio.timeout(30.0):
            while front_end.is_ready is not ready:
                await asyncio.sleep(EVERY_S)

    async def hear(engine: EngineProcess) -> None:
        front_end = Backend(Settings(address=engine.address))
        async with kept_connected(front_end):
            await is_ready(front_end, ready=True)
            await asyncio.to_thread(engine.unregister, "letters")
            await is_ready(front_end, ready=False)
            await asyncio.to_thread(engine.load, "letters")
            await is_ready(front_end, ready=True)

    with EngineProcess(workers=1) as engine:
        engine.register("tests.serve.models:letters")
        asyncio.run(hear(engine))
