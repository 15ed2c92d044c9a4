"""The number of cores that this process may use, by its affinity and the CPU quotas of its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cellrt.worker.control_groups import ROOT, control_groups


def num_cores(root: Path = ROOT) -> int:
    """Return the number of cores that this process may use, at least 1; ``root`` has ``proc`` and ``sys``.

    A quota is rounded down: threads that use it up before its period is over all stand still until then.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([allowed, *map(int, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the cores of each quota that holds for this process."""
    for folder, is_v1 in control_groups("cpu", root):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
            yield _quota_v1(folder) if is_v1 else _quota_v2(folder)


def _quota_v2(group: Path) -> float:
    quota, period = (group / "cpu.max").read_text().split()
    return int(quota) / int(period)


def _quota_v1(group: Path) -> float:
    quota = int((group / "cpu.cfs_quota_us").read_text())
    if quota <= 0:
        raise ValueError("no quota")
    return quota / int((group / "cpu.cfs_period_us").read_text())
