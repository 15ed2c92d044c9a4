"""How many threads torch's operations use, thread by thread."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

HOST_THREADS = 1
"""Of whoever calls compiled functions for a device: torch makes other functions for another number."""


def use_torch_threads(count: int) -> None:
    """Sets the number for the calling thread, for good; threads that begin later get it too, unless they set theirs."""
    # At its first operation a thread takes over the number that any thread set last; asking for it is an operation.
    torch.get_num_threads()
    torch.set_num_threads(count)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """The calling thread uses so many inside, and as many as before after."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
