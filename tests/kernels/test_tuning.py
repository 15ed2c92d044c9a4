import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from cellrt.kernels import tuning
from cellrt.kernels.lstm_step import pack_weights
from cellrt.kernels.tiles import Tile, candidates, fit, measured_tiles, rows_class, tile_key, tuned_path, usual_tile


def test_what_was_measured_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "tuned" / "device.json"
    first, second = Tile(16, 8, 64, 4, 4), Tile(32, 16, 64, 4, 3)
    tuning.write(path, "a device", {"lstm_step/bfloat16/1024/16": first})
    other = path.with_name("other.json")  # another name: what was read of a file is kept
    other.write_text(path.read_text())
    tuning.write(other, "a device", {"lstm_step/bfloat16/1024/32": second})
    again = other.rename(path.with_name("again.json"))
    assert measured_tiles(again) == {"lstm_step/bfloat16/1024/16": first, "lstm_step/bfloat16/1024/32": second}


def test_a_file_of_another_format_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text('{"format": 0, "tiles": {"lstm_step/bfloat16/1024/16": [1, 2, 3]}}')
    assert measured_tiles(path) == {}


def test_numbers_of_rows_share_tiles_by_powers_of_two() -> None:
    assert [rows_class(rows) for rows in (1, 16, 17, 512, 513, 5000)] == [16, 16, 32, 512, 1024, 1024]
    weights = pack_weights(torch.zeros(64, 16))
    assert tile_key("lstm_step", weights, 100, "tf32") == "lstm_step/float32-tf32/16/128"
    assert tuned_path("NVIDIA H100 80GB HBM3").name == "nvidia-h100-80gb-hbm3.json"


def test_stages_fit_into_shared_memory() -> None:
    weights = pack_weights(torch.zeros(64, 16))
    assert fit(Tile(16, 8, 64, 4, 4), weights, 232_448).stages == 4
    assert fit(Tile(16, 8, 64, 4, 4), weights, 32_768).stages == 2


def test_rule_takes_the_largest_tile_that_fills_the_device() -> None:
    weights = pack_weights(torch.zeros(4096, 1024, dtype=torch.bfloat16))
    assert usual_tile(weights, 512, "ieee", 132, 232_448) == Tile(128, 32, 64, 8, 4)
    assert usual_tile(weights, 1, "ieee", 132, 232_448) == Tile(16, 8, 128, 4, 4)


def take_time(times: dict[Tile, float], last: list[Tile]) -> Callable[[Callable[[], None]], float]:
    def time_of(call: Callable[[], None]) -> float:
        call()
        return times[last[-1]]

    return time_of


def test_fastest_right_tile_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    case = tuning.Case("lstm_step", torch.float32, "tf32", 16, 64, device="cpu")
    tiles = list(candidates(case.weights, 64, "tf32", 232_448))
    assert len(tiles) >= 3
    launched: list[Tile] = []
    errors = {tile: 0.0 for tile in tiles} | {tiles[0]: 1.0}
    monkeypatch.setattr(case, "error", errors.__getitem__)
    monkeypatch.setattr(case, "launch", launched.append)
    times = {tile: float(k) for k, tile in enumerate(tiles)}
    assert tuning.fastest(case, "tf32", 64, take_time(times, launched)) == tiles[1]


@pytest.mark.parametrize("operation", tuning.OPERATIONS)
def test_cases_compare_with_the_reference(operation: str) -> None:
    """On a CPU the operation is the reference, so the error is that of packing and unpacking: rounding alone."""
    case = tuning.Case(operation, torch.float32, "ieee", 20, 5, device="cpu")
    assert case.error(Tile(16, 8, 16, 4, 1)) < 1e-5
    (first, *_) = case.outputs
    assert dataclasses.astuple(Tile(16, 8, 16, 4, 1)) == (16, 8, 16, 4, 1)
    assert torch.isfinite(first.values).all()


def test_command_says_that_there_is_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert tuning.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_measured_tile_is_one_of_the_candidates() -> None:
    from triton.testing import do_bench_cudagraph

    case = tuning.Case("lstm_step", torch.bfloat16, "ieee", 256, 64)
    tile = tuning.fastest(case, "ieee", 64, do_bench_cudagraph)
    assert tile in list(candidates(case.weights, 64, "ieee", 232_448))
