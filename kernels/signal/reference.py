"""The signal in plain torch."""

from __future__ import annotations

from torch import Tensor


def signal(count: Tensor, word: Tensor) -> None:
    """Compute the operation in plain torch; arguments are not checked."""
    count += 1
    word.copy_(count, non_blocking=True)
