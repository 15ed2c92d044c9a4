"""The inner loops of attention on a CPU: blocks of keys turned for the product, a tile of products, the softmax.

Each is a handful of LLVM vector instructions in the width of this machine's registers (``vectors.py``), for numbers of
rows and kinds of numbers that are constants. All take addresses of contiguous memory. What a row gets never depends on
how many rows are computed with it: the order of its own operations is the same in every tile.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cellrt.definition.compiled_form import nogil_part
from cellrt.products.tile import multiply_rows, rows_of_tile
from cellrt.products.vectors import FLOAT32, LANES, VectorBuilder

GROUPS = 4
"""Vectors of a row that are computed together."""
BLOCK_KEYS = GROUPS * LANES
"""Keys that are looked at together."""
TILE_ROWS = rows_of_tile(GROUPS)

_INDEX = ir.IntType(64)


@nogil_part
def multiply_scores(rows, x, depth, panel, keys, out):  # type: ignore[no-untyped-def]
    """Write ``x @ panel``, for ``keys`` of a block, in whole vectors, and at most ``TILE_ROWS`` rows: ``x`` ``[rows,
    depth]``, ``panel`` ``[depth, BLOCK_KEYS]``, ``out`` ``[rows, BLOCK_KEYS]``."""
    if keys > 2 * LANES:
        multiply_rows(GROUPS, 1, FLOAT32, rows, x, depth, panel, BLOCK_KEYS, depth, out, BLOCK_KEYS, 0, None)
    elif keys > LANES:
        multiply_rows(2, 1, FLOAT32, rows, x, depth, panel, BLOCK_KEYS, depth, out, BLOCK_KEYS, 0, None)
    else:
        multiply_rows(1, 1, FLOAT32, rows, x, depth, panel, BLOCK_KEYS, depth, out, BLOCK_KEYS, 0, None)


@nogil_part
def add_values(rows, weights, values, stride, count, out, width):  # type: ignore[no-untyped-def]
    """Add ``weights @ values`` to ``out``: ``weights`` ``[rows, BLOCK_KEYS]``, of which ``count``, ``values``
    ``[count, width]``, ``stride`` apart, ``out`` ``[rows, width]``; the width is whole vectors."""
    column = 0
    while column < width:
        left, at = (width - column) // LANES, 4 * column
        if left >= 4:
            multiply_rows(
                4, 0, FLOAT32, rows, weights, BLOCK_KEYS, values + at, stride, count, out + at, width, 0, None
            )
            column += 4 * LANES
        elif left >= 2:
            multiply_rows(
                2, 0, FLOAT32, rows, weights, BLOCK_KEYS, values + at, stride, count, out + at, width, 0, None
            )
            column += 2 * LANES
        else:
            multiply_rows(
                1, 0, FLOAT32, rows, weights, BLOCK_KEYS, values + at, stride, count, out + at, width, 0, None
            )
            column += LANES


@intrinsic(prefer_literal=True)
def _copy_row(
    typing_context: Any, source_kind: Any, target_kind: Any, source: Any, target: Any, size: Any, factor: Any
) -> Any:
    """Write ``factor`` times a row of ``size`` numbers, from one kind (a constant) to another."""
    kinds = source_kind.literal_value, target_kind.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target, size, factor = arguments[2:]
        whole = builder.and_(size, _INDEX(-LANES))
        for width, start, stop in ((LANES, _INDEX(0), whole), (1, whole, size)):
            lanes = VectorBuilder(builder, width)
            with cgutils.for_range_slice(builder, start, stop, _INDEX(width), _INDEX) as (index, _):
                value = lanes.multiply(lanes.read(source, index, kinds[0]), lanes.spread(factor))
                lanes.write(value, target, index, kinds[1])
        return context.get_dummy_value()

    return types.void(source_kind, target_kind, *[types.intp] * 3, types.float32), generate


@nogil_part
def read_row(kind, source, target, size, factor):  # type: ignore[no-untyped-def]
    """Write ``factor`` times a row of this kind as float32."""
    if kind == 0:
        _copy_row(0, 0, source, target, size, factor)
    elif kind == 1:
        _copy_row(1, 0, source, target, size, factor)
    else:
        _copy_row(2, 0, source, target, size, factor)


@nogil_part
def write_row(kind, source, target, size, factor):  # type: ignore[no-untyped-def]
    """Write ``factor`` times a row of float32 as a row of this kind."""
    if kind == 0:
        _copy_row(0, 0, source, target, size, factor)
    elif kind == 1:
        _copy_row(0, 1, source, target, size, factor)
    else:
        _copy_row(0, 2, source, target, size, factor)


@intrinsic(prefer_literal=True)
def _turn(typing_context: Any, kind: Any, places: Any, offset: Any, size: Any, target: Any) -> Any:
    """Write the columns of ``LANES`` rows of ``size`` numbers, which lie ``offset`` bytes behind the addresses
    at ``places``, as rows of ``BLOCK_KEYS`` float32 numbers."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, places, offset, size, target = arguments
        lanes, few = VectorBuilder(builder), VectorBuilder(builder, 1)
        words = builder.inttoptr(places, _INDEX.as_pointer())
        rows = [builder.add(builder.load(builder.gep(words, [_INDEX(k)])), offset) for k in range(LANES)]
        whole = builder.and_(size, _INDEX(-LANES))
        with cgutils.for_range_slice(builder, _INDEX(0), whole, _INDEX(LANES), _INDEX) as (index, _):
            block = [lanes.read(row, index, kind.literal_value) for row in rows]
            for column, turned in enumerate(_turned(builder, block)):
                at = builder.mul(builder.add(index, _INDEX(column)), _INDEX(BLOCK_KEYS))
                lanes.write(turned, target, at)
        with cgutils.for_range_slice(builder, whole, size, _INDEX(1), _INDEX) as (index, _):
            at = builder.mul(index, _INDEX(BLOCK_KEYS))
            for column, row in enumerate(rows):
                few.write(few.read(row, index, kind.literal_value), target, builder.add(at, _INDEX(column)))
        return context.get_dummy_value()

    return types.void(kind, *[types.intp] * 4), generate


