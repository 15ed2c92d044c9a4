"""The compiled form of a cell with pages or spans: its function is handed a task's tensors as they are.

At ``task`` lie, in int64 words, how many tensors there are, and of each where it lies, a number of its dtype, how many
dimensions it has, its sizes and its strides (``AT``, ``DTYPE``, ``DIMS``, ``SIZES``, ``STRIDES`` from
``FIRST_TENSOR + TENSOR * number`` on). They are those of the inputs in order: rows ``[rows, *shape]``; of ragged rows
the values and int64 offsets; of a state that grows the pages of all, int32 tables ``[nodes, most pages]``, lengths
``[nodes]`` and positions ``[rows]``; of spans the int32 positions. Then come int32 offsets ``[nodes + 1]``, the node of
each row, and whether it is read, a byte each (``traced_pages.flatten``). Then the outputs ``[rows, *shape]``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.definition.compiled_form import DONE, CompiledForm, TaskFunction
from cellrt.definition.form_inputs import check_inputs
from cellrt.definition.spec import CellInput, RowSpec
from cellrt.definition.task_memory import AT, DIMS, DTYPE, FIRST_TENSOR, MOST_DIMS, SIZES, STRIDES, TENSOR
from cellrt.definition.traced_pages import flatten
from cellrt.errors import DefinitionError

__all__ = ["AT", "DIMS", "DTYPE", "FIRST_TENSOR", "SIZES", "STRIDES", "TENSOR", "SpanForm"]

WIDTH = (-1,)
"""A mark in place of the shape of tables, which are as wide as the longest list of pages."""


class _Call(NamedTuple):
    """The data that each call of a form needs.

    Attributes:
        function: the C function.
        words: the words of a task that are the same in each task.
        tables, by_row: which of its tensors are tables, and which have a row for each of the batch.
        least_rows: fewer are filled up with a row of no node.
        keeps: what must live as long.
    """

    function: Any
    words: NDArray[np.int64]
    tables: tuple[int, ...]
    by_row: frozenset[int]
    least_rows: int
    keeps: object


class SpanForm(CompiledForm):
    """A form for cells with spans, as the module describes. ``of`` makes one."""

    @classmethod
    def of(
        cls,
        function: TaskFunction,
        inputs: Mapping[str, RowSpec],
        outputs: Mapping[str, RowSpec],
        constants: NDArray[np.int64],
        keeps: object,
        *,
        dtype_number: Callable[[torch.dtype], int] = lambda dtype: 0,
        least_rows: int = 1,
        origin: str = "written by hand",
    ) -> SpanForm:
        """Return the form of a function (see ``CompiledForm``).

        Args:
            function, inputs, outputs, constants, keeps, origin: see there.
            dtype_number: what says of each tensor's dtype.
            least_rows: fewer rows come with one more, which is of no node.

        Raise DefinitionError for rows of too many dimensions.
        """
        flat = _flat(inputs.values())
        tables = tuple(k for k, tensor in enumerate(flat) if tensor.shape == WIDTH)
        by_row = frozenset(k for k, tensor in enumerate(flat) if tensor.by_row)
        flat += [_Tensor(spec.shape, spec.dtype, True) for spec in outputs.values()]
        words = np.zeros(FIRST_TENSOR + TENSOR * len(flat), np.int64)
        words[0] = len(flat)
        for tensor, (shape, dtype, _) in zip(words[FIRST_TENSOR:].reshape(-1, TENSOR), flat):
            strides = (1, 1) if shape == WIDTH else torch.empty(1, *shape, device="meta").stride()
            if len(strides) > MOST_DIMS:
                raise DefinitionError(f"rows of {len(shape)} dimensions; expected at most {MOST_DIMS - 1}")
            tensor[DTYPE], tensor[DIMS] = dtype_number(dtype), len(strides)
            tensor[SIZES + 1 : SIZES + len(strides)] = shape
            tensor[STRIDES : STRIDES + len(strides)] = strides
        called = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(function.address)
        call = _Call(called, words, tables, by_row, least_rows, keeps)
        return cls(function, inputs, outputs, constants, call, origin)

    @property
    def least_rows(self) -> int:
        """Fewer rows come with one more."""
        return self._call.least_rows

    def words_with(self, num_pages: Mapping[str, int]) -> NDArray[np.int64]:
        """Return the words of a task, with all that is the same in each; the inputs that grow have this many pages in
        all.
        """
        words, number = self._call.words.copy(), 0
        for name, spec in self.inputs.items():
            if spec.page_size:
                words[FIRST_TENSOR + TENSOR * number + SIZES] = num_pages[name]
            number += 4 if spec.page_size else 2 if spec.ragged and not spec.span else 1
        return words

    def run(self, num_rows: int, inputs: Mapping[str, CellInput]) -> dict[str, torch.Tensor] | None:
        """Run one step on contiguous CPU tensors; append to pages what the module would. None if the function
        refuses.

        Raise DefinitionError for other inputs than the form reads.
        """
        check_inputs(self.inputs, num_rows, inputs)
        return self.run_gathered(num_rows, inputs)

    def run_gathered(self, num_rows: int, inputs: Mapping[str, CellInput]) -> dict[str, torch.Tensor] | None:
        """Run as ``run`` does, on inputs that a worker has gathered for the form; nothing is checked."""
        call = self._call
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

    @property
    def _call(self) -> _Call:
        assert isinstance(self.keeps, _Call)
        return self.keeps


class _Tensor(NamedTuple):
    """A tensor of a task: what follows its first dimension, and whether that has a row for each of the batch."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    by_row: bool


def _flat(specs: Iterable[RowSpec]) -> list[_Tensor]:
    """Return the tensors that ``flatten`` makes of a cell's inputs."""
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
