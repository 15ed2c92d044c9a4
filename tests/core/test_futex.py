"""Threads that sleep until a word changes: they are woken, and none sleeps through it."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from cellrt.native.answer_wait import comes_soon, have_told, is_there, sleep_until_there, stop_waiting
from cellrt.native.answer_word import OPEN, THERE, TO_BE_TOLD, say_there
from cellrt.native.futex import NEVER, NS, SPIN_NS, roused, slept, woken
from cellrt.native.jit import entry
from cellrt.native.row_types import Rows
from tests.waiting import WAIT_S, until

ASLEEP, AWAKE = 1, 0


@entry
def answered(word_at: int) -> bool:
    """What a turn does when results are there."""
    return say_there(word_at)


@pytest.fixture
def words() -> Rows[int]:
    """A thread's word, and a client's."""
    return np.array([ASLEEP, OPEN], np.int64)  # type: ignore[return-value]


def client_word(words: Rows[int]) -> int:
    return int(words.ctypes.data) + 8


def sleeping(words: Rows[int], word_at: int = 0, limit_ns: int = NEVER) -> threading.Thread:
    """A thread that sleeps on its word, or until results are there."""

    def sleep() -> None:
        if word_at:
            sleep_until_there(word_at, words, 0, limit_ns)
        else:
            slept(words, 0, ASLEEP, limit_ns)

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    return thread


def ends(thread: threading.Thread) -> bool:
    thread.join(WAIT_S)
    return not thread.is_alive()


def test_one_that_sleeps_is_woken_by_whoever_changes_its_word(words):
    thread = sleeping(words)
    assert woken(words, 0, ASLEEP, AWAKE)
    assert ends(thread) and words[0] == AWAKE
    assert not woken(words, 0, ASLEEP, AWAKE)


def test_a_word_that_has_changed_is_not_slept_on(words):
    roused(words, 0, AWAKE)
    assert ends(sleeping(words))


def test_sleep_ends_after_its_time(words):
    begin_s = time.monotonic()
    assert ends(sleeping(words, limit_ns=NS // 50))
    assert time.monotonic() - begin_s >= 0.02 and words[0] == ASLEEP


def test_results_wake_the_thread_that_waits_for_them(words):
    thread = sleeping(words, client_word(words))
    until(lambda: words[1] == words.ctypes.data, "it says that it waits")
    assert not answered(client_word(words))
    assert ends(thread) and words[1] == THERE and is_there(client_word(words))


def test_who_looks_for_results_sees_them_or_gives_up_soon(words):
    begin_s = time.monotonic()
    assert not comes_soon(client_word(words))
    assert time.monotonic() - begin_s >= SPIN_NS / NS and words[1] == OPEN
    assert not answered(client_word(words))
    assert comes_soon(client_word(words))


def test_results_that_are_there_are_not_waited_for(words):
    assert not answered(client_word(words))
    assert ends(sleeping(words, client_word(words)))
    assert have_told(client_word(words))


def test_who_is_to_be_told_by_python_is_not_woken_without(words):
    thread = sleeping(words, client_word(words))
    until(lambda: words[1] != OPEN, "it says that it waits")
    assert not have_told(client_word(words))
    assert words[1] == TO_BE_TOLD
    assert answered(client_word(words)) and is_there(client_word(words))
    assert woken(words, 0, ASLEEP, AWAKE) and ends(thread)


def test_two_threads_that_wait_are_told_by_python(words):
    others = np.array([ASLEEP], np.int64)
    threads = [sleeping(words, client_word(words))]
    until(lambda: words[1] != OPEN, "the first waits")
    other = threading.Thread(target=lambda: sleep_until_there(client_word(words), others, 0, NEVER), daemon=True)
    other.start()
    until(lambda: words[1] == TO_BE_TOLD, "the second waits")
    assert answered(client_word(words))
    for its in (words, others):
        assert woken(its, 0, ASLEEP, AWAKE)
    assert ends(threads[0]) and ends(other)


def test_who_waits_no_longer_is_not_woken(words):
    sleep_until_there(client_word(words), words, 0, 0)
    stop_waiting(client_word(words), words, 0)
    assert words[1] == OPEN
    assert not answered(client_word(words)) and words[0] == ASLEEP
