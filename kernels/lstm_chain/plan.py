"""Chooses the form of the chain kernel, and its tile."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cellrt.kernels.gate_weights import PackedWeights, Precision
from cellrt.kernels.lstm_chain.scratch import MAX_GROUPS
from cellrt.kernels.tiles import SMALLEST_ROWS, Tile, fit

MAX_BLOCKS = 2
MAX_DOUBLED_DEPTH = 128  # in tf32x3 each number is two, and a thread's part of more of them is not in registers
STREAMED_BYTES = 512 * 1024  # a program reads so much from the L2 cache in some 5 microseconds


@dataclass(frozen=True)
class ChainPlan:
    """``groups`` of programs share the rows in the persistent form; 0 is the form by rows. In the persistent form
    ``tile.units`` is a program's slice."""

    tile: Tile
    groups: int


def fitting_plan(
    weights: PackedWeights, num_rows: int, precision: Precision, processors: int, shared_bytes: int
) -> ChainPlan | None:
    """Return the form for these weights, or None where they neither fit on chip nor are small.

    Small weights by rows, if the rows leave no processor with more than one block; others in the persistent form.
    """
    is_small = weights.weight_hh.numel() * weights.weight_hh.element_size() <= STREAMED_BYTES
    if is_small and -(-num_rows // SMALLEST_ROWS) <= processors:
        return rows_plan(weights, precision, shared_bytes)
    return persistent_plan(weights, num_rows, precision, processors, shared_bytes)


def choose_plan(
    weights: PackedWeights, num_rows: int, precision: Precision, processors: int, shared_bytes: int
) -> ChainPlan | None:
    """Return the form that should be the faster one, or None where single steps should be: a rule of thumb, not
    measured.

    In the persistent form each program may have few blocks of rows at a step.
    """
    plan = fitting_plan(weights, num_rows, precision, processors, shared_bytes)
    if plan is None or plan.groups == 0:
        return plan
    return plan if -(-num_rows // SMALLEST_ROWS) <= MAX_BLOCKS * plan.groups else None


def rows_plan(weights: PackedWeights, precision: Precision, shared_bytes: int) -> ChainPlan:
    """Return the form by rows, which always can run."""
    is_float32 = weights.weight_hh.dtype == torch.float32
    units = 8 if is_float32 and precision != "ieee" else 16
    depth = 16 if is_float32 and precision == "ieee" else 32 if is_float32 else 64
    return ChainPlan(fit(Tile(SMALLEST_ROWS, units, depth, 4, 4), weights, shared_bytes), 0)


def persistent_plan(
    weights: PackedWeights, num_rows: int, precision: Precision, processors: int, shared_bytes: int
) -> ChainPlan | None:
    """Return the persistent form, or None where the weights do not fit on chip.

    A program keeps its weights, and a block of h, in shared memory; all programs are on the device at once.
    """
    is_float32 = weights.weight_hh.dtype == torch.float32
    is_doubled = is_float32 and precision == "tf32x3"
    depth = weights.weight_hh.shape[1]
    if is_doubled and depth > MAX_DOUBLED_DEPTH:
        return None
    depth_bytes = depth * weights.weight_hh.element_size() * (2 if is_doubled else 1)
    for units in (8,) if is_doubled else (16, 8):
        slices = -(-weights.hidden_size // units)
        if (4 * units + SMALLEST_ROWS) * depth_bytes + 1024 <= shared_bytes and slices <= processors:
            groups = min(processors // slices, -(-num_rows // SMALLEST_ROWS), MAX_GROUPS)
            return ChainPlan(Tile(SMALLEST_ROWS, units, 64 if is_float32 else 128, 8, 1), groups)
    return None
