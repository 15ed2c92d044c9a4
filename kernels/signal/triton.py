"""The signal in Triton.

The addition returns the old count, from which the stored value is made, and acquires: so the store cannot come
before it, nor before what the addition releases. ``.wt`` writes through the caches to host memory.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def signal_kernel(p_count, p_word):
    """Add 1 to the count, and write the sum to the word."""
    before = tl.atomic_add(p_count, 1, sem="acq_rel", scope="sys")
    tl.store(p_word, before + 1, cache_modifier=".wt")


def signal(count: Tensor, word: Tensor) -> None:
    """Launch the kernel; arguments are as in the operation, and are not checked."""
    signal_kernel[(1,)](count, word, num_warps=1)
