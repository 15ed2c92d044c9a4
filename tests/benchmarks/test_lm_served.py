"""The benchmark of servers of language models: what it asks, counts and refuses, with a small server in their place."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks import lm_served
from benchmarks.http_server import Command, Server, serving
from benchmarks.lm_served import OURS, READ, STEPS, Prompts, check, measured, record, servers_of
from benchmarks.record import Recorder

tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("gguf")
SERVER = """
import http.server, json, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(200)
        self.end_headers()
        usage = {"prompt_tokens": len(asked["prompt"].split()), "completion_tokens": asked["max_tokens"]}
        answer = {"choices": [{"text": "yes"}], "usage": usage}
        count = asked["max_tokens"] if asked.get("stream") else 1
        for _ in range(count):
            self.wfile.write((b"data: %s\\n\\n" if count > 1 else b"%s") % json.dumps(answer).encode())

    def log_message(self, *_):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def prompts() -> Prompts:
    vocabulary = {"<unk>": 0, "part": 1, "Ġnot1": 2, "Ġone": 3, "Ġtwo": 4}
    return Prompts(tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>")))


def test_prompts_are_whole_words_and_differ(prompts: Prompts) -> None:
    first, other = prompts.draw(2)
    assert {*first, *other} == {3, 4} and len(first) == READ and first != other


def test_a_server_is_asked_by_all_clients(prompts: Prompts) -> None:
    @contextmanager
    def prepared(port: int) -> Iterator[Command]:
        yield [sys.executable, "-c", SERVER, str(port)], os.environ

    text_of = lambda tokens: " ".join(map(str, tokens))  # noqa: E731
    ours = servers_of(Path("none"), "float32", text_of)[OURS]
    server = Server(ours.path, prepared, ours.missing, ours.body, ours.answered)
    with serving(server) as address:
        found = measured(server, address, 4, prompts)
    assert found.keys() == lm_served.UNITS.keys() and found["tokens/s"] > 0 and found["first token"] > 0


def test_peers_that_are_not_there_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(lm_served.VLLM, raising=False)
    servers = servers_of(Path("none"), "float32", str)
    assert {name for name, server in servers.items() if server.missing() is None} == {OURS}
    assert lm_served.VLLM in (servers["vLLM"].missing() or "")


def test_wrong_counts_and_other_texts_are_refused() -> None:
    good = [(str(number), READ, STEPS) for number in range(8)]
    check("peer", [("x", READ, STEPS), *good[1:]], good, is_compared=True)
    with pytest.raises(RuntimeError, match="8 answers of peer are not ours"):
        check("peer", [("x", READ, STEPS)] * 8, good, is_compared=True)
    check("peer", [("x", READ, STEPS)] * 8, good, is_compared=False)
    with pytest.raises(RuntimeError, match="peer read and made"):
        check("peer", [("x", READ, STEPS - 1)] * 8, good, is_compared=False)


def test_a_ratio_is_of_figures_of_one_round() -> None:
    recorder = Recorder("serve")
    rounds = [
        {(OURS, 8, "tokens/s"): ours, ("vLLM", 8, "tokens/s"): other} for ours, other in ((4, 2), (9, 3), (80, 10))
    ]
    record(recorder, "float32", {OURS: ("", 1.0), "vLLM": ("", 2.0)}, rounds)  # type: ignore[arg-type]
    found = {row["metric"]: row["value"] for row in recorder.rows}
    assert found[f"{OURS} / vLLM: tokens/s"] == 3
    assert (found[f"{OURS}: tokens/s"], found["vLLM: start-up"]) == (9, 2)
