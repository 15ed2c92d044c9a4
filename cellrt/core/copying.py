"""Copies of rows, in compiled code.

A task of a few short rows costs less than it does to hand over the interpreter lock and wait to get it back, which
NumPy and torch do for every copy; so small copies keep it, and only large ones (``*_freely``) give it away.
"""

from __future__ import annotations

from numba import njit

from cellrt.core.tables import LOCATION_SHIFT, NUM_PERMANENT, ROW_MASK

LARGE_BYTES = 1 << 18


def _put_columns(arena, rows, first, count, values):
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


def _get_rows(arena, rows, values):
    """``values[k] = arena[rows[k]]`` for byte rows ``[n, bytes]``."""
    for k in range(rows.size):
        row = rows[k]
        for j in range(arena.shape[1]):
            values[k, j] = arena[row, j]


def _get_rows_of(arena, handles, location, own, values):
    """``values[k]`` gets the row of ``handles[k]`` where that is at ``location``. Permanent rows are at ``own``."""
    for k in range(handles.size):
        at = own if handles[k] < NUM_PERMANENT else handles[k] >> LOCATION_SHIFT
        if at == location:
            row = handles[k] & ROW_MASK
            for j in range(arena.shape[1]):
                values[k, j] = arena[row, j]


def _move_rows(arena, rows, values, positions):
    """``arena[rows[k]] = values[positions[k]]`` for byte rows."""
    for k in range(rows.size):
        row, position = rows[k], positions[k]
        for j in range(arena.shape[1]):
            arena[row, j] = values[position, j]


put_columns = njit(cache=True)(_put_columns)
get_rows = njit(cache=True)(_get_rows)
move_rows = njit(cache=True)(_move_rows)
get_rows_of = njit(cache=True)(_get_rows_of)
get_rows_of_nogil = njit(cache=True, nogil=True)(_get_rows_of)
get_rows_nogil = njit(cache=True, nogil=True)(_get_rows)
move_rows_nogil = njit(cache=True, nogil=True)(_move_rows)
