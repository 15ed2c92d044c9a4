"""The lengths of a program: programs that differ in them alone share a template.

*Lengths* are the numbers of steps of chains and loops, from two on, and of rows of the request's tensors; equal numbers
are one length. A program with lengths is *shortened*: of these steps and rows only the first and the last remain, the
only ones that it may name, and its lengths are numbered. So programs that differ in their lengths alone become equal,
and share one template (``sums.py``). A program that names steps in between has no lengths, and neither has one that
lists values of each step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cellrt.core.templates.program import (
    EACH,
    EMITTED,
    LEADS,
    OP_CHAIN,
    OP_EXTERNAL,
    OP_RESULT_STEPS,
    RANGE,
    STEP,
    Draft,
    find_makers,
    num_values,
)
from cellrt.core.templates.sums import MOST_LENGTHS, MOST_SUMS
from cellrt.native.jit import compiled, making

Lengths = NDArray[np.int32]
"""The lengths of one program, ``[lengths]``, in order of their first use."""

MOST_WORDS = 1024
"""The most words of a program with lengths: the template of a longer one, such as a tree's, would not be used again."""
MOST_SPACED = 512
"""The most evenly spaced values, other than steps, in a program with lengths: ``sums.py`` has room for no more."""
BETWEEN = -2
"""The id of a value that a shortened program does not have."""


@compiled
def _number(lengths: Lengths, length: int) -> int:
    """Return -1 minus the number of a length; any other number is returned unchanged."""
    for k in range(lengths.size):
        if lengths[k] == length:
            return -1 - k
    return length


@making
def _collect_lengths(draft: Draft) -> Lengths:
    """Return the lengths of a program; none if they are too many."""
    lengths, count = np.zeros(MOST_LENGTHS, np.int32), 0
    for k in range(-draft.sources.size, draft.units.size):
        length = draft.units[k].length if k >= 0 else draft.sources[-1 - k].length
        if length > 1 and _number(lengths[:count], length) > 0:
            if count == MOST_LENGTHS:
                return lengths[:0]
            lengths[count] = length
            count += 1
    return lengths[:count]


@compiled
def _length_of_maker(draft: Draft, value: int) -> int:
    """Return how many steps or rows the maker of a value has, or 0 if it has no length."""
    maker, count = draft.makers[value], 0
    if maker < 0 and draft.sources[-1 - maker].op == OP_EXTERNAL:
        count = draft.sources[-1 - maker].length
    elif maker >= 0 and draft.units[maker].op == OP_CHAIN:
        count = draft.units[maker].length
    return count if count > 1 else 0


@compiled
def _width_of_maker(draft: Draft, value: int) -> int:
    """Return how many values each step of a value's maker has."""
    maker = draft.makers[value]
    return 1 if maker < 0 else draft.types[draft.units[maker].cell_type].num_outputs


@making
def _new_ids(draft: Draft) -> NDArray[np.int32]:
    """Return the id of each value in the shortened program, or BETWEEN."""
    ids = np.full(draft.makers.size, BETWEEN, np.int32)
    first = end = 0
    for value in range(ids.size):
        if draft.makers[value] != draft.makers[first]:
            first = value
        length, width, place = _length_of_maker(draft, value), _width_of_maker(draft, value), value - first
        if length == 0 or place < width or place >= (length - 1) * width:
            ids[value] = end
            end += 1
    return ids


@compiled
def _is_kept(ids: NDArray[np.int32], value: int) -> bool:
    """Return whether a value is in the shortened program; -1 is none."""
    return value < 0 or ids[value] != BETWEEN


@compiled
def _is_run_kept(draft: Draft, base: int, stride: int, count: int) -> bool:
    """Return whether evenly spaced values are all steps of their maker, or none of them is a step.

    Else they would be others with other lengths, or might reach beyond their maker: as the outputs of one step do, if
    they happen to be as many as there are steps.
    """
    if count < 2:
        return True
    last, length = base + (count - 1) * stride, _length_of_maker(draft, base)
    if length > 0:
        is_of_one = draft.makers[base] == draft.makers[last] and length == count
        return bool(is_of_one and abs(stride) == _width_of_maker(draft, base))
    for value in range(min(base, last), max(base, last) + 1):
        if _length_of_maker(draft, value) > 0:
            return False
    return count <= MOST_SPACED


