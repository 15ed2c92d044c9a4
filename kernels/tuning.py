"""Measures which tile is the fastest on this device, for each operation, type, hidden size and number of rows.

    python -m cellrt.kernels.tuning                        # everything: some minutes
    python -m cellrt.kernels.tuning --operation lstm_step --hidden 1024 --rows 512

writes ``tuned/<device>.json`` beside this file; what it held of other choices is kept. A tile whose results differ
from the reference, or that does not fit on the device, is left out and named. Times are of a captured CUDA graph,
so they hold no launch from the host.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple
from pathlib import Path

import torch

from cellrt.kernels import gru_step, lstm_step, tree_lstm_step
from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_weights import PackedWeights, Precision
from cellrt.kernels.tiles import FORMAT, Tile, candidates, device_limits, measured_tiles, tile_key, tuned_path

COMMAND = "python -m cellrt.kernels.tuning"
KINDS: tuple[tuple[torch.dtype, Precision], ...] = (
    (torch.float32, "ieee"),
    (torch.float32, "tf32"),
    (torch.float32, "tf32x3"),
    (torch.bfloat16, "ieee"),
    (torch.float16, "ieee"),
)
HIDDEN_SIZES = (256, 512, 1024, 2048)
ROWS = (16, 32, 64, 128, 256, 512, 1024)
# A sum that lost a block of the product is off by far more than any type's rounding.
MAX_ERROR = 0.05

Launch = Callable[[Tile | None], None]


class Case:
    """One operation on random rows: ``launch(tile)`` writes ``outputs``; a tile of None is the reference."""

    def __init__(
        self, operation: str, dtype: torch.dtype, precision: Precision, hidden: int, rows: int, device: str = "cuda"
    ) -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._hidden, self._rows, self._like = hidden, rows, torch.empty(0, dtype=dtype, device=device)
        self.outputs: list[ArenaRows] = []
        self.weights, self.launch = getattr(self, f"_{operation}")(precision)

    def error(self, tile: Tile) -> float:
        """The largest difference between the results with ``tile`` and the reference."""
        self.launch(None)
        expected = [arena.values.clone() for arena in self.outputs]
        for arena in self.outputs:
            arena.values.fill_(torch.nan)
        self.launch(tile)
        differences = [(arena.values - values).abs() for arena, values in zip(self.outputs, expected)]
        return float(torch.stack(differences).nan_to_num(torch.inf).max())

    def _random(self, *shape: int) -> torch.Tensor:
        numbers: torch.Tensor = torch.randn(shape, generator=self._generator, device=self._like.device)
        numbers = numbers / shape[-1] ** 0.5
        return numbers.to(self._like.dtype)

    def _inputs(self, width: int) -> ArenaRows:
        order = torch.randperm(self._rows, generator=self._generator, device=self._like.device)
        return ArenaRows(self._random(self._rows, width), order.to(torch.int32))

    def _output(self) -> ArenaRows:
        self.outputs.append(self._inputs(self._hidden))
        return self.outputs[-1]

    def _lstm_step(self, precision: Precision) -> tuple[PackedWeights, Launch]:
        hidden = self._hidden
        weight, bias = self._random(4 * hidden, hidden), self._random(4 * hidden)
        weights = lstm_step.pack_weights(weight, bias)
        h, c, gates = self._inputs(hidden), self._inputs(hidden), self._inputs(4 * hidden)
        h_out, c_out = self._output(), self._output()

        def launch(tile: Tile | None) -> None:
            if tile is None:
                lstm_step.reference.lstm_step(weight, bias, h=h, c=c, h_out=h_out, c_out=c_out, gates=gates)
            else:
                lstm_step.lstm_step(
                    weights, h=h, c=c, h_out=h_out, c_out=c_out, gates=gates, precision=precision, tile=tile
                )

        return weights, launch

    def _gru_step(self, precision: Precision) -> tuple[PackedWeights, Launch]:
        hidden = self._hidden
        weight, bias = self._random(3 * hidden, hidden), self._random(3 * hidden)
        weights = gru_step.pack_weights(weight, bias)
        h, gates, h_out = self._inputs(hidden), self._inputs(3 * hidden), self._output()

        def launch(tile: Tile | None) -> None:
            if tile is None:
                gru_step.reference.gru_step(weight, bias, torch.zeros_like(bias), h=h, h_out=h_out, gates=gates)
            else:
                gru_step.gru_step(weights, h=h, h_out=h_out, gates=gates, precision=precision, tile=tile)

        return weights, launch

    def _tree_lstm_step(self, precision: Precision) -> tuple[PackedWeights, Launch]:
        hidden = self._hidden
        weight, bias = self._random(5 * hidden, 2 * hidden), self._random(5 * hidden)
        weights = tree_lstm_step.pack_weights(weight, bias)
        states = {name: self._inputs(hidden) for name in ("h_left", "h_right", "c_left", "c_right")}
        outputs = {"h_out": self._output(), "c_out": self._output()}

        def launch(tile: Tile | None) -> None:
            if tile is None:
                tree_lstm_step.reference.tree_lstm_step(weight, bias, weight_ih=None, x=None, **states, **outputs)
            else:
                tree_lstm_step.tree_lstm_step(weights, x=None, precision=precision, tile=tile, **states, **outputs)

        return weights, launch


OPERATIONS = ("lstm_step", "gru_step", "tree_lstm_step")


def fastest(case: Case, precision: Precision, rows: int, time_of: Callable[[Callable[[], None]], float]) -> Tile | None:
    """The tile of least time among those that are right, or None if none is; ``time_of`` measures a call."""
    _, shared_bytes = device_limits(case.weights.weight_hh.device)
    times: list[tuple[float, Tile]] = []
    for tile in candidates(case.weights, rows, precision, shared_bytes):
        try:
            error = case.error(tile)
        except Exception as failure:  # whatever Triton raises for a tile that this device cannot run
            print(f"  {tile}: {failure}", file=sys.stderr)
            continue
        if error > MAX_ERROR:
            print(f"  {tile}: left out, wrong by {error}", file=sys.stderr)
            continue
        times.append((time_of(lambda tile=tile: case.launch(tile)), tile))  # type: ignore[misc]
    return min(times, key=lambda pair: pair[0])[1] if times else None


def write(path: Path, device: str, chosen: dict[str, Tile]) -> None:
    """Add ``chosen`` to the file at ``path``."""
    tiles = {**measured_tiles(path), **chosen}
    table = {
        "format": FORMAT,
        "device": device,
        "command": COMMAND,
        "torch": torch.__version__,
        "tiles": {key: astuple(tiles[key]) for key in sorted(tiles)},
    }
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table, indent=1) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit status."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Find the fastest tiles on this device.")
    parser.add_argument("--operation", nargs="*", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--hidden", nargs="*", type=int, default=HIDDEN_SIZES)
    parser.add_argument("--rows", nargs="*", type=int, default=ROWS)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no CUDA device to measure on", file=sys.stderr)
        return 2
    from triton.testing import do_bench_cudagraph

    device = torch.cuda.get_device_name()
    chosen: dict[str, Tile] = {}
    for operation in options.operation:
        for dtype, precision in KINDS:
            for hidden in options.hidden:
                for rows in options.rows:
                    case = Case(operation, dtype, precision, hidden, rows)
                    tile = fastest(case, precision, rows, do_bench_cudagraph)
                    key = tile_key(operation, case.weights, rows, precision)
                    print(f"{key}: {tile}", flush=True)
                    if tile is not None:
                        chosen[key] = tile
        write(tuned_path(device), device, chosen)
    return 0


if __name__ == "__main__":
    sys.exit(main())
