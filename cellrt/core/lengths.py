"""What of a program is its lengths, so that programs that differ in them alone share a template.

*Lengths* are the steps of chains and loops, from two on, and the rows of the request's tensors; equal ones are one.
Value ids depend on the lengths of what was created before. So a value is named by its operation and its place there,
which counts from the first step or, in what has a length, from the last; a program that uses steps in between has no
lengths, and neither has one that lists values of each step.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cellrt.core.jit import allocating, compiled
from cellrt.core.program import (
    CARRY,
    EACH,
    EMITTED,
    FIXED,
    LAST,
    LEADS,
    LIST,
    NEXT,
    OP_CHAIN,
    OP_EXTERNAL,
    OP_KEEP,
    OP_LOOP,
    OP_MEMBER,
    OP_NODE,
    OP_RESULT,
    OP_RESULT_LAST,
    OP_RESULT_STEPS,
    OP_STATE,
    RANGE,
    SAME,
    STEP,
    inputs_at,
    next_input,
    next_operation,
)

MOST_LENGTHS = 4
"""A program with more has none: what many lengths have in common is seldom met twice."""

MOST_WORDS = 1024
"""So has a longer program, such as that of a tree: it would be compiled several times for nobody."""

PLAIN, VALUE, LENGTH = range(3)
"""What a word is: itself, a value's id, a length."""


@compiled
def _count_makers(program, types):
    """Operations that make values; -1 if a chain lists the values of each of its steps."""
    at = count = 0
    while at < program.size:
        op = program[at]
        if op == OP_CHAIN and program[at + 2] > 1:
            word = inputs_at(program, at)
            for _ in range(types[program[at + 1]].num_inputs):
                if program[word] == EACH:
                    return -1
                word = next_input(program, word)
        at, num_values = next_operation(program, at, types)
        count += 1 if num_values > 0 else 0
    return count


@compiled
def _find_makers(program, types, firsts, steps, widths):
    """Of each operation that makes values its first one, how many steps they are of, 0 if it has no length, and how
    many there are of each."""
    at = maker = value = 0
    while at < program.size:
        op = program[at]
        after, num_values = next_operation(program, at, types)
        if num_values > 0:
            count = program[at + 2] if op in (OP_EXTERNAL, OP_CHAIN) else 0
            firsts[maker], steps[maker] = value, count if count > 1 else 0
            widths[maker] = num_values // max(1, count)
            maker += 1
        at, value = after, value + num_values


@compiled
def _maker_of(firsts, value):
    """The operation that makes a value."""
    low, high = 0, firsts.size
    while high - low > 1:
        middle = (low + high) // 2
        if firsts[middle] <= value:
            low = middle
        else:
            high = middle
    return low


@compiled
def _mark_length(program, at, kinds):
    """Marks a length; of one alone much is different."""
    if program[at] > 1:
        kinds[at] = LENGTH


@compiled
def _mark_run(program, at, count_at, count, firsts, steps, widths, kinds):
    """Marks the base at ``at`` of evenly spaced values, and their number at ``count_at`` unless that is below 0. False
    if it would be another with other lengths, or might reach beyond what makes them: as the outputs of one step do,
    where they happen to be as many as there are steps."""
    kinds[at] = VALUE
    if count < 2:
        return True
    base, stride = program[at], program[at + 1]
    first, last = _maker_of(firsts, base), _maker_of(firsts, base + (count - 1) * stride)
    if steps[first] > 0:
        if first != last or steps[first] != count or abs(stride) != widths[first]:
            return False
        if count_at >= 0:
            kinds[count_at] = LENGTH
        return True
    for maker in range(min(first, last), max(first, last) + 1):
        if steps[maker] > 0:
            return False
    return count_at >= 0


@compiled
def _mark_inputs(program, at, types, firsts, steps, widths, kinds):
    """Marks the inputs of a unit; False if they would be others with other lengths."""
    word = inputs_at(program, at)
    for _ in range(types[program[at + 1]].num_inputs):
        mode = program[word]
        if mode in (FIXED, CARRY, NEXT, SAME):
            kinds[word + 1] = VALUE
        elif mode == LAST:
            kinds[word + 1] = kinds[word + 2] = VALUE
        elif mode == EMITTED:
            kinds[word + 1] = VALUE
            _mark_length(program, word + 2, kinds)
        elif mode in (LIST, EACH):
            kinds[word + 2 : word + 2 + program[word + 1]] = VALUE
        elif mode in (RANGE, LEADS):
            if not _mark_run(program, word + 1, word + 3, program[word + 3], firsts, steps, widths, kinds):
                return False
        elif mode == STEP and not _mark_run(program, word + 1, -1, program[at + 2], firsts, steps, widths, kinds):
            return False
        word = next_input(program, word)
    return True


