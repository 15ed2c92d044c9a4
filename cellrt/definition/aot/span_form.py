"""The compiled form of a cell with pages or spans, and how it is tried against the module."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.definition.aot.library import Library
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.aot.run_spans import AT, DIMS, DTYPE, FIRST_TENSOR, SIZES, STRIDES, TENSOR, run_spans
from cellrt.definition.aot.run_step import MOST_DIMS
from cellrt.definition.compiled_form import DONE, CompiledForm
from cellrt.definition.computation import Computation, count_rows
from cellrt.definition.examples import random_nodes
from cellrt.definition.form_inputs import check_inputs
from cellrt.definition.row_wise import is_close
from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec, copy_input
from cellrt.definition.traced_pages import flatten

WIDTH = (-1,)
"""In place of the shape of tables, which are as wide as the longest list of pages."""
TRIED = ((1, 1, 0), (1, 1, 5), (1, 4, 3), (3, 1, 9), (4, 3, 2), (16, 1, 17))
"""Nodes, rows of each, and rows before them, with which a form is tried."""


class _Call(NamedTuple):
    """What a form's calls need.

    Attributes:
        function: the C function.
        words: of a task, with all that is the same in each.
        tables, by_row: which of its tensors are tables, and which have a row for each of the batch.
        least_rows: fewer are filled up with a row of no node.
        library: what must live as long.
    """

    function: Any
    words: NDArray[np.int64]
    tables: tuple[int, ...]
    by_row: frozenset[int]
    least_rows: int
    library: Library


class SpanForm(CompiledForm):
    """The form of a cell with pages or spans: a task's tensors are handed to the library as they are."""

    def run(self, num_rows: int, inputs: Mapping[str, CellInput]) -> dict[str, torch.Tensor] | None:
        """One step on contiguous CPU tensors; appends to pages what the module would. None if the library refuses.

        Raises DefinitionError for other inputs than the form reads.
        """
        check_inputs(self.inputs, num_rows, inputs)
        return self.run_gathered(num_rows, inputs)

    def run_gathered(self, num_rows: int, inputs: Mapping[str, CellInput]) -> dict[str, torch.Tensor] | None:
        """As ``run``, of what a worker has gathered for the form: nothing is looked at."""
        call = self.keeps
        assert isinstance(call, _Call)
        given = [value if value.is_contiguous() else value.contiguous() for value in flatten(inputs.values())]
        rows = num_rows
        if rows < call.least_rows:
            rows += 1
            given = [torch.cat([value, value[:1]]) if k in call.by_row else value for k, value in enumerate(given)]
        outputs = {
            name: torch.empty(rows, *spec.shape, dtype=spec.dtype, device="cpu") for name, spec in self.outputs.items()
        }
        words = call.words.copy()
        tensors = words[FIRST_TENSOR:].reshape(-1, TENSOR)
        for tensor, value in zip(tensors, (*given, *outputs.values()), strict=True):
            tensor[AT], tensor[SIZES] = value.data_ptr(), value.shape[0]
        for place in call.tables:
            tensors[place, SIZES + 1] = tensors[place, STRIDES] = given[place].shape[1]
        if call.function(self.constants.ctypes.data, words.ctypes.data) != DONE:
            return None
        return outputs if rows == num_rows else {name: value[:num_rows] for name, value in outputs.items()}


class _Tensor(NamedTuple):
    """A tensor of a task: what follows its first dimension, and whether that has a row for each of the batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    by_row: bool


def _flat(specs: Iterable[RowSpec]) -> list[_Tensor]:
    """The tensors that ``flatten`` makes of a cell's inputs."""
    flat: list[_Tensor] = []
    by_row, by_node = (_Tensor((), torch.int32, is_by_row) for is_by_row in (True, False))
    for spec in specs:
        if spec.page_size:
            flat += [_Tensor(spec.stored.shape, spec.dtype, False), by_node._replace(shape=WIDTH), by_node, by_row]
        elif spec.span:
            flat.append(by_row)
        elif spec.ragged:
            flat += [_Tensor(spec.shape, spec.dtype, False), _Tensor((), torch.int64, False)]
        else:
            flat.append(_Tensor(spec.shape, spec.dtype, True))
    return [*flat, by_node, by_row, by_row._replace(dtype=torch.bool)]


def span_form(cell: Computation, library: Library, least_rows: int, origin: str) -> SpanForm:
    """The form of a cell of which there is a library. Raises NotCompiledError for what it cannot take."""
    if least_rows > 1 and any(spec.ragged for spec in cell.inputs.values()):
        raise NotCompiledError(Reason.FIXED_ROWS)
    flat = _flat(cell.inputs.values())
    tables = tuple(k for k, tensor in enumerate(flat) if tensor.shape == WIDTH)
    by_row = frozenset(k for k, tensor in enumerate(flat) if tensor.by_row)
    flat += [_Tensor(spec.shape, spec.dtype, True) for spec in cell.outputs.values()]
    words = np.zeros(FIRST_TENSOR + TENSOR * len(flat), np.int64)
    words[0] = len(flat)
    for tensor, (shape, dtype, _) in zip(words[FIRST_TENSOR:].reshape(-1, TENSOR), flat):
        strides = (1, 1) if shape == WIDTH else torch.empty(1, *shape, device="meta").stride()
        if len(strides) > MOST_DIMS:
            raise NotCompiledError(Reason.NOT_COMPILED, f"rows of {len(shape)} dimensions")
        tensor[DTYPE], tensor[DIMS] = library.dtype_number(dtype), len(strides)
        tensor[SIZES + 1 : SIZES + len(strides)] = shape
        tensor[STRIDES : STRIDES + len(strides)] = strides
    constants = np.array([*library.words(), *library.handles], np.int64)
    function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(run_spans.address)
    call = _Call(function, words, tables, by_row, least_rows, library)
    return SpanForm(run_spans, cell.inputs, cell.outputs, constants, call, origin)


@torch.inference_mode()
def try_span_form(cell: Computation, form: SpanForm) -> bool:
    """Whether rows give the same bits whoever else is there.

    Raises NotCompiledError if outputs, or what is appended, are not the module's.
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
    """What the form, or else the module, makes of copies of the inputs, and their pages after that."""
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
    """An input of one node of several that have so many rows each."""
    if isinstance(value, PagedRows | Spans):
        return value.take([node])
    if isinstance(value, RaggedRows):
        offsets = value.offsets[node * rows : (node + 1) * rows + 1]
        return RaggedRows(value.values[offsets[0] : offsets[-1]], offsets - offsets[0])
    return value[node * rows : (node + 1) * rows]
