"""Copies of rows, in compiled code.

A task of a few short rows costs less than it does to hand over the interpreter lock and wait to get it back, which
NumPy and torch do for every copy; so small copies keep it, and only large ones (``*_nogil``) give it away.
"""

from __future__ import annotations

from numba import njit

from cellrt.core.tables import LOCATION_SHIFT, NUM_PERMANENT, ROW_MASK

LARGE_BYTES = 1 << 18


@njit(cache=True)
def put_columns(arena, rows, first, count, values):
    """``arena[rows[k, first + j]] =`` row ``k * count + j`` of ``values``, for byte rows; negative rows are skipped."""
    width = arena.shape[1]
    at = 0
    for k in range(rows.shape[0]):
        for j in range(first, first + count):
            row = rows[k, j]
            if row >= 0:
                for byte in range(width):
                    arena[row, byte] = values[at + byte]
            at += width


@njit(cache=True)
def get_rows(arena, rows, values):
    """``values[k] = arena[rows[k]]`` for byte rows ``[n, bytes]``."""
    for k in range(rows.size):
        row = rows[k]
        for j in range(arena.shape[1]):
            values[k, j] = arena[row, j]


@njit(cache=True)
def get_rows_of(arena, handles, location, own, values):
    """``values[k]`` gets the row of ``handles[k]`` where that is at ``location``. Permanent rows are at ``own``."""
    for k in range(handles.size):
        at = own if handles[k] < NUM_PERMANENT else handles[k] >> LOCATION_SHIFT
        if at == location:
            row = handles[k] & ROW_MASK
            for j in range(arena.shape[1]):
                values[k, j] = arena[row, j]


@njit(cache=True)
def move_rows(arena, rows, values, positions):
    """``arena[rows[k]] = values[positions[k]]`` for byte rows."""
    for k in range(rows.size):
        row, position = rows[k], positions[k]
        for j in range(arena.shape[1]):
            arena[row, j] = values[position, j]


@njit(cache=True, nogil=True)
def get_rows_nogil(arena, rows, values):
    """``get_rows``. A function of its own: Numba keeps one compiled form of each on disk, with the lock or without."""
    get_rows(arena, rows, values)


@njit(cache=True, nogil=True)
def get_rows_of_nogil(arena, handles, location, own, values):
    """``get_rows_of``."""
    get_rows_of(arena, handles, location, own, values)


@njit(cache=True, nogil=True)
def move_rows_nogil(arena, rows, values, positions):
    """``move_rows``."""
    move_rows(arena, rows, values, positions)
