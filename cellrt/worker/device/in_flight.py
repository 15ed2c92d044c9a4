"""A task that is on a device."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cellrt.core.state.task_layout import TaskView
from cellrt.worker.base import Launch
from cellrt.worker.device import launch as compiled
from cellrt.worker.device.plans import Plan
from cellrt.worker.device.ring import Block, Ring, block_at
from cellrt.worker.failed_rows import Failures


@dataclass(slots=True)
class InFlight:
    """A task on the device; ``slots`` have its places in the rings, in the layout of ``launch.py``."""

    launch: Launch
    plan: Plan
    up: Ring
    down: Ring
    slots: NDArray[np.int64]
    begun_ns: int
    failures: Failures = field(default_factory=Failures)

    @property
    def task(self) -> TaskView:
        """The task's buffer."""
        return TaskView(self.launch.buffer)

    @property
    def up_block(self) -> Block:
        """The block of its uploads: its words first."""
        return block_at(self.slots, compiled.UP_BLOCK, len(self.plan.arrays[compiled.UP_PIECES]))

    @property
    def down_block(self) -> Block:
        """The block of its downloads: its answers last."""
        return block_at(self.slots, self.plan.down_at, len(self.plan.arrays[compiled.DOWN_PIECES]))
