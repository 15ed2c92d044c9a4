"""The comparison of a compiled form's time with its module's, measured once for a library and kept beside it."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.compiled_form import DONE, CompiledForm
from cellrt.definition.computation import Computation
from cellrt.definition.examples import random_inputs
from cellrt.definition.modes import torch_threads
from cellrt.definition.spec import plain

TIMED_ROWS = (64, 512)
ROUNDS, LEAST_ROUNDS = 7, 3
LONG_S = 0.05
"""The seconds of rounds after which the least number suffices, and no larger number of rows is timed."""
CLEARLY = 1.2
EAGER_S = 15e-6
"""The approximate cost of a step without a form, beside its module's own time: 5 us in chains, 15 in loops."""

StepTimes = dict[int, tuple[float, float]]
"""The seconds of the module and of the form, by rows."""


def check_that_it_pays(cell: Computation, form: CompiledForm, library: Path) -> None:
    """Raise NotCompiledError if the form is clearly slower than the module at all numbers of rows that were timed.

    Cells of one library and one ``max_batch`` get one answer: times that were kept are read again.
    """
    kept = library.with_suffix(f".times{min(TIMED_ROWS[-1], cell.max_batch)}")
    times = _read(kept)
    if times is None:
        times = _measure(cell, form)
        _write(kept, times)
    if times and all(_is_slower(*each) for each in times.values()):
        told = [
            f"{1e6 * form_s:,.0f} us, and the module {1e6 * module_s:,.0f}, for {rows} rows"
            for rows, (module_s, form_s) in times.items()
        ]
        raise NotCompiledError(Reason.SLOWER, "; ".join(told))


def _is_slower(module_s: float, form_s: float) -> bool:
    return form_s > CLEARLY * (module_s + EAGER_S)


@torch.inference_mode()
def _measure(cell: Computation, form: CompiledForm) -> StepTimes:
    """Return the times by rows.

    The smallest number of rows suffices if the form is not slower there; there are no times if either does not take the
    rows. Times are the processor's time of this thread, with one thread of torch, as compiled code has: neither other
    threads nor other processes lengthen it by having the interpreter's lock or the core. Of several rounds in turns the
    least is taken.
    """
    times: StepTimes = {}
    with torch_threads(1):
        for rows in sorted({min(rows, cell.max_batch) for rows in TIMED_ROWS}):
            try:
                inputs = random_inputs(cell.inputs.values(), rows, torch.Generator().manual_seed(0))
                call, _ = form.bind(rows, dict(zip(cell.inputs, map(plain, inputs))))
                if call() != DONE:
                    return {}
                least = _least_of_rounds(lambda given=inputs: cell.run_step(*given), call)  # type: ignore[misc]
            except Exception:  # this many rows may be more than there is memory
                return {}
            times[rows] = least
            if not _is_slower(*least) or max(least) > LONG_S:
                break
    return times


def _least_of_rounds(module: Callable[[], object], form: Callable[[], object]) -> tuple[float, float]:
    """Return the least time of each over rounds in which they take turns."""
    least, spent = [float("inf")] * 2, 0.0
    for number in range(ROUNDS):
        for which, run in enumerate((module, form)):
            start = time.thread_time()
            run()
            took = time.thread_time() - start
            least[which], spent = min(least[which], took), spent + took
        if number + 1 >= LEAST_ROUNDS and spent > LONG_S:
            break
    return least[0], least[1]


def _read(kept: Path) -> StepTimes | None:
    with suppress(OSError, ValueError, TypeError, AttributeError):
        return {
            int(rows): (float(module), float(form)) for rows, (module, form) in json.loads(kept.read_text()).items()
        }
    return None


def _write(kept: Path, times: StepTimes) -> None:
    """Write the times atomically, unless the folder is read-only, as in an image."""
    partial = kept.with_suffix(f"{kept.suffix}.{os.getpid()}")
    with suppress(OSError):
        partial.write_text(json.dumps(times))
        os.replace(partial, kept)