@compiled
def _mark(program, types, firsts, steps, widths, kinds):
    """Says what each word is; False if the program has no lengths."""
    at = 0
    while at < program.size:
        op = program[at]
        after, _ = next_operation(program, at, types)
        if op in (OP_NODE, OP_CHAIN, OP_LOOP, OP_MEMBER):
            if op != OP_NODE:
                _mark_length(program, at + 2, kinds)
            if not _mark_inputs(program, at, types, firsts, steps, widths, kinds):
                return False
        elif op == OP_EXTERNAL:
            _mark_length(program, at + 2, kinds)
        elif op == OP_STATE:
            if program[at + 2] >= 0:
                kinds[at + 2] = VALUE
        elif op == OP_RESULT_LAST:
            kinds[at + 1] = VALUE
        elif op == OP_RESULT_STEPS:
            kinds[at + 1] = VALUE
            _mark_length(program, at + 2, kinds)
        elif op == OP_RESULT:
            if not _mark_run(program, at + 1, at + 3, program[at + 3], firsts, steps, widths, kinds):
                return False
        elif op == OP_KEEP:
            kinds[at + 1] = VALUE
            if not _mark_run(program, at + 2, at + 4, program[at + 4], firsts, steps, widths, kinds):
                return False
        at = after
    return True


@compiled
def _number_of(lengths, num_lengths, length):
    """The number of a length; -1 if it is new."""
    for k in range(num_lengths):
        if lengths[k] == length:
            return k
    return -1


@allocating
def find_lengths(program, types):
    """Returns (key, lengths): programs of one key, an int32 array, differ in their lengths alone. No lengths if the
    program has none; then the key is empty too."""
    none = np.zeros(0, np.int32)
    count = _count_makers(program, types) if program.size <= MOST_WORDS else 0
    if count < 1:
        return none, none
    firsts, steps, widths = np.zeros(count, np.int32), np.zeros(count, np.int32), np.zeros(count, np.int32)
    _find_makers(program, types, firsts, steps, widths)
    kinds = np.zeros(program.size, np.uint8)
    if not _mark(program, types, firsts, steps, widths, kinds):
        return none, none
    key, lengths = np.zeros(2 * program.size, np.int32), np.zeros(MOST_LENGTHS, np.int32)
    end = num_lengths = 0
    for at in range(program.size):
        word = program[at]
        if kinds[at] == LENGTH:
            number = _number_of(lengths, num_lengths, word)
            if number < 0:
                if num_lengths == MOST_LENGTHS:
                    return none, none
                number, lengths[num_lengths], num_lengths = num_lengths, word, num_lengths + 1
            word = -1 - number
        elif kinds[at] == VALUE:
            maker = _maker_of(firsts, word)
            place = word - firsts[maker]
            if steps[maker] > 0:
                from_end = place - (steps[maker] - 1) * widths[maker]
                if place >= widths[maker] and from_end < 0:
                    return none, none
                place = -1 - from_end if from_end >= 0 else place
            key[end], word, end = maker, place, end + 1
        key[end], end = word, end + 1
    return key[:end].copy(), lengths[:num_lengths].copy()


@allocating
def with_lengths(program, types, lengths, others):
    """A program that has ``lengths``, with others in their place."""
    count = _count_makers(program, types)
    firsts, steps, widths = np.zeros(count, np.int32), np.zeros(count, np.int32), np.zeros(count, np.int32)
    _find_makers(program, types, firsts, steps, widths)
    kinds, made = np.zeros(program.size, np.uint8), program.copy()
    _mark(program, types, firsts, steps, widths, kinds)
    for at in range(program.size):
        if kinds[at] == LENGTH:
            made[at] = others[_number_of(lengths, lengths.size, program[at])]
    new_firsts, new_steps = np.zeros(count, np.int32), np.zeros(count, np.int32)
    _find_makers(made, types, new_firsts, new_steps, widths)
    for at in range(program.size):
        if kinds[at] == VALUE:
            maker = _maker_of(firsts, program[at])
            place = program[at] - firsts[maker]
            if steps[maker] > 0 and place >= widths[maker]:
                place += (new_steps[maker] - steps[maker]) * widths[maker]
            made[at] = new_firsts[maker] + place
    return made


Lengths = NDArray[np.int32]
"""``[lengths]``, those of one program, in order of their first use."""