@compiled
def _are_inputs_kept(draft: Draft, ids: NDArray[np.int32]) -> bool:
    """Return whether the inputs would be the same with other lengths."""
    for unit in range(draft.units.size):
        operation = draft.units[unit]
        is_long = operation.op == OP_CHAIN and operation.length > 1
        for at in range(operation.input, operation.input + draft.types[operation.cell_type].num_inputs):
            given = draft.inputs[at]
            if not _is_kept(ids, given.first) or not _is_kept(ids, given.value) or (is_long and given.mode == EACH):
                return False
            if given.mode in (STEP, RANGE, LEADS):
                if not _is_run_kept(draft, given.first, given.stride, given.count):
                    return False
                if given.mode == STEP and given.count > 1 and _length_of_maker(draft, given.first) == 0:
                    return False
            for k in range(given.count if given.listed >= 0 else 0):
                if not _is_kept(ids, draft.listed[given.listed + k]):
                    return False
    return True


@compiled
def _are_others_kept(draft: Draft, ids: NDArray[np.int32]) -> bool:
    """Return whether all other operations that name values would be the same with other lengths."""
    for k in range(draft.sources.size):
        if not _is_kept(ids, draft.sources[k].start):
            return False
    for k in range(draft.results.size + draft.keeps.size):
        names = draft.results[k] if k < draft.results.size else draft.keeps[k - draft.results.size]
        if not _is_kept(ids, names.first) or not _is_kept(ids, names.state):
            return False
        if names.op != OP_RESULT_STEPS and not _is_run_kept(draft, names.first, names.stride, names.length):
            return False
    return True


@compiled
def _shorten_inputs(draft: Draft, ids: NDArray[np.int32], lengths: Lengths) -> None:
    for at in range(draft.inputs.size):
        given = draft.inputs[at]
        is_run = given.mode in (RANGE, LEADS) and _length_of_maker(draft, given.first) > 0
        if is_run or given.mode in (STEP, EMITTED):
            given.count = _number(lengths, given.count)
        given.first = ids[given.first] if given.first >= 0 else -1
        given.value = ids[given.value] if given.value >= 0 else -1
    for k in range(draft.listed.size):
        draft.listed[k] = ids[draft.listed[k]]


@compiled
def _shorten_others(draft: Draft, ids: NDArray[np.int32], lengths: Lengths) -> None:
    for k in range(draft.results.size + draft.keeps.size):
        names = draft.results[k] if k < draft.results.size else draft.keeps[k - draft.results.size]
        if names.op == OP_RESULT_STEPS or _length_of_maker(draft, names.first) > 0:
            names.length = _number(lengths, names.length)
        names.first = ids[names.first]
        names.state = ids[names.state] if names.state >= 0 else -1
    for k in range(-draft.sources.size, draft.units.size):
        makes = draft.units[k] if k >= 0 else draft.sources[-1 - k]
        makes.start = ids[makes.start] if makes.start >= 0 else -1
        makes.value = ids[makes.value] if num_values(makes, draft.types) > 0 else 0
        makes.length = _number(lengths, makes.length)


@making
def shorten(draft: Draft) -> Lengths:
    """Shorten a program in place, but for its makers; return its lengths. A program without lengths stays unchanged."""
    lengths: Lengths = _collect_lengths(draft)
    if lengths.size == 0:
        return lengths
    ids = _new_ids(draft)
    if not _are_inputs_kept(draft, ids) or not _are_others_kept(draft, ids):
        return lengths[:0]
    _shorten_inputs(draft, ids, lengths)
    _shorten_others(draft, ids, lengths)
    return lengths


@making
def with_sums(draft: Draft) -> Draft:
    """Return a shortened program as it is compiled: with its makers, and room for sums."""
    types, ports, units, sources, results, keeps, pages, inputs, listed, layers, _, steps, _ = draft
    makers, sums = find_makers(units, sources, types), np.empty(MOST_SUMS, np.int64)
    sums[0] = 0
    return Draft(types, ports, units, sources, results, keeps, pages, inputs, listed, layers, makers, steps, sums)


@making
def key_of(draft: Draft) -> NDArray[np.int32]:
    """Return the words that programs share which differ in their lengths alone: the whole shortened program."""
    units, sources, results, keeps, pages = draft.units, draft.sources, draft.results, draft.keeps, draft.pages
    sizes = np.array((units.size, sources.size, results.size, keeps.size, pages.size)).astype(np.int32)
    makers = np.concatenate((sizes, units.view(np.int32), sources.view(np.int32)))
    others = np.concatenate((results.view(np.int32), keeps.view(np.int32), pages.view(np.int32)))
    return np.concatenate((makers, others, draft.inputs.view(np.int32), draft.listed, draft.layers))
