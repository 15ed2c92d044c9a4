"""The pages in a real browser: they show what the server does, and load nothing from elsewhere."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.conftest import MODELS
from tests.serve.helpers import Server

NODE, CHROMIUM = shutil.which("node"), shutil.which("chromium")
SCRIPT = Path(__file__).parent / "page.cjs"


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
