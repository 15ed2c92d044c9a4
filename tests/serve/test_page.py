"""The pages show what the server does, and load nothing from elsewhere; in a real browser, but for one script."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from cellrt.serve import openapi
from tests.serve.conftest import MODELS
from tests.serve.helpers import Server

NODE, CHROMIUM = shutil.which("node"), shutil.which("chromium")
SCRIPT, DOCS_SCRIPT, LIVE_SCRIPT = (
    Path(__file__).parent / name for name in ("page.cjs", "docs_page.cjs", "live_page.cjs")
)


@pytest.fixture
def node() -> str:
    """Node, where it finds playwright-core, and a browser."""
    if NODE is None or CHROMIUM is None:
        pytest.skip("needs node and chromium: apt install nodejs chromium")
    if subprocess.run([NODE, "-e", "require('playwright-core')"], capture_output=True, timeout=60).returncode:
        pytest.skip("needs playwright-core: npm install playwright-core, and NODE_PATH=.../node_modules")
    return NODE


@pytest.mark.slow
def test_pages_show_what_the_server_does(server: Server, node: str) -> None:
    for _ in range(20):
        assert server.post("/v1/models/chain/infer", {"request": [[1, 2]] * 5}).status_code == 200
    done = subprocess.run([node, str(SCRIPT), server.url, str(CHROMIUM)], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert set(seen["models"]) == set(MODELS)
    assert seen["isDrawn"] and not seen["errors"] and not seen["elsewhere"]


@pytest.mark.skipif(NODE is None, reason="needs node: apt install nodejs")
def test_the_page_asks_for_what_stands_in_an_address() -> None:
    paths = openapi.document([], has_keys=False)["paths"]
    chosen = ("/debug/requests/{id}", "/debug/timeline", "/v2/repository/models/{model}/unload")
    description = {"paths": {path: paths[path] for path in chosen}, "components": {"schemas": {}}}
    page = (Path(openapi.__file__).parent / "docs.html").read_text()
    given = json.dumps([page, description])
    done = subprocess.run([str(NODE), str(DOCS_SCRIPT)], input=given, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    asked = [each for each in json.loads(done.stdout) if not each.startswith("200 ")]
    assert asked == [
        "/debug/timeline",
        "id is needed",
        "model is needed",
        "/debug/requests/a%2Fb%20c",
        "/debug/timeline?count=a%2Fb+c",
        "/v2/repository/models/a%2Fb%20c/unload",
    ]


def test_a_model_s_own_doors_are_described_first(server: Server) -> None:
    paths = list(server.http.get("/openapi.json").json()["paths"])
    first = paths.index("/v1/models/chain/infer")
    assert paths[first : first + 3] == [
        "/v1/models/chain/infer",
        "/v2/models/chain/generate",
        "/v2/models/chain/generate_stream",
    ]
    assert max(place for place, path in enumerate(paths) if "/models/two" in path) < paths.index("/metrics")


@pytest.mark.skipif(NODE is None, reason="needs node: apt install nodejs")
def test_the_live_page_has_a_key_of_its_colours_an_axis_and_curves(server: Server) -> None:
    seen = []
    for _ in range(3):
        assert server.post("/v1/models/chain/infer", {"request": [[1, 2]] * 5}).status_code == 200
        seen.append(server.statistics())
    trace = server.http.get("/debug/timeline?count=1000").json()
    page = (Path(openapi.__file__).parent / "page.html").read_text()
    given = json.dumps([page, seen, trace])
    done = subprocess.run([str(NODE), str(LIVE_SCRIPT)], input=given, capture_output=True, text=True, timeout=60)
    assert not done.stderr
    shown = json.loads(done.stdout)
    names = sorted({event["name"] for event in trace["traceEvents"] if event["ph"] == "X"})
    assert shown["state"] == "" and shown["colours"] == names
    assert shown["axis"] == ["-50 ms", "-40 ms", "-30 ms", "-20 ms", "-10 ms"]
    workers = {event["tid"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert set(shown["workers"]) == {f"worker {worker}" for worker in workers}
    curves = {title: (key, is_drawn) for title, key, is_drawn in shown["curves"]}
    assert list(curves) == ["requests a second", "latency p99, ms", "rows a task", "workers busy, %"]
    assert all(is_drawn for _, is_drawn in curves.values()) and "chain" in curves["requests a second"][0]
    assert "rows of" in shown["moment"]
