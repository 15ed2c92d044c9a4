"""CPU kernels for the operations of a Transformer on each row: norms, gates, rotary positions, the next token.

Every function works on one row after the other, and on the numbers of a row in an order that its width alone decides.
So a row's bits do not depend on the other rows of its batch. Torch's own functions do not promise this: they cut a
batch into vectors wherever these fall. All functions take addresses of contiguous memory, float32 unless stated
otherwise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cellrt.definition.compiled_form import array_at, nogil, nogil_part, start_of
from cellrt.products.packed import FLOAT_BYTES, copy
from cellrt.products.vectors import LANES, VectorBuilder

LOG2_E = 1.4426950408889634
_SEARCHED = 512
"""Columns whose highest is found before it is asked where it is."""


@intrinsic
def _gate(typing_context: Any, gate: Any, up: Any, out: Any) -> Any:
    """Write ``gate * sigmoid(gate) * up`` of ``LANES`` numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        gate, up, out = arguments
        lanes = VectorBuilder(builder)
        # sigmoid(x) is 1 / (1 + e) from 0 on and e / (1 + e) below, with e = exp(-|x|): small ones stay exact.
        x, one = lanes.load(gate), lanes.constant(1.0)
        is_low = builder.fcmp_ordered("<", x, lanes.constant(0.0))
        below = builder.select(is_low, x, builder.fneg(x))
        power = lanes.power_of_two(lanes.multiply(below, lanes.constant(LOG2_E)))
        part = builder.fdiv(builder.select(is_low, power, one), builder.fadd(power, one))
        lanes.store(lanes.multiply(lanes.multiply(x, part), lanes.load(up)), out)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic
def _add_powers(typing_context: Any, x: Any, highest: Any, sums: Any) -> Any:
    """Add ``exp(x - highest)`` of ``LANES`` numbers to as many sums; ``highest`` has ``LANES`` equal numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, highest, sums = arguments
        lanes = VectorBuilder(builder)
        below = lanes.subtract(lanes.load(x), lanes.load(highest))
        power = lanes.power_of_two(lanes.multiply(below, lanes.constant(LOG2_E)))
        lanes.store(builder.fadd(lanes.load(sums), power), sums)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic
def raise_lanes(typing_context: Any, x: Any, highest: Any) -> Any:
    """Raise ``LANES`` numbers to those of ``x`` that are higher."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, highest = arguments
        lanes = VectorBuilder(builder)
        lanes.store(lanes.larger(lanes.load(x), lanes.load(highest)), highest)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def _add_squares(typing_context: Any, x: Any, count: Any, sums: Any) -> Any:
    """Write the sums of the squares of every ``LANES``th of ``count`` numbers, which are whole vectors."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, count, sums = arguments
        lanes, index = VectorBuilder(builder), ir.IntType(64)
        total = cgutils.alloca_once(builder, lanes.type)
        builder.store(lanes.constant(0.0), total)
        with cgutils.for_range_slice(builder, index(0), count, index(LANES), index) as (place, _):
            own = lanes.read(x, place)
            builder.store(builder.fadd(builder.load(total), lanes.multiply(own, own)), total)
        lanes.store(builder.load(total), sums)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic
def _turn(typing_context: Any, x: Any, half: Any, pair: Any, turn: Any, out: Any) -> Any:
    """Turn ``LANES`` pairs of a head from ``pair`` on; each has its other number ``half`` numbers behind."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, half, pair, turn, out = arguments
        lanes, other = VectorBuilder(builder), builder.add(half, pair)
        left, right, cosine, sine = (lanes.read(at, place) for at in (x, turn) for place in (pair, other))
        lanes.write(builder.fsub(lanes.multiply(left, cosine), lanes.multiply(right, sine)), out, pair)
        lanes.write(builder.fadd(lanes.multiply(right, cosine), lanes.multiply(left, sine)), out, other)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 5), generate


@nogil
def gate_rows(gate, up, rows, width, out):  # type: ignore[no-untyped-def]
    """``silu(gate) * up``, all three ``[rows, width]``."""
    tail = np.zeros((3, LANES), np.float32)
    for row in range(rows):
        at = row * width * FLOAT_BYTES
        whole = width // LANES * LANES
        for column in range(0, whole, LANES):
            place = at + column * FLOAT_BYTES
            _gate(gate + place, up + place, out + place)
        if whole < width:
            place, left = at + whole * FLOAT_BYTES, width - whole
            copy(start_of(tail[0]), gate + place, left)
            copy(start_of(tail[1]), up + place, left)
            _gate(start_of(tail[0]), start_of(tail[1]), start_of(tail[2]))
            copy(out + place, start_of(tail[2]), left)


