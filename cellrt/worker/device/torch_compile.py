"""Cells of plain torch through ``torch.compile``: gather, cell and scatter are one function.

A cell that cannot be compiled (no C++ compiler on a CPU, code that torch cannot trace as a whole) runs as it is, with a
warning.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MappingProxyType
from typing import Any

import torch
import torch.utils.dlpack

from cellrt.definition.cell import Cell
from cellrt.definition.fused import IndexedRows
from cellrt.definition.snapshot import FunctionSnapshot, globals_of, rebound
from cellrt.worker.device.compilations import COMPILATIONS
from cellrt.worker.device.limits import Limits


class CompiledFunction:
    """A function that is compiled at its first call. After the first call that the compiled code cannot make, it is not
    used.

    Such a call is made twice, so a function must not write to memory that it reads. ``compiled`` raises the error that
    keeps it from being compiled.

    Args:
        name: the name of the cell, for the warning.
        function: the function to compile.
        backend: the backend of ``torch.compile``.
        is_whole: refuse code that would be compiled in pieces; sizes that are not marked are constants.
    """

    def __init__(self, name: str, function: Callable[..., Any], backend: str, is_whole: bool) -> None:
        self._name, self._function = name, function
        COMPILATIONS.watch_torch()

        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        # Code of its own: torch counts by code how often it compiled something, and gives up after a few times.
        own = FunctionType(call.__code__.replace(), globals(), name, None, call.__closure__)
        self.compiled: Callable[..., Any] = torch.compile(
            own, backend=backend, fullgraph=is_whole, dynamic=None if is_whole else True
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function; raise what it raises."""
        try:
            return self.compiled(*args, **kwargs)
        except Exception as error:
            if self.compiled is self._function:
                raise
            result = self._function(*args, **kwargs)
            self.compiled = self._function
            warn_not_compiled(self._name, error)
            return result


class CompiledStep:
    """One step of a cell, from rows of arenas to rows of arenas, like ``run_rows`` of a ``FusedModule``.

    It is compiled once for each way in which inputs and outputs share tensors (an input lies in its arena, or comes
    from
    the host), for any number of rows; the compiled code may gather, compute and scatter at once. The last row of each
    output's tensor must be the trash row: it gets the rows that are not to be written. A number outside an input's
    ``limits`` is clamped, as compiled code would read there or lose the device; the caller fails the row.
    """

    def __init__(self, cell: Cell, backend: str, limits: Mapping[str, Limits] = MappingProxyType({})) -> None:
        self._cell, self._backend, self._limits = cell, backend, limits
        self._functions: dict[tuple[int, ...], CompiledFunction] = {}
        self._targets: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Tensors by the identity of an output's tensor, which is kept, so that no other gets it."""

    def compile(self, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]) -> None:
        """Run a step; raise the error that keeps it from being compiled."""
        tensors, values, rows = self._arguments(inputs, outputs)
        with torch.inference_mode():
            self._function(tensors, values, rows).compiled(values, rows)

    def run_rows(self, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]) -> None:
        """Run a step (see ``FusedModule``)."""
        tensors, values, rows = self._arguments(inputs, outputs)
        self._function(tensors, values, rows)(values, rows)

    def _arguments(
        self, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]
    ) -> tuple[tuple[int, ...], list[torch.Tensor], list[torch.Tensor]]:
        """Return the index of the tensor of each input and output; these tensors; the rows of each."""
        given = [inputs[name] for name in self._cell.inputs]
        given += [
            IndexedRows(self._target(tensor), numbers)
            for tensor, numbers in (outputs[name] for name in self._cell.outputs)
        ]
        values = {id(tensor): tensor for tensor, _ in given}
        order = {key: number for number, key in enumerate(values)}
        rows = [numbers for _, numbers in given]
        if len(rows[0]) == 1 and not self._cell.batch_sizes:  # torch makes another function for a single row
            rows = [numbers.repeat(2) for numbers in rows]
        return tuple(order[id(tensor)] for tensor, _ in given), list(values.values()), rows

    def _target(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the memory of an output's tensor as a tensor that torch does not know to be an input's, too.

        No row that is read is written, but torch cannot know: it would not write before all is read.
        """
        if id(tensor) not in self._targets:
            with torch.inference_mode(False):
                self._targets[id(tensor)] = tensor, torch.utils.dlpack.from_dlpack(tensor)
        return self._targets[id(tensor)][1]

    def _function(
        self, tensors: tuple[int, ...], values: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]
    ) -> CompiledFunction:
        made = self._functions.get(tensors)
        if made is None:
            for tensor in (*values, *rows):
                torch._dynamo.maybe_mark_dynamic(tensor, 0)
            step = _make_step(self._cell, tensors, self._limits)
            made = self._functions[tensors] = CompiledFunction(self._cell.name, step, self._backend, is_whole=True)
        return made


def _make_step(cell: Cell, tensors: tuple[int, ...], limits: Mapping[str, Limits]) -> Callable[..., None]:
    num_inputs, within = len(cell.inputs), [limits.get(name) for name in cell.inputs]
    sources, targets = tensors[:num_inputs], tensors[num_inputs:]

    def step(values: Sequence[torch.Tensor], rows: Sequence[torch.Tensor]) -> None:
        gathered = [values[source].index_select(0, numbers) for source, numbers in zip(sources, rows)]
        for k, limit in enumerate(within):
            if limit is not None:
                gathered[k] = gathered[k].clamp(limit.first, limit.end - 1)
        for target, numbers, output in zip(targets, rows[num_inputs:], cell.run_step(*gathered)):
            arena = values[target]
            arena.index_copy_(0, torch.where(numbers < 0, len(arena) - 1, numbers), output)

    return step


def as_function(module: Callable[..., Any]) -> Callable[..., Any]:
    """Return a module, or the plain function that a ``FunctionSnapshot`` makes at each call,
    which torch cannot trace.
    """
    if isinstance(module, functools.partial):
        return functools.partial(as_function(module.func), *_with_functions(module.args), **module.keywords)
    if not isinstance(module, FunctionSnapshot):
        return module
    original = module.function
    captured: dict[str, Any] = _with_functions(module.captured())
    names = {**original.__globals__, **globals_of(captured)}
    names.pop("__name__", None)  # by which torch would find the module's own globals instead
    return rebound(original, captured, names)


def _with_functions(value: Any) -> Any:
    """Return a value with functions in place of their snapshots, in lists, tuples and dicts, too."""
    if isinstance(value, dict):
        return {key: _with_functions(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(_with_functions, value))
    return as_function(value) if isinstance(value, FunctionSnapshot | functools.partial) else value


class NotCompilableError(RuntimeError):
    """The code of a cell is of a kind that is not passed through ``torch.compile``."""


def check_compilable(cell: Cell) -> None:
    """Raise NotCompilableError for cells that get the rows of each node.

    They write to their pages in place. Torch's functional form of that copies all pages of an arena at each write,
    unless
    attention is an operator that declares no writes, as in a compiled form on a CPU (docs/decisions/0026); on a device
    that
    operator has no kernel.
    """
    if cell.has_spans:
        raise NotCompilableError("attention over pages and spans is no operator on a device")


def warn_not_compiled(name: str, error: Exception) -> str:
    """Warn that a cell runs as it is, and why; return the reason."""
    reason = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    warnings.warn(f"cell {name!r} is not compiled and runs as it is, because of {reason}", RuntimeWarning, stacklevel=3)
    return reason
