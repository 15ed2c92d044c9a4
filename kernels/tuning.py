"""Measures which tile is the fastest on this device, for each operation, type, size, kind of inputs and number of rows.

    python -m cellrt.kernels.tuning                        # what serves most: some minutes
    python -m cellrt.kernels.tuning --operation lstm_step --hidden 1024 --rows 512

writes ``tuned/<device>.json`` beside this file as it goes; what it held of other choices is kept. First the shapes that
the rule of thumb knows are measured, then the best of them with other numbers of stages and warps. Several processes
build the kernels beforehand, each by launching it, and Triton keeps them on disk. A tile whose results differ from the
reference, or that does not fit on the device, is left out and named. Times are of a captured CUDA graph, so they hold
no launch from the host.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, wait
from dataclasses import astuple, replace
from itertools import product
from pathlib import Path

import torch

from cellrt.kernels.gate_weights import DEPTH_MULTIPLE, PackedWeights, Precision
from cellrt.kernels.tiles import (
    FORMAT,
    ROW_CLASSES,
    Tile,
    candidates,
    device_limits,
    fit,
    measured_tiles,
    tile_key,
    tuned_path,
)
from cellrt.kernels.tuning_cases import OPERATIONS, Case, Use

COMMAND = "python -m cellrt.kernels.tuning"
KINDS: dict[str, tuple[torch.dtype, Precision]] = {
    "bfloat16": (torch.bfloat16, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "float16": (torch.float16, "ieee"),
    "float32": (torch.float32, "ieee"),
    "tf32x3": (torch.float32, "tf32x3"),
}
USUAL_KINDS = ("bfloat16", "tf32")
HIDDEN_SIZES = (1024, 512, 256)
STAGES = (2, 3, 4, 5, 6)
WARPS = (4, 8)
WIDE_WARPS = (8, 16)
MAX_SUMS = 128  # of a thread, in registers
NUM_BEST = 2
# A sum that lost a block of the product is off by far more than any type's rounding.
MAX_ERROR = 0.05

TimeOf = Callable[[Callable[[], None]], float]
Times = list[tuple[float, Tile]]


def shapes_of(weights: PackedWeights, rows: int, precision: Precision, shared_bytes: int) -> list[Tile]:
    """Return the tiles to measure: those the rule of thumb chooses from, and variants of the largest.

    The variants have twice the depth or twice the units. The latter spills on some devices.
    """
    shapes = list(candidates(weights, rows, precision, shared_bytes))
    deep = replace(shapes[0], depth=min(2 * shapes[0].depth, DEPTH_MULTIPLE))
    wide = (replace(shapes[0], units=2 * shapes[0].units, warps=warps) for warps in WIDE_WARPS)
    return list(dict.fromkeys([*shapes, *(fit(other, weights, shared_bytes) for other in (deep, *wide))]))


def variants(tile: Tile, weights: PackedWeights, shared_bytes: int) -> Iterator[Tile]:
    """Yield a tile with other numbers of stages and warps, as far as they fit, without itself."""
    gates = sum(map(len, weights.sections))
    for warps, stages in product(WARPS, STAGES):
        other = replace(tile, warps=warps, stages=stages)
        sums = tile.rows * gates * tile.units // (32 * warps)
        if other != tile and sums <= MAX_SUMS and fit(other, weights, shared_bytes) == other:
            yield other


def measure(case: Case, tiles: Iterable[Tile], time_of: TimeOf) -> Times:
    """Return the times of those tiles that are right, the shortest first; ``time_of`` measures a call."""
    times: Times = []
    for tile in tiles:
        try:
            error = case.error(tile)
        except Exception as failure:  # whatever Triton raises for a tile that this device cannot run
            print(f"  {tile}: {failure}", file=sys.stderr)
            continue
        if error > MAX_ERROR:
            print(f"  {tile}: left out, wrong by {error}", file=sys.stderr)
            continue
        times.append((time_of(lambda tile=tile: case.launch(tile)), tile))  # type: ignore[misc]
    return sorted(times, key=lambda pair: pair[0])


class Tuner:
    """Finds the tiles of one way to use a step, for several numbers of rows.

    Args:
        use: the step.
        time_of: measures a call.
        executor: processes that build kernels ahead; None: each is built where it is first measured.
        device: the device of the tensors.
    """

    def __init__(self, use: Use, time_of: TimeOf, executor: Executor | None = None, device: str = "cuda") -> None:
        self._use, self._time_of, self._executor, self._device = use, time_of, executor, device

    def find(self, rows: Sequence[int]) -> dict[str, Tile]:
        """Return the fastest tile for each number of rows, by key; none where no tile is right."""
        cases = {count: Case(self._use, count, self._device) for count in rows}
        weights = next(iter(cases.values())).weights
        _, shared_bytes = device_limits(weights.weight_hh.device)
        shapes = {count: shapes_of(weights, count, self._use.precision, shared_bytes) for count in rows}
        self._build(shapes.values())
        times = {count: measure(case, shapes[count], self._time_of) for count, case in cases.items()}
        others = {
            count: [other for _, tile in best[:NUM_BEST] for other in variants(tile, weights, shared_bytes)]
            for count, best in times.items()
        }
        self._build(others.values())
        for count, case in cases.items():
            times[count] += measure(case, others[count], self._time_of)
        return {
            tile_key(self._use.operation, weights, count, self._use.precision): min(found, key=lambda pair: pair[0])[1]
            for count, found in times.items()
            if found
        }

    def _build(self, tiles: Iterable[Iterable[Tile]]) -> None:
        """Build the kernels of all these tiles, each once; what cannot be built is told when it is measured."""
        if self._executor is not None:
            each = dict.fromkeys(tile for some in tiles for tile in some)
            wait([self._executor.submit(build, self._use, tile, self._device) for tile in each])


def build(use: Use, tile: Tile, device: str) -> None:
    """Build a kernel in this process, and so on disk."""
    Case(use, ROW_CLASSES[0], device).launch(tile)


def write(path: Path, device: str, chosen: dict[str, Tile]) -> None:
    """Add ``chosen`` to the file at ``path``."""
    measured_tiles.cache_clear()
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
    """Run the command; return its exit status."""
    parser = argparse.ArgumentParser(prog=COMMAND, description="Find the fastest tiles on this device.")
    parser.add_argument("--operation", nargs="*", choices=OPERATIONS, default=OPERATIONS)
    parser.add_argument("--kind", nargs="*", choices=tuple(KINDS), default=USUAL_KINDS)
    parser.add_argument("--hidden", nargs="*", type=int, default=HIDDEN_SIZES)
    parser.add_argument("--rows", nargs="*", type=int, default=ROW_CLASSES)
    parser.add_argument("--most-s", type=float, default=1200.0, help="no more is begun after this many seconds")
    parser.add_argument("--copy-to", type=Path, help="folder that gets a copy of the file")
    parser.add_argument("--jobs", type=int, default=min(16, os.cpu_count() or 1), help="processes that build kernels")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("there is no CUDA device to measure on", file=sys.stderr)
        return 2
    from triton.testing import do_bench_cudagraph

    device, end_s = torch.cuda.get_device_name(), time.monotonic() + options.most_s
    uses = [
        Use(operation, *KINDS[kind], hidden, has_inputs)
        for hidden, operation, has_inputs, kind in product(
            options.hidden, options.operation, (True, False), options.kind
        )
    ]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, mp_context=context) as executor:
        for number, use in enumerate(uses):
            if time.monotonic() > end_s:
                print(f"no time is left for {len(uses) - number} of {len(uses)}", file=sys.stderr)
                return 1
            chosen = Tuner(use, do_bench_cudagraph, executor).find(options.rows)
            path = tuned_path(device)
            write(path, device, chosen)
            if options.copy_to is not None:
                shutil.copy(path, options.copy_to / f"tuned-{path.name}")
            for key, tile in chosen.items():
                print(f"{key}: {tile}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
