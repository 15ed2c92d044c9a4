"""Products with weights that are narrower than their rows: bfloat16, float16, or int8 with a factor for each output.

A product reads a half or a quarter of the memory. Rows are float32, and so are sums. Panels are those of ``packed.py``.
They go through the same inner loop, which widens numbers of 16 bits itself where it has few rows; else a block is
widened in the nearest cache first. So a row has the bits that it would have with widened weights, in any batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cellrt.definition.compiled_form import array_at, nogil, nogil_part, start_of
from cellrt.products.packed import AHEAD_BYTES, CHUNK_ROWS, FLOAT_BYTES, copy, multiply_four, project, write
from cellrt.products.tile import lines_of_row, multiply_rows, rows_of_tile
from cellrt.products.vectors import BFLOAT16, FLOAT16, FLOAT32, LANES, VectorBuilder, fetch_line

WIDTH = 4 * LANES
"""Outputs of a panel."""
BLOCK_DEPTH = 1 << 7
"""The most rows of a panel that are widened at once."""
_HALF_BYTES, _MOST = 2, rows_of_tile(4)
FEW_TILES = 8
"""The most tiles of rows that widen numbers of two bytes each for itself; with more it takes longer than a block."""
_AHEAD_BYTES = 1 << 11
"""The distance, in bytes, at which numbers are fetched ahead of their reads."""


@intrinsic(prefer_literal=True)
def _widen_halves(typing_context: Any, kind: Any, source: Any, steps: Any, target: Any) -> Any:
    """Write ``steps`` rows of a panel of numbers of two bytes, of a constant ``kind``, as float32; by addresses."""
    number = kind.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, begin, count, to = arguments
        index, lanes = ir.IntType(64), VectorBuilder(builder)
        with cgutils.for_range(builder, count) as loop:
            first = builder.mul(loop.index, index(WIDTH))
            ahead = builder.add(begin, builder.add(builder.mul(first, index(_HALF_BYTES)), index(_AHEAD_BYTES)))
            fetch_line(builder, ahead, 3)
            for group in range(4):
                place = builder.add(first, index(group * LANES))
                lanes.write(lanes.read(begin, place, number), to, place)
        return context.get_dummy_value()

    return types.void(kind, *[types.intp] * 3), generate


def _in_blocks(widen: Any, num_bytes: int) -> Any:
    """Return a function that adds ``x @ panel`` to ``tile``, with a block widened at a time; ``x`` has whole rows."""

    @nogil
    def multiply(x, rows, depth, panel, scale, tile):  # type: ignore[no-untyped-def]
        block = np.empty(min(depth, BLOCK_DEPTH) * WIDTH, np.float32)
        for step in range(0, depth, BLOCK_DEPTH):
            steps = min(BLOCK_DEPTH, depth - step)
            widen(panel + step * WIDTH * num_bytes, steps, scale, start_of(block))
            multiply_four(x + step * FLOAT_BYTES, depth, rows, start_of(block), steps, tile)
        return block.size  # what is used here is not freed before

    return multiply


def _of_halves(kind: int, widen: Any) -> Any:
    """Return such a function for numbers of two bytes: for rows of few tiles they are widened in registers."""
    in_blocks, lines = _in_blocks(widen, _HALF_BYTES), lines_of_row(4, kind)

    @nogil
    def multiply(x, rows, depth, panel, scale, tile):  # type: ignore[no-untyped-def]
        if rows > FEW_TILES * _MOST:
            in_blocks(x, rows, depth, panel, scale, tile)
            return
        block = depth if rows <= _MOST else BLOCK_DEPTH
        for step in range(0, depth, block):
            steps, weights = min(block, depth - step), panel + step * WIDTH * _HALF_BYTES
            for row in range(0, rows, _MOST):
                count, begin = min(_MOST, rows - row), x + (row * depth + step) * FLOAT_BYTES
                sums, ahead = tile + row * WIDTH * FLOAT_BYTES, weights + AHEAD_BYTES
                multiply_rows(4, 0, kind, count, begin, depth, weights, WIDTH, steps, sums, WIDTH, lines, ahead)

    return multiply


def _product(multiply: Any, num_bytes: int) -> Any:
    """Return a function that writes ``x @ weights.T + bias`` ``[rows, columns]`` to ``out``, given addresses and sizes.

    ``values`` are panels ``[ceil(columns / WIDTH), depth, WIDTH]`` of numbers of so many bytes; ``bias`` may be 0.
    """

    @nogil
    def project_narrow(x, rows, depth, values, scales, bias, columns, out):  # type: ignore[no-untyped-def]
        scratch = np.empty(min(rows, CHUNK_ROWS) * WIDTH, np.float32)
        for column in range(0, columns, WIDTH):
            used = min(WIDTH, columns - column)
            panel, scale = values + column * depth * num_bytes, scales + column * FLOAT_BYTES
            for first in range(0, rows, CHUNK_ROWS):
                count, tile = min(CHUNK_ROWS, rows - first), start_of(scratch)
                for row in range(count):
                    begin = tile + row * WIDTH * FLOAT_BYTES
                    if bias:
                        copy(begin, bias + column * FLOAT_BYTES, used)
                    else:
                        for index in range(used):
                            write(begin, index, np.float32(0))
                multiply(x + first * depth * FLOAT_BYTES, count, depth, panel, scale, tile)
                for row in range(count):
                    result = out + ((first + row) * columns + column) * FLOAT_BYTES
                    copy(result, tile + row * WIDTH * FLOAT_BYTES, used)
        return scratch.size  # what is used here is not freed before

    return project_narrow


@nogil
def _widen_bfloat16(source, steps, scales, target):  # type: ignore[no-untyped-def]
    _widen_halves(BFLOAT16, source, steps, target)


@nogil
def _widen_float16(source, steps, scales, target):  # type: ignore[no-untyped-def]
    _widen_halves(FLOAT16, source, steps, target)


@nogil
def _widen_int8(source, steps, scales, target):  # type: ignore[no-untyped-def]
    narrow, scale = array_at(source, steps * WIDTH, np.int8), array_at(scales, WIDTH, np.float32)
    wide = array_at(target, steps * WIDTH, np.float32)
    for step in range(steps):
        for lane in range(WIDTH):
            wide[step * WIDTH + lane] = np.float32(narrow[step * WIDTH + lane]) * scale[lane]


project_int8 = _product(_in_blocks(_widen_int8, 1), 1)
project_bfloat16 = _product(_of_halves(BFLOAT16, _widen_bfloat16), _HALF_BYTES)
project_float16 = _product(_of_halves(FLOAT16, _widen_float16), _HALF_BYTES)


@nogil_part
def project_kind(kind, x, rows, depth, weight, bias, columns, out):  # type: ignore[no-untyped-def]
    """Call ``project`` with a weight of this kind of numbers; rows and the bias are float32."""
    if kind == FLOAT32:
        project(x, rows, depth, weight, bias, columns, out)
    elif kind == BFLOAT16:
        project_bfloat16(x, rows, depth, weight, 0, bias, columns, out)
    else:
        project_float16(x, rows, depth, weight, 0, bias, columns, out)
