"""The signal: how a device tells the host, without a call, how many tasks are done (BatchMaker section 2.5).

A kernel of one thread at the end of each task adds 1 to a count and stores it to a word of pinned host memory, which
the host polls. The paper's kernel increases the pinned word itself. Here the count is in device memory, so no read and
no atomic crosses the bus: one write of 8 bytes does. The addition acquires and releases at system scope, so a reader
that sees the new count in the word sees everything the stream wrote before, results in pinned memory included.

8 bytes do not wrap in any engine's life, and an aligned write of 8 bytes is seen whole or not at all.
"""

from __future__ import annotations

import torch
from torch import Tensor

from cellrt.kernels.choose import uses_triton
from cellrt.kernels.signal import reference


def signal(count: Tensor, word: Tensor) -> None:
    """Add 1 to ``count`` and stores the sum to ``word``, on the current stream of ``count``'s device.

    Both are int64 ``[1]``; ``word`` is on the CPU, pinned if ``count`` is on a CUDA device. One stream at a time may
    signal the same count. Raise ValueError.
    """
    for name, tensor in (("count", count), ("word", word)):
        if tensor.dtype != torch.int64 or tensor.shape != (1,):
            raise ValueError(f"{name} must be int64 [1], got {tensor.dtype} {tuple(tensor.shape)}")
    if word.device.type != "cpu" or (count.is_cuda and not word.is_pinned()):
        raise ValueError("word must be in host memory, pinned if a CUDA device writes it")
    if uses_triton(count):
        from cellrt.kernels.signal import triton

        triton.signal(count, word)
    else:
        reference.signal(count, word)


class Signal:
    """A count of completed tasks: ``send`` at the end of each on the device's stream, ``completed`` from any thread.

    ``device`` is where the tasks run. On a CPU ``send`` counts at once.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.count = torch.zeros(1, dtype=torch.int64, device=device)
        self.word = torch.zeros(1, dtype=torch.int64, pin_memory=self.count.is_cuda)
        self._view = self.word.numpy()

    def send(self) -> None:
        """Put the signal behind what the current stream holds; may be captured in a CUDA graph."""
        signal(self.count, self.word)

    def completed(self) -> int:
        """Return how many signals the device has reached. This reads host memory, and calls neither torch nor CUDA."""
        return int(self._view[0])
