"""The load generator of ``cellrt bench serve`` on a live server, run as a user does."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.cli.test_planning import run
from tests.serve.helpers import Server

pytest.importorskip("aiohttp")


@pytest.mark.parametrize(
    "options",
    [
        ["--max-concurrency", "4"],
        ["--request-rate", "500"],
        ["--request-rate", "500", "--burstiness", "0.2"],
        ["--stream"],
    ],
)
def test_a_load_is_sent_and_every_request_answered(server: Server, tmp_path: Path, options: list[str]) -> None:
    path = tmp_path / "requests.jsonl"
    path.write_text('{"request": [[1, 2]]}\n[[1, 2], [3, 4]]\n')
    common = ["--model", "chain", "--base-url", server.url, "--dataset-path", path, "--num-prompts", 40, "--json"]
    summary = json.loads(run("bench", "serve", *common, *options))
    assert (summary["successful_requests"], summary["failed_requests"]) == (40, 0)
    assert 0 < summary["p50_e2el_ms"] <= summary["p99_e2el_ms"]
    if "--stream" in options:
        assert summary["p50_ttft_ms"] <= summary["p50_e2el_ms"]


def test_a_trace_file_says_when(server: Server, tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps({"time_s": 0.05 * k, "request": [[1, 2]]}) + "\n" for k in range(5)))
    common = ["--model", "chain", "--base-url", server.url, "--dataset-path", path, "--num-prompts", 5, "--json"]
    assert json.loads(run("bench", "serve", *common))["duration_s"] >= 0.2


def test_a_load_that_nobody_answers_fails(server: Server) -> None:
    common = ["--model", "chain", "--base-url", server.url, "--request", "1", "--num-prompts", 3]
    assert "'400': 3" in run("bench", "serve", *common, status=1)


def test_a_model_that_is_not_there_is_said_before_the_load_is_sent(server: Server) -> None:
    common = ["--base-url", server.url, "--request", "1", "--num-prompts", 3]
    told = run("bench", "serve", "--model", "nobody", *common, status=1)
    assert "nothing was sent" in told and "model 'nobody' is not" in told and "failed" not in told


def test_an_address_that_names_its_model_needs_no_name_that_the_server_knows(server: Server) -> None:
    common = ["--base-url", server.url, "--request", "[[1, 2]]", "--num-prompts", 3, "--json"]
    sent = run("bench", "serve", "--model", "ours", "--endpoint", "/v1/models/chain/infer", *common)
    assert json.loads(sent)["successful_requests"] == 3


class Other(BaseHTTPRequestHandler):
    """A server that knows nothing of the protocol, and answers what is posted to it."""

    def do_GET(self) -> None:
        self.send_error(404)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def test_what_other_servers_have_not_keeps_no_load_from_them() -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        common = ["--base-url", f"http://127.0.0.1:{other.server_port}", "--request", "1", "--num-prompts", 3, "--json"]
        sent = run("bench", "serve", "--model", "any", *common)
        other.shutdown()
    assert json.loads(sent)["successful_requests"] == 3


@pytest.mark.parametrize("place", ["nowhere/a.json", "."])
def test_a_result_that_cannot_be_kept_is_said_before_the_load_is_sent(server: Server, place: str) -> None:
    common = ["--model", "chain", "--base-url", server.url, "--request", "[[1, 2]]", "--num-prompts", 3]
    told = run("bench", "serve", *common, "--save-result", place, status=1)
    assert "Traceback" not in told and place.partition("/")[0] in told and "successful" not in told


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "127.0.0.1:8000", "http://no such host", "ftp://127.0.0.1"])
def test_a_server_that_is_not_there_is_said_with_its_address(url: str) -> None:
    common = ["--model", "chain", "--base-url", url, "--request", "[[1, 2]]", "--num-prompts", 100_000]
    told = run("bench", "serve", *common, status=1)
    assert f"cannot reach {url}" in told and told.count(url) <= 2
    assert "failed requests" not in told  # none was sent


def test_a_server_that_goes_away_is_said_with_its_address(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reached(*_: object) -> None: ...

    monkeypatch.setattr("cellrt.planning.load.check_served", reached)
    common = ["--model", "chain", "--base-url", "http://127.0.0.1:9", "--request", "[[1, 2]]", "--num-prompts", 3]
    told = run("bench", "serve", *common, status=1)
    assert "'ClientConnectorError': 3" in told and "the first: http://127.0.0.1:9/v1/models/chain/infer" in told
