"""One step of the tree-LSTM cells as one compiled call: all rows, whatever their number of children.

A step works on a few rows at a time: the products of ``packed.py`` write the sums of their gates to scratch in the
second-level cache, where the pointwise half reads them. In scratch a gate takes a whole number of vector registers
(``padded`` units); weights are packed with as many units, zero beyond the last (``pack_padded``).

Sizes and addresses are integers, and memory is contiguous float32 (int64 for offsets and tokens), as in ``packed.py``.
``tree_lstm.py`` and ``child_sum_tree_lstm.py`` have the equations, and the plain-torch form of each function, which the
tests compare with this one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from cellrt.definition.compiled_form import nogil, nogil_part, read_float, read_word, start_of
from cellrt.products.packed import (
    CHUNK_ROWS,
    FLOAT_BYTES,
    PackedWeight,
    copy,
    pack_linear,
    project,
    write,
)
from cellrt.products.vectors import LANES, VectorBuilder


def pad_gates(gates: Tensor, units: int) -> Tensor:
    """``gates`` ``[gates * units, ...]`` with zeros behind the units of each gate, up to whole vector registers."""
    padded = -(-units // LANES) * LANES
    if padded == units:
        return gates.detach()
    count = gates.shape[0] // units
    result = gates.new_zeros(count, padded, *gates.shape[1:])
    result[:, :units] = gates.detach().view(count, units, *gates.shape[1:])
    return result.flatten(0, 1)


def pack_padded(weight: Tensor, units: int) -> PackedWeight:
    """Pack ``weight`` ``[gates * units, depth]`` for ``project``, which then gives sums ``[rows, gates * padded]``."""
    return pack_linear(pad_gates(weight, units))


@intrinsic
def _begin_units(typing_context: Any, i: Any, u: Any, c: Any) -> Any:
    """``c = sigmoid(i) * tanh(u)``, for ``LANES`` units at these addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = VectorBuilder(builder)
        i, u = (lanes.load(address) for address in arguments[:2])
        lanes.store(lanes.multiply(lanes.sigmoid(i), lanes.tanh(u)), arguments[2])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic
def _add_child_units(typing_context: Any, f: Any, child: Any, c: Any) -> Any:
    """``c += sigmoid(f) * child``, for ``LANES`` units."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = VectorBuilder(builder)
        f, child, c = (lanes.load(address) for address in arguments)
        lanes.store(lanes.multiply_add(lanes.sigmoid(f), child, c), arguments[2])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic
def _end_units(typing_context: Any, o: Any, c: Any, h: Any) -> Any:
    """``h = sigmoid(o) * tanh(c)``, for ``LANES`` units."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = VectorBuilder(builder)
        o, c = (lanes.load(address) for address in arguments[:2])
        lanes.store(lanes.multiply(lanes.sigmoid(o), lanes.tanh(c)), arguments[2])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@nogil_part
def _add(target, source, size):  # type: ignore[no-untyped-def]
    """Add ``size`` floats to those at ``target``."""
    for index in range(size):
        write(target, index, read_float(target, index) + read_float(source, index))


@nogil_part
def _padded(units):  # type: ignore[no-untyped-def]
    """Return the number of a gate's units in scratch: whole vector registers."""
    return (units + LANES - 1) // LANES * LANES


@nogil_part
def _begin(sums, units, c):  # type: ignore[no-untyped-def]
    """Start a row's state ``c`` (padded) from its gates i, o, u."""
    padded = _padded(units)
    for unit in range(0, units, LANES):
        shift = unit * FLOAT_BYTES
        _begin_units(sums + shift, sums + 2 * padded * FLOAT_BYTES + shift, c + shift)


@nogil_part
def _add_child(f, child, units, c, spare):  # type: ignore[no-untyped-def]
    """Add what the gate ``f`` lets through of a child's state to a row's state ``c``; ``f`` and ``c`` are padded."""
    whole = units // LANES * LANES
    for unit in range(0, whole, LANES):
        shift = unit * FLOAT_BYTES
        _add_child_units(f + shift, child + shift, c + shift)
    if whole < units:
        shift = whole * FLOAT_BYTES
        copy(spare, child + shift, units - whole)
        _add_child_units(f + shift, spare, c + shift)


