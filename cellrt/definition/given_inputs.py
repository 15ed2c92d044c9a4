"""Checks of the inputs that a user gives to ``Cell.run``, in order or by name, against the cell's specs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cellrt.definition.computation import Computation, count_rows
from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec, conversion, describe
from cellrt.errors import RequestError


def fit(computation: Computation, inputs: Sequence[Any]) -> bool:
    """Return whether inputs plainly fit the cell; if not, ``in_order`` names the mistake.

    Pages and spans, which the runtime makes, are not looked at.
    """
    if len(inputs) != len(computation.inputs) or computation.has_spans:
        return len(inputs) == len(computation.inputs)
    rows = -1
    for spec, value in zip(computation.inputs.values(), inputs):
        values = value.values if spec.ragged and type(value) is RaggedRows else value
        if type(values) is not torch.Tensor or values.dtype is not spec.dtype or values.shape[1:] != spec.shape:
            return False
        if values.dim() == 0 or (spec.ragged and values is value) or rows not in (-1, count_rows(value)):
            return False
        rows = count_rows(value)
    return True


def in_order(computation: Computation, inputs: Sequence[Any], named: Mapping[str, Any]) -> list[CellInput]:
    """Return the inputs in order.

    Raise RequestError that names the cell, the input, what was expected and what came.
    """
    where = f"cell {computation.name!r}"
    names = list(computation.inputs)
    if len(inputs) > len(names):
        raise RequestError(f"{where}: expected inputs {names}, got {len(inputs)} in order")
    given = dict(zip(names, inputs))
    for name in named:
        if name not in computation.inputs:
            raise RequestError(f"{where}, input {name!r}: unknown; the cell has inputs {names}")
        if name in given:
            raise RequestError(f"{where}, input {name!r}: given in order and by name")
    given |= named
    rows: dict[str, int] = {}
    for name, spec in computation.inputs.items():
        if name not in given:
            raise RequestError(f"{where}, input {name!r}: missing; expected {_expected(spec)}")
        if not _fits(spec, given[name]):
            hint = conversion(spec.dtype, given[name].dtype) if isinstance(given[name], torch.Tensor) else ""
            told = f"expected {_expected(spec)}, got {_described(given[name])}{hint}"
            raise RequestError(f"{where}, input {name!r}: {told}")
        if not spec.has_nodes:
            rows[name] = count_rows(given[name])
    if len(set(rows.values())) > 1:
        raise RequestError(f"{where}: expected as many rows of each input, got {rows}")
    return [given[name] for name in names]


def _fits(spec: RowSpec, value: object) -> bool:
    if spec.has_nodes:
        return isinstance(value, Spans if spec.span else PagedRows)
    if spec.ragged:
        return isinstance(value, RaggedRows) and _fits(RowSpec(spec.shape, spec.dtype), value.values)
    if not isinstance(value, torch.Tensor) or value.dtype != spec.dtype:
        return False
    return value.dim() > 0 and value.shape[1:] == spec.shape


def _expected(spec: RowSpec) -> str:
    if spec.span:
        return "cellrt.Spans"
    if spec.page_size:
        return f"cellrt.PagedRows of {spec}"
    row = f"{str(spec.dtype).removeprefix('torch.')}[{', '.join(map(str, ('rows', *spec.shape)))}]"
    return f"cellrt.RaggedRows of {row}" if spec.ragged else row


def _described(value: object) -> str:
    if isinstance(value, RaggedRows) and isinstance(value.values, torch.Tensor):
        return f"RaggedRows of {describe(value.values)}"
    return describe(value) if isinstance(value, torch.Tensor) else type(value).__name__
