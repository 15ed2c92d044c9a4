from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest
import torch

from cellrt.kernels import tuning
from cellrt.kernels.lstm_step import pack_weights
from cellrt.kernels.tiles import (
    Tile,
    candidates,
    device_limits,
    fit,
    measured_tiles,
    rows_class,
    tile_key,
    tuned_path,
    usual_tile,
)
from cellrt.kernels.tree_lstm_step import pack_weights as pack_tree
from cellrt.kernels.tuning_cases import OPERATIONS, Case, Use

SMALL = Use("lstm_step", torch.float32, "tf32", 16, True)


def test_what_was_measured_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "tuned" / "device.json"
    first, second = Tile(16, 8, 64, 4, 4), Tile(32, 16, 64, 4, 3)
    tuning.write(path, "a device", {"lstm_step/bfloat16/1024/x/16": first})
    other = path.with_name("other.json")  # another name: what was read of a file is kept
    other.write_text(path.read_text())
    tuning.write(other, "a device", {"lstm_step/bfloat16/1024/x/32": second})
    again = other.rename(path.with_name("again.json"))
    assert measured_tiles(again) == {"lstm_step/bfloat16/1024/x/16": first, "lstm_step/bfloat16/1024/x/32": second}


def test_a_file_of_another_format_is_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "device.json"
    path.write_text('{"format": 0, "tiles": {"lstm_step/bfloat16/1024/x/16": [1, 2, 3]}}')
    assert measured_tiles(path) == {}


def test_numbers_of_rows_share_tiles_by_powers_of_two() -> None:
    assert [rows_class(rows) for rows in (1, 16, 17, 512, 513, 5000)] == [16, 16, 32, 512, 1024, 1024]
    weights = pack_weights(torch.zeros(64, 16))
    assert tile_key("lstm_step", weights, 100, "tf32") == "lstm_step/float32-tf32/16/h/128"
    weights = pack_weights(torch.zeros(64, 16), weight_ih=torch.zeros(64, 8))
    assert tile_key("lstm_step", weights, 100, "tf32") == "lstm_step/float32-tf32/16/x/128"
    assert tuned_path("NVIDIA H100 80GB HBM3").name == "nvidia-h100-80gb-hbm3.json"


def test_stages_fit_into_shared_memory() -> None:
    weights = pack_weights(torch.zeros(64, 16))
    assert fit(Tile(16, 8, 64, 4, 4), weights, 232_448).stages == 4
    assert fit(Tile(16, 8, 64, 4, 4), weights, 32_768).stages == 2


