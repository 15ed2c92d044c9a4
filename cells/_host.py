"""The task functions of the cells' compiled forms (``cellrt.definition.compiled_form`` says what they are given).

Each returns ``REFUSED`` for what only the module can do or explain. Constants and inputs come in the order in which
each reads them.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import carray

from cellrt import RowSpec
from cellrt.cells._recurrence import (
    all_below,
    gru_decode,
    gru_run,
    gru_run_inputs,
    lstm_decode,
    lstm_run,
    lstm_run_inputs,
    project_best,
)
from cellrt.cells._tree import are_offsets, child_sum_step, leaf_step, nary_step
from cellrt.definition.compiled_form import (
    DONE,
    FIRST_INPUT,
    POSITIONS,
    REFUSED,
    STEPS,
    TaskFunction,
    array_at,
    as_pointer,
    batch_sizes,
    nogil_part,
    port_address,
    read_word,
    read_words,
    start_of,
)
from cellrt.products.packed import FLOAT_BYTES, copy, project

TOKEN = RowSpec((), torch.int64)
STOP = RowSpec((), torch.bool)


@TaskFunction
def project_rows(constants, task):  # type: ignore[no-untyped-def]
    """``x`` -> its product."""
    depth, weight, bias, columns = read_words(constants, 4)
    project(port_address(task, 0), read_word(task, POSITIONS), depth, weight, bias, columns, port_address(task, 1))
    return DONE


@TaskFunction
def choose_best(constants, task):  # type: ignore[no-untyped-def]
    """``h`` -> ``token``, ``stop``."""
    units, weight, bias, columns, end_token = read_words(constants, 5)
    rows, token = read_word(task, POSITIONS), port_address(task, 1)
    project_best(port_address(task, 0), rows, units, weight, bias, columns, token)
    mark_stops(token, rows, end_token, port_address(task, 2))
    return DONE


@nogil_part
def mark_stops(token, rows, end_token, stop):  # type: ignore[no-untyped-def]
    """Write to the bytes ``stop`` whether each of the tokens ends its sequence."""
    flags = carray(as_pointer(stop), rows, np.uint8)
    for row in range(rows):
        flags[row] = read_word(token, row) == end_token


@TaskFunction
def lstm_inputs(constants, task):  # type: ignore[no-untyped-def]
    """``x``, ``h``, ``c`` -> ``h``, ``c``."""
    depth, x_weight, x_bias, weight, bias, units = read_words(constants, 6)
    x, h, c, h_out, c_out = read_words(task + 8 * FIRST_INPUT, 5)
    lstm_run_inputs(batch_sizes(task), x, depth, x_weight, x_bias, weight, bias, h, c, h_out, c_out, units)
    return DONE


@nogil_part
def _embed(table, width, token, rows):  # type: ignore[no-untyped-def]
    """Return the rows of a table, ``width`` floats each, that tokens name; a new array."""
    found = np.empty(rows * width, np.float32)
    for row in range(rows):
        copy(start_of(found) + row * width * FLOAT_BYTES, table + read_word(token, row) * width * FLOAT_BYTES, width)
    return found


@nogil_part
def _hold(array):  # type: ignore[no-untyped-def]
    """Keep an array of which only the address is used before."""
    return array.size


@TaskFunction
def lstm_embedded(constants, task):  # type: ignore[no-untyped-def]
    """``token``, ``h``, ``c`` -> ``h``, ``c``, with a table of inputs."""
    table, tokens, depth, x_weight, x_bias, weight, bias, units = read_words(constants, 8)
    token, h, c, h_out, c_out = read_words(task + 8 * FIRST_INPUT, 5)
    rows = read_word(task, POSITIONS)
    if not all_below(token, rows, tokens):
        return REFUSED
    x = _embed(table, depth, token, rows)
    lstm_run_inputs(batch_sizes(task), start_of(x), depth, x_weight, x_bias, weight, bias, h, c, h_out, c_out, units)
    _hold(x)
    return DONE


@TaskFunction
def lstm_gates(constants, task):  # type: ignore[no-untyped-def]
    """``gates``, ``h``, ``c`` -> ``h``, ``c``."""
    weight, bias, units = read_words(constants, 3)
    gates, h, c, h_out, c_out = read_words(task + 8 * FIRST_INPUT, 5)
    lstm_run(batch_sizes(task), gates, 0, weight, bias, h, c, h_out, c_out, units)
    return DONE


@TaskFunction
def lstm_tokens(constants, task):  # type: ignore[no-untyped-def]
    """``token``, ``h``, ``c`` -> ``h``, ``c``, with a table of gates."""
    table, tokens, weight, bias, units = read_words(constants, 5)
    token, h, c, h_out, c_out = read_words(task + 8 * FIRST_INPUT, 5)
    if not all_below(token, read_word(task, POSITIONS), tokens):
        return REFUSED
    lstm_run(batch_sizes(task), table, token, weight, bias, h, c, h_out, c_out, units)
    return DONE


@TaskFunction
def lstm_decoder(constants, task):  # type: ignore[no-untyped-def]
    """``token``, ``h``, ``c`` -> ``token``, ``stop``, ``h``, ``c``, with a table of gates."""
    table, tokens, weight, bias, out_weight, out_bias, end_token, units = read_words(constants, 8)
    token, h, c, token_out, stop, h_out, c_out = read_words(task + 8 * FIRST_INPUT, 7)
    sizes = batch_sizes(task)
    if not all_below(token, sizes[0], tokens):
        return REFUSED
    lstm_decode(sizes, table, token, weight, bias, out_weight, out_bias, tokens, h, c, token_out, h_out, c_out, units)
    mark_stops(token_out, read_word(task, POSITIONS), end_token, stop)
    return DONE


@TaskFunction
def gru_inputs(constants, task):  # type: ignore[no-untyped-def]
    """``x``, ``h`` -> ``h``."""
    depth, x_weight, x_bias, weight, bias, units = read_words(constants, 6)
    x, h, h_out = read_words(task + 8 * FIRST_INPUT, 3)
    gru_run_inputs(batch_sizes(task), x, depth, x_weight, x_bias, weight, bias, h, h_out, units)
    return DONE


@TaskFunction
def gru_embedded(constants, task):  # type: ignore[no-untyped-def]
    """``token``, ``h`` -> ``h``, with a table of inputs."""
    table, tokens, depth, x_weight, x_bias, weight, bias, units = read_words(constants, 8)
    token, h, h_out = read_words(task + 8 * FIRST_INPUT, 3)
    rows = read_word(task, POSITIONS)
    if not all_below(token, rows, tokens):
        return REFUSED
    x = _embed(table, depth, token, rows)
    gru_run_inputs(batch_sizes(task), start_of(x), depth, x_weight, x_bias, weight, bias, h, h_out, units)
    _hold(x)
    return DONE


@TaskFunction
def gru_gates(constants, task):  # type: ignore[no-untyped-def]
    """``gates``, ``h`` -> ``h``."""
    weight, bias, units = read_words(constants, 3)
    gates, h, h_out = read_words(task + 8 * FIRST_INPUT, 3)
    gru_run(batch_sizes(task), gates, 0, weight, bias, h, h_out, units)
    return DONE


@TaskFunction
def gru_tokens(constants, task):  # type: ignore[no-untyped-def]
    """``token``, ``h`` -> ``h``, with a table of gates."""
    table, tokens, weight, bias, units = read_words(constants, 5)
    token, h, h_out = read_words(task + 8 * FIRST_INPUT, 3)
    if not all_below(token, read_word(task, POSITIONS), tokens):
        return REFUSED
    gru_run(batch_sizes(task), table, token, weight, bias, h, h_out, units)
    return DONE


@TaskFunction
def gru_decoder(constants, task):  # type: ignore[no-untyped-def]
    """``token``, ``h`` -> ``token``, ``stop``, ``h``, with a table of gates."""
    table, tokens, weight, bias, out_weight, out_bias, end_token, units = read_words(constants, 8)
    token, h, token_out, stop, h_out = read_words(task + 8 * FIRST_INPUT, 5)
    sizes = batch_sizes(task)
    if not all_below(token, sizes[0], tokens):
        return REFUSED
    gru_decode(sizes, table, token, weight, bias, out_weight, out_bias, tokens, h, token_out, h_out, units)
    mark_stops(token_out, read_word(task, POSITIONS), end_token, stop)
    return DONE


@TaskFunction
def tree_leaf(constants, task):  # type: ignore[no-untyped-def]
    """``x`` -> ``h``, ``c``."""
    depth, weight, bias, units = read_words(constants, 4)
    x, h_out, c_out = read_words(task + 8 * FIRST_INPUT, 3)
    leaf_step(read_word(task, POSITIONS), x, depth, weight, bias, h_out, c_out, units)
    return DONE


@TaskFunction
def tree_leaf_embedded(constants, task):  # type: ignore[no-untyped-def]
    """``token`` -> ``h``, ``c``, with a table of inputs."""
    table, tokens, depth, weight, bias, units = read_words(constants, 6)
    token, h_out, c_out = read_words(task + 8 * FIRST_INPUT, 3)
    rows = read_word(task, POSITIONS)
    if not all_below(token, rows, tokens):
        return REFUSED
    x = _embed(table, depth, token, rows)
    leaf_step(rows, start_of(x), depth, weight, bias, h_out, c_out, units)
    _hold(x)
    return DONE


@TaskFunction
def tree_leaf_tokens(constants, task):  # type: ignore[no-untyped-def]
    """``token`` -> ``h``, ``c``, from the tables of both."""
    h, c, tokens, units = read_words(constants, 4)
    token, h_out, c_out = read_words(task + 8 * FIRST_INPUT, 3)
    rows, row_bytes = read_word(task, POSITIONS), units * FLOAT_BYTES
    if not all_below(token, rows, tokens):
        return REFUSED
    for row in range(rows):
        source = read_word(token, row) * row_bytes
        copy(h_out + row * row_bytes, h + source, units)
        copy(c_out + row * row_bytes, c + source, units)
    return DONE


@TaskFunction
def tree_nary(constants, task):  # type: ignore[no-untyped-def]
    """``h`` of each child, ``c`` of each child, and ``x`` if ``depth`` is not 0 -> ``h``, ``c``."""
    children, weight, bias, depth, x_weight, x_bias, units = read_words(constants, 7)
    if read_word(task, STEPS) != 1:
        return REFUSED
    states = array_at(task + 8 * FIRST_INPUT, 2 * children, np.int64)
    x, outputs = 0, 2 * children
    if depth > 0:
        x, outputs = port_address(task, outputs), outputs + 1
    rows, h_out, c_out = read_word(task, POSITIONS), port_address(task, outputs), port_address(task, outputs + 1)
    nary_step(rows, states, weight, bias, x, depth, x_weight, x_bias, h_out, c_out, units)
    return DONE


@TaskFunction
def tree_child_sum(constants, task):  # type: ignore[no-untyped-def]
    """``x`` (or ``token``, if there is a ``table``), ragged ``h`` and ``c`` -> ``h``, ``c``.

    The table is one of gates, or of inputs if ``depth`` is not 0.
    """
    depth, x_weight, x_bias, table, tokens, weight, f_weight, zeros, units = read_words(constants, 9)
    x, h, c, h_out, c_out, _, offsets, others = read_words(task + 8 * FIRST_INPUT, 8)
    rows, token = read_word(task, POSITIONS), 0
    if read_word(task, STEPS) != 1 or not are_offsets(offsets, others, rows, read_word(offsets, rows)):
        return REFUSED
    if table != 0:
        x, token = 0, x
        if not all_below(token, rows, tokens):
            return REFUSED
    embedded = _embed(table, depth, token, rows if table != 0 and depth > 0 else 0)
    if embedded.size > 0:
        x, token = start_of(embedded), 0
    child_sum_step(
        rows, x, depth, x_weight, x_bias, table, token, offsets, h, c, weight, f_weight, zeros, h_out, c_out, units
    )
    _hold(embedded)
    return DONE
