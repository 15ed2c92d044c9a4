"""A program may end at any moment without closing its engines: its exit status stays its own, and nothing aborts."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest

from tests.engine.exits import WAYS

STATUS = {"raise_an_error": 1, "exit_with_3": 3, "be_interrupted": -signal.SIGINT}
ENGINE = "Engine(2 workers, models ['sum'], 0 of 1 cells compiled; add eager: compile is off)"
LAST_LINE = {"raise_an_error": f"RuntimeError: {ENGINE} was not closed"}


@pytest.fixture(scope="module")
def endings(request: pytest.FixtureRequest) -> dict[str, tuple[int, list[str]]]:
    """Exit status and lines of stderr by way of ending; of those that tests of this run ask for."""
    asked = [item.callspec.params["way"] for item in request.session.items if item.path == request.path]
    command = [sys.executable, "-m", "tests.engine.exits", *asked]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("way", WAYS)
def test_the_exit_status_is_the_programs_own(endings, way):
    status, said = endings[way]
    assert status == STATUS.get(way, 0), said
    if way not in STATUS:
        assert said == []
    elif way in LAST_LINE:
        assert said[0].startswith("Traceback") and said[-1] == LAST_LINE[way]
