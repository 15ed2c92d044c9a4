"""Matrix products with weights packed once: the inner loop of the fused CPU cells.

A library call lays the weights out anew at every product of a few rows, which costs more than the product. Here a
weight is packed once, into the panels of Goto and van de Geijn (2008): ``LANES`` (one vector register of float32)
columns of each of a few groups, for all of the depth, in the order in which the inner loop reads them. For an LSTM the
groups of a panel are the four gates of the same eight units, so that the gates of a unit are complete when its tile is.

The inner loop (``_multiply_tile``) keeps a tile of ``rows x groups`` registers, and is written as LLVM
instructions because a compiler does not find that form by itself. Everything else is Numba, compiled at the
first call and cached. Kernels take the addresses of contiguous float32 memory, as integers: handing over an
array costs more than some of the steps. The callers in this package check shapes, types and layout first.

Everything runs on the calling thread, holds no state and releases the interpreter lock.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from cellrt.definition.compiled_form import nogil, read_float

LANES = 8
"""Columns of a group that are computed together."""

FLOAT_BYTES = 4
CHUNK_ROWS = 48
"""Rows that go through all panels together: their inputs stay in the second-level cache."""

_BLOCK_DEPTH = 128
_WIDE_ROWS = 24
"""From this many rows on, the depth is cut into blocks, so that a piece of a panel stays in the first-level
cache."""

_LINEAR_GROUPS = 4


class PackedWeight(NamedTuple):
    """A packed weight. ``values`` are its panels ``[ceil(units / LANES), depth, groups * LANES]``, zero beyond the last
    unit."""

    values: Tensor
    units: int
    depth: int

    @property
    def address(self) -> int:
        """Where the values lie; valid as long as this object lives."""
        return self.values.data_ptr()


def pack_gates(weight: Tensor, gates: int) -> PackedWeight:
    """Pack ``weight`` ``[gates * units, depth]`` so that a panel holds all gates of ``LANES`` units."""
    units, depth = weight.shape[0] // gates, weight.shape[1]
    count = -(-units // LANES)
    padded = weight.new_zeros(gates, count * LANES, depth)
    padded[:, :units] = weight.detach().view(gates, units, depth)
    panels = padded.view(gates, count, LANES, depth).permute(1, 3, 0, 2)
    return PackedWeight(panels.contiguous().view(count, depth, gates * LANES), units, depth)


def pack_linear(weight: Tensor) -> PackedWeight:
    """Pack ``weight`` ``[columns, depth]`` of a plain linear layer: a panel holds ``4 * LANES`` neighbouring
    columns."""
    columns, depth = weight.shape
    width = _LINEAR_GROUPS * LANES
    count = -(-columns // width)
    padded = weight.new_zeros(count * width, depth)
    padded[:columns] = weight.detach()
    return PackedWeight(padded.view(count, width, depth).transpose(1, 2).contiguous(), columns, depth)


@intrinsic
def write(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
    """Set the float32 number ``index`` of those at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base = builder.inttoptr(arguments[0], ir.FloatType().as_pointer())
        builder.store(arguments[2], builder.gep(base, [arguments[1]]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.float32), generate


@nogil
def copy(target, source, size):  # type: ignore[no-untyped-def]
    """Copy ``size`` floats from one address to another."""
    for index in range(size):
        write(target, index, read_float(source, index))


def _tile_body(builder: Any, rows: int, groups: int, arguments: Any) -> None:
    """Emit ``tile[r, g] += sum over k of x[r, k] * panel[k, g]``, with the whole tile in vector registers."""
    single, index = ir.FloatType(), ir.IntType(64)
    vector = ir.VectorType(single, LANES)
    fma = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(vector, [vector] * 3), f"llvm.fmuladd.v{LANES}f32"
    )
    x, stride, panel, depth, tile = arguments
    x, panel, tile = (builder.inttoptr(address, single.as_pointer()) for address in (x, panel, tile))
    undefined, every_lane = (
        ir.Constant(vector, ir.Undefined),
        ir.Constant(ir.VectorType(ir.IntType(32), LANES), None),
    )

    def vector_at(base: Any, offset: int) -> Any:
        return builder.bitcast(builder.gep(base, [index(offset)]), vector.as_pointer())

    def load(place: Any) -> Any:
        return builder.load(place, align=FLOAT_BYTES)

    def value_of(row: int, k: Any) -> Any:
        first = builder.insert_element(undefined, builder.load(builder.gep(x_rows[row], [k])), ir.IntType(32)(0))
        return builder.shuffle_vector(first, undefined, every_lane)

    def add_product(row: int, group: int, value: Any, weight: Any) -> None:
        total = builder.load(sums[row, group])
        builder.store(builder.call(fma, [value, weight, total]), sums[row, group])

    cells = [(row, group) for row in range(rows) for group in range(groups)]
    sums = {cell: cgutils.alloca_once(builder, vector) for cell in cells}
    for row, group in cells:
        start = vector_at(tile, (row * groups + group) * LANES)
        builder.store(load(start), sums[row, group])
    x_rows = [builder.gep(x, [builder.mul(stride, index(row))]) for row in range(rows)]
    with cgutils.for_range(builder, depth) as loop:
        weights = builder.gep(panel, [builder.mul(loop.index, index(groups * LANES))])
        if rows <= groups:  # The fewer ones stay in registers: 12 sums, 3 of these and 1 of those make 16.
            values = [value_of(row, loop.index) for row in range(rows)]
            for group in range(groups):
                weight = load(vector_at(weights, group * LANES))
                for row in range(rows):
                    add_product(row, group, values[row], weight)
        else:
            columns = [load(vector_at(weights, group * LANES)) for group in range(groups)]
            for row in range(rows):
                value = value_of(row, loop.index)
                for group in range(groups):
                    add_product(row, group, value, columns[group])
    for row, group in cells:
        end = vector_at(tile, (row * groups + group) * LANES)
        builder.store(builder.load(sums[row, group]), end, align=FLOAT_BYTES)


