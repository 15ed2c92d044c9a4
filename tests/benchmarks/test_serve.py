"""The HTTP benchmark: what it makes of its rounds, and that a server's wrong answer is not timed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.http_load import measured
from benchmarks.http_peers import why_missing
from benchmarks.http_server import Command, Server, serving
from benchmarks.record import Recorder
from benchmarks.serve import GOAL_CLIENTS, IN_PROCESS, OURS, Figures, check, record_rounds, requests_of

SEVEN = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    status = 200

    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(Handler.status)
        Handler.status = int(sys.argv[2])
        self.send_header("Content-Length", "1")
        self.end_headers()
        self.wfile.write(b"7")

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def answering(status: int) -> Server:
    """A server that says 7, with this status from the second answer on."""

    @contextmanager
    def prepared(port: int) -> Iterator[Command]:
        yield [sys.executable, "-c", SEVEN, str(port), str(status)], os.environ

    return Server("/", prepared, lambda: None, list, int)


def test_a_ratio_is_of_figures_of_one_round() -> None:
    def figures(in_process: float, own: float, others: tuple[float, float], p99: tuple[float, float, float]) -> Figures:
        rates = {IN_PROCESS: in_process, OURS: own, "one": others[0], "other": others[1]}
        found = {(name, GOAL_CLIENTS, "rate"): rate for name, rate in rates.items()}
        return found | {(name, GOAL_CLIENTS, "p99"): ms for name, ms in zip((OURS, "one", "other"), p99)}

    recorder = Recorder("serve")
    slow, fast = figures(100, 50, (20, 25), (8, 10, 16)), figures(1000, 800, (100, 200), (1, 4, 2))
    record_rounds(recorder, [slow, fast, fast])
    found = {str(row["metric"]): (row["value"], row["lowest"], row["highest"], row["unit"]) for row in recorder.rows}
    assert found[f"{OURS}: rate"] == (800, 50, 800, "requests/s")
    assert found[f"{OURS}: rate, of {IN_PROCESS}"] == (0.8, 0.5, 0.8, "ratio")
    assert found[f"{OURS}: rate, of the best other's"] == (4, 2, 4, "ratio")
    assert found[f"{OURS}: p99, of the lowest other's"] == (0.5, 0.5, 0.8, "ratio")


def test_a_server_that_answers_something_else_than_torch_is_named() -> None:
    server = answering(200)
    with serving(server) as address, pytest.raises(RuntimeError, match="liar answers"):
        check("liar", server, address, requests_of(10)[:4])


@pytest.mark.skipif(shutil.which("wrk") is None, reason="wrk is not installed")
def test_answers_that_are_no_success_are_not_counted_as_requests() -> None:
    good, bad = answering(200), answering(503)
    bodies = [[1]]
    with serving(good) as address:
        found = measured(address + "/", bodies, 2, 1)
        assert 0 < found["p50"] <= found["p99"]
        assert found["rate"] > 0
    with serving(bad) as address, pytest.raises(RuntimeError, match="Non-2xx"):
        measured(address + "/", bodies, 2, 1)


def test_a_peer_that_lacks_what_it_needs_is_left_out_and_said_so(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "half_a_peer.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert why_missing("half_a_peer") == (
        "importing half_a_peer ends in ModuleNotFoundError: No module named 'no_such_package'"
    )
    assert why_missing("no_such_package") == "the package no_such_package is not installed"
    assert why_missing("json") is None
