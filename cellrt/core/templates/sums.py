"""Numbers that depend on the lengths of a program: a constant plus multiples of lengths, packed into one integer.

Sums are added, multiplied with constants and compared as any integers are, as a length is two or more and above every
constant that it is compared with. So the compiler of graphs (``template.py``) treats them as numbers, and for a program
without lengths they are numbers. A 32-bit word has no room for a sum that is not a constant: until all words are there
it holds the sum's place among ``Sums``.

In a program a length is named by -1 minus its number. So many steps or rows have two value ids there: those of the
first and the last (``lengths.py``).
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellrt.native.jit import compiled, making

MOST_LENGTHS = 4
"""The most lengths of a program; one with more is compiled without lengths, as so many seldom recur."""
CONSTANT_BITS, FACTOR_BITS = 20, 11
"""The bits of the constant and of each factor, all signed: more than a program of MOST_WORDS needs."""
END = 1 << (CONSTANT_BITS - 1)
"""The least number that is no constant."""
IN_SUMS = 1 << 30
"""The number that is added to the place among the sums; no other word of a template is so large."""
MOST_SUMS = 1 << 12

Sum: TypeAlias = Any
"""An integer of 64 bits; Numba's and NumPy's count too."""
Sums = NDArray[np.int64]
"""The number of sums, then the sums.

It is empty for a program without lengths. It is full if a part of the template is no sum, or if there are too many.
"""


@compiled
def sum_of(length: int) -> Sum:
    """Return the sum that stands for a length of a program."""
    return np.int64(length) if length >= 0 else np.int64(1) << (CONSTANT_BITS + FACTOR_BITS * (-1 - length))


@compiled
def steps_of(length: int) -> int:
    """Return how many steps or rows have value ids, where a program has this length."""
    return length if length >= 0 else 2


@compiled
def position_of(length: int, step: int) -> Sum:
    """Return the position of a step, of those that have value ids."""
    return sum_of(length) - 1 if length < 0 and step > 0 else step


@compiled
def give_up(sums: Sums) -> None:
    """Record that a part of the template is no sum, so that programs with other lengths are compiled by themselves."""
    if sums.size > 0:
        sums[0] = sums.size


@compiled
def has_sums(sums: Sums) -> bool:
    """Return whether all of the template is sums."""
    return sums.size == 0 or sums[0] < sums.size


@compiled
def word_of(sums: Sums, number: Sum) -> int:
    """Return the word that stands for a sum until the end."""
    if sums.size == 0 or -END <= number < END:
        return int(number)
    if sums[0] + 1 >= sums.size:
        give_up(sums)
        return 0
    sums[0] += 1
    sums[sums[0]] = number
    return int(IN_SUMS + sums[0])


@compiled
def sum_in(sums: Sums, word: int) -> Sum:
    """Return the sum that a word stands for."""
    return sums[word - IN_SUMS] if sums.size > 0 and word >= IN_SUMS else word


@compiled
def split(number: Sum, parts: NDArray[np.int64]) -> None:
    """Write the constant of a sum and its factors."""
    bits = CONSTANT_BITS
    for k in range(parts.size):
        parts[k] = ((number + (1 << (bits - 1))) & ((1 << bits) - 1)) - (1 << (bits - 1))
        number = (number - parts[k]) >> bits
        bits = FACTOR_BITS


@making
def words_of(sums: Sums, numbers: NDArray[np.int64]) -> NDArray[np.int32]:
    """Return the words that stand for the sums of a table."""
    words = np.empty(numbers.shape, np.int32)
    for k in range(numbers.shape[0]):
        for column in range(numbers.shape[1]):
            words[k, column] = word_of(sums, numbers[k, column])
    return words


@making
def take_out(sums: Sums, memory: NDArray[np.int32], num_lengths: int) -> NDArray[np.int32]:
    """Take the sums out of a template's memory; return the patches.

    A patch is the place of a word that depends on lengths, its constant, and its factors.
    """
    count = 0
    for at in range(memory.size if sums.size > 0 else 0):
        count += memory[at] >= IN_SUMS
    patches, parts, end = np.zeros((count, 2 + num_lengths), np.int32), np.zeros(1 + num_lengths, np.int64), 0
    for at in range(memory.size if count > 0 else 0):
        if memory[at] >= IN_SUMS:
            split(sum_in(sums, memory[at]), parts)
            patches[end, 0], memory[at] = at, parts[0]
            patches[end, 1:] = parts
            end += 1
    return patches
