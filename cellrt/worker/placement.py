"""A cell placed on a device: a copy of its weights there, and how to call it."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn

from cellrt.define import Cell, CellInput
from cellrt.freeze import FrozenFunction
from cellrt.host_kernel import is_changed


class Rows(NamedTuple):
    """Rows of a tensor by number: row k of an input or output is ``values[rows[k]]``.

    Attributes:
        values: ``[n, *shape]`` contiguous, an arena or a ring.
        rows: int64 ``[number of rows]`` contiguous on the same device. An output is not written where it is negative.
    """

    values: torch.Tensor
    rows: torch.Tensor


@runtime_checkable
class FusedModule(Protocol):
    """A cell module that reads and writes arena rows itself: the door for fused kernels.

    On a GPU the runtime calls ``run_rows`` instead of ``forward`` for the steps of cell calls and chains. It must do
    what ``forward`` does to the rows that ``inputs`` name, and put each output into the rows that ``outputs`` name, on
    the current stream, without waiting for the device and without a shape that depends on values. No row is both read
    and written in one call, and none is written twice. Loops, ragged inputs and inputs from several places still
    use ``forward``. If it raises, all rows of the task fail.

    It is not called where a hook or a subclass changed ``forward``, nor where the module also has a method
    ``can_run_rows(inputs, outputs) -> bool`` that refuses a cell's ``RowSpec`` of each input and output. That is asked
    once, when the weights are on the device.
    """

    def run_rows(self, inputs: Mapping[str, Rows], outputs: Mapping[str, Rows]) -> None:
        """One step of as many rows as each of them names."""


RunRows = Callable[[Mapping[str, Rows], Mapping[str, Rows]], None]


class PlacedCell:
    """A cell with its weights on a device. ``call`` is as ``Cell.run``; ``steps`` as ``Cell.run_steps``."""

    def __init__(self, cell: Cell, device: torch.device, compiled: bool = False) -> None:
        self.cell = cell
        self._device = device
        self._names_device = False
        if device.type != "cpu":
            self.cell = copy.copy(cell)
            self.cell.module = move(cell.module, device)
            self.cell._steps = _method(self.cell.module, "steps")
        module = self.cell.module
        self.run_rows = _fused_form(self.cell)
        if compiled:
            self.cell = copy.copy(self.cell)
            self.cell.module = torch.compile(module, dynamic=True)

    def call(self, inputs: Sequence[CellInput]) -> list[torch.Tensor]:
        """One step."""
        return self._on_device(lambda: self.cell.run(*inputs))

    def steps(self, sizes: Sequence[int], inputs: Sequence[CellInput]) -> list[torch.Tensor]:
        """Several steps, packed."""
        return self._on_device(lambda: self.cell.run_steps(list(sizes), *inputs))

    def example_step(self, rows: int) -> Callable[[], object]:
        """A step of so many rows of zeros, in the form that is used on this device."""
        run_rows = self.run_rows
        if run_rows is None:
            inputs = self.cell.example_inputs(rows, str(self._device))
            return lambda: self.call(inputs)
        index = torch.arange(rows, device=self._device)
        given, made = (
            {
                name: Rows(torch.zeros((rows, *spec.shape), dtype=spec.dtype, device=self._device), index)
                for name, spec in specs.items()
            }
            for specs in (self.cell.inputs, self.cell.outputs)
        )
        return lambda: run_rows(given, made)

    def _on_device(self, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Runs a cell; if it fails, once more with new tensors made on the device, as its author may have meant.

        That costs a little at each operation, so it is done only for cells that need it.
        """
        if self._device.type == "cpu":
            return run()
        if not self._names_device:
            try:
                return run()
            except RuntimeError:
                with self._device:
                    outputs = run()
                self._names_device = True
                return outputs
        with self._device:
            return run()


def _fused_form(cell: Cell) -> RunRows | None:
    """``run_rows`` of a cell's module, if it has one that does what ``forward`` does and takes the cell's rows."""
    module: object = cell.module
    if not isinstance(module, FusedModule) or is_changed(module, "run_rows"):
        return None
    can_run_rows: Callable[..., bool] | None = getattr(module, "can_run_rows", None)
    return module.run_rows if can_run_rows is None or can_run_rows(cell.inputs, cell.outputs) else None


def move(definition: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """A copy of a frozen module or function with its tensors on a device."""
    if isinstance(definition, nn.Module):
        moved = copy.deepcopy(definition).to(device)
        for part in moved.modules():
            if isinstance(part, FrozenFunction):
                part._values = {key: _move_value(value, device) for key, value in part._values.items()}
        return moved
    if isinstance(definition, functools.partial):
        args, keywords = _move_value((definition.args, definition.keywords), device)
        return functools.partial(move(definition.func, device), *args, **keywords)
    return definition


def _move_value(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, nn.Module | functools.partial):
        return move(value, device)
    if isinstance(value, dict):
        return {key: _move_value(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_move_value(item, device) for item in value)
    return value


def _method(module: Callable[..., Any], name: str) -> Callable[..., Any] | None:
    method = getattr(module, name, None)
    return method if callable(method) and not isinstance(method, nn.Module) else None
