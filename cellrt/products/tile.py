"""The inner loop of every product on a CPU: a tile of sums that stays in vector registers.

How many rows a tile has follows from the registers of this machine (``vectors.py``). It is written as LLVM
instructions, because a compiler does not find that form by itself. A row's own sums are added up in the same order in
every tile, so its bits do not depend on how many rows are computed with it.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cellrt.products.vectors import LINE_BYTES, REGISTERS, VectorBuilder, fetch_line

_INDEX = ir.IntType(64)


def rows_of_tile(groups: int) -> int:
    """How many rows, of so many vectors each, fit the registers: their sums, all of the operand of which there is less,
    and one of the other."""
    rows = 1
    while (rows + 1) * groups + min(rows + 1, groups) + 1 <= REGISTERS:
        rows += 1
    return rows


def _emit_tile(builder: Any, rows: int, groups: int, is_fresh: bool, arguments: Any, ahead: Any) -> None:
    x, x_stride, panel, stride, depth, out, out_stride = arguments
    lanes = VectorBuilder(builder)
    starts = [_row(builder, x, x_stride, row) for row in range(rows)]
    ends = [_row(builder, out, out_stride, row) for row in range(rows)]
    cells = [(row, group) for row in range(rows) for group in range(groups)]
    sums = {cell: cgutils.alloca_once(builder, lanes.type) for cell in cells}
    for row, group in cells:
        begin = lanes.constant(0.0) if is_fresh else lanes.load(ends[row], group)
        builder.store(begin, sums[row, group])
    with cgutils.for_range(builder, depth) as loop:
        at = _row(builder, panel, stride, loop.index)
        if ahead is not None:
            fetch_line(builder, builder.add(ahead, builder.mul(loop.index, _INDEX(LINE_BYTES))), 2)

        def value_of(row: int) -> Any:
            place = builder.gep(builder.inttoptr(starts[row], ir.FloatType().as_pointer()), [loop.index])
            return lanes.spread(builder.load(place))

        def add_product(row: int, group: int, value: Any, column: Any) -> None:
            total = builder.load(sums[row, group])
            builder.store(lanes.multiply_add(value, column, total), sums[row, group])

        if rows <= groups:  # The operand of which there is less stays in registers.
            values = [value_of(row) for row in range(rows)]
            for group in range(groups):
                column = lanes.load(at, group)
                for row in range(rows):
                    add_product(row, group, values[row], column)
        else:
            columns = [lanes.load(at, group) for group in range(groups)]
            for row in range(rows):
                value = value_of(row)
                for group in range(groups):
                    add_product(row, group, value, columns[group])
    for row, group in cells:
        lanes.store(builder.load(sums[row, group]), ends[row], group)


def _row(builder: Any, base: Any, stride: Any, row: Any) -> Any:
    row = _INDEX(row) if isinstance(row, int) else row
    return builder.add(base, builder.mul(builder.mul(stride, _INDEX(4)), row))


@intrinsic(prefer_literal=True)
def multiply_rows(
    typing_context: Any, groups: Any, fresh: Any, rows: Any, x: Any, x_stride: Any, panel: Any, stride: Any,
    depth: Any, out: Any, out_stride: Any, ahead: Any,
) -> Any:  # fmt: skip
    """Add ``x @ panel`` to ``groups`` vectors of each row of ``out``, or write it there if ``fresh``.

    ``groups`` and ``fresh`` are constants. There are 1 to ``rows_of_tile(groups)`` rows; ``panel`` has ``depth`` rows
    of ``groups`` vectors. All places are addresses of float32, and strides are in numbers. ``ahead``, unless it is
    None, is memory of which a full tile fetches a cache line for each of the ``depth``, for whom will read it soon.
    """
    num_groups, is_fresh = groups.literal_value, bool(fresh.literal_value)
    most = rows_of_tile(num_groups)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *places, next_place = arguments[3:]
        done = builder.append_basic_block("multiplied")
        choice = builder.switch(arguments[2], done)
        for count in range(1, most + 1):
            block = builder.append_basic_block(f"rows.{count}")
            choice.add_case(_INDEX(count), block)
            builder.position_at_end(block)
            fetched = next_place if count == most and ahead != types.none else None
            _emit_tile(builder, count, num_groups, is_fresh, places, fetched)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(groups, fresh, *[types.intp] * 8, ahead), generate
