"""Whole runs of an LSTM or a GRU as one compiled call: many steps, rows that end at different steps, no
Python.

A run takes ``batch_sizes`` (rows of each step, not increasing) and works on packed memory, the rows of one step
behind those of the step before, as in ``torch.nn.utils.rnn.PackedSequence``. All other arguments are sizes, and
addresses of contiguous float32 memory, or of int64 for ``rows_of`` and tokens; ``rows_of`` may be 0 for "none".
See ``packed.py``.

Each step works on ``CHUNK_ROWS`` rows and one panel at a time: the products of all gates of ``LANES`` units, and
at once the pointwise half, so that the sums of the gates never leave the first-level cache. ``tile`` is scratch
for those sums.
"""

from __future__ import annotations

import numpy as np

from cellrt.cells._pointwise import add_units, gru_units, lstm_units
from cellrt.cells._row_kernels import best_column
from cellrt.definition.compiled_form import nogil, nogil_part, read_float, read_word, start_of, write_word
from cellrt.products.packed import (
    CHUNK_ROWS,
    FLOAT_BYTES,
    copy,
    fetch,
    multiply_four,
    multiply_three,
    project,
    write,
)
from cellrt.products.vectors import LANES

_INDEX_BYTES = 8
_PROJECT_ROWS = 96
"""The rows of step inputs that are multiplied by their weight together, over several steps if need be."""
_TILE_FLOATS = (CHUNK_ROWS + 2) * 4 * LANES
"""Room for the sums of a chunk and two spare rows, for units that do not fill a vector."""


@nogil
def all_below(address, size, limit):  # type: ignore[no-untyped-def]
    """Return whether each of ``size`` int64 at ``address`` is in ``[0, limit)``."""
    for index in range(size):
        value = read_word(address, index)
        if value < 0 or value >= limit:
            return False
    return True


@nogil_part
def _source_row(rows_of, row):  # type: ignore[no-untyped-def]
    """Return the row of the input halves that belongs to ``row``."""
    return read_word(rows_of, row) if rows_of != 0 else row


@nogil_part
def _fill(tile, groups, given, bias, row_bytes, lanes):  # type: ignore[no-untyped-def]
    """Start the sums of a row: ``tile`` ``[groups, LANES]`` becomes ``given + bias``, of which the groups are a row
    apart.

    The numbers behind, which the next panel starts with, are asked for: they may be in no cache.
    """
    for group in range(groups):
        sums, left, right = (
            tile + group * LANES * FLOAT_BYTES,
            given + group * row_bytes,
            bias + group * row_bytes,
        )
        if lanes == LANES:
            add_units(left, right, sums)
        else:
            for lane in range(lanes):
                write(sums, lane, read_float(left, lane) + read_float(right, lane))
        fetch(left + LANES * FLOAT_BYTES, LANES * FLOAT_BYTES)


@nogil_part
def _lstm_step(rows, gates, rows_of, weight, bias, h, c, h_out, c_out, units, tile):  # type: ignore[no-untyped-def]
    """One LSTM step of ``rows`` rows; row r takes its input half from row ``rows_of[r]`` of ``gates``."""
    row_bytes, tile_bytes = units * FLOAT_BYTES, 4 * LANES * FLOAT_BYTES
    spare = tile + CHUNK_ROWS * tile_bytes
    for first in range(0, rows, CHUNK_ROWS):
        count = min(CHUNK_ROWS, rows - first)
        for unit in range(0, units, LANES):
            lanes, shift = min(LANES, units - unit), unit * FLOAT_BYTES
            for local in range(count):
                given = gates + _source_row(rows_of, first + local) * 4 * row_bytes
                _fill(tile + local * tile_bytes, 4, given + shift, bias + shift, row_bytes, lanes)
            multiply_four(h + first * row_bytes, units, count, weight + unit * units * 4 * FLOAT_BYTES, units, tile)
            for local in range(count):
                row = (first + local) * row_bytes + shift
                sums = tile + local * tile_bytes
                if lanes == LANES:
                    lstm_units(sums, c + row, h_out + row, c_out + row)
                else:
                    copy(spare, c + row, lanes)
                    lstm_units(sums, spare, sums, spare)
                    copy(c_out + row, spare, lanes)
                    copy(h_out + row, sums, lanes)


