"""Checks of the offsets and sources of an acyclic graph, in one compiled call."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cellrt.native.jit import short_entry


@short_entry
def is_dag(offsets: NDArray[np.int32], sources: NDArray[np.int32]) -> bool:
    """Return whether ``why_no_dag`` has nothing to say; offsets are two or more."""
    size = offsets.size - 1
    if offsets[0] != 0 or offsets[size] != sources.size:
        return False
    for node in range(size):
        if offsets[node + 1] < offsets[node] or offsets[node + 1] > sources.size:
            return False
        for k in range(offsets[node], offsets[node + 1]):
            if sources[k] < 0 or sources[k] >= node:
                return False
    return True


def why_no_dag(offsets: NDArray[np.integer], sources: NDArray[np.integer]) -> str:
    """Return why ``is_dag`` refuses these offsets and sources, or why they do not fit into 32 bits."""
    if offsets[0] != 0:
        return f"offsets begin with {int(offsets[0])}; expected 0"
    falling = np.flatnonzero(offsets[1:] < offsets[:-1])
    if falling.size:
        node = int(falling[0])
        begin, end = int(offsets[node]), int(offsets[node + 1])
        return f"node {node}: expected offsets that do not decrease, got {begin} and then {end}"
    if offsets[-1] != sources.size:
        return f"offsets end with {int(offsets[-1])}; expected {sources.size}, as many as there are sources"
    readers = np.repeat(np.arange(offsets.size - 1), (offsets[1:] - offsets[:-1]).astype(np.int64))
    wrong = int(np.flatnonzero((sources < 0) | (sources >= readers))[0])
    reader, source = int(readers[wrong]), int(sources[wrong])
    what = "itself" if source == reader else f"node {source}"
    expected = f"a node before it, from 0 to {reader - 1}" if reader else "no sources, as no node comes before it"
    return f"node {reader} reads {what}; expected {expected}"
