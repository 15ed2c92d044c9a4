"""The layout of the memory that a client in another process shares with the engine.

``requests/region_entries.py`` reads it, ``process/region.py`` writes it. First come words of 8 bytes, then slots, each
for the tensors and results of one request.
"""

from __future__ import annotations

from cellrt.native.row_types import CACHE_LINE

PAGE_BYTES = 4096
WORD_BYTES = 8
_LINE = CACHE_LINE // WORD_BYTES

NUM_SLOTS = 256
SLOT_BYTES = 1 << 16
MAX_PLANS = 1 << 10
"""The most plans that a client may name at a time: number ``n`` is in row ``n % MAX_PLANS``."""

HANDED, RESTS = 0, _LINE
"""The words for the number of slots that the client has handed in; and 1 while its bell is to be rung."""
RING = 2 * _LINE
"""The first of ``NUM_SLOTS`` words: the slots that were handed in, one after the other."""
ANSWER_WORDS = RING + NUM_SLOTS
"""The first of ``NUM_SLOTS`` words: the answer of each slot (``native/answer_word.py``)."""
ENTRIES = ANSWER_WORDS + NUM_SLOTS
"""The first word of ``NUM_SLOTS`` rows, one of each slot, which say what is in it."""


ENTRY_BYTES = 32
"""A row of four words: the number of the request's plan, the client's number of it, when it came, and ``how_of``."""
SESSION_SHIFT = 8
MAX_SEATS = 1 << 12
"""The most sessions that a client may name at a time: number ``n`` is in row ``n % MAX_SEATS`` of its seats."""
NUM_WORDS = ENTRIES + NUM_SLOTS * ENTRY_BYTES // WORD_BYTES
HEAD_BYTES = -(-NUM_WORDS * WORD_BYTES // PAGE_BYTES) * PAGE_BYTES
REGION_BYTES = HEAD_BYTES + NUM_SLOTS * SLOT_BYTES


def how_of(priority: int, session: int) -> int:
    """Return the word that tells the priority of a request, and the client's number of its session, or 0."""
    return priority | session << SESSION_SHIFT


def padded(size: int) -> int:
    """Return the bytes that a tensor of this many bytes takes in a slot: results begin where a cache line does."""
    return -(-size // CACHE_LINE) * CACHE_LINE
