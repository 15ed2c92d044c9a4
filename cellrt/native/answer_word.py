"""The word in front of a request's results in its client's memory: whether they are there, and who waits for them.

It is one of the numbers below, or the address of the word that a thread of the client sleeps on until that is 0. The
turn that answers the request changes it to THERE and wakes that thread, without Python. A client that has others told,
as by a callback or an event loop, changes it to TO_BE_TOLD; then a turn in Python follows.
"""

from __future__ import annotations

from cellrt.native.atomics import exchange, load, replace, store
from cellrt.native.futex import sleep, wake
from cellrt.native.jit import compiled, entry, short_entry
from cellrt.native.memory import words_at
from cellrt.native.row_types import Rows

OPEN, THERE, TO_BE_TOLD, AT_THE_END = range(4)
"""Results are not there, and nobody waits; they are; or the client waits for Python to tell it: of each, or of several
requests that were handed in together when the last has ended."""


@compiled
def say_there(word_at: int) -> bool:
    """Say that all results are there, and wake the thread that sleeps until then; return whether Python must tell the
    client."""
    waits = exchange(words_at(word_at, 1, 1)[0], 0, THERE)
    if waits > AT_THE_END:
        its = words_at(waits, 1, 1)[0]
        store(its, 0, 0)
        wake(its, 0)
    return bool(waits in (TO_BE_TOLD, AT_THE_END))


@compiled
def is_each_told(word_at: int) -> bool:
    """Return whether Python must tell the client of each of several requests."""
    return bool(load(words_at(word_at, 1, 1)[0], 0) == TO_BE_TOLD)


@short_entry
def is_there(word_at: int) -> bool:
    """Return whether results are there."""
    return bool(load(words_at(word_at, 1, 1)[0], 0) == THERE)


@short_entry
def have_told(word_at: int) -> bool:
    """Have Python tell the client; return whether results are there already, and nobody will."""
    word = words_at(word_at, 1, 1)[0]
    while True:
        known = load(word, 0)
        if known in (THERE, TO_BE_TOLD) or replace(word, 0, known, TO_BE_TOLD):
            return bool(known == THERE)


@entry
def sleep_until_there(word_at: int, own: Rows[int], at: int, limit_ns: int) -> None:
    """Sleep until results are there, or the thread's own word, which was set to 1 before, changes; at most so long.

    Two threads at a time are woken in Python.
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
    """Take back that a thread sleeps until results are there."""
    replace(words_at(word_at, 1, 1)[0], 0, own.ctypes.data + 8 * at, OPEN)