@nogil
def lstm_run(batch_sizes, gates, rows_of, weight, bias, h, c, h_out, c_out, units):  # type: ignore[no-untyped-def]
    """Run an LSTM over input halves that are already computed; write the state after every step, packed."""
    scratch = np.zeros(_TILE_FLOATS, np.float32)  # Its address is taken where it is used, which keeps it alive.
    start = 0
    for rows in batch_sizes:
        h_next, c_next = h_out + start * units * FLOAT_BYTES, c_out + start * units * FLOAT_BYTES
        step_gates = gates if rows_of != 0 else gates + start * 4 * units * FLOAT_BYTES
        step_rows = rows_of + start * _INDEX_BYTES if rows_of != 0 else 0
        _lstm_step(rows, step_gates, step_rows, weight, bias, h, c, h_next, c_next, units, start_of(scratch))
        h, c = h_next, c_next
        start += rows


@nogil_part
def _steps_together(batch_sizes, step):  # type: ignore[no-untyped-def]
    """Return the step behind the last one to project together with ``step``, and the number of their rows."""
    last, rows = step, 0
    while last < batch_sizes.size and (rows == 0 or rows + batch_sizes[last] <= _PROJECT_ROWS):
        rows += batch_sizes[last]
        last += 1
    return last, rows


@nogil
def lstm_run_inputs(batch_sizes, x, depth, x_weight, x_bias, weight, bias, h, c, h_out, c_out, units):  # type: ignore[no-untyped-def]
    """Run an LSTM over inputs ``x`` of width ``depth``, multiplied by their weight for several steps together."""
    gates = np.empty(max(_PROJECT_ROWS, batch_sizes[0]) * 4 * units, np.float32)
    start, step = 0, 0
    while step < batch_sizes.size:
        last, rows = _steps_together(batch_sizes, step)
        project(x + start * depth * FLOAT_BYTES, rows, depth, x_weight, x_bias, 4 * units, start_of(gates))
        h_next, c_next = h_out + start * units * FLOAT_BYTES, c_out + start * units * FLOAT_BYTES
        lstm_run(batch_sizes[step:last], start_of(gates), 0, weight, bias, h, c, h_next, c_next, units)
        start += rows
        final = (start - batch_sizes[last - 1]) * units * FLOAT_BYTES
        h, c = h_out + final, c_out + final
        step = last


@nogil_part
def _gru_step(rows, gates, rows_of, weight, bias, h, h_out, units, tile):  # type: ignore[no-untyped-def]
    """One GRU step of ``rows`` rows; row r takes its input half from row ``rows_of[r]`` of ``gates``."""
    row_bytes, tile_bytes = units * FLOAT_BYTES, 3 * LANES * FLOAT_BYTES
    spare = tile + CHUNK_ROWS * tile_bytes
    spare_given = spare + LANES * FLOAT_BYTES
    for first in range(0, rows, CHUNK_ROWS):
        count = min(CHUNK_ROWS, rows - first)
        for unit in range(0, units, LANES):
            lanes, shift = min(LANES, units - unit), unit * FLOAT_BYTES
            for local in range(count):
                given = gates + _source_row(rows_of, first + local) * 3 * row_bytes
                sums = tile + local * tile_bytes
                _fill(sums, 2, given + shift, bias + shift, row_bytes, lanes)
                copy(sums + 2 * LANES * FLOAT_BYTES, bias + 2 * row_bytes + shift, lanes)
            multiply_three(h + first * row_bytes, units, count, weight + unit * units * 3 * FLOAT_BYTES, units, tile)
            for local in range(count):
                given = gates + _source_row(rows_of, first + local) * 3 * row_bytes
                given += 2 * row_bytes + shift
                row = (first + local) * row_bytes + shift
                sums = tile + local * tile_bytes
                if lanes == LANES:
                    gru_units(sums, given, h + row, h_out + row)
                else:
                    copy(spare, h + row, lanes)
                    copy(spare_given, given, lanes)
                    gru_units(sums, spare_given, spare, spare)
                    copy(h_out + row, spare, lanes)


