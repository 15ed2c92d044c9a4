"""Captured work: that of each signature that recurs, while there is memory for them."""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cellrt.worker.blame import describe_error
from cellrt.worker.device.capturable import NotCapturableError
from cellrt.worker.device.device import Device, Work
from cellrt.worker.device.packing import Signature

MAX_COUNTED = 4096
STALE_AFTER = 1024
"""A capture that so many tasks did without gives way to another where memory is short."""


@dataclass
class Capture:
    """Work that repeats what it was captured doing, with the words that lie in ``words``."""

    words: torch.Tensor
    replay: Work
    num_bytes: int
    last_used: int
    """Of the tasks that asked for a capture, the number of the last that got this one."""


class Captures:
    """Decides which signatures are captured. Belongs to whoever runs the device's work.

    Args:
        device: that captures.
        budget_bytes: device memory that captures may take in all; 0 captures nothing.
        after: how often a signature runs before it is captured, at least 1, which warms its cell up.

    Attributes:
        counts: ``captures`` made, ``captures_refused`` by work that cannot be captured, ``captures_failed`` on the
            device, ``captures_evicted``, and tasks that were ``replayed``.
    """

    COUNTED = ("replayed", "captures", "captures_refused", "captures_failed", "captures_evicted")

    def __init__(self, device: Device, budget_bytes: int, after: int = 2) -> None:
        self._device, self._budget_bytes, self._after = device, budget_bytes, max(1, after)
        self._known: OrderedDict[Signature, Capture | None] = OrderedDict()
        """Those that cannot be captured have none; the others are in order of their last use."""
        self._seen: OrderedDict[Signature, int] = OrderedDict()
        self._num_asked = 0
        self._lost_bytes = 0
        """What captures took that failed: nobody gives it back."""
        self.counts: Counter[str] = Counter()

    @property
    def used_bytes(self) -> int:
        """Device memory that captures have taken."""
        return self._lost_bytes + sum(capture.num_bytes for capture in list(self._known.values()) if capture)

    def find(self, signature: Signature) -> Capture | None:
        """The capture of a signature, if there is one."""
        self._num_asked += 1
        capture = self._known.get(signature)
        if capture is not None:
            capture.last_used = self._num_asked
            self._known.move_to_end(signature)
            self.counts["replayed"] += 1
        return capture

    def is_due(self, signature: Signature) -> bool:
        """Counts a signature that has run without a capture; whether it should be captured now.

        Where there is no memory, captures that nobody used for long give way, if there are such.
        """
        if signature in self._known or not self._budget_bytes:
            return False
        count = self._seen.pop(signature, 0) + 1
        self._seen[signature] = count
        if len(self._seen) > MAX_COUNTED:
            self._seen.popitem(last=False)
        return count >= self._after and self._has_room()

    def make(self, signature: Signature, words: torch.Tensor, operations_of: Callable[[torch.Tensor], Work]) -> None:
        """Captures a signature's work. What cannot be captured runs as before; what loses the device raises.

        ``words`` are those of a task that has just run. No row is read and written in one task, so a device that runs
        what it captures does it no harm.
        """
        words = words.clone()
        before = self._device.memory_in_use()
        self._seen.pop(signature, None)
        self._known[signature] = None
        try:
            replay = self._device.capture(operations_of(words))
        except NotCapturableError:
            self.counts["captures_refused"] += 1
        except BaseException as error:  # the cell's own code runs meanwhile
            self._device.check()
            self._lost_bytes += max(0, self._device.memory_in_use() - before)
            self.counts["captures_failed"] += 1
            logging.getLogger("cellrt").warning("a task was not captured and runs as it is: %s", describe_error(error))
        else:
            num_bytes = max(0, self._device.memory_in_use() - before)
            self._known[signature] = Capture(words, replay, num_bytes, self._num_asked)
            self.counts["captures"] += 1

    def forget(self, type_id: int) -> None:
        """Drops the captures of a cell type that no task has; while others are found and made."""
        for signature in [signature for signature in list(self._known) if signature.type_id == type_id]:
            self._known.pop(signature, None)

    def _has_room(self) -> bool:
        """Whether the budget allows one more, for which others may be dropped."""
        for signature, capture in list(self._known.items()):
            if self.used_bytes < self._budget_bytes:
                break
            if capture is None:
                continue
            if self._num_asked - capture.last_used < STALE_AFTER:
                break
            self._known.pop(signature, None)
            self.counts["captures_evicted"] += 1
        return self.used_bytes < self._budget_bytes
