"""The word in front of a request's results in its client's memory: whether they are there, and who waits for them.

It is one of the numbers below, or the address of the word that a thread of the client sleeps on until that is 0. The
turn that answers the request changes it to THERE and wakes that thread, without Python. A client that has others told,
as by a callback or an event loop, changes it to TO_BE_TOLD; then a turn in Python follows.
"""

from __future__ import annotations

from cellrt.native.atomics import exchange, load, store
from cellrt.native.futex import wake
from cellrt.native.jit import compiled
from cellrt.native.memory import words_at

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
