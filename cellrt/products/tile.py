"""The inner loop of every product on a CPU: a tile of sums that stays in vector registers.

The number of rows of a tile follows from the registers of this machine (``vectors.py``). The loop is written as LLVM
instructions, because a compiler does not find that form by itself. A row's sums are added up in the same order in every
tile, so its bits do not depend on how many rows are computed with it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cellrt.products.vectors import FLOAT32, LANES, LINE_BYTES, REGISTERS, SIZES, VectorBuilder, fetch_line

HALF_GROUPS = 2
"""Vectors of a row in a tile of half of four groups, which has room for more rows than a tile of all four."""

_AGAIN_BYTES = 1 << 12
"""The distance, in bytes, at which tiles of half of the columns fetch each line a second time.

They fetch faster than memory delivers, and a processor drops fetches beyond those that it can have in flight.
"""

_INDEX = ir.IntType(64)


def rows_of_tile(groups: int) -> int:
    """Return how many rows, of this many vectors each, fit the registers.

    The registers hold the rows' sums, the whole operand that has fewer vectors, and one vector of the other operand.
    """
    rows = 1
    while (rows + 1) * groups + min(rows + 1, groups) + 1 <= REGISTERS:
        rows += 1
    return rows


def lines_of_row(groups: int, kind: int = FLOAT32) -> int:
    """Return how many cache lines one of the ``depth`` rows of a panel takes, rounded up."""
    return -(-groups * LANES * SIZES[kind] // LINE_BYTES)


def shapes_of(groups: int, kind: int = FLOAT32) -> list[tuple[int, int]]:
    """Return the shapes of tiles of this many vectors a row: rows, and cache lines fetched for each of the ``depth``.

    A single tile fetches as much as it reads, a little ahead. Each of two or three tiles fetches half of the next
    block's lines, each of more tiles one line. Rows are shared out evenly, so that a tile has at least half of the
    most. Two tiles may also be the halves of the columns, with all rows: each fetches as many lines as it reads. Panels
    of narrower numbers are read by a single tile alone.
    """
    most, lines = rows_of_tile(groups), lines_of_row(groups, kind)
    shapes = {(rows, lines) for rows in range(1, most + 1)}
    if kind != FLOAT32:
        return sorted(shapes)
    shapes |= {(rows, fetched) for rows in range((most + 1) // 2, most + 1) for fetched in (-(-lines // 2), 1)}
    if groups == HALF_GROUPS:
        shapes |= {(rows, lines) for rows in range(rows_of_tile(2 * groups) + 1, most + 1)}
    return sorted(shapes)


def _emit_tile(
    builder: Any, rows: int, groups: int, is_fresh: bool, kind: int, lines: int, arguments: Any, ahead: Any
) -> None:
    x, x_stride, panel, stride, depth, out, out_stride = arguments
    lanes = VectorBuilder(builder)
    # Begin with the sums that are there, or with zeros.
    starts = [_row(builder, x, x_stride, row) for row in range(rows)]
    ends = [_row(builder, out, out_stride, row) for row in range(rows)]
    cells = [(row, group) for row in range(rows) for group in range(groups)]
    sums = {cell: cgutils.alloca_once(builder, lanes.type) for cell in cells}
    for row, group in cells:
        begin = lanes.constant(0.0) if is_fresh else lanes.load(ends[row], group)
        builder.store(begin, sums[row, group])
    with cgutils.for_range(builder, depth) as loop:
        at = _row(builder, panel, stride, loop.index, SIZES[kind])
        # Fetch lines that will be read later.
        for line in range(lines):
            number = builder.add(builder.mul(loop.index, _INDEX(lines)), _INDEX(line))
            place = builder.add(ahead, builder.mul(number, _INDEX(LINE_BYTES)))
            fetch_line(builder, place, 3)
            if groups == HALF_GROUPS and rows > rows_of_tile(2 * HALF_GROUPS):
                fetch_line(builder, builder.sub(place, _INDEX(_AGAIN_BYTES)), 3)

        def value_of(row: int) -> Any:
            place = builder.gep(builder.inttoptr(starts[row], ir.FloatType().as_pointer()), [loop.index])
            return lanes.spread(builder.load(place))

        def add_product(row: int, group: int, value: Any, column: Any) -> None:
            total = builder.load(sums[row, group])
            builder.store(lanes.multiply_add(value, column, total), sums[row, group])

        def column_of(group: int) -> Any:
            return lanes.read(at, _INDEX(group * LANES), kind)

        if rows <= groups:  # The operand with fewer vectors stays in registers.
            values = [value_of(row) for row in range(rows)]
            for group in range(groups):
                column = column_of(group)
                for row in range(rows):
                    add_product(row, group, values[row], column)
        else:
            columns = [column_of(group) for group in range(groups)]
            for row in range(rows):
                value = value_of(row)
                for group in range(groups):
                    add_product(row, group, value, columns[group])
    for row, group in cells:
        lanes.store(builder.load(sums[row, group]), ends[row], group)


def _row(builder: Any, base: Any, stride: Any, row: Any, size: int = SIZES[FLOAT32]) -> Any:
    row = _INDEX(row) if isinstance(row, int) else row
    return builder.add(base, builder.mul(builder.mul(stride, _INDEX(size)), row))


@intrinsic(prefer_literal=True)
def multiply_rows(
    typing_context: Any, groups: Any, fresh: Any, kind: Any, rows: Any, x: Any, x_stride: Any, panel: Any, stride: Any,
    depth: Any, out: Any, out_stride: Any, lines: Any, ahead: Any,
) -> Any:  # fmt: skip
    """Add ``x @ panel`` to ``groups`` vectors of each row of ``out``, or write it there if ``fresh``.

    ``groups``, ``fresh`` and ``kind`` are constants. ``panel`` has ``depth`` rows of ``groups`` vectors of numbers of
    this kind, which are widened in registers. All other places are addresses of float32, and strides are in numbers. If
    ``ahead`` is an address, ``rows`` and ``lines`` are one of ``shapes_of(groups, kind)``, and ``lines`` cache lines
    are fetched from there for each of the ``depth``, one after the other. If it is None there are 1 to
    ``rows_of_tile(groups)`` rows.
    """
    num_groups, is_fresh, number = groups.literal_value, bool(fresh.literal_value), kind.literal_value
    shapes, factor = shapes_of(num_groups, number), lines_of_row(num_groups) + 1
    if ahead == types.none:
        shapes = [(count, 0) for count in range(1, rows_of_tile(num_groups) + 1)]

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *places, num_lines, next_place = arguments[4:]
        done = builder.append_basic_block("multiplied")
        choice = builder.switch(builder.add(builder.mul(arguments[3], _INDEX(factor)), num_lines), done)
        for count, fetched in shapes:
            block = builder.append_basic_block(f"rows.{count}.{fetched}")
            choice.add_case(_INDEX(count * factor + fetched), block)
            builder.position_at_end(block)
            _emit_tile(builder, count, num_groups, is_fresh, number, fetched, places, next_place)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(groups, fresh, kind, *[types.intp] * 9, ahead), generate
