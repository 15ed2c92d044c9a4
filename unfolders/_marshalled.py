"""Nested tuples of integers as parents and leaves, read in compiled code from how Python writes them."""

from __future__ import annotations

from typing import Any

import numpy as np

from cellrt.definition.compiled_form import nogil


@nogil
def _read_int(words: Any, at: int) -> Any:
    value = np.int64(words[at]) | np.int64(words[at + 1]) << 8
    value |= np.int64(words[at + 2]) << 16 | np.int64(words[at + 3]) << 24
    return (value ^ 0x80000000) - 0x80000000


@nogil
def _read_marshalled(words: Any, most: int, parents: Any, leaves: Any) -> tuple[int, int]:
    """Walk through what ``marshalled_tree`` reads; writes parents and leave where there is room.

    Returns (nodes, leaves): 0 nodes for anything but such tuples, ``most + 1`` as soon as there are more than ``most``.
    """
    depth_limit = words.size // 2 + 2
    nodes, left = np.empty(depth_limit, np.int32), np.empty(depth_limit, np.int32)  # open nodes and children to come
    back = np.empty(depth_limit, np.int64)  # where to go on after each of them, -1 for what follows
    seen = np.empty(depth_limit, np.int64)  # where each object is written that may come again
    left[0], nodes[0], back[0] = 1, -1, -1
    depth, size, num_leaves, num_seen, at, end = 1, 0, 0, 0, 0, 0
    while depth > 0:
        resume = -1
        if at + 5 <= words.size and words[at] == 114:  # "r": comes again
            k = _read_int(words, at + 1)
            if not 0 <= k < num_seen:
                return 0, 0
            resume, at = at + 5, seen[k]
        if at + 2 > words.size or depth >= depth_limit:
            return 0, 0
        code = words[at] & 0x7F
        is_short = code == 41  # ")": a length of one byte
        if not is_short and at + 5 > words.size:
            return 0, 0
        if words[at] & 0x80 and at >= end:
            seen[num_seen] = at
            num_seen += 1
        value = np.int64(words[at + 1]) if is_short else _read_int(words, at + 1)
        following = at + (2 if is_short else 5)
        end = max(end, following)
        if size == most:
            return most + 1, num_leaves
        if size < parents.size:
            parents[size] = nodes[depth - 1]
        left[depth - 1] -= 1
        if code == 105:  # "i"
            if num_leaves < leaves.size:
                leaves[num_leaves] = value
            num_leaves += 1
            at = resume if resume >= 0 else following
        elif (is_short or code == 40) and value > 0:  # "("
            left[depth], nodes[depth], back[depth] = value, size, resume
            depth += 1
            at = following
        else:
            return 0, 0
        size += 1
        while depth > 0 and left[depth - 1] == 0:
            depth -= 1
            at = back[depth] if back[depth] >= 0 else at
    return size, num_leaves


@nogil
def marshalled_tree(words: Any, most: int) -> tuple[Any, Any, int]:
    """Return the parents and leaves of nested tuples of integers, from the bytes of Python's ``marshal`` (version 4).

    A tuple is "(" and its length in 4 bytes, or ")" and its length in one; a small integer "i" and its value in 4
    bytes. What may come again has its highest bit set; where it does come again is "r" and its number, in order.
    Nodes are in the order in which they begin. What is shared is a node each time, so a short text may be a huge tree.

    Return (parents, leaves, nodes). The first two are empty if there are more than ``most`` nodes, which are then
    ``most + 1``. They are also empty for anything else than nested tuples, such as an empty tuple; nodes are 0 then.
    """
    none = np.empty(0, np.int32)
    size, num_leaves = _read_marshalled(words, most, none, np.empty(0, np.int64))
    if size > most:
        return none, np.empty(0, np.int64), size
    parents, leaves = np.empty(size, np.int32), np.empty(num_leaves, np.int64)
    _read_marshalled(words, most, parents, leaves)
    return parents, leaves, size
