"""The word before a request's results in its client's memory: it says whether they are there, and how a client waits.

It is one of the numbers below, or the address of another word, on which a thread of the client sleeps until that is 0.
The turn that answers the request changes it to THERE and wakes that thread, without Python. If a callback or an event
loop waits, the client changes it to TO_BE_TOLD; then a turn in Python notifies these.

Threads of another process sleep on the word itself, which is then ASLEEP_HERE (``core/requests/region_entries.py``).
"""

from __future__ import annotations

from cellrt.native.atomics import exchange, load, store
from cellrt.native.futex import wake
from cellrt.native.jit import compiled, short_entry
from cellrt.native.memory import words_at

OPEN, THERE, TO_BE_TOLD, AT_THE_END = range(4)
"""OPEN: results are not there, and no thread waits. THERE: they are there. TO_BE_TOLD: Python must notify the client of
each request. AT_THE_END: Python must notify it when the last of several requests has ended."""
ASLEEP_HERE, ELSEWHERE, GIVEN_UP = range(4, 7)
"""The values of a client in another process. ASLEEP_HERE: threads sleep on the word. ELSEWHERE: results come by a
message. GIVEN_UP: no thread waits any more."""


@compiled
def say_there(word_at: int) -> bool:
    """Say that all results are there, and wake the thread that waits; return whether Python must notify the client."""
    waits = exchange(words_at(word_at, 1, 1)[0], 0, THERE)
    if waits > AT_THE_END:
        its = words_at(waits, 1, 1)[0]
        store(its, 0, 0)
        wake(its, 0)
    return bool(waits in (TO_BE_TOLD, AT_THE_END))


@compiled
def is_each_told(word_at: int) -> bool:
    """Return whether Python must notify the client of each of several requests."""
    return bool(load(words_at(word_at, 1, 1)[0], 0) == TO_BE_TOLD)


@compiled
def say_there_to_others(word_at: int) -> bool:
    """Say to another process that results are there, and wake its threads that wait.

    Return whether the process must be notified. Any other value that it wrote to the word is ignored.
    """
    word = words_at(word_at, 1, 1)[0]
    waits = exchange(word, 0, THERE)
    if waits == ASLEEP_HERE:
        wake(word, 0)
    return bool(waits == TO_BE_TOLD)


@short_entry
def say_elsewhere(word_at: int) -> None:
    """Say to another process that results come by a message."""
    word = words_at(word_at, 1, 1)[0]
    exchange(word, 0, ELSEWHERE)
    wake(word, 0)
