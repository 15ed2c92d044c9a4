"""Requests of a trace have its lengths and bursts, scaled to the model and to a rate."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from benchmarks import lm_open

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
    np.testing.assert_allclose(at_rate(1.5), [0.0, 0.5, 2.0])
    np.testing.assert_allclose(at_rate(150.0), [0.0, 0.005, 0.02])


def test_a_trace_that_is_too_short_is_told(trace: Path) -> None:
    with pytest.raises(ValueError, match="fewer than 5 requests"):
        lm_open.traced_requests(trace, 4, vocabulary=50)


def test_a_trace_that_is_not_there_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(lm_open.TRACE_VARIABLE, str(tmp_path / "none.csv"))
    assert lm_open.find_trace() is None
    assert lm_open.TRACE_VARIABLE in capsys.readouterr().err
