"""Copies of rows, in compiled code.

For a few short rows, giving up the interpreter lock and waiting to get it back costs more than the copy. NumPy and
torch give it up for every copy. So small copies here keep the lock, and only large ones (``*_nogil``) release it.
"""

from __future__ import annotations

from cellrt.core.state.tables import LOCATION_SHIFT, NUM_PERMANENT, ROW_MASK
from cellrt.native.jit import compiled, nogil, short_allocating
from cellrt.native.memory import WORD_BYTES, copy_bytes, read_word, write_word
from cellrt.native.row_types import Matrix, Rows

LARGE_BYTES = 1 << 18


@compiled
def copy_at(to: int, given: int, size: int) -> None:
    """Copy a row of this many bytes from one address to another."""
    if size == WORD_BYTES:  # as a number or a token is
        write_word(to, 0, read_word(given, 0))
    else:
        copy_bytes(to, given, size)


@compiled
def copy_row(target: Matrix, k: int, source: Matrix, j: int) -> None:
    """Set ``target[k] = source[j]``, for byte rows ``[n, bytes]``; the source may be flat."""
    size = target.shape[1]
    copy_at(target.ctypes.data + int(k) * size, source.ctypes.data + int(j) * size, size)


@short_allocating
def put_columns(arena: Matrix, rows: Matrix, first: int, count: int, values: Rows[int]) -> None:
    """Set ``arena[rows[k, first + j]] = values[k * count + j]``, for byte rows; negative rows are skipped."""
    at = 0
    for k in range(rows.shape[0]):
        for j in range(first, first + count):
            if rows[k, j] >= 0:
                copy_row(arena, rows[k, j], values, at)
            at += 1


@short_allocating
def get_rows(arena: Matrix, rows: Rows[int], values: Matrix) -> None:
    """Set ``values[k] = arena[rows[k]]`` for byte rows ``[n, bytes]``."""
    for k in range(rows.size):
        copy_row(values, k, arena, rows[k])


@short_allocating
def get_rows_of(arena: Matrix, handles: Rows[int], location: int, own: int, values: Matrix) -> None:
    """Set ``values[k]`` to the row of ``handles[k]`` where that is at ``location``. Permanent rows are at ``own``."""
    for k in range(handles.size):
        at = own if handles[k] < NUM_PERMANENT else handles[k] >> LOCATION_SHIFT
        if at == location:
            copy_row(values, k, arena, handles[k] & ROW_MASK)


@short_allocating
def move_rows(arena: Matrix, rows: Rows[int], values: Matrix, positions: Rows[int]) -> None:
    """Set ``arena[rows[k]] = values[positions[k]]`` for byte rows."""
    for k in range(rows.size):
        copy_row(arena, rows[k], values, positions[k])


@nogil
def get_rows_nogil(arena: Matrix, rows: Rows[int], values: Matrix) -> None:
    """Call ``get_rows`` without the lock.

    It is a function of its own, as Numba keeps one compiled form of each on disk, with the lock or without.
    """
    get_rows(arena, rows, values)


@nogil
def get_rows_of_nogil(arena: Matrix, handles: Rows[int], location: int, own: int, values: Matrix) -> None:
    """Call ``get_rows_of`` without the lock."""
    get_rows_of(arena, handles, location, own, values)


@nogil
def move_rows_nogil(arena: Matrix, rows: Rows[int], values: Matrix, positions: Rows[int]) -> None:
    """Call ``move_rows`` without the lock."""
    move_rows(arena, rows, values, positions)
