"""The likeliest of a row's numbers on a CPU without sorting it: the best k, or those that weigh so much together.

The bound is found by counting numbers by the leading bits of integers that rise with them, 11 bits at a
time: by the second 11 bits only those that begin as the bound does. What is far below is passed over by whole vectors.
For the bound of so much weight, two bounds around it are first brought near each other by adding up what weighs more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cellrt.cells._row_kernels import LOG2_E, raise_lanes
from cellrt.definition.compiled_form import array_at, nogil_part, start_of
from cellrt.products.vectors import LANES, VectorBuilder

BLOCK = 512
"""Numbers whose weights are added up together; whole vectors."""
STRIDE = 256
"""Numbers of which every ``LANES``th are looked at together for their highest."""
DIGITS = 1 << 11
HALVINGS, FEW = 12, 256
"""The number of times that two bounds are brought nearer, unless there are few numbers."""


def _add_up(builder: Any, count: Any, sums: Any, number_at: Callable[[VectorBuilder, Any], Any]) -> None:
    """Write the sums of every ``LANES``th of the numbers that ``number_at`` makes at ``count`` places, which are whole
    vectors."""
    lanes, index = VectorBuilder(builder), ir.IntType(64)
    total = cgutils.alloca_once(builder, lanes.type)
    builder.store(lanes.constant(0.0), total)
    with cgutils.for_range_slice(builder, index(0), count, index(LANES), index) as (place, _):
        builder.store(builder.fadd(builder.load(total), number_at(lanes, place)), total)
    lanes.store(builder.load(total), sums)


@intrinsic
def _weigh(typing_context: Any, x: Any, highest: Any, factor: Any, weights: Any, count: Any, sums: Any) -> Any:
    """Write ``2^((x - highest) * factor)`` of whole vectors, and the sums of every ``LANES``th."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, highest, factor, weights, count, sums = arguments
        lanes = VectorBuilder(builder)
        highest, factor = lanes.spread(highest), lanes.spread(factor)

        def weight_at(lanes: VectorBuilder, place: Any) -> Any:
            weight = lanes.power_of_two(lanes.multiply(lanes.subtract(lanes.read(x, place), highest), factor))
            lanes.write(weight, weights, place)
            return weight

        _add_up(builder, count, sums, weight_at)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.float32, *[types.intp] * 3), generate


@intrinsic
def _add_reaching(typing_context: Any, weights: Any, bound: Any, count: Any, sums: Any) -> Any:
    """Write the sums of every ``LANES``th of those of whole vectors of weights that are as high as a bound."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        weights, bound, count, sums = arguments
        bound = VectorBuilder(builder).spread(bound)

        def reaching_at(lanes: VectorBuilder, place: Any) -> Any:
            own = lanes.read(weights, place)
            return builder.select(builder.fcmp_ordered(">=", own, bound), own, lanes.constant(0.0))

        _add_up(builder, count, sums, reaching_at)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp, types.intp), generate


@intrinsic
def _drop(typing_context: Any, values: Any, bound: Any, weights: Any, least: Any, count: Any, sums: Any) -> Any:
    """Set those of whole vectors of weights to 0 that are below ``least``, or whose values are below ``bound``; write
    the sums of every ``LANES``th of the others."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        values, bound, weights, least, count, sums = arguments
        lanes = VectorBuilder(builder)
        bound, least = lanes.spread(bound), lanes.spread(least)

        def kept_at(lanes: VectorBuilder, place: Any) -> Any:
            own = lanes.read(weights, place)
            is_high = builder.fcmp_ordered(">=", lanes.read(values, place), bound)
            is_kept = builder.and_(is_high, builder.fcmp_ordered(">=", own, least))
            kept = builder.select(is_kept, own, lanes.constant(0.0))
            lanes.write(kept, weights, place)
            return kept

        _add_up(builder, count, sums, kept_at)
        return context.get_dummy_value()

    return types.void(types.intp, types.float32, types.intp, types.float32, types.intp, types.intp), generate


