"""Matrix products with weights packed once: the inner loop of the fused CPU cells.

A library call packs the weights again for each product of a few rows, which costs more than the product. Here a weight
is packed once, into the panels of Goto and van de Geijn (2008). A panel has the weights of a few groups of ``LANES``
columns (one vector register of float32), for all of the depth. They lie in the order in which the inner loop
(``tile.py``) reads them. For an LSTM the groups of a panel are the four gates of the same units. So one tile of results
has all gates of its units.

Everything here is compiled by Numba at the first call, and cached. Kernels take addresses of contiguous float32 memory
as integers, since passing an array costs more than some of the steps. The callers in this package check shapes, types
and layout first.

Everything runs on the calling thread, holds no state and releases the interpreter lock.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from cellrt.native.jit import c_function, nogil
from cellrt.native.memory import read_float, start_of
from cellrt.products.tile import HALF_GROUPS, lines_of_row, multiply_rows, rows_of_tile
from cellrt.products.vectors import FLOAT32, LANES, LINE_BYTES, fetch_line

FLOAT_BYTES = 4
CHUNK_ROWS = 96
"""The number of rows that are multiplied by all panels together: their inputs stay in the second-level cache."""

_BLOCK_BYTES = 1 << 14
"""The size up to which a panel is cut into equal blocks along the depth, in bytes, if the rows are two or three tiles.

A block is multiplied by all rows while it is in the nearest cache. That also has room for the part of the next block
that is fetched meanwhile.
"""
_LONG_BLOCK_BYTES = 1 << 15
"""The same if the rows are more tiles.

Then computing takes longer than fetching, so larger blocks are better: each block costs a read and a write of the sums.
"""
AHEAD_BYTES = 1 << 13
"""The distance at which a single tile prefetches memory ahead of its reads, in bytes."""

_LINEAR_GROUPS = 4


class PackedWeight(NamedTuple):
    """A packed weight. ``values`` has its panels: ``[ceil(units / LANES), depth, groups * LANES]``.

    The lanes after the last unit are zero.
    """

    values: Tensor
    units: int
    depth: int

    @property
    def address(self) -> int:
        """The address of the values; valid as long as this object lives."""
        return self.values.data_ptr()


def new_room(numbers: int) -> Tensor:
    """Return memory for this many float32 numbers of packed weights, aligned to a cache line.

    NumPy allocates it, as it asks for huge pages if it is large: one core reads those faster.
    """
    line = LINE_BYTES // FLOAT_BYTES
    room = np.empty(numbers + line, np.float32)
    first = -room.ctypes.data // FLOAT_BYTES % line
    return torch.from_numpy(room[first : first + numbers])


def pack_gates(weight: Tensor, gates: int) -> PackedWeight:
    """Pack ``weight`` ``[gates * units, depth]`` so that a panel holds all gates of ``LANES`` units."""
    units, depth = weight.shape[0] // gates, weight.shape[1]
    count = -(-units // LANES)
    padded = weight.new_zeros(gates, count * LANES, depth)
    padded[:, :units] = weight.detach().view(gates, units, depth)
    panels = padded.view(gates, count, LANES, depth).permute(1, 3, 0, 2)
    values = new_room(padded.numel()).view(panels.shape).copy_(panels)
    return PackedWeight(values.view(count, depth, gates * LANES), units, depth)


def packed_numbers(weight: Tensor) -> int:
    """Return the number of float32 numbers that ``pack_linear`` needs for a weight."""
    width = _LINEAR_GROUPS * LANES
    return -(-weight.shape[0] // width) * width * weight.shape[1]


def pack_linear(weight: Tensor, room: Tensor | None = None) -> PackedWeight:
    """Pack ``weight`` ``[columns, depth]`` of a plain linear layer: a panel holds ``4 * LANES`` neighbouring columns.

    ``room`` is the memory for the result; weights that are read one after the other should lie one after the other.
    """
    columns, depth = weight.shape
    width = _LINEAR_GROUPS * LANES
    count = -(-columns // width)
    padded = weight.detach()
    if columns < count * width:
        padded = weight.new_zeros(count * width, depth)
        padded[:columns] = weight.detach()
    values = (new_room(padded.numel()) if room is None else room).view(count, depth, width)
    return PackedWeight(values.copy_(padded.view(count, width, depth).transpose(1, 2)), columns, depth)


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


@intrinsic
def fetch(typing_context: Any, address: Any, size: Any) -> Any:
    """Prefetch ``size`` bytes of memory that will be read soon."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        index = ir.IntType(64)
        with cgutils.for_range_slice(builder, index(0), arguments[1], index(LINE_BYTES), index) as (shift, _):
            fetch_line(builder, builder.add(arguments[0], shift), 3)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@intrinsic