@nogil_part
def _end(sums, units, c, spare, h_out, c_out):  # type: ignore[no-untyped-def]
    """Write a row's ``h_out`` and ``c_out`` from its gates and its finished state ``c`` (padded)."""
    o = sums + _padded(units) * FLOAT_BYTES
    whole = units // LANES * LANES
    for unit in range(0, whole, LANES):
        shift = unit * FLOAT_BYTES
        _end_units(o + shift, c + shift, h_out + shift)
    if whole < units:
        shift = whole * FLOAT_BYTES
        _end_units(o + shift, c + shift, spare)
        copy(h_out + shift, spare, units - whole)
    copy(c_out, c, units)


@nogil
def leaf_step(rows, x, depth, weight, bias, h_out, c_out, units):  # type: ignore[no-untyped-def]
    """Write the states of leaves from inputs ``x`` ``[rows, depth]``; gates i, o, u."""
    padded = _padded(units)
    row_bytes, sums_bytes = units * FLOAT_BYTES, 3 * padded * FLOAT_BYTES
    scratch = np.empty(min(rows, CHUNK_ROWS) * 3 * padded, np.float32)
    work = np.zeros(padded + LANES, np.float32)  # The state of a row, and a spare register.
    for first in range(0, rows, CHUNK_ROWS):
        count = min(CHUNK_ROWS, rows - first)
        project(x + first * depth * FLOAT_BYTES, count, depth, weight, bias, 3 * padded, start_of(scratch))
        for local in range(count):
            sums, out = start_of(scratch) + local * sums_bytes, (first + local) * row_bytes
            state = start_of(work)
            _begin(sums, units, state)
            _end(sums, units, state, state + padded * FLOAT_BYTES, h_out + out, c_out + out)


@nogil_part
def _add_inputs(count, x, depth, weight, bias, given, padded, groups, sums):  # type: ignore[no-untyped-def]
    """Add products of inputs ``x`` (gates i, o, u, f, through scratch ``given``) to the sums of ``groups`` gates."""
    project(x, count, depth, weight, bias, 4 * padded, given)
    gate_bytes = padded * FLOAT_BYTES
    for local in range(count):
        source, target = given + local * 4 * gate_bytes, sums + local * groups * gate_bytes
        _add(target, source, 3 * padded)
        for gate in range(3, groups):
            _add(target + gate * gate_bytes, source + 3 * gate_bytes, padded)


@nogil
def nary_step(rows, states, weight, bias, x, depth, x_weight, x_bias, h_out, c_out, units):  # type: ignore[no-untyped-def]
    """Write the states of nodes with the same number of children, all in order; gates i, o, u and f of each child.

    ``states`` are the addresses of h of each child, then of c of each; ``x`` is 0 if nodes have no input.
    """
    children, padded = states.size // 2, _padded(units)
    groups, width = 3 + children, children * units
    row_bytes, sums_bytes = units * FLOAT_BYTES, groups * padded * FLOAT_BYTES
    joined = np.empty(min(rows, CHUNK_ROWS) * width, np.float32)
    scratch = np.empty(min(rows, CHUNK_ROWS) * groups * padded, np.float32)
    given = np.empty(min(rows, CHUNK_ROWS) * 4 * padded if x != 0 else 0, np.float32)
    work = np.zeros(padded + LANES, np.float32)
    for first in range(0, rows, CHUNK_ROWS):
        count = min(CHUNK_ROWS, rows - first)
        for local in range(count):
            for child in range(children):
                place = start_of(joined) + (local * width + child * units) * FLOAT_BYTES
                copy(place, states[child] + (first + local) * row_bytes, units)
        project(start_of(joined), count, width, weight, bias, groups * padded, start_of(scratch))
        if x != 0:
            inputs = x + first * depth * FLOAT_BYTES
            given_place = start_of(given)
            _add_inputs(count, inputs, depth, x_weight, x_bias, given_place, padded, groups, start_of(scratch))
        for local in range(count):
            sums, row = start_of(scratch) + local * sums_bytes, (first + local) * row_bytes
            state = start_of(work)
            spare = state + padded * FLOAT_BYTES
            _begin(sums, units, state)
            for child in range(children):
                forget = sums + (3 + child) * padded * FLOAT_BYTES
                _add_child(forget, states[children + child] + row, units, state, spare)
            _end(sums, units, state, spare, h_out + row, c_out + row)


