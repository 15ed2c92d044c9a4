"""Which form of a cell's step is faster on a device, its fused or its plain one, measured when its model is registered.

Both are timed on the device's own clock, without what their launches cost the host: what recurs is captured, and then
costs it the same.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from cellrt.worker.device.device import Work
from cellrt.worker.device.placement import PlacedCell

NUM_SAMPLES = 3
"""How often each form runs to be timed, after a first time that is not; the fastest counts."""


def choose_form(placed: PlacedCell, sizes: Sequence[int], elapsed: Callable[[Work], float]) -> None:
    """Times both forms of steps of so many rows of zeros, and has all tasks use the faster one, for good.

    ``elapsed`` runs work and returns the seconds that the device had it. A cell that has but one form, or whose options
    name one, is left as it is; so is one that raises, as it may refuse zeros, and one that was timed before.
    """
    if placed.run_rows is None or not placed.is_measured or placed.has_times:
        return
    fused: dict[int, float] = {}
    plain: dict[int, float] = {}
    try:
        for rows in sizes:
            fused[rows] = _fastest(placed.fused_step(rows), elapsed)
            plain[rows] = _fastest(placed.plain_step(rows), elapsed)
    except KeyboardInterrupt:
        raise
    except BaseException:  # whatever a cell raises
        return
    placed.keep_times(fused, plain)
    logging.getLogger("cellrt").info("measured %r", placed)


def _fastest(step: Callable[[], object], elapsed: Callable[[Work], float]) -> float:
    def work() -> None:
        step()

    return min([elapsed(work) for _ in range(1 + NUM_SAMPLES)][1:])
