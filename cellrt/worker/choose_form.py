"""The choice between a cell's fused and plain form on a device, by times that are measured at registration.

For runs it is the choice between single steps and the author's ``steps``. Steps are timed on the device's own clock,
without the host's cost of their launches: recurring work is captured, and then costs the host the same. An author's run
gets its sizes on the host, so hardly any is like another; it is timed with the host's cost of its calls.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from cellrt.worker.device.device import Work
from cellrt.worker.device.placement import EXAMPLE_ROWS, PlacedCell

NUM_SAMPLES = 3
"""The number of timed runs of each form, after a first one that is not timed; the fastest counts."""

NUM_STEPS = 8
"""The steps of an author's run."""


def choose_form(placed: PlacedCell, sizes: Sequence[int], elapsed: Callable[[Work], float]) -> None:
    """Time both forms of steps of this many rows of zeros, and let all tasks use the faster one from now on.

    ``elapsed`` runs work and returns its seconds on the device. A cell that has but one form, or whose options name
    one, is
    left as it is; so is one that raises, as it may refuse zeros, and one that was timed before.
    """
    if placed.run_rows is None or not placed.is_measured or placed.has_times:
        return
    fused: dict[int, float] = {}
    plain: dict[int, float] = {}
    try:
        for rows in sizes:
            fused[rows] = fastest(placed.fused_step(rows), elapsed)
            plain[rows] = fastest(placed.plain_step(rows), elapsed)
    except KeyboardInterrupt:
        raise
    except BaseException:  # whatever a cell raises
        return
    placed.keep_times(fused, plain)
    logging.getLogger("cellrt").info("measured %r", placed)


def choose_runs(placed: PlacedCell, elapsed: Callable[[Work], float], wait: Callable[[], object]) -> None:
    """Time a run of zeros by its author's ``steps``, and as many single steps; let runs go the faster way from now on.

    ``wait`` returns when the device has done this thread's work. A cell without ``steps`` is left as it is, and so is
    one
    with ragged inputs, spans or pages, one that raises, and one that was timed before.
    """
    cell = placed.cell
    is_by_row = not cell.has_spans and not any(spec.ragged for spec in cell.inputs.values())
    if not cell.has_steps or not is_by_row or placed.goes_by_steps is not None:
        return
    rows = cell.batch_sizes[-1] if cell.batch_sizes else min(EXAMPLE_ROWS, cell.max_batch)
    try:
        steps_s = NUM_STEPS * fastest(placed.example_step(rows), elapsed)
        run = placed.authors_run(rows, NUM_STEPS)
        run_s = min([_wall_time(run, wait) for _ in range(1 + NUM_SAMPLES)][1:])
    except KeyboardInterrupt:
        raise
    except BaseException:  # whatever a cell raises
        return
    placed.goes_by_steps = steps_s < run_s
    said = "cell %r: %d steps of %d rows %.1f us captured, by its own method %.1f us"
    logging.getLogger("cellrt").info(said, cell.name, NUM_STEPS, rows, 1e6 * steps_s, 1e6 * run_s)


def _wall_time(run: Callable[[], object], wait: Callable[[], object]) -> float:
    wait()
    start = time.perf_counter()
    run()
    wait()
    return time.perf_counter() - start


def fastest(step: Callable[[], object], elapsed: Callable[[Work], float]) -> float:
    """Return the least seconds on the device of a few runs of a step, which has run before."""

    def work() -> None:
        step()

    return min([elapsed(work) for _ in range(1 + NUM_SAMPLES)][1:])
