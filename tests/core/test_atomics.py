"""Words that threads change at once: one step is whole, and what was written before it is seen."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numba
import numpy as np

from cellrt.native.atomics import load, replace, replaced, store, stored
from cellrt.native.jit import entry
from cellrt.native.row_types import Rows

HELD, COUNT = 0, 8  # in cache lines of their own


@entry
def count_alone(words: Rows[int], times: int) -> None:
    for _ in range(times):
        while load(words, HELD) != 0 or not replace(words, HELD, 0, 1):
            pass
        words[COUNT] += 1
        store(words, HELD, 0)


def test_threads_that_take_a_word_in_turns_lose_no_count() -> None:
    words, times = np.zeros(16, np.int64), 100 if numba.config.DISABLE_JIT else 50_000
    count_alone(words, 0)
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(lambda _: count_alone(words, times), range(2)))
    assert words[HELD] == 0 and words[COUNT] == 2 * times


def test_python_takes_a_word_that_is_the_one_known_and_no_other() -> None:
    words = np.zeros(2, np.int64)
    assert replaced(words, 1, 0, 5) and not replaced(words, 1, 0, 6)
    assert words.tolist() == [0, 5]
    stored(words, 1, 0)
    assert words.tolist() == [0, 0]
