"""AOTInductor's form of a cell with pages or spans, and its comparison with the module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from cellrt.definition.aot.library import Library
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.aot.run_spans import run_spans
from cellrt.definition.computation import Computation, count_rows
from cellrt.definition.examples import random_nodes
from cellrt.definition.row_wise import is_close
from cellrt.definition.span_form import SpanForm
from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput, RaggedRows, copy_input
from cellrt.errors import DefinitionError

TRIED = ((1, 1, 0), (1, 1, 5), (1, 4, 3), (3, 1, 9), (4, 3, 2), (16, 1, 17))
"""The nodes, the rows of each, and the rows before them, with which a form is tried."""


def span_form(cell: Computation, library: Library, least_rows: int, origin: str) -> SpanForm:
    """Return the form of a cell with a library. Raise NotCompiledError for inputs that it cannot take."""
    if least_rows > 1 and any(spec.ragged for spec in cell.inputs.values()):
        raise NotCompiledError(Reason.FIXED_ROWS)
    constants = np.array([*library.step_words(), *library.handles], np.int64)
    what = run_spans, cell.inputs, cell.outputs, constants, library
    try:
        return SpanForm.of(*what, dtype_number=library.dtype_number, least_rows=least_rows, origin=origin)
    except DefinitionError as error:
        raise NotCompiledError(Reason.NOT_COMPILED, str(error)) from None


@torch.inference_mode()
def try_span_form(cell: Computation, form: SpanForm) -> bool:
    """Return whether rows give the same bits with any other rows of the batch.

    Raise NotCompiledError if outputs, or appended rows, are not the module's.
    """
    generator = torch.Generator().manual_seed(0)
    is_invariant, wrong = True, Counter[str]()
    for nodes, rows, before in TRIED:
        if nodes * rows > min(cell.max_batch_rows or nodes * rows, cell.max_batch * rows):
            continue
        inputs = random_nodes(cell.inputs.values(), nodes, rows, before, generator)
        expected, expected_pages = _outcome(cell, inputs, None)
        together, pages = _outcome(cell, inputs, form)
        for name, value, other in zip(cell.outputs, together, expected):
            if not is_close(value, other):
                wrong[name] += 2 if value.is_floating_point() else 1
        for name, value, other in zip(expected_pages, pages.values(), expected_pages.values()):
            wrong[name] += 0 if is_close(value, other) else 2
        for node in range(nodes if nodes > 1 else 0):
            alone, _ = _outcome(cell, [_of_node(value, node, rows) for value in inputs], form)
            own = slice(node * rows, (node + 1) * rows)
            is_invariant &= all(torch.equal(one, value[own]) for one, value in zip(alone, together))
    if names := [name for name, count in wrong.items() if count > 1]:
        raise NotCompiledError(Reason.OTHER_RESULTS, f"{names}")
    return is_invariant


def _outcome(
    cell: Computation, inputs: Sequence[CellInput], form: SpanForm | None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return the outputs of the form, or else the module, on copies of the inputs, and their pages after that."""
    copies = dict(zip(cell.inputs, map(copy_input, inputs)))
    if form is None:
        try:
            outputs = cell.run_step(*copies.values())
        except Exception as error:
            raise NotCompiledError(Reason.NOT_TRIED, f"{type(error).__name__}: {error}") from error
    else:
        made = form.run(count_rows(next(iter(copies.values()))), copies)
        if made is None:
            raise NotCompiledError(Reason.OTHER_RESULTS, "it refused rows that the module takes")
        outputs = [made[name] for name in cell.outputs]
    return outputs, {name: value.pages for name, value in copies.items() if isinstance(value, PagedRows)}


def _of_node(value: CellInput, node: int, rows: int) -> CellInput:
    """Return the part of an input for one of several nodes, each of which has this many rows."""
    if isinstance(value, PagedRows | Spans):
        return value.take([node])
    if isinstance(value, RaggedRows):
        offsets = value.offsets[node * rows : (node + 1) * rows + 1]
        return RaggedRows(value.values[offsets[0] : offsets[-1]], offsets - offsets[0])
    return value[node * rows : (node + 1) * rows]
