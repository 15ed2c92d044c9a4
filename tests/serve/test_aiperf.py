"""NVIDIA's load generator against a live server: whole runs without an error, and as many requests as counted here.

It needs the command ``aiperf`` (``pip install aiperf``, best in an environment of its own; ``CELLRT_AIPERF`` may say
where it is), and is skipped where that is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.serve.helpers import Server

AIPERF = os.environ.get("CELLRT_AIPERF") or shutil.which("aiperf")
TEXTS = ("cat", "batch", "maker", "ab", "recurrent", "trees")
REQUESTS, CONCURRENCY = 300, 8
RUN_S = 300.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(RUN_S + 60),
    pytest.mark.skipif(AIPERF is None, reason="needs aiperf: pip install aiperf"),
]


def tokenizer(folder: Path) -> Path:
    """One that knows no word, and comes from no network: it counts tokens, which no model here has."""
    folder.mkdir()
    words = {"type": "WordLevel", "vocab": {"[UNK]": 0}, "unk_token": "[UNK]"}
    parts = ("truncation", "padding", "normalizer", "post_processor", "decoder")
    made = {"version": "1.0", **dict.fromkeys(parts), "pre_tokenizer": {"type": "Whitespace"}, "model": words}
    (folder / "tokenizer.json").write_text(json.dumps({**made, "added_tokens": []}))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def done(server: Server) -> int:
    """Requests of ``letters`` that were answered."""
    return int(server.statistics()["models"]["letters"]["done"])


@pytest.mark.parametrize(
    ("path", "field", "more"), [("generate", "codes", []), ("generate_stream", "to_string(codes)", ["--streaming"])]
)
def test_a_whole_run_has_no_error(server: Server, tmp_path: Path, path: str, field: str, more: list[str]) -> None:
    given = tmp_path / "texts.jsonl"
    given.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    form = {"payload_template": '{"text": {{ text|tojson }}}', "response_field": field}
    options = {
        "--model": "letters",
        "--url": server.url,
        "--endpoint-type": "template",
        "--custom-endpoint": f"/v2/models/letters/{path}",
        "--extra-inputs": json.dumps(form),
        "--input-file": str(given),
        "--custom-dataset-type": "single_turn",
        "--concurrency": str(CONCURRENCY),
        "--request-count": str(REQUESTS),
        "--tokenizer": str(tokenizer(tmp_path / "tokenizer")),
        "--ui": "none",
        "--artifact-dir": str(tmp_path / "found"),
    }
    before = done(server)
    command = [str(AIPERF), "profile", *(word for pair in options.items() for word in pair), *more]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, cwd=tmp_path)
    assert ended.returncode == 0, ended.stdout[-3000:]
    found = json.loads((tmp_path / "found" / "profile_export_aiperf.json").read_text())
    assert found["error_summary"] == [] and not found["was_cancelled"] and found["request_error_rate"]["avg"] == 0
    assert found["request_count"]["avg"] == REQUESTS == done(server) - before
    assert "cellrt_requests" in (tmp_path / "found" / "server_metrics_export.json").read_text()
