"""Compiled code of clients in other processes: it hands requests in, and finds those whose results are there."""

from __future__ import annotations

from cellrt.native.answer_word import ELSEWHERE, THERE
from cellrt.native.atomics import add, load, replace, store
from cellrt.native.futex import wake
from cellrt.native.jit import short_entry
from cellrt.native.row_types import Rows


@short_entry
def handed_in(
    words: Rows[int],
    slots: Rows[int],
    count: int,
    ring: int,
    num_slots: int,
    handed: int,
    turn_words: Rows[int],
    first: int,
    step: int,
    num_workers: int,
    known: int,
    value: int,
    called: int,
) -> None:
    """Hand in the first ``count`` of slots, whose requests are written, call the engine and wake a worker that rests.

    ``ring``, ``handed``: where these are among ``words`` (``core/state/region_layout.py``). ``first``,
    ``step``, ``called``: where the words of workers are among ``turn_words``, of which the first that is ``known`` is
    set to ``value``, and how often the engine was called.
    """
    end = words[handed]
    for k in range(count):
        words[ring + (end + k) % num_slots] = slots[k]
    store(words, handed, end + count)
    add(turn_words, called, 1)
    for k in range(first, first + step * num_workers, step):
        if load(turn_words, k) == known and replace(turn_words, k, known, value):
            wake(turn_words, k)
            return


@short_entry
def ended(words: Rows[int], answers: int, num_slots: int, slots: Rows[int]) -> int:
    """Write the slots to ``slots`` whose results are there, or come by a message; return how many they are."""
    count = 0
    for slot in range(num_slots):
        if load(words, answers + slot) in (THERE, ELSEWHERE):
            slots[count] = slot
            count += 1
    return count
