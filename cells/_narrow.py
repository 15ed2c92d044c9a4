"""Products with weights that are narrower than their rows: bfloat16, float16, or int8 with a factor for each output.

A product reads a half or a quarter of the memory. Rows are float32, and so are sums. Panels are those of ``packed.py``:
a block of one is widened in the nearest cache and goes through the same inner loop. So a row has the bits that it would
have with widened weights, in any batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cellrt.definition.compiled_form import array_at, nogil, start_of
from cellrt.products.packed import CHUNK_ROWS, FLOAT_BYTES, copy, multiply_four, write
from cellrt.products.vectors import BFLOAT16, FLOAT16, LANES, VectorBuilder, fetch_line

WIDTH = 4 * LANES
"""Outputs of a panel."""
BLOCK_DEPTH = 1 << 7
"""The most rows of a panel that are widened at once."""
_HALF_BYTES = 2
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


def _product(widen: Any, num_bytes: int) -> Any:
    """Return a function that writes ``x @ weights.T + bias`` ``[rows, columns]`` to ``out``, given addresses and sizes.

    ``values`` are panels ``[ceil(columns / WIDTH), depth, WIDTH]`` of numbers of so many bytes; ``bias`` may be 0.
    """

    @nogil
    def project_narrow(x, rows, depth, values, scales, bias, columns, out):  # type: ignore[no-untyped-def]
        block = np.empty(min(depth, BLOCK_DEPTH) * WIDTH, np.float32)
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
                for step in range(0, depth, BLOCK_DEPTH):
                    steps = min(BLOCK_DEPTH, depth - step)
                    widen(panel + step * WIDTH * num_bytes, steps, scale, start_of(block))
                    begin = x + (first * depth + step) * FLOAT_BYTES
                    multiply_four(begin, depth, count, start_of(block), steps, tile)
                for row in range(count):
                    result = out + ((first + row) * columns + column) * FLOAT_BYTES
                    copy(result, tile + row * WIDTH * FLOAT_BYTES, used)
        return block.size + scratch.size  # what is used here is not freed before

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


project_int8 = _product(_widen_int8, 1)
project_bfloat16, project_float16 = _product(_widen_bfloat16, _HALF_BYTES), _product(_widen_float16, _HALF_BYTES)
