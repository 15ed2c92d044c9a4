"""The word in front of a request's results in its client's memory: whether they are there, and who waits for them.

It is one of the numbers below, or the address of the word that a thread of the client sleeps on until that is 0. The
turn that answers the request changes it to THERE and wakes that thread, without Python. A client that has others told,
as by a callback or an event loop, changes it to TO_BE_TOLD; then a turn in Python follows.

Threads of another process sleep on the word itself, which is then ASLEEP_HERE (``core/requests/region_entries.py``).
"""

from __future__ import annotations

from cellrt.native.atomics import exchange, load, store
from cellrt.native.futex import wake
from cellrt.native.jit import compiled, short_entry
from cellrt.native.memory import words_at

OPEN, THERE, TO_BE_TOLD, AT_THE_END = range(4)
"""Results are not there, and nobody waits; they are; or the client waits for Python to tell it: of each, or of several
requests that were handed in together when the last has ended."""
ASLEEP_HERE, ELSEWHERE, GIVEN_UP = range(4, 7)
"""Of a client in another process: threads sleep on the word; results come by a message; it waits for none."""


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


@compiled
def say_there_to_others(word_at: int) -> bool:
    """Say to another process that results are there, and wake its threads that sleep until then; return whether it is
    to be told. What else it wrote to its word means nothing."""
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
