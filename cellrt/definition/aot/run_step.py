"""The task function of every form that AOTInductor compiled: calls its library by address, without Python.

A library takes and returns handles of tensors. The handles of the weights live as long as the form; a call gets new
references to them, and new tensors over the rows of its inputs and outputs, and the library releases both.
"""

from __future__ import annotations

import numpy as np

from cellrt.definition.compiled_form import (
    DONE,
    REFUSED,
    TaskFunction,
    array_at,
    batch_sizes,
    nogil_part,
    port_address,
    read_word,
)
from cellrt.definition.task_memory import FIRST_INPUT
from cellrt.native.memory import call_status, copy_bytes

# The form's constants: addresses of C functions and of the container, counts, then the ports, the weights' handles.
RUN, CREATE, SHARE, DELETE, CONTAINER, WEIGHTS, INPUTS, OUTPUTS, LEAST_ROWS, LEAST_VALUES, HAS_EQUAL_VALUES = range(11)
FIRST_PORT = 11

# A port, which is an input or an output: how its tensor is made. The first size is the number of rows; the strides
# follow the sizes.
DTYPE, RAGGED, SOURCE, ROW_BYTES, DIMS, SIZES = range(6)
MOST_DIMS = 8
PORT = SIZES + 2 * MOST_DIMS

# A port in a call, in int64 words: where its rows lie, how many, and the offsets of a ragged one, or 0.
AT, COUNT, OFFSETS, PLACE = range(4)

INT64 = 4  # torch's number of the dtype


@nogil_part
def new_tensor(constants, at, dims, sizes, strides, dtype, handle):  # type: ignore[no-untyped-def]
    """Write the handle of a new tensor over memory of the CPU to ``handle``; return whether that failed."""
    word, none, index = np.int64(0), np.int32(0), np.int32(-1)
    given = (at, dims, sizes, strides, word, np.int32(dtype), none, index, handle, none, word, word)
    return call_status(read_word(constants, CREATE), given) != 0


@nogil_part
def _call(constants, places, rows):  # type: ignore[no-untyped-def]
    """Run the library on the tensors at ``places``; return whether that failed."""
    num_weights, num_inputs = read_word(constants, WEIGHTS), read_word(constants, INPUTS)
    num_ports = num_inputs + read_word(constants, OUTPUTS)
    handles = np.zeros(num_weights + num_inputs + num_ports + 1, np.int64)
    sizes = np.ones(MOST_DIMS, np.int64)
    each, sizes_at = handles.ctypes.data, sizes.ctypes.data
    first_weight, made, has_failed = FIRST_PORT + PORT * num_ports, 0, False
    for k in range(num_weights):
        shared = (read_word(constants, first_weight + k), each + 8 * made)
        has_failed |= call_status(read_word(constants, SHARE), shared) != 0
        made += 1
    for k in range(num_ports):
        port = constants + 8 * (FIRST_PORT + PORT * k)
        dims, strides = read_word(port, DIMS), port + 8 * (SIZES + MOST_DIMS)
        for dim in range(1, dims):
            sizes[dim] = read_word(port, SIZES + dim)
        sizes[0] = places[k, COUNT]
        has_failed |= new_tensor(
            constants, places[k, AT], dims, sizes_at, strides, read_word(port, DTYPE), each + 8 * made
        )
        made += 1
        if places[k, OFFSETS] != 0:
            sizes[0] = rows + 1
            # A stride of 1 is that of any last dimension.
            last = strides + 8 * (dims - 1)
            has_failed |= new_tensor(constants, places[k, OFFSETS], 1, sizes_at, last, INT64, each + 8 * made)
            made += 1
    returned = each + 8 * made
    if not has_failed:
        given = (read_word(constants, CONTAINER), each, np.int64(made), returned, np.int64(1), np.int64(0), np.int64(0))
        has_failed = call_status(read_word(constants, RUN), given) != 0
        handles[:made] = 0  # they were taken
    for handle in handles:
        if handle != 0:
            call_status(read_word(constants, DELETE), (handle,))
    return has_failed