@nogil
def gru_run(batch_sizes, gates, rows_of, weight, bias, h, h_out, units):  # type: ignore[no-untyped-def]
    """Run a GRU over input halves that are already computed; write the state after every step, packed."""
    scratch = np.zeros(_TILE_FLOATS, np.float32)  # Its address is taken where it is used, which keeps it alive.
    start = 0
    for rows in batch_sizes:
        h_next = h_out + start * units * FLOAT_BYTES
        step_gates = gates if rows_of != 0 else gates + start * 3 * units * FLOAT_BYTES
        step_rows = rows_of + start * _INDEX_BYTES if rows_of != 0 else 0
        _gru_step(rows, step_gates, step_rows, weight, bias, h, h_next, units, start_of(scratch))
        h = h_next
        start += rows


@nogil
def gru_run_inputs(batch_sizes, x, depth, x_weight, x_bias, weight, bias, h, h_out, units):  # type: ignore[no-untyped-def]
    """Run a GRU over inputs ``x`` of width ``depth``, multiplied by their weight for several steps together."""
    gates = np.empty(max(_PROJECT_ROWS, batch_sizes[0]) * 3 * units, np.float32)
    start, step = 0, 0
    while step < batch_sizes.size:
        last, rows = _steps_together(batch_sizes, step)
        project(x + start * depth * FLOAT_BYTES, rows, depth, x_weight, x_bias, 3 * units, start_of(gates))
        h_next = h_out + start * units * FLOAT_BYTES
        gru_run(batch_sizes[step:last], start_of(gates), 0, weight, bias, h, h_next, units)
        start += rows
        h = h_out + (start - batch_sizes[last - 1]) * units * FLOAT_BYTES
        step = last


@nogil
def project_best(h, rows, units, out_weight, out_bias, tokens, token_out):  # type: ignore[no-untyped-def]
    """Write the token with the largest of the ``tokens`` logits of each row of ``h`` as int64 to ``token_out``.

    Logits are kept for ``CHUNK_ROWS`` rows at a time only.
    """
    logits = np.empty(min(rows, CHUNK_ROWS) * tokens, np.float32)
    for first in range(0, rows, CHUNK_ROWS):
        count = min(CHUNK_ROWS, rows - first)
        states = h + first * units * FLOAT_BYTES
        project(states, count, units, out_weight, out_bias, tokens, start_of(logits))
        for row in range(count):
            best = best_column(start_of(logits) + row * tokens * FLOAT_BYTES, tokens)
            write_word(token_out, first + row, best)


@nogil
def lstm_decode(  # type: ignore[no-untyped-def]
    batch_sizes, table, token, weight, bias, out_weight, out_bias, tokens, h, c, token_out, h_out, c_out, units
):
    """Run a greedy LSTM decoder over a folded embedding ``table``; each step takes the token of the step
    before."""
    scratch = np.zeros(_TILE_FLOATS, np.float32)
    start = 0
    for rows in batch_sizes:
        h_next, c_next = h_out + start * units * FLOAT_BYTES, c_out + start * units * FLOAT_BYTES
        token_next = token_out + start * _INDEX_BYTES
        _lstm_step(rows, table, token, weight, bias, h, c, h_next, c_next, units, start_of(scratch))
        project_best(h_next, rows, units, out_weight, out_bias, tokens, token_next)
        h, c, token = h_next, c_next, token_next
        start += rows


@nogil
def gru_decode(  # type: ignore[no-untyped-def]
    batch_sizes, table, token, weight, bias, out_weight, out_bias, tokens, h, token_out, h_out, units
):
    """Run a greedy GRU decoder over a folded embedding ``table``; each step takes the token of the step
    before."""
    scratch = np.zeros(_TILE_FLOATS, np.float32)
    start = 0
    for rows in batch_sizes:
        h_next, token_next = h_out + start * units * FLOAT_BYTES, token_out + start * _INDEX_BYTES
        _gru_step(rows, table, token, weight, bias, h, h_next, units, start_of(scratch))
        project_best(h_next, rows, units, out_weight, out_bias, tokens, token_next)
        h, token = h_next, token_next
        start += rows
