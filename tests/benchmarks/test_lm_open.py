"""Requests of a trace have its lengths and bursts, scaled to the model and to a rate."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import lm_open
from benchmarks.lm_llama_cpp import write_gguf
from benchmarks.lm_peers import Asked
from benchmarks.record import Recorder
from cellrt.cells.llama import Llama, LlamaSizes
from cellrt.cells.llama_weights import llama_from_gguf
from tools.policies import open_table

SIZES = LlamaSizes(vocabulary=300, hidden=16, inner=24, layers=2, heads=4, kv_heads=2)
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(lm_open, "AZURE_FIRST", 1)
    path = tmp_path / "trace.csv"
    seconds = ["46.6805900", "50.0000000", "50.5000000", "52.0000000"]
    sizes = ["1,1", "320,5", "99999,32", "16,99999"]
    path.write_text(HEAD + "".join(f"2023-11-16 18:15:{at},{size}\n" for at, size in zip(seconds, sizes)))
    return path


def test_lengths_are_divided_and_cut(trace: Path) -> None:
    requests, _ = lm_open.traced_requests(trace, 3, vocabulary=50)
    most = lm_open.AZURE_LONGEST
    assert [(len(asked.prompt), asked.steps) for asked in requests] == [(20, 1), (most[0], 2), (1, most[1])]
    assert all(0 <= token < 50 for asked in requests for token in asked.prompt)


def test_gaps_keep_their_ratios_at_any_rate(trace: Path) -> None:
    _, at_rate = lm_open.traced_requests(trace, 3, vocabulary=50)
    np.testing.assert_allclose(at_rate(1.5, 3), [0.0, 0.5, 2.0])
    np.testing.assert_allclose(at_rate(150.0, 3), [0.0, 0.005, 0.02])


def test_a_trace_that_is_too_short_is_told(trace: Path) -> None:
    with pytest.raises(ValueError, match="fewer than 5 requests"):
        lm_open.traced_requests(trace, 4, vocabulary=50)


def test_a_trace_that_is_not_there_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(lm_open.TRACE_VARIABLE, str(tmp_path / "none.csv"))
    assert lm_open.find_trace() is None
    assert lm_open.TRACE_VARIABLE in capsys.readouterr().err


def test_latencies_are_those_of_a_token_and_who_is_overwhelmed_gets_no_higher_load(tmp_path: Path) -> None:
    arriving = lm_open.Arriving([Asked([1, 2], 4)] * 30, lambda rate, count: np.arange(count) / rate)

    def serving(each_s: float) -> lm_open.Serve:
        return lambda requests, arrivals: (
            np.full(len(requests), 4 * each_s),
            max(len(requests) * each_s, arrivals[-1]),
        )

    recorder, servers = Recorder("lm"), {"cellrt, iterations": serving(0.1), "slow": serving(0.5)}
    lm_open.compare_open(recorder, "case", servers, arriving, (0.3, 0.6, 1.0))
    found = {(row.get("server"), row.get("load"), row["metric"]): row["value"] for row in recorder.rows}
    assert found[None, None, "iterations, at most"] == pytest.approx(10.0)
    assert found["slow", 0.3, lm_open.LATENCY] == pytest.approx(500.0)
    assert found["slow", 0.6, lm_open.THROUGHPUT] == pytest.approx(2.0)
    assert ("slow", 1.0, lm_open.THROUGHPUT) not in found
    assert open_table(recorder.rows).splitlines()[2:] == [
        "| cellrt, iterations | 100 ms, 3.13/s | 100 ms, 6.21/s | 100 ms, 10/s |",
        "| slow | 500 ms, 2/s | 500 ms, 2/s |  |",
    ]
    pytest.importorskip("matplotlib")
    lm_open.draw(recorder.rows, tmp_path / "open.png")
    assert (tmp_path / "open.png").stat().st_size > 1000


@pytest.mark.parametrize("is_tied", [True, False])
def test_llama_cpp_gets_the_same_weights(is_tied: bool, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    model = Llama(replace(SIZES, is_tied=is_tied))
    write_gguf(model, tmp_path / "model.gguf")
    read = llama_from_gguf(tmp_path / "model.gguf")
    assert read.sizes.is_tied == is_tied
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(read.state_dict()[name], weight, rtol=0, atol=0)
