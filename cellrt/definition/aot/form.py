"""The compiled form of any cell: its step is exported, compiled, loaded, and compared with the module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numba
import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.definition.aot.compiled_spans import span_form, try_span_form
from cellrt.definition.aot.library import Library
from cellrt.definition.aot.pays import check_that_it_pays
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.aot.run_step import MOST_DIMS, run_step
from cellrt.definition.aot.step_program import with_tied
from cellrt.definition.aot.store import Compiled, LibraryStore
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.computation import Computation, count_rows
from cellrt.definition.examples import random_inputs
from cellrt.definition.exported import LEAST_VALUES
from cellrt.definition.mixing_trials import row_of
from cellrt.definition.modes import workers_modes
from cellrt.definition.row_wise import is_close
from cellrt.definition.snapshot import weights_of
from cellrt.definition.spec import CellInput, RowSpec, copy_input

TRIED_ROWS = (1, 1, 2, 7, 16)
NAME = "AOTInductor"
SAME = 1e-6
"""The tolerance for two calls of a module, relative to an output's largest value: threads add up in varying order."""


def compile_cells(
    cells: Sequence[Computation],
    store: LibraryStore,
    note_compiling: Callable[[], object] = lambda: None,
    must_pay: bool = True,
) -> Iterator[CompiledForm | Exception]:
    """Yield the form of each cell, compiled now unless the store has it, or the error: mostly NotCompiledError.

    Args:
        cells, store: the cells, and where their libraries are.
        note_compiling: called, often, while a cell is compiled; not while one is found and loaded.
        must_pay: leaves out forms that are clearly slower than their modules, as ``pays.py`` finds.
    """
    refusals = [_refusal(cell) for cell in cells]
    wanted = [cell for cell, refusal in zip(cells, refusals) if refusal is None]
    found = store.compile(wanted, note_compiling) if wanted else iter(())
    for cell, refusal in zip(cells, refusals):
        made = next(found) if refusal is None else refusal
        try:
            yield made if isinstance(made, NotCompiledError) else _load(cell, made, must_pay)
        except Exception as error:  # an error of torch costs this cell's form alone
            yield error


def compile_cell(cell: Computation, store: LibraryStore) -> CompiledForm:
    """Return the form of one cell, however slow. Raise NotCompiledError with the reason if there is none."""
    (made,) = compile_cells([cell], store, must_pay=False)
    if isinstance(made, Exception):
        raise made
    return made


def _refusal(cell: Computation) -> NotCompiledError | None:
    """Return the reason for which compiling a cell need not be tried, if there is one."""
    if numba.config.DISABLE_JIT:
        return NotCompiledError(Reason.NO_JIT)
    unseen = [name for name in cell.finite if cell.outputs[name].dtype != torch.float32]
    return NotCompiledError(Reason.FINITE, str(unseen)) if unseen else None


@workers_modes()
def _load(cell: Computation, made: Compiled, must_pay: bool) -> CompiledForm:
    """Return the form of a compiled cell, if it gives the module's results, and is not slower than it if it must pay.

    Cells with pages or spans are not timed: their attention and products are ours.
    """
    library = Library(made.library, with_tied(tuple(weights_of(cell.module).values()), made.tied), made.packed)
    if cell.has_spans:
        of_spans = span_form(cell, library, made.least_rows, NAME)
        return of_spans._replace(is_batch_invariant=try_span_form(cell, of_spans))
    form = CompiledForm(run_step, cell.inputs, cell.outputs, _constants(cell, made, library), library, NAME)
    form = form._replace(is_batch_invariant=_try(cell, form))
    if must_pay:
        check_that_it_pays(cell, form, made.library)
    return form


def _constants(cell: Computation, made: Compiled, library: Library) -> NDArray[np.int64]:
    """Return the constants of the form's task function, in the layout of ``run_step.py``."""
    words = [*library.step_words(), len(cell.inputs), len(cell.outputs)]
    words += [made.least_rows, LEAST_VALUES, made.has_equal_values]
    for name, spec in cell.inputs.items():
        words += _port(spec, library, cell.output_index[cell.carry[name]] if name in cell.carry else -1)
    for spec in cell.outputs.values():
        words += _port(spec, library, -1)
    return np.array([*words, *library.handles], np.int64)


def _port(spec: RowSpec, library: Library, source: int) -> list[int]:
    sizes = [0, *spec.shape]
    strides = torch.empty(2, *spec.shape, device="meta").stride()
    if len(sizes) > MOST_DIMS:
        raise NotCompiledError(Reason.NOT_COMPILED, f"rows of {len(spec.shape)} dimensions")
    padding = [0] * (MOST_DIMS - len(sizes))
    words = [library.dtype_number(spec.dtype), int(spec.ragged), source, spec.num_bytes, len(sizes)]
    return [*words, *sizes, *padding, *strides, *padding]


@torch.inference_mode()
def _try(cell: Computation, form: CompiledForm) -> bool:
    """Return whether rows give the same bits alone and together.

    Raise NotCompiledError if they do not give the module's results. Integers may differ once: a comparison of two
    numbers
    may depend on rounding.
    """
    generator = torch.Generator().manual_seed(0)
    is_invariant, differing = True, Counter[str]()
    for rows in (count for count in TRIED_ROWS if count <= cell.max_batch):
        inputs = random_inputs(cell.inputs.values(), rows, generator)
        together, by_module = _run(cell, form, inputs), _run_module(cell, inputs)
        if not all(map(_is_equal, by_module, _run_module(cell, inputs))):
            raise NotCompiledError(Reason.OTHER_RESULTS_AGAIN)
        for name, value, expected in zip(cell.outputs, together, by_module):
            if not is_close(value, expected):
                differing[name] += 2 if value.is_floating_point() else 1
        for row in range(rows):
            alone = _run(cell, form, [row_of(value, row) for value in inputs])
            is_invariant &= all(torch.equal(a[0], b[row]) for a, b in zip(alone, together))
    if wrong := [name for name, count in differing.items() if count > 1]:
        raise NotCompiledError(Reason.OTHER_RESULTS, f"outputs {wrong}")
    return is_invariant


def _run(cell: Computation, form: CompiledForm, inputs: Sequence[CellInput]) -> list[torch.Tensor]:
    outputs = form.run(count_rows(inputs[0]), dict(zip(cell.inputs, inputs)))
    if outputs is None:
        raise NotCompiledError(Reason.OTHER_RESULTS, "it refused rows that the module takes")
    return [outputs[name] for name in cell.outputs]


def _run_module(cell: Computation, inputs: Sequence[CellInput]) -> list[torch.Tensor]:
    try:
        return cell.run_step(*map(copy_input, inputs))
    except Exception as error:
        raise NotCompiledError(Reason.NOT_TRIED, f"{type(error).__name__}: {error}") from error


def _is_equal(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Return whether two calls on the same rows gave the same results, but for the last bits."""
    first, second = first.double(), second.double()
    largest = first.nan_to_num(0.0, 0.0, 0.0).abs().amax() if first.numel() else 0.0
    return torch.allclose(first, second, rtol=0.0, atol=SAME * float(largest), equal_nan=True)