def touch(typing_context: Any, address: Any, size: Any) -> Any:
    """Read ``size`` bytes of memory from an even address, only to bring them into the caches."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        index = ir.IntType(64)
        with cgutils.for_range_slice(builder, index(0), arguments[1], index(LINE_BYTES), index) as (shift, _):
            place = builder.inttoptr(builder.add(arguments[0], shift), ir.IntType(16).as_pointer())
            builder.load_atomic(place, "monotonic", 2)  # a compiler would remove a plain load whose value is not used
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


def _depth_of(num_bytes: int, groups: int) -> int:
    """Return how many of the ``depth`` rows of a panel fit into this many bytes."""
    return num_bytes // (groups * LANES * FLOAT_BYTES)


@nogil
def _equal_part(depth, most):  # type: ignore[no-untyped-def]
    """Return the size of equal parts of the depth, of at least one and at most ``most`` rows each."""
    return max(1, -(-depth // max(1, -(-depth // most))))


def _product(groups: int) -> Any:
    """Return a function that adds ``x @ panel`` to ``tile`` ``[rows, groups, LANES]``; ``stride`` is that of ``x``.

    While the tiles multiply a block, each of them prefetches a share of the next block, which may be in no cache.
    """
    width, most, row_lines = groups * LANES, rows_of_tile(groups), lines_of_row(groups)
    half_lines = -(-row_lines // 2)
    most_depth, long_depth = _depth_of(_BLOCK_BYTES, groups), _depth_of(_LONG_BLOCK_BYTES, groups)

    @nogil
    def multiply(x, stride, rows, panel, depth, tile):  # type: ignore[no-untyped-def]
        tiles = -(-rows // most)
        # One tile reads each line once, and fetches a little ahead.
        if tiles == 1:
            ahead = panel + AHEAD_BYTES
            multiply_rows(groups, 0, FLOAT32, rows, x, stride, panel, width, depth, tile, width, row_lines, ahead)
            return
        # Several tiles read each block from the nearest cache, while they fetch the next block.
        few = tiles <= 3
        lines, block = half_lines if few else 1, _equal_part(depth, most_depth if few else long_depth)
        for start in range(0, depth, block):
            size = min(block, depth - start)
            weights = panel + start * width * FLOAT_BYTES
            row = 0
            for k in range(tiles):
                count = -(-(rows - row) // (tiles - k))
                begin = x + (row * stride + start) * FLOAT_BYTES
                sums = tile + row * width * FLOAT_BYTES
                ahead = weights + (size + k * size // tiles) * width * FLOAT_BYTES
                multiply_rows(groups, 0, FLOAT32, count, begin, stride, weights, width, size, sums, width, lines, ahead)
                row += count

    return multiply


_multiply_four, multiply_three = _product(4), _product(3)
_MOST, _MOST_IN_HALVES, _HALF_LINES = rows_of_tile(4), rows_of_tile(HALF_GROUPS), lines_of_row(HALF_GROUPS)
_HALVES_DEPTH = _depth_of(_BLOCK_BYTES, 4)


@nogil
def multiply_four(x, stride, rows, panel, depth, tile):  # type: ignore[no-untyped-def]
    """Multiply as ``_product(4)`` does; if all rows fit a tile of half the columns, do one half after the other."""
    if rows <= _MOST or rows > _MOST_IN_HALVES:
        _multiply_four(x, stride, rows, panel, depth, tile)
        return
    width = 4 * LANES
    half = HALF_GROUPS * LANES * FLOAT_BYTES
    block = _equal_part(depth, _HALVES_DEPTH)
    for start in range(0, depth, block):
        size = min(block, depth - start)
        begin, weights = x + start * FLOAT_BYTES, panel + start * width * FLOAT_BYTES
        for k in range(2):
            place, sums = weights + k * half, tile + k * half
            ahead = weights + (size + k * size // 2) * width * FLOAT_BYTES
            multiply_rows(
                HALF_GROUPS, 0, FLOAT32, rows, begin, stride, place, width, size, sums, width, _HALF_LINES, ahead
            )


@nogil
def project_strided(x, stride, rows, depth, weight, bias, columns, out):  # type: ignore[no-untyped-def]
    """Write ``x @ weight.T + bias`` ``[rows, columns]`` to ``out``, with a weight from ``pack_linear``.

    Rows of ``x`` begin ``stride`` numbers apart. ``bias`` is an address, or 0 for none.
    """
    width = 4 * LANES
    scratch = np.empty(min(rows, CHUNK_ROWS) * width, np.float32)
    for first in range(0, rows, CHUNK_ROWS):
        count = min(CHUNK_ROWS, rows - first)
        for column in range(0, columns, width):
            tile = start_of(scratch)  # Taken in each round, as Numba frees an array after its last use.
            used = min(width, columns - column)
            for row in range(count):
                begin = tile + row * width * FLOAT_BYTES
                if bias:
                    copy(begin, bias + column * FLOAT_BYTES, used)
                else:
                    for index in range(used):
                        write(begin, index, np.float32(0))
            panel = weight + column * depth * FLOAT_BYTES
            multiply_four(x + first * stride * FLOAT_BYTES, stride, count, panel, depth, tile)
            for row in range(count):
                result = out + ((first + row) * columns + column) * FLOAT_BYTES
                copy(result, tile + row * width * FLOAT_BYTES, used)


@nogil
def project(x, rows, depth, weight, bias, columns, out):  # type: ignore[no-untyped-def]
    """Call ``project_strided`` on contiguous rows."""
    project_strided(x, depth, rows, depth, weight, bias, columns, out)


@functools.cache
def product_kernel() -> Any:
    """Return ``project_strided`` as a C function ``void (int64 x 8)``; its ``address`` stays valid in this process."""
    return c_function(_kernel, types.void(*(types.int64,) * 8))


def _kernel(x, stride, rows, depth, weight, bias, columns, out):  # type: ignore[no-untyped-def]
    project_strided(x, stride, rows, depth, weight, bias, columns, out)
