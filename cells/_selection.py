"""The likeliest of a row's numbers on a CPU without sorting it: the best k, or those that weigh so much together.

A bound is found by counting or weighing numbers by the leading bits of integers that rise with them, 11 bits at a time:
of the second 11 bits only among those that begin as the bound does. What is far below is passed over by whole vectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from cellrt.cells._row_kernels import LOG2_E, raise_lanes
from cellrt.definition.compiled_form import array_at, nogil
from cellrt.products.vectors import LANES, VectorBuilder

BLOCK = 512
"""Numbers whose weights are added up together; whole vectors."""
STRIDE = 256
"""Numbers of which every ``LANES``th are looked at together for their highest."""
DIGITS = 1 << 11


@intrinsic
def _weigh_lanes(typing_context: Any, x: Any, highest: Any, factor: Any, out: Any, sums: Any) -> Any:
    """Write ``2^((x - highest) * factor)`` of ``LANES`` numbers, and add them to as many sums."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, highest, factor, out, sums = arguments
        lanes = VectorBuilder(builder)
        below = lanes.subtract(lanes.load(x), lanes.spread(highest))
        weight = lanes.power_of_two(lanes.multiply(below, lanes.spread(factor)))
        lanes.store(weight, out)
        lanes.store(builder.fadd(lanes.load(sums), weight), sums)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.float32, types.intp, types.intp), generate


@intrinsic
def _reaches(typing_context: Any, x: Any, bound: Any) -> Any:
    """Whether any of ``LANES`` numbers is as high as a bound."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, bound = arguments
        lanes = VectorBuilder(builder)
        found = builder.fcmp_ordered(">=", lanes.load(x), lanes.spread(bound))
        bits = builder.bitcast(found, ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.IntType(LANES)(0))

    return types.boolean(types.intp, types.float32), generate


@nogil
def new_room(width):  # type: ignore[no-untyped-def]
    """Scratch memory for rows of so many numbers: values, their weights and places, keys and what those weigh, sums."""
    numbers, whole = np.empty((3, width + LANES), np.float32), np.empty((2, width + LANES), np.int64)
    return numbers[0], numbers[1], numbers[2], whole[0], whole[1], np.empty(max(DIGITS, width // BLOCK + 1))


@nogil
def weigh(values, count, highest, temperature, room):  # type: ignore[no-untyped-def]
    """The weights ``exp((value - highest) / temperature)``; writes the sum of each block, and returns that of all."""
    _, weights, _, _, _, sums = room
    factor = np.float32(LOG2_E / temperature)
    tail, lanes = np.full((2, LANES), -np.inf, np.float32), np.empty(LANES, np.float32)
    total = 0.0
    for start in range(0, count, BLOCK):
        stop = min(start + BLOCK, count)
        whole = start + (stop - start) // LANES * LANES
        lanes[:] = 0
        for place in range(start, whole, LANES):
            _weigh_lanes(
                values[place:].ctypes.data, np.float32(highest), factor, weights[place:].ctypes.data, lanes.ctypes.data
            )
        if whole < stop:
            tail[0, : stop - whole] = values[whole:stop]
            _weigh_lanes(tail[0].ctypes.data, np.float32(highest), factor, tail[1].ctypes.data, lanes.ctypes.data)
            weights[whole:stop] = tail[1, : stop - whole]
        block = 0.0
        for lane in range(LANES):
            block += lanes[lane]
        sums[start // BLOCK] = block
        total += block
    return total


@nogil
def keep(by, bound, count, values, places, room):  # type: ignore[no-untyped-def]
    """Keep of ``count`` numbers those of which ``by`` is as high as ``bound``; returns how many these are.

    Of each, ``values``, its weight and its place (``places``, or where it lies if these are empty) go to the room.
    """
    to_values, weights, _, to_places, _, _ = room
    kept = 0
    for start in range(0, count, LANES):
        stop = min(start + LANES, count)
        if stop - start == LANES and not _reaches(by[start:].ctypes.data, np.float32(bound)):
            continue
        for place in range(start, stop):
            if by[place] >= bound:
                to_values[kept], weights[kept] = values[place], weights[place]
                to_places[kept] = places[place] if places.size else place
                kept += 1
    return kept


@nogil
def highest_with(values, weights, count, enough, room):  # type: ignore[no-untyped-def]
    """The highest bound that numbers reach which weigh enough together (``weights`` empty: one each); minus infinity if
    all together do not."""
    _, _, masses, _, keys, sums = room
    bits = array_at(values.ctypes.data, count, np.int32)
    for place in range(count):
        keys[place] = bits[place] + (1 << 31) if bits[place] >= 0 else -1 - bits[place]  # rises with the number
        masses[place] = weights[place] if weights.size else 1
    bound, above = 0, 0.0
    for shift, digits in ((21, DIGITS), (10, DIGITS), (0, DIGITS // 2)):
        sums[:digits] = 0
        for place in range(count):
            sums[(keys[place] >> shift) & (digits - 1)] += masses[place]
        digit = digits - 1
        while digit > 0 and not above + sums[digit] >= enough:
            above += sums[digit]
            digit -= 1
        if bound == 0 and digit == 0:
            return np.float32(-np.inf)
        kept = 0
        for place in range(count):
            if (keys[place] >> shift) & (digits - 1) == digit:
                keys[kept], masses[kept] = keys[place], masses[place]
                kept += 1
        count, bound = kept, bound | (digit << shift)
    found = np.empty(1, np.int32)
    found[0] = bound - (1 << 31) if bound >= 1 << 31 else -1 - bound
    return array_at(found.ctypes.data, 1, np.float32)[0]


@nogil
def keep_best(values, count, wanted, room):  # type: ignore[no-untyped-def]
    """Keep of whole rows the best ``wanted`` numbers and more, of which the highest of every ``LANES``th of a stretch
    are as high as the bound of so many of these; of few numbers all. Returns how many."""
    _, _, highest, _, _, _ = room
    places = np.empty(0, np.int64)
    stretches = count // STRIDE
    if wanted > stretches * LANES // 2:
        return keep(values, np.float32(-np.inf), count, values, places, room)
    found = np.full(stretches * LANES, -np.inf, np.float32)
    for stretch in range(stretches):
        for start in range(stretch * STRIDE, (stretch + 1) * STRIDE, LANES):
            raise_lanes(values[start:].ctypes.data, found[stretch * LANES :].ctypes.data)
    bound = highest_with(found, highest[:0], found.size, wanted, room)
    return keep(values, bound, count, values, places, room)


@nogil
def place_of(weights, count, target, room):  # type: ignore[no-untyped-def]
    """Where the running sum of weights passes a number: the last place that weighs anything if nowhere. ``sums`` of the
    room are those of the blocks."""
    sums = room[5]
    before, start = 0.0, 0
    while start + BLOCK < count and not before + sums[start // BLOCK] > target:
        before += sums[start // BLOCK]
        start += BLOCK
    last = 0
    for place in range(start, count):
        if weights[place] > 0:
            last, before = place, before + weights[place]
            if before > target:
                return place
    while last == 0 and start > 0:  # nothing behind weighs anything: what rounding took is far below
        start -= 1
        last = start if weights[start] > 0 else 0
    return last


@nogil
def add_up(weights, count, room):  # type: ignore[no-untyped-def]
    """Write the sum of each block, and return that of all."""
    sums, total = room[5], 0.0
    for start in range(0, count, BLOCK):
        block = 0.0
        for place in range(start, min(start + BLOCK, count)):
            block += weights[place]
        sums[start // BLOCK] = block
        total += block
    return total
