"""Writes a task's words, in compiled code."""

from __future__ import annotations

from numba import njit


def _pack_words(words, buffer, copies, ranges):  # type: ignore[no-untyped-def]
    """Copies (word, where in the buffer, how many, how many with the padding, padding or -2: repeat the last), then
    ranges (word, first number, how many, how many with the padding, which repeats the last)."""
    for k in range(copies.shape[0]):
        at, source, count, padded, pad = copies[k]
        for j in range(count):
            words[at + j] = buffer[source + j]
        if pad == -2 and padded > count:
            pad = words[at + count - 1]
        for j in range(count, padded):
            words[at + j] = pad
    for k in range(ranges.shape[0]):
        at, first, count, padded = ranges[k]
        for j in range(padded):
            words[at + j] = first + min(j, count - 1)


pack_words = njit(cache=True)(_pack_words)