@pytest.mark.parametrize("shared_bytes", [166_912, 232_448])
@pytest.mark.parametrize(("dtype", "depth"), [(torch.bfloat16, 64), (torch.float32, 32)])
@pytest.mark.parametrize("operation", ["lstm_step", "tree_lstm_step"])
def test_every_tile_has_five_stages_or_six(operation: str, dtype: torch.dtype, depth: int, shared_bytes: int) -> None:
    """On an A100 the largest of a TreeLSTM, which has five gates, at half the depth; else nothing changes."""
    packs = {"lstm_step": lambda w: pack_weights(w[:256, :64]), "tree_lstm_step": pack_tree}
    weights = packs[operation](torch.zeros(320, 128, dtype=dtype))
    tiles = list(candidates(weights, 512, "tf32", shared_bytes))
    assert {tile.stages for tile in tiles} <= {5, 6}
    is_halved = operation == "tree_lstm_step" and shared_bytes < 200_000
    assert tiles[0].depth == (depth // 2 if is_halved else depth)
    assert tiles[1].depth == depth


def test_rule_takes_the_largest_tile_that_fills_the_device() -> None:
    weights = pack_weights(torch.zeros(4096, 1024, dtype=torch.bfloat16))
    assert usual_tile(weights, 512, "ieee", 132, 232_448) == Tile(128, 32, 64, 8, 6)
    assert usual_tile(weights, 1, "ieee", 132, 232_448) == Tile(16, 8, 128, 4, 6)


def take_time(times: Callable[[Tile], float], last: list[Tile]) -> Callable[[Callable[[], None]], float]:
    def time_of(call: Callable[[], None]) -> float:
        call()
        return times(last[-1])

    return time_of


def test_tiles_are_measured_that_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(SMALL, 64, device="cpu")
    tiles = list(candidates(case.weights, 64, "tf32", 232_448))
    assert len(tiles) >= 3
    launched: list[Tile] = []
    errors = {tile: 0.0 for tile in tiles} | {tiles[0]: 1.0}
    monkeypatch.setattr(case, "error", errors.__getitem__)
    monkeypatch.setattr(case, "launch", launched.append)
    measured = tuning.measure(case, tiles, take_time(lambda tile: -tiles.index(tile), launched))
    assert [tile for _, tile in measured] == tiles[:0:-1]


def test_stages_and_warps_of_the_best_shapes_are_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """With times that six stages and eight warps shorten, the fastest tile has them where they fit."""
    launched: list[Tile] = []
    monkeypatch.setattr(Case, "error", lambda self, tile: 0.0)
    monkeypatch.setattr(Case, "launch", property(lambda self: launched.append, lambda self, value: None), raising=False)
    time_of = take_time(lambda tile: abs(tile.units - 16) - 1e-3 * tile.stages - 1e-4 * min(tile.warps, 8), launched)
    found = tuning.Tuner(SMALL, time_of, device="cpu").find([16, 512])
    assert {key: (tile.stages, tile.warps) for key, tile in found.items()} == {
        "lstm_step/float32-tf32/16/x/16": (6, 8),
        "lstm_step/float32-tf32/16/x/512": (6, 8),
    }
    assert len(launched) < 2 * 30


def test_variants_fit_into_registers_and_shared_memory() -> None:
    weights = pack_weights(torch.zeros(4096, 1024, dtype=torch.bfloat16))
    large = Tile(128, 64, 64, 8, 3)
    found = list(tuning.variants(large, weights, 166_912))
    assert [tile.stages for tile in found] == [2]  # four stages of 48 KB are too much, and so are 256 sums a thread
    assert list(tuning.variants(large, weights, 232_448))[-1] == Tile(128, 64, 64, 8, 4)


class Recorded(Executor):
    """Runs nothing, and keeps what it is given."""

    def __init__(self) -> None:
        self.built: list[Tile] = []

    def submit(self, function: Callable[..., None], *arguments: Any) -> Future[None]:
        self.built.append(arguments[1])
        done: Future[None] = Future()
        done.set_exception(ValueError("cannot be built"))
        return done


def test_every_tile_is_built_once_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    executor, launched = Recorded(), []
    monkeypatch.setattr(Case, "error", lambda self, tile: launched.append((tile, tile in executor.built)) or 0.0)
    tuning.Tuner(SMALL, lambda call: 1.0, executor, device="cpu").find([16, 32, 64])
    assert all(was_built for _, was_built in launched)
    assert {tile for tile, _ in launched} == set(executor.built)
    shapes = tuning.shapes_of(Case(SMALL, 64, device="cpu").weights, 64, "tf32", 232_448)
    assert executor.built[: len(shapes)] == list(dict.fromkeys(executor.built[: len(shapes)]))


@pytest.mark.parametrize("has_inputs", [True, False])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_cases_compare_with_the_reference(operation: str, has_inputs: bool) -> None:
    """On a CPU the operation is the reference, so the error is that of packing and unpacking: rounding alone."""
    case = Case(Use(operation, torch.float32, "ieee", 20, has_inputs), 5, device="cpu")
    assert case.error(Tile(16, 8, 16, 4, 1)) < 1e-5
    assert (case.weights.weight_ih is not None) == has_inputs
    (first, *_) = case.outputs
    assert torch.isfinite(first.values).all()


def test_command_says_that_there_is_no_device(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert tuning.main([]) == 2
    assert "no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_a_measured_tile_is_a_candidate_or_a_variant_of_one() -> None:
    from triton.testing import do_bench_cudagraph

    use = Use("lstm_step", torch.bfloat16, "ieee", 256, True)
    case = Case(use, 64)
    _, shared_bytes = device_limits(case.weights.weight_hh.device)
    shapes = tuning.shapes_of(case.weights, 64, "ieee", shared_bytes)
    others = [other for tile in shapes for other in tuning.variants(tile, case.weights, shared_bytes)]
    (tile,) = tuning.Tuner(use, do_bench_cudagraph).find([64]).values()
    assert tile in [*shapes, *others]
