"""What the server says of its doors is true: schemathesis sends what the schema allows, and what it does not."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from starlette.routing import Route, WebSocketRoute

from cellrt.serve.backend import Backend
from cellrt.serve.http_native import NativeHandlers
from cellrt.serve.http_oip import OipHandlers
from cellrt.serve.http_watching import WatchingHandlers
from cellrt.serve.inference import InferenceService
from cellrt.serve.measures import Measures
from cellrt.serve.openai_handlers import OpenAIHandlers
from cellrt.serve.server_settings import Settings
from tests.serve.conftest import MODELS
from tests.serve.helpers import Server, start

MOST_S = 1500.0

CONFIG = """
[checks.positive_data_acceptance]
enabled = false  # a schema cannot say all that an unfolder refuses

[checks.negative_data_rejection]
expected-statuses = ["4xx", "5xx"]  # 413, too, of what is too large

[checks.unsupported_method]
enabled = false

[checks.not_a_server_error]
expected-statuses = ["2xx", "3xx", "4xx", 504]  # a deadline that passed is told so
"""


def test_every_model_is_described(server: Server) -> None:
    description = server.http.get("/openapi.json").json()
    assert description["openapi"].startswith("3.1")
    for model in MODELS:
        schema = description["components"]["schemas"][f"{model}.Request"]
        assert schema["properties"]["request"], model
        assert f"/v1/models/{model}/infer" in description["paths"]


def test_every_door_is_described(server: Server) -> None:
    description = server.http.get("/openapi.json").json()
    service = InferenceService(Backend(Settings()), Measures(is_shared=False))
    doors = OipHandlers(service), NativeHandlers(service), OpenAIHandlers(service), WatchingHandlers(service)
    routes = [route for each in doors for route in each.routes()]
    assert len(routes) > 25
    for route in routes:
        if isinstance(route, Route):
            ways = [description["paths"].get(path) for path in (route.path, route.path.replace("{model}", "chain"))]
            assert any(way and way.keys() <= {each.lower() for each in route.methods or ()} for way in ways), route
        elif route.path != "/{path:path}":  # where it is said that there is none
            assert isinstance(route, WebSocketRoute) and route.path in description["info"]["description"]


def test_pages_are_there(server: Server) -> None:
    for path in ("/", "/docs"):
        answer = server.http.get(path)
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/html")
        assert "src=" not in answer.text and "http" not in answer.text.replace(
            "http-equiv", ""
        )  # nothing from elsewhere


@pytest.mark.slow
@pytest.mark.timeout(MOST_S + 60)
def test_nothing_that_is_sent_is_a_server_error_or_breaks_the_schema(weight_file: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("schemathesis") is None:
        pytest.skip("needs schemathesis: pip install schemathesis")
    (tmp_path / "schemathesis.toml").write_text(CONFIG)
    with start(*MODELS, environment={"CELLRT_TEST_WEIGHT": str(weight_file)}) as server:  # models of it are taken out
        for which in ("--exclude-path-regex", "--include-path-regex"):
            done = sent_by_schemathesis(server, tmp_path, which, "load$")
            assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
        assert not [line for line in server.lines if "Traceback" in line], "\n".join(server.lines[-40:])


def sent_by_schemathesis(server: Server, folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Has it send requests to what the options choose."""
    command = "import sys; from schemathesis.cli import schemathesis; sys.exit(schemathesis())"
    options += ("--max-examples", "100", "--phases", "coverage,fuzzing", "--seed", "1", "--no-color")
    options += ("--request-timeout", "60")  # one of the models counts for ten seconds and more
    config = ["--config-file", str(folder / "schemathesis.toml")]
    return subprocess.run(
        [sys.executable, "-c", command, *config, "run", f"{server.url}/openapi.json", *options],
        capture_output=True,
        text=True,
        timeout=MOST_S,
        cwd=folder,
    )
