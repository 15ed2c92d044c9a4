"""MLPerf's load generator against a live server: a whole run of its server scenario, which it finds valid.

It needs ``pip install mlcommons-loadgen``, and is skipped where that is missing.
"""

from __future__ import annotations

import array
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.helpers import WAIT_S, Server

loadgen = pytest.importorskip("mlperf_loadgen")
SAMPLES = ("cat", "batch", "maker", "ab", "recurrent", "trees")
RATE, SECONDS, LATENCY_S, COUNT = 60, 8, 1.0, 480  # as many as 99% within the latency take to be shown
THREADS = 32


@pytest.mark.slow
def test_a_whole_run_is_valid_and_has_no_error(server: Server, tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    http = httpx.Client(base_url=server.url, timeout=WAIT_S, trust_env=False, limits=httpx.Limits(max_connections=None))
    kept: list[array.array[int]] = []

    def answer(query: Any) -> None:
        text = SAMPLES[query.index]
        reply = http.post("/v2/models/letters/generate", json={"text": text})
        is_right = reply.status_code == 200 and reply.json()["codes"] == [ord(letter) + 1 for letter in text]
        seen["right" if is_right else reply.text] += 1
        data = array.array("B", reply.content)
        kept.append(data)  # it reads where this lies
        address, size = data.buffer_info()
        loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(query.id, address, size)])

    with ThreadPoolExecutor(THREADS) as pool:

        def issue(queries: list[Any]) -> None:
            for query in queries:
                pool.submit(answer, query)

        sut = loadgen.ConstructSUT(issue, lambda: None)
        samples = loadgen.ConstructQSL(len(SAMPLES), len(SAMPLES), lambda _: None, lambda _: None)
        settings = loadgen.TestSettings()
        settings.scenario, settings.mode = loadgen.TestScenario.Server, loadgen.TestMode.PerformanceOnly
        settings.server_target_qps = RATE
        settings.server_target_latency_ns = int(LATENCY_S * 1e9)
        settings.min_duration_ms = SECONDS * 1000
        settings.min_query_count = COUNT
        logs = loadgen.LogSettings()
        logs.log_output.outdir = str(tmp_path)
        loadgen.StartTestWithLogSettings(sut, samples, settings, logs)
        loadgen.DestroyQSL(samples)
        loadgen.DestroySUT(sut)
    http.close()
    summary = (tmp_path / "mlperf_log_summary.txt").read_text()
    assert "Result is : VALID" in summary, summary
    assert seen.keys() == {"right"} and seen["right"] >= COUNT, seen