@nogil_part
def _find(constants, task, step, before, first, rows, places, offsets):  # type: ignore[no-untyped-def]
    """Write the places of a step's rows.

    The step begins at position ``first``, and the step before at ``before``. Each ragged input gets offsets from 0 on,
    ``[rows + 2]`` numbers of ``offsets``. Return whether the library can take the step as it is, or needs more rows.
    """
    num_inputs, num_ports = read_word(constants, INPUTS), places.shape[0]
    is_enough = rows >= read_word(constants, LEAST_ROWS)
    for k in range(num_ports):
        port = constants + 8 * (FIRST_PORT + PORT * k)
        size, source = read_word(port, ROW_BYTES), read_word(port, SOURCE)
        places[k, COUNT], places[k, OFFSETS] = rows, 0
        if source >= 0 and step > 0:
            places[k, AT] = port_address(task, num_inputs + source) + before * size
        elif source >= 0:
            places[k, AT] = port_address(task, k)
        elif read_word(port, RAGGED) == 0:
            places[k, AT] = port_address(task, k) + first * size
        else:
            given = array_at(read_word(task, FIRST_INPUT + num_ports + k) + 8 * first, rows + 1, np.int64)
            own = offsets[k * (rows + 2) : (k + 1) * (rows + 2)]
            for row in range(rows + 1):
                own[row] = given[row] - given[0]
            places[k, AT] = port_address(task, k) + given[0] * size
            places[k, COUNT], places[k, OFFSETS] = own[rows], own.ctypes.data
            is_enough &= own[rows] >= read_word(constants, LEAST_VALUES)
    return is_enough


@nogil_part
def _call_with_more(constants, places, rows):  # type: ignore[no-untyped-def]
    """Run the library with one more row, a copy of the first, with two values of zeros in each ragged input.

    Return whether that failed.
    """
    num_inputs, num_ports, num_bytes = read_word(constants, INPUTS), places.shape[0], 0
    more = places.copy()
    for k in range(num_ports):
        more[k, COUNT] += 2 if places[k, OFFSETS] != 0 else 1
        num_bytes += more[k, COUNT] * read_word(constants, FIRST_PORT + PORT * k + ROW_BYTES)
    memory = np.zeros(num_bytes, np.uint8)
    at = memory.ctypes.data
    for k in range(num_ports):
        size = read_word(constants, FIRST_PORT + PORT * k + ROW_BYTES)
        more[k, AT] = at
        if k < num_inputs:
            copy_bytes(at, places[k, AT], places[k, COUNT] * size)
            if places[k, OFFSETS] == 0:
                copy_bytes(at + rows * size, places[k, AT], size)
            else:
                offsets = array_at(places[k, OFFSETS], rows + 2, np.int64)
                offsets[rows + 1] = offsets[rows] + 2
        at += more[k, COUNT] * size
    has_failed = _call(constants, more, rows + 1)
    for k in range(num_inputs, num_ports):
        copy_bytes(places[k, AT], more[k, AT], rows * read_word(constants, FIRST_PORT + PORT * k + ROW_BYTES))
    return has_failed or memory.size != num_bytes  # which keeps the memory until here


@nogil_part
def _have_equal_values(constants, places):  # type: ignore[no-untyped-def]
    """Return whether all ragged inputs have the same number of values, if they must."""
    found = -1
    for k in range(read_word(constants, INPUTS) if read_word(constants, HAS_EQUAL_VALUES) != 0 else 0):
        if places[k, OFFSETS] != 0:
            if found >= 0 and places[k, COUNT] != found:
                return False
            found = places[k, COUNT]
    return True


@TaskFunction
def run_step(constants, task):  # type: ignore[no-untyped-def]
    """Run a task, step by step; return DONE or REFUSED."""
    sizes, num_inputs = batch_sizes(task), read_word(constants, INPUTS)
    places = np.empty((num_inputs + read_word(constants, OUTPUTS), PLACE), np.int64)
    offsets = np.empty(num_inputs * (sizes[0] + 2), np.int64)
    before = first = 0
    for step in range(sizes.size):
        rows = sizes[step]
        if rows < 1:
            return REFUSED
        is_enough = _find(constants, task, step, before, first, rows, places, offsets)
        if not _have_equal_values(constants, places):
            return REFUSED
        if _call(constants, places, rows) if is_enough else _call_with_more(constants, places, rows):
            return REFUSED
        before, first = first, first + rows
    return DONE if offsets.size >= 0 else REFUSED  # which keeps the offsets until here