@nogil
def are_offsets(offsets, others, rows, total):  # type: ignore[no-untyped-def]
    """Return whether two ``[rows + 1]`` int64 are equal, start at 0, never decrease and end at ``total``."""
    before = 0
    for row in range(rows + 1):
        value = read_word(offsets, row)
        if value < before or value != read_word(others, row) or (row == 0 and value != 0):
            return False
        before = value
    return before == total


@nogil_part
def _add_children(first, count, offsets, h, c, weight, sums, states, units, forget, zeros, spare):  # type: ignore[no-untyped-def]
    """Add to the ``states`` of ``count`` rows, from row ``first``, what the forget gates let through of their children.

    ``sums`` has the gates i, o, u, f of these rows; ``forget`` is scratch for the gates of ``CHUNK_ROWS`` children.
    """
    padded = _padded(units)
    row_bytes, gate_bytes = units * FLOAT_BYTES, padded * FLOAT_BYTES
    row, end = 0, read_word(offsets, first + count)
    for start in range(read_word(offsets, first), end, CHUNK_ROWS):
        together = min(CHUNK_ROWS, end - start)
        project(h + start * row_bytes, together, units, weight, zeros, padded, forget)
        for child in range(start, start + together):
            while child >= read_word(offsets, first + row + 1):
                row += 1
            gate = forget + (child - start) * gate_bytes
            _add(gate, sums + (row * 4 + 3) * gate_bytes, padded)
            _add_child(gate, c + child * row_bytes, units, states + row * gate_bytes, spare)


@nogil
def child_sum_step(  # type: ignore[no-untyped-def]
    rows, x, depth, x_weight, x_bias, table, token, offsets, h, c, weight, f_weight, zeros, h_out, c_out, units
):
    """Write the states of nodes with any number of children: row r has ``offsets[r]`` to ``offsets[r + 1]`` of h and c.

    The input half of the gates i, o, u, f is the product of ``x``, or if ``token`` is not 0 the row of ``table``
    (padded) that it names. ``weight`` are of i, o, u; ``f_weight`` of f; ``zeros`` has ``3 * padded`` of them.
    """
    padded, most = _padded(units), min(rows, CHUNK_ROWS)
    row_bytes, gate_bytes = units * FLOAT_BYTES, padded * FLOAT_BYTES
    gates = np.empty(most * 4 * padded, np.float32)
    sums = np.empty(most * 3 * padded, np.float32)
    total = np.empty(most * units, np.float32)
    states = np.empty(most * padded, np.float32)
    forget = np.empty(min(CHUNK_ROWS, read_word(offsets, rows)) * padded, np.float32)
    work = np.zeros(LANES, np.float32)
    for first in range(0, rows, CHUNK_ROWS):
        count = min(CHUNK_ROWS, rows - first)
        if token == 0:
            inputs = x + first * depth * FLOAT_BYTES
            project(inputs, count, depth, x_weight, x_bias, 4 * padded, start_of(gates))
        else:
            for local in range(count):
                source = table + read_word(token, first + local) * 4 * gate_bytes
                copy(start_of(gates) + local * 4 * gate_bytes, source, 4 * padded)
        total[:] = 0
        for local in range(count):
            for child in range(read_word(offsets, first + local), read_word(offsets, first + local + 1)):
                _add(start_of(total) + local * row_bytes, h + child * row_bytes, units)
        if read_word(offsets, first + count) > read_word(offsets, first):
            project(start_of(total), count, units, weight, zeros, 3 * padded, start_of(sums))
        else:  # All are leaves.
            sums[:] = 0
        for local in range(count):
            place = start_of(gates) + local * 4 * gate_bytes
            _add(place, start_of(sums) + local * 3 * gate_bytes, 3 * padded)
            _begin(place, units, start_of(states) + local * gate_bytes)
        _add_children(
            first,
            count,
            offsets,
            h,
            c,
            f_weight,
            start_of(gates),
            start_of(states),
            units,
            start_of(forget),
            zeros,
            start_of(work),
        )
        for local in range(count):
            place, state = start_of(gates) + local * 4 * gate_bytes, start_of(states) + local * gate_bytes
            out = (first + local) * row_bytes
            _end(place, units, state, start_of(work), h_out + out, c_out + out)
