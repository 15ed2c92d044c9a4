"""The task function of compiled steps of cells with pages or spans: calls the library by address, without Python."""

from __future__ import annotations

import numpy as np

from cellrt.definition.aot.run_step import CONTAINER, DELETE, INPUTS, RUN, SHARE, WEIGHTS, new_tensor
from cellrt.definition.compiled_form import DONE, REFUSED, TaskFunction, read_word
from cellrt.definition.task_memory import AT, DIMS, DTYPE, FIRST_TENSOR, SIZES, STRIDES, TENSOR
from cellrt.native.memory import call_status

FIRST_WEIGHT = INPUTS
"""The constants are the first of those of ``run_step.py``; then come the weights' handles."""


@TaskFunction
def run_spans(constants, task):  # type: ignore[no-untyped-def]
    """Run a step. ``task`` has the number of tensors that the library takes besides the weights, and each of them."""
    num_weights, num_tensors = read_word(constants, WEIGHTS), read_word(task, 0)
    handles = np.zeros(num_weights + num_tensors + 1, np.int64)
    each, made, has_failed = handles.ctypes.data, 0, False
    for k in range(num_weights):
        shared = (read_word(constants, FIRST_WEIGHT + k), each + 8 * made)
        has_failed |= call_status(read_word(constants, SHARE), shared) != 0
        made += 1
    for k in range(num_tensors):
        tensor = task + 8 * (FIRST_TENSOR + TENSOR * k)
        at, dtype, dims = read_word(tensor, AT), read_word(tensor, DTYPE), read_word(tensor, DIMS)
        sizes, strides = tensor + 8 * SIZES, tensor + 8 * STRIDES
        has_failed |= new_tensor(constants, at, dims, sizes, strides, dtype, each + 8 * made)
        made += 1
    returned = each + 8 * made
    if not has_failed:
        given = (read_word(constants, CONTAINER), each, np.int64(made), returned, np.int64(1), np.int64(0), np.int64(0))
        has_failed = call_status(read_word(constants, RUN), given) != 0
        handles[:made] = 0  # they were taken
    for handle in handles:
        if handle != 0:
            call_status(read_word(constants, DELETE), (handle,))
    return REFUSED if has_failed else DONE
