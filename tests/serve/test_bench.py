"""The load generator of ``cellrt bench serve`` on a live server, run as a user does."""

from __future__ import annotations

import json
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
    common = ["--base-url", server.url, "--request", "1", "--num-prompts", 3]
    told = run("bench", "serve", "--model", "nobody", *common, status=1)
    assert "'404': 3" in told and "model 'nobody' is not" in told