@nogil_part
def add_rows(x, part, rows, width):  # type: ignore[no-untyped-def]
    """Add ``part`` to ``x``, both ``[rows, width]``."""
    own, added = array_at(x, rows * width, np.float32), array_at(part, rows * width, np.float32)
    for place in range(rows * width):
        own[place] += added[place]


@nogil
def norm_rows(x, weight, rows, width, epsilon, out):  # type: ignore[no-untyped-def]
    """``x / sqrt(mean(x^2) + epsilon) * weight`` of each row (Zhang and Sennrich 2019)."""
    scale = array_at(weight, width, np.float32)
    whole, sums = width // LANES * LANES, np.empty(LANES, np.float32)
    for row in range(rows):
        own = array_at(x + row * width * FLOAT_BYTES, width, np.float32)
        made = array_at(out + row * width * FLOAT_BYTES, width, np.float32)
        _add_squares(x + row * width * FLOAT_BYTES, whole, start_of(sums))
        total = np.float32(0)
        for column in range(whole, width):
            total += own[column] * own[column]
        for lane in range(LANES):
            total += sums[lane]
        factor = np.float32(1.0 / math.sqrt(total / np.float32(width) + epsilon))
        for column in range(width):
            made[column] = own[column] * factor * scale[column]


@nogil
def fill_turns(frequencies, half, amplitude, count, turns):  # type: ignore[no-untyped-def]
    """Cosines and sines ``[count, 2, half]`` of the first positions' angles."""
    frequency = array_at(frequencies, half, np.float32)
    made = array_at(turns, count * 2 * half, np.float32)
    for position in range(count):
        for pair in range(half):
            angle = np.float32(np.float32(position) * frequency[pair])
            made[2 * position * half + pair] = np.float32(math.cos(angle)) * np.float32(amplitude)
            made[(2 * position + 1) * half + pair] = np.float32(math.sin(angle)) * np.float32(amplitude)


@nogil
def turn_rows(x, positions, rows, heads, half, turns, out):  # type: ignore[no-untyped-def]
    """Heads ``[rows, heads, 2 * half]`` turned by the angles of their int32 ``positions``, from ``fill_turns``."""
    size, whole = 2 * half, half // LANES * LANES
    position = array_at(positions, rows, np.int32)
    for row in range(rows):
        angles = turns + position[row] * size * FLOAT_BYTES
        turn = array_at(angles, size, np.float32)
        for head in range(row * heads, (row + 1) * heads):
            at = head * size * FLOAT_BYTES
            for pair in range(0, whole, LANES):
                _turn(x + at, half, pair, angles, out + at)
            own, made = array_at(x + at, size, np.float32), array_at(out + at, size, np.float32)
            for pair in range(whole, half):
                left, right = own[pair], own[half + pair]
                made[pair] = left * turn[pair] - right * turn[half + pair]
                made[half + pair] = right * turn[pair] + left * turn[half + pair]


@nogil_part
def best_column(numbers, count):  # type: ignore[no-untyped-def]
    """Return the place of the first of the highest of ``count`` numbers; 0 if none is above minus infinity."""
    own, highest = array_at(numbers, count, np.float32), np.empty(LANES, np.float32)
    top, best = np.float32(-np.inf), 0
    for start in range(0, count, _SEARCHED):
        stop = min(start + _SEARCHED, count)
        whole = start + (stop - start) // LANES * LANES
        highest[:] = -np.inf
        for column in range(start, whole, LANES):
            raise_lanes(numbers + column * FLOAT_BYTES, start_of(highest))
        for column in range(whole, stop):
            highest[0] = max(highest[0], own[column])
        if highest.max() > top:
            top, best = highest.max(), start
    while top > -np.inf and own[best] != top:
        best += 1
    return best


@nogil
def choose_likeliest(logits, rows, width, tokens, logprobs):  # type: ignore[no-untyped-def]
    """Write the first of the highest logits of each row ``[rows, width]``, int64, and its log-probability."""
    token, logprob = array_at(tokens, rows, np.int64), array_at(logprobs, rows, np.float32)
    whole = width // LANES * LANES
    for row in range(rows):
        at = logits + row * width * FLOAT_BYTES
        own, best = array_at(at, width, np.float32), best_column(at, width)
        highest, sums = np.full(LANES, own[best], np.float32), np.zeros(LANES, np.float32)
        for column in range(0, whole, LANES):
            _add_powers(at + column * FLOAT_BYTES, start_of(highest), start_of(sums))
        total = np.float64(0)
        for lane in range(LANES):
            total += sums[lane]
        for column in range(whole, width):
            total += math.exp(np.float64(own[column]) - own[best])
        token[row], logprob[row] = best, -math.log(total)
