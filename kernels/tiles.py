"""The size of a program's tile: as measured on this device, or else by a rule of thumb.

``tuned/<device>.json`` holds what ``python -m cellrt.kernels.tuning`` measured on that device. For a device, type, size
or number of rows that is not in it, the rule decides: the largest tile that still fills the device. The rule was
written for an H100 without having measured it there.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cellrt.kernels.gate_weights import PackedWeights, Precision

FORMAT = 2
MOST_STAGES = 6  # blocks of the product that are on their way from memory, or multiplied, at once
LEAST_STAGES = 5  # where fewer fit, blocks of half the depth are taken
ROW_CLASSES = tuple(1 << power for power in range(4, 11))
"""Numbers of rows that share a tile are rounded up to one of these: launches with them build all forms of a kernel."""
SMALLEST_ROWS, LARGEST_ROWS = ROW_CLASSES[0], ROW_CLASSES[-1]


@dataclass(frozen=True)
class Tile:
    """A program computes ``rows`` x ``units`` (all gates of each), ``depth`` of the product at a time.

    ``rows``, ``units`` and ``depth`` are powers of two; at least 16, 8 and 16, at most 128, 64 and 128. ``warps`` of 32
    threads; ``stages`` tiles of the product are under way at once.
    """

    rows: int
    units: int
    depth: int
    warps: int
    stages: int

    def options(self, is_limited: bool | None = None) -> dict[str, int]:
        """Return the options with which Triton compiles a step with this tile.

        The assembler spills a few bytes of some steps to use fewer registers, of which there are enough; where it is
        told so (of most steps, with four warps) it does not.
        """
        options = {"num_warps": self.warps, "num_stages": self.stages}
        is_limited = self.warps == 4 if is_limited is None else is_limited
        return options | {"maxnreg": 255} if is_limited else options


def choose_tile(operation: str, weights: PackedWeights, num_rows: int, precision: Precision) -> Tile:
    """Return the tile for ``num_rows`` rows on the device of ``weights``: measured, or by the rule."""
    device = weights.weight_hh.device
    if device.type == "cuda":
        key = tile_key(operation, weights, num_rows, precision)
        tile = measured_tiles(tuned_path(torch.cuda.get_device_name(device))).get(key)
        if tile is not None:
            return tile
    return usual_tile(weights, rows_class(num_rows), precision, *device_limits(device))


def device_limits(device: torch.device) -> tuple[int, int]:
    """Return the number of processors of a CUDA device, and the shared memory of a program in bytes.

    Any other device, on which kernels are interpreted, has the limits of an H100.
    """
    if device.type != "cuda":
        return 132, 232_448
    properties = torch.cuda.get_device_properties(device)
    shared_bytes: int = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]  # not in torch's stubs
    return properties.multi_processor_count, shared_bytes


def tile_key(operation: str, weights: PackedWeights, num_rows: int, precision: Precision) -> str:
    """Return the name of the cases that a measured tile serves, such as ``lstm_step/bfloat16/1024/x/512``.

    With ``x`` a step multiplies inputs, too; with ``h`` its state alone.
    """
    kind = str(weights.weight_hh.dtype).removeprefix("torch.")
    if weights.weight_hh.dtype == torch.float32:
        kind = f"{kind}-{precision}"
    inputs = "h" if weights.weight_ih is None else "x"
    return f"{operation}/{kind}/{weights.hidden_size}/{inputs}/{rows_class(num_rows)}"


def rows_class(num_rows: int) -> int:
    """``num_rows`` rounded up to a power of two from 16 to 1024: such numbers share a tile."""
    return min(max(1 << (num_rows - 1).bit_length(), SMALLEST_ROWS), LARGEST_ROWS)


def tuned_path(device_name: str) -> Path:
    """Return the file of what was measured on a device of this name."""
    return Path(__file__).parent / "tuned" / (re.sub(r"[^a-z0-9]+", "-", device_name.lower()).strip("-") + ".json")


@functools.cache
def measured_tiles(path: Path) -> Mapping[str, Tile]:
    """Return the tiles in a file of ``tuned``, by key; none where there is no such file, or it has another format."""
    if not path.exists():
        return {}
    table = json.loads(path.read_text())
    if table["format"] != FORMAT:
        return {}
    return {key: Tile(*sizes) for key, sizes in table["tiles"].items()}


def usual_tile(weights: PackedWeights, num_rows: int, precision: Precision, processors: int, shared_bytes: int) -> Tile:
    """Return the rule of thumb: the largest tile with which three of four processors have a program, else the
    smallest.
    """
    tile = Tile(SMALLEST_ROWS, 8, 64, 4, 4)
    for tile in candidates(weights, num_rows, precision, shared_bytes):
        programs = -(-num_rows // tile.rows) * -(-weights.hidden_size // tile.units)
        if 4 * programs >= 3 * processors:
            break
    return tile


def candidates(weights: PackedWeights, num_rows: int, precision: Precision, shared_bytes: int) -> Iterator[Tile]:
    """Yield tiles worth trying, the largest first, none with much more rows than there are."""
    is_float32 = weights.weight_hh.dtype == torch.float32
    if is_float32 and precision == "ieee":  # no tensor cores: sums and operands are all in registers
        shapes = [(64, 16, 16, 4), (32, 16, 16, 4), (16, 8, 64, 4)]
    elif is_float32 and precision == "tf32x3":  # each operand is in registers twice
        shapes = [(64, 16, 32, 8), (32, 16, 32, 8), (16, 8, 32, 4)]
    else:
        deep = 32 if is_float32 else 64
        shapes = [(128, 32, deep, 8), (64, 32, deep, 8), (64, 16, deep, 4), (32, 16, deep, 4)]
        shapes += [(16, 16, 2 * deep, 4), (16, 8, 2 * deep, 4)]
    for rows, units, depth, warps in shapes:
        if rows <= rows_class(num_rows):
            tile = fit(Tile(rows, units, depth, warps, MOST_STAGES), weights, shared_bytes)
            if tile.stages < LEAST_STAGES:
                tile = fit(Tile(rows, units, depth // 2, warps, MOST_STAGES), weights, shared_bytes)
            yield tile


def fit(tile: Tile, weights: PackedWeights, shared_bytes: int) -> Tile:
    """``tile`` with as many of its stages as fit into ``shared_bytes`` of shared memory."""
    gates = sum(map(len, weights.sections))
    stage_bytes = (tile.rows + gates * tile.units) * tile.depth * weights.weight_hh.element_size()
    return replace(tile, stages=max(1, min(tile.stages, (shared_bytes - 1024) // stage_bytes)))
