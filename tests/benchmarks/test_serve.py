"""The HTTP benchmark: what it makes of its rounds, and that a server's wrong answer is not timed."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import serve
from benchmarks.http_load import measured
from benchmarks.http_peers import why_missing
from benchmarks.http_server import Command, DidNotStartError, Server, serving
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


def test_a_peer_that_does_not_start_is_said_once_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    @contextmanager
    def broken(port: int) -> Iterator[Command]:
        yield [sys.executable, "-c", "raise SystemExit('no licence')"], os.environ

    @contextmanager
    def gone(port: int) -> Iterator[Command]:
        yield ["/no/such/program"], os.environ

    dead, lost = (Server("/", prepared, lambda: None, list, int) for prepared in (broken, gone))
    monkeypatch.setattr(serve, "in_process", lambda *_: 100.0)
    monkeypatch.setattr(serve, "check", lambda *_: None)
    monkeypatch.setattr(serve, "_measured", lambda *_: {"rate": 50.0, "p99": 2.0})
    servers = {OURS: answering(200), "dead": dead, "lost": lost, "other": answering(200)}
    rounds = list(serve._rounds(servers, (GOAL_CLIENTS,), 0.1, 2))
    assert [sorted({name for name, _, _ in each}) for each in rounds] == [[OURS, IN_PROCESS, "other"]] * 2
    said = capsys.readouterr().out.splitlines()
    assert [line.partition(" did not start: ")[0] for line in said] == ["dead", "lost"]
    assert "no licence" in said[0] and "/no/such/program" in said[1]
    with pytest.raises(DidNotStartError, match="no licence"):
        list(serve._rounds({OURS: dead}, (GOAL_CLIENTS,), 0.1, 1))


def test_a_peer_that_started_in_some_rounds_has_their_figures() -> None:
    recorder = Recorder("serve")
    own = {(name, GOAL_CLIENTS, metric): 8.0 for name in (IN_PROCESS, OURS) for metric in ("rate", "p99")}
    record_rounds(recorder, [own | {("other", GOAL_CLIENTS, "rate"): 4.0, ("other", GOAL_CLIENTS, "p99"): 2.0}, own])
    found = {str(row["metric"]): row["value"] for row in recorder.rows}
    assert found["other: rate"] == 4.0 and found[f"{OURS}: rate, of the best other's"] == 2.0


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
