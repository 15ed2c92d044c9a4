"""Captured programs: one for each layout that recurs, while there is memory for them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cellrt.worker.device.device import Device, Work
from cellrt.worker.device.task_plan import Layout

MAX_COUNTED = 4096


@dataclass
class Capture:
    """A program that repeats what it was captured doing, with the words that lie in ``words``."""

    words: torch.Tensor
    replay: Work


class Captures:
    """Decides which layouts are captured. Belongs to whoever runs the device's work.

    Args:
        device: that captures.
        budget_bytes: device memory that captures may take in all; 0 captures nothing.
        after: how often a layout runs before it is captured, at least 1, which warms its cell up.
    """

    def __init__(self, device: Device, budget_bytes: int, after: int = 2) -> None:
        self._device, self._budget_bytes, self._after = device, budget_bytes, max(1, after)
        self._known: dict[Layout, Capture | None] = {}
        self._counts: OrderedDict[Layout, int] = OrderedDict()
        self.used_bytes = 0

    def find(self, layout: Layout) -> Capture | None:
        """The capture of a layout, if there is one."""
        return self._known.get(layout)

    def is_due(self, layout: Layout) -> bool:
        """Counts a layout that is about to run without a capture; whether it should be captured afterwards."""
        if layout in self._known or self.used_bytes >= self._budget_bytes:
            return False
        count = self._counts.pop(layout, 0) + 1
        self._counts[layout] = count
        if len(self._counts) > MAX_COUNTED:
            self._counts.popitem(last=False)
        return count >= self._after

    def make(self, layout: Layout, words: torch.Tensor, program_of: Callable[[torch.Tensor], Work]) -> None:
        """Captures a layout's program. What cannot be captured runs as before; what loses the device raises.

        ``words`` are those of a task that has just run. No row is read and written in one task, so a device that runs
        what it captures does it no harm.
        """
        words = words.clone()
        before = self._device.memory_in_use()
        self._counts.pop(layout, None)
        self._known[layout] = None
        try:
            self._known[layout] = Capture(words, self._device.capture(program_of(words)))
        except BaseException:  # the cell's own code runs meanwhile
            self._device.check()
        self.used_bytes += max(0, self._device.memory_in_use() - before)