def _turned(builder: Any, block: list[Any]) -> list[Any]:
    """Return the columns of a square of vectors: halves are exchanged, then quarters, down to single numbers."""
    count, step = len(block), len(block) // 2
    number = ir.IntType(32)
    while step:
        low = [lane if not lane & step else count + (lane ^ step) for lane in range(count)]
        high = [lane ^ step if not lane & step else count + lane for lane in range(count)]
        orders = [
            ir.Constant(ir.VectorType(number, count), [ir.Constant(number, lane) for lane in order])
            for order in (low, high)
        ]
        turned = list(block)
        for row in range(count):
            if not row & step:
                pair = block[row], block[row ^ step]
                turned[row], turned[row ^ step] = (builder.shuffle_vector(*pair, order) for order in orders)
        block, step = turned, step // 2
    return block


@nogil_part
def turn_rows(kind, places, offset, size, target):  # type: ignore[no-untyped-def]
    """Turn rows as ``_turn`` does, for any kind."""
    if kind == 0:
        _turn(0, places, offset, size, target)
    elif kind == 1:
        _turn(1, places, offset, size, target)
    else:
        _turn(2, places, offset, size, target)


@intrinsic
def soften(typing_context: Any, scores: Any, low: Any, high: Any, highest: Any, sums: Any) -> Any:
    """Write 2 to the power of ``BLOCK_KEYS`` scores less the highest so far in their place, 0 except from ``low`` to
    ``high``.

    ``highest`` is the address of the highest score so far, ``sums`` of a vector of sums; both are brought up to date.
    Gives the factor for what was summed before. (Milakov and Gimelshein 2018, algorithm 3.)
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        scores, low, high, highest, sums = arguments
        lanes, number = VectorBuilder(builder), ir.IntType(32)
        least = lanes.constant(-float("inf"))
        limits = [lanes.spread(builder.trunc(limit, number)) for limit in (low, high)]
        held = builder.inttoptr(highest, ir.FloatType().as_pointer())
        before = lanes.spread(builder.load(held))
        vectors, largest = [], before
        for group in range(GROUPS):
            places = [number(group * LANES + lane) for lane in range(LANES)]
            place = ir.Constant(lanes.integers, [ir.Constant(number, one.constant) for one in places])
            is_seen = builder.and_(
                builder.icmp_signed(">=", place, limits[0]), builder.icmp_signed("<", place, limits[1])
            )
            vectors.append(builder.select(is_seen, lanes.load(scores, group), least))
            largest = lanes.larger(vectors[-1], largest)
        largest = lanes.largest(largest)
        builder.store(lanes.first(largest), held)
        # Where nothing was seen so far, there is nothing to subtract.
        reference = builder.select(builder.fcmp_ordered(">", largest, least), largest, lanes.constant(0.0))
        factor = lanes.power_of_two(lanes.subtract(before, reference))
        total = lanes.multiply(lanes.load(sums), factor)
        for group, vector in enumerate(vectors):
            weight = lanes.power_of_two(lanes.subtract(vector, reference))
            lanes.store(weight, scores, group)
            total = builder.fadd(total, weight)
        lanes.store(total, sums)
        return lanes.first(factor)

    return types.float32(*[types.intp] * 5), generate


@intrinsic
def sum_lanes(typing_context: Any, address: Any) -> Any:
    """Return the sum of the numbers of a vector, one after the other."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = VectorBuilder(builder)
        vector = lanes.load(arguments[0])
        total = lanes.first(vector)
        for lane in range(1, LANES):
            total = builder.fadd(total, builder.extract_element(vector, ir.IntType(32)(lane)))
        return total

    return types.float32(types.intp), generate


@nogil_part
def scale_rows(row, width, factor):  # type: ignore[no-untyped-def]
    """Multiply a row of float32 in place."""
    _copy_row(FLOAT32, FLOAT32, row, row, width, factor)
