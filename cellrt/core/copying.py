"""Copies rows into and out of the host's arenas without handing over the interpreter lock.

A request has a few short rows: NumPy and torch would give the lock away for each copy, and the manager would
wait to get it back.
"""

from __future__ import annotations

from numba import njit


@njit(cache=True)
def put_rows(arena, rows, values):
    """``arena[rows[k]] = values[k]`` for byte rows ``[n, bytes]``; negative rows are skipped."""
    for k in range(rows.size):
        row = rows[k]
        if row >= 0:
            for j in range(arena.shape[1]):
                arena[row, j] = values[k, j]


@njit(cache=True)
def get_rows(arena, rows, values):
    """``values[k] = arena[rows[k]]`` for byte rows ``[n, bytes]``."""
    for k in range(rows.size):
        row = rows[k]
        for j in range(arena.shape[1]):
            values[k, j] = arena[row, j]