@intrinsic
def _has_between(typing_context: Any, x: Any, least: Any, most: Any) -> Any:
    """Return whether any of ``LANES`` numbers is at least ``least``, and below ``most`` unless that is NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        x, least, most = arguments
        lanes = VectorBuilder(builder)
        own = lanes.load(x)
        reaches = builder.fcmp_ordered(">=", own, lanes.spread(least))
        found = builder.and_(reaches, builder.fcmp_unordered("<", own, lanes.spread(most)))
        bits = builder.bitcast(found, ir.IntType(LANES))
        return builder.icmp_unsigned("!=", bits, ir.IntType(LANES)(0))

    return types.boolean(types.intp, types.float32, types.float32), generate


@nogil_part
def new_room(width):  # type: ignore[no-untyped-def]
    """Return scratch memory for rows of this many numbers: values, their weights and places, keys and what those weigh,
    sums, and some of the values and their weights.

    Of values and weights there may be ``LANES`` more than there are, which are of no meaning.
    """
    numbers, whole = np.empty((5, width + LANES), np.float32), np.empty((2, width + LANES), np.int64)
    sums = np.empty(max(DIGITS, width // BLOCK + 1))
    return numbers[0], numbers[1], numbers[2], whole[0], whole[1], sums, numbers[3], numbers[4]


@nogil_part
def weigh(values, count, highest, temperature, room):  # type: ignore[no-untyped-def]
    """Return the sum of the weights ``exp((value - highest) / temperature)``; write each weight, and each block's
    sum.
    """
    weights, sums = room[1], room[5]
    factor, total = np.float32(LOG2_E / temperature), 0.0
    tail, lanes = np.full((2, LANES), -np.inf, np.float32), np.empty(LANES, np.float32)
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        whole = size // LANES * LANES
        at = start_of(values[start:]), np.float32(highest), factor, start_of(weights[start:])
        _weigh(at[0], at[1], at[2], at[3], whole, start_of(lanes))
        block = _sum_of(lanes)
        if whole < size:
            for lane in range(size - whole):
                tail[0, lane] = values[start + whole + lane]
            _weigh(start_of(tail[0]), at[1], at[2], start_of(tail[1]), LANES, start_of(lanes))
            for lane in range(size - whole):
                weights[start + whole + lane] = tail[1, lane]
            block += _sum_of(lanes)
        sums[start // BLOCK] = block
        total += block
    return total


@nogil_part
def _sum_of(lanes):  # type: ignore[no-untyped-def]
    total = 0.0
    for lane in range(LANES):
        total += lanes[lane]
    return total


@nogil_part
def keep(by, bound, count, values, places, room):  # type: ignore[no-untyped-def]
    """Keep of ``count`` numbers those of which ``by`` is as high as ``bound``; return how many these are.

    Of each, ``values``, its weight and its place (``places``, or where it lies if these are empty) go to the room.
    """
    to_values, weights, to_places = room[0], room[1], room[3]
    kept = 0
    for start in range(0, count, LANES):
        stop = min(start + LANES, count)
        if stop - start == LANES and not _has_between(start_of(by[start:]), np.float32(bound), np.float32(np.nan)):
            continue
        for place in range(start, stop):
            if by[place] >= bound:
                to_values[kept], weights[kept] = values[place], weights[place]
                to_places[kept] = places[place] if places.size else place
                kept += 1
    return kept


@nogil_part
def highest_with(values, weights, count, enough, room):  # type: ignore[no-untyped-def]
    """Return the highest bound that numbers reach which weigh enough together (``weights`` empty: one each); minus
    infinity if all together do not.
    """
    masses, keys, sums = room[2], room[4], room[5]
    bits = array_at(start_of(values), count, np.int32)
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
    return array_at(start_of(found), 1, np.float32)[0]


@nogil_part
def keep_best(values, count, wanted, room):  # type: ignore[no-untyped-def]
    """Keep of whole rows the best ``wanted`` numbers and more, of which the highest of every ``LANES``th of a stretch
    are as high as the bound of this many of these; of few numbers all. Returns how many."""
    places = np.empty(0, np.int64)
    stretches = count // STRIDE
    if wanted > stretches * LANES // 2:
        return keep(values, np.float32(-np.inf), count, values, places, room)
    found = np.full(stretches * LANES, -np.inf, np.float32)
    for stretch in range(stretches):
        for start in range(stretch * STRIDE, (stretch + 1) * STRIDE, LANES):
            raise_lanes(start_of(values[start:]), start_of(found[stretch * LANES :]))
    bound = highest_with(found, found[:0], found.size, wanted, room)
    return keep(values, bound, count, values, places, room)


@nogil_part
def place_of(weights, count, target, room):  # type: ignore[no-untyped-def]
    """Return where the running sum of weights passes a number; the last place with any weight if it never does.

    The room's ``sums`` are those of the blocks.
    """
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


@nogil_part
def _weight_of(weights, bound, count):  # type: ignore[no-untyped-def]
    """Return the sum of the weights that are at least ``bound``."""
    lanes, total = np.empty(LANES, np.float32), 0.0
    for start in range(0, count, 4 * BLOCK):
        size = min(4 * BLOCK, count - start)
        whole = size // LANES * LANES
        _add_reaching(start_of(weights[start:]), np.float32(bound), whole, start_of(lanes))
        total += _sum_of(lanes)
        for place in range(start + whole, start + size):
            total += weights[place] if weights[place] >= bound else np.float32(0)
    return total


@nogil_part
def heaviest_with(values, count, least, enough, room):  # type: ignore[no-untyped-def]
    """Return the highest bound that values reach which weigh enough together, and of which each weighs more than
    ``least``; minus infinity if all together do not.
    """
    weights, some, their = room[1], room[6], room[7]
    bits, number = np.empty(1, np.int32), np.empty(1, np.float32)
    number[0] = min(least, 1.0)
    low, high, above = array_at(start_of(number), 1, np.int32)[0], 0x3F800001, 0.0  # the heaviest weighs 1
    for _ in range(HALVINGS):
        if count <= FEW or high - low < 2:
            break
        bits[0] = (low + high) // 2
        total = _weight_of(weights, array_at(start_of(bits), 1, np.float32)[0], count)
        if total >= enough:
            low = bits[0]
        else:
            high, above = bits[0], total
    bits[0] = low
    least = array_at(start_of(bits), 1, np.float32)[0]
    bits[0] = high
    most, found = array_at(start_of(bits), 1, np.float32)[0], 0
    for start in range(0, count, LANES):
        stop = min(start + LANES, count)
        if stop - start == LANES and not _has_between(start_of(weights[start:]), least, most):
            continue
        for place in range(start, stop):  # without a branch that nobody can foresee
            some[found], their[found] = values[place], weights[place]
            found += least <= weights[place] < most
    return highest_with(some, their, found, enough - above, room)


@nogil_part
def drop_below(values, bound, least, count, room):  # type: ignore[no-untyped-def]
    """Set the weights to 0 that are below ``least``, and those of values below ``bound``; writes the sum of each block
    of the others, and returns that of all."""
    weights, sums = room[1], room[5]
    lanes, total = np.empty(LANES, np.float32), 0.0
    bound, least = np.float32(bound), np.float32(least)
    for start in range(0, count, BLOCK):
        size = min(BLOCK, count - start)
        whole = size // LANES * LANES
        at = start_of(values[start:]), start_of(weights[start:])
        _drop(at[0], bound, at[1], least, whole, start_of(lanes))
        block = _sum_of(lanes)
        for place in range(start + whole, start + size):
            if not (values[place] >= bound and weights[place] >= least):
                weights[place] = 0
            block += weights[place]
        sums[start // BLOCK] = block
        total += block
    return total
