"""Chooses the number of replicas by how long requests wait before their first task."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

QUEUEING, BUSY = "queueing_s", "busy"
"""The names of what replicas report: seconds from arrival to first task, and the share of time workers computed."""
MOST_AT_ONCE = 2.0
"""Replicas are at most doubled at once."""
FULL = 0.7
"""The share of their time that workers may be busy, after one replica less."""


@dataclass(frozen=True)
class Scaling:
    """Between which limits the number of replicas follows the load.

    Attributes:
        min_replicas, max_replicas: the limits.
        queueing_s: how long requests may wait before their first task; beyond, there are more replicas.
        up_after_s, down_after_s: for how long it must be so before replicas are added, or taken away.
    """

    min_replicas: int = 1
    max_replicas: int = 4
    queueing_s: float = 0.05
    up_after_s: float = 5.0
    down_after_s: float = 300.0


def wanted(num: int, queueing_s: Sequence[float], busy: Sequence[float], target_s: float) -> float:
    """Return the number of replicas to have, given the reports of ``num`` replicas.

    Ask for more as soon as the requests of one wait too long; for one less if the others have time for its work.
    """
    if queueing_s and max(queueing_s) > target_s:
        return num * min(MOST_AT_ONCE, max(queueing_s) / target_s)
    if num > 1 and len(busy) == num and sum(busy) < FULL * (num - 1):
        return num - 1
    return num


class QueueingPolicy:
    """A policy of Ray Serve's autoscaler. ``target_s``: how long requests may wait before their first task."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s

    def __call__(self, context: Any) -> tuple[float, dict[str, Any]]:
        """Return the number of replicas, and nothing to keep; ``context``: Ray's ``AutoscalingContext``."""
        metrics: Mapping[str, Mapping[Any, float]] = context.aggregated_metrics or {}
        queueing, busy = (list(metrics.get(name, {}).values()) for name in (QUEUEING, BUSY))
        return wanted(context.current_num_replicas, queueing, busy, self._target_s), {}


class Load:
    """The report of a replica about the time since the last report, from its engine's counters."""

    def __init__(self) -> None:
        self._waited_s = self._busy_s = self._at_s = 0.0
        self._num_done = 0

    def look(self, counts: Mapping[str, Any], now_s: float) -> dict[str, float]:
        """``queueing_s`` and ``busy``; ``counts``: as ``Engine.statistics`` has them.

        While none is done and nodes are ready that no worker takes, requests wait since the last look at least.
        """
        done = [model["histograms"]["queueing"] for model in counts["models"].values()]
        waited_s, num_done = sum(each["sum_s"] for each in done), sum(sum(each["counts"]) for each in done)
        busy_s = sum(worker["busy_s"] for worker in counts["workers"].values())
        since_s = now_s - self._at_s if self._at_s else 0.0
        queueing_s = 0.0
        if num_done > self._num_done:
            queueing_s = (waited_s - self._waited_s) / (num_done - self._num_done)
        elif counts["unfinished"] and any(cell["ready"] for cell in counts["cells"].values()):
            queueing_s = since_s
        busy = (busy_s - self._busy_s) / (since_s * max(1, len(counts["workers"]))) if since_s else 0.0
        self._waited_s, self._num_done, self._busy_s, self._at_s = waited_s, num_done, busy_s, now_s
        return {QUEUEING: queueing_s, BUSY: busy}
