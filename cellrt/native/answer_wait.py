"""Wait for the results of a request, by the word before them (``answer_word.py``)."""

from __future__ import annotations

from cellrt.native.answer_word import ASLEEP_HERE, ELSEWHERE, GIVEN_UP, OPEN, THERE, TO_BE_TOLD
from cellrt.native.atomics import load, replace
from cellrt.native.clocks import now_ns
from cellrt.native.futex import SPIN_NS, relax, sleep, wake
from cellrt.native.jit import entry, short_entry
from cellrt.native.memory import words_at
from cellrt.native.row_types import Rows


@short_entry
def is_there(word_at: int) -> bool:
    """Return whether results are there."""
    return bool(load(words_at(word_at, 1, 1)[0], 0) == THERE)


@entry
def comes_soon(word_at: int) -> bool:
    """Poll for results for a while, in place of a short sleep; return whether they are there.

    Python's other threads go on meanwhile.
    """
    word, end_ns = words_at(word_at, 1, 1)[0], now_ns() + SPIN_NS
    while load(word, 0) != THERE:
        if now_ns() > end_ns:
            return False
        relax()
    return True


@short_entry
def have_told(word_at: int) -> bool:
    """Have Python notify the client; return whether results are there already: then it does not."""
    word = words_at(word_at, 1, 1)[0]
    while True:
        known = load(word, 0)
        if known in (THERE, TO_BE_TOLD, ELSEWHERE) or replace(word, 0, known, TO_BE_TOLD):
            return bool(known == THERE)


@entry
def sleep_until_there(word_at: int, own: Rows[int], at: int, limit_ns: int) -> None:
    """Sleep until results are there, or the thread's own word, which was set to 1 before, changes; at most so long.

    If two threads wait for one word, Python wakes both.
    """
    word, own_at = words_at(word_at, 1, 1)[0], own.ctypes.data + 8 * at
    while True:
        known = load(word, 0)
        if known == THERE:
            return
        wanted = own_at if known == OPEN else TO_BE_TOLD
        if known in (own_at, TO_BE_TOLD) or replace(word, 0, known, wanted):
            break
    sleep(own, at, 1, limit_ns)


@short_entry
def stop_waiting(word_at: int, own: Rows[int], at: int) -> None:
    """Note in the word that the thread no longer waits for results."""
    replace(words_at(word_at, 1, 1)[0], 0, own.ctypes.data + 8 * at, OPEN)


@entry
def sleep_here(word_at: int, id_at: int, id: int, limit_ns: int) -> None:
    """Sleep on a word itself until results are there or come by a message, or ``rouse`` is called; at most so long.

    Return at once if the word belongs to another request by now: if the word at ``id_at`` is not ``id``.
    """
    word = words_at(word_at, 1, 1)[0]
    known = load(word, 0)
    if known == OPEN:
        known = ASLEEP_HERE if replace(word, 0, OPEN, ASLEEP_HERE) else load(word, 0)
    if known in (ASLEEP_HERE, TO_BE_TOLD) and load(words_at(id_at, 1, 1)[0], 0) == id:
        sleep(word, 0, known, limit_ns)


@short_entry
def rouse(word_at: int) -> None:
    """Wake the threads that sleep on a word, and let none sleep there any more."""
    word = words_at(word_at, 1, 1)[0]
    while True:
        known = load(word, 0)
        if known in (THERE, ELSEWHERE, GIVEN_UP) or replace(word, 0, known, GIVEN_UP):
            wake(word, 0)
            return


@short_entry
def is_elsewhere(word_at: int) -> bool:
    """Return whether results come by a message."""
    return bool(load(words_at(word_at, 1, 1)[0], 0) == ELSEWHERE)
