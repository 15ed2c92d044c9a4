"""Captured work: that of each signature that recurs, while there is memory for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cellrt.worker.device.device import Device, Work
from cellrt.worker.device.packing import Signature

MAX_COUNTED = 4096


@dataclass
class Capture:
    """Work that repeats what it was captured doing, with the words that lie in ``words``."""

    words: torch.Tensor
    replay: Work


class Captures:
    """Decides which signatures are captured. Belongs to whoever runs the device's work.

    Args:
        device: that captures.
        budget_bytes: device memory that captures may take in all; 0 captures nothing.
        after: how often a signature runs before it is captured, at least 1, which warms its cell up.
    """

    def __init__(self, device: Device, budget_bytes: int, after: int = 2) -> None:
        self._device, self._budget_bytes, self._after = device, budget_bytes, max(1, after)
        self._known: dict[Signature, Capture | None] = {}
        self._counts: OrderedDict[Signature, int] = OrderedDict()
        self._bytes: dict[Signature, int] = {}

    @property
    def used_bytes(self) -> int:
        """Device memory that captures have taken."""
        return sum(list(self._bytes.values()))

    def find(self, signature: Signature) -> Capture | None:
        """The capture of a signature, if there is one."""
        return self._known.get(signature)

    def is_due(self, signature: Signature) -> bool:
        """Counts a signature that is about to run without a capture; whether it should be captured afterwards."""
        if signature in self._known or self.used_bytes >= self._budget_bytes:
            return False
        count = self._counts.pop(signature, 0) + 1
        self._counts[signature] = count
        if len(self._counts) > MAX_COUNTED:
            self._counts.popitem(last=False)
        return count >= self._after

    def make(self, signature: Signature, words: torch.Tensor, operations_of: Callable[[torch.Tensor], Work]) -> None:
        """Captures a signature's work. What cannot be captured runs as before; what loses the device raises.

        ``words`` are those of a task that has just run. No row is read and written in one task, so a device that runs
        what it captures does it no harm.
        """
        words = words.clone()
        before = self._device.memory_in_use()
        self._counts.pop(signature, None)
        self._known[signature] = None
        try:
            self._known[signature] = Capture(words, self._device.capture(operations_of(words)))
        except BaseException:  # the cell's own code runs meanwhile
            self._device.check()
        self._bytes[signature] = max(0, self._device.memory_in_use() - before)

    def forget(self, type_id: int) -> None:
        """Drops the captures of a cell type that no task has; while others are found and made."""
        for signature in [signature for signature in list(self._known) if signature.type_id == type_id]:
            self._known.pop(signature, None)
            self._bytes.pop(signature, None)