@intrinsic(prefer_literal=True)
def _multiply_tile(
    typing_context: Any, rows: Any, groups: Any, x: Any, stride: Any, panel: Any, depth: Any, tile: Any
) -> Any:
    """Add ``x @ panel`` to ``tile`` ``[rows, groups, LANES]``; ``rows`` and ``groups`` are constants, the rest
    addresses, the row stride of ``x`` in elements, and the depth."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _tile_body(builder, rows.literal_value, groups.literal_value, arguments[2:])
        return context.get_dummy_value()

    return types.void(rows, groups, *[types.intp] * 5), generate


@nogil
def multiply_four(x, stride, rows, panel, depth, tile):  # type: ignore[no-untyped-def]
    """Add ``x @ panel`` to ``tile`` ``[rows, 4, LANES]``: three rows at a time fill the sixteen registers of
    AVX2."""
    block = _BLOCK_DEPTH if rows >= _WIDE_ROWS else depth
    for start in range(0, depth, block):
        size = min(block, depth - start)
        weights = panel + start * 4 * LANES * FLOAT_BYTES
        row = 0
        while row < rows:
            left = x + (row * stride + start) * FLOAT_BYTES
            sums = tile + row * 4 * LANES * FLOAT_BYTES
            if rows - row >= 3:
                _multiply_tile(3, 4, left, stride, weights, size, sums)
            elif rows - row == 2:
                _multiply_tile(2, 4, left, stride, weights, size, sums)
            else:
                _multiply_tile(1, 4, left, stride, weights, size, sums)
            row += 3


@nogil
def multiply_three(x, stride, rows, panel, depth, tile):  # type: ignore[no-untyped-def]
    """Add ``x @ panel`` to ``tile`` ``[rows, 3, LANES]``, four rows at a time."""
    block = _BLOCK_DEPTH if rows >= _WIDE_ROWS else depth
    for start in range(0, depth, block):
        size = min(block, depth - start)
        weights = panel + start * 3 * LANES * FLOAT_BYTES
        row = 0
        while row < rows:
            left = x + (row * stride + start) * FLOAT_BYTES
            sums = tile + row * 3 * LANES * FLOAT_BYTES
            if rows - row >= 4:
                _multiply_tile(4, 3, left, stride, weights, size, sums)
            elif rows - row == 3:
                _multiply_tile(3, 3, left, stride, weights, size, sums)
            elif rows - row == 2:
                _multiply_tile(2, 3, left, stride, weights, size, sums)
            else:
                _multiply_tile(1, 3, left, stride, weights, size, sums)
            row += 4


@nogil
def project(x, rows, depth, weight, bias, columns, out):  # type: ignore[no-untyped-def]
    """Write ``x @ weight.T + bias`` ``[rows, columns]`` to ``out``, with a weight from ``pack_linear``."""
    width = 4 * LANES
    scratch = np.zeros(CHUNK_ROWS * width, np.float32)
    for first in range(0, rows, CHUNK_ROWS):
        count = min(CHUNK_ROWS, rows - first)
        for column in range(0, columns, width):
            tile = scratch.ctypes.data  # Taken anew each time: Numba frees an array behind its last use.
            used = min(width, columns - column)
            for row in range(count):
                copy(tile + row * width * FLOAT_BYTES, bias + column * FLOAT_BYTES, used)
            panel = weight + column * depth * FLOAT_BYTES
            multiply_four(x + first * depth * FLOAT_BYTES, depth, count, panel, depth, tile)
            for row in range(count):
                result = out + ((first + row) * columns + column) * FLOAT_BYTES
                copy(result, tile + row * width * FLOAT_BYTES, used)
