"""Kernels that run a cell on a CPU without Python: compiled functions that see addresses alone.

Python's interpreter lock is what several workers and clients of one process wait for, and a step of a few small rows
takes less time than the torch calls around it. A module with a method ``host_kernel() -> HostKernel | None`` lets the
CPU worker run its tasks in one compiled call (``core/run_task.py``): gather, kernel and scatter.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba.core.ccallback import CFunc
from numpy.typing import NDArray
from torch import nn

from cellrt.core.compiled import watch_callees
from cellrt.definition.spec import RaggedRows, RowSpec
from cellrt.errors import DefinitionError

_SIGNATURE = numba.int64(numba.int64, numba.int64)


class HostFunction:
    """A function that Numba compiles when it is first needed: ``(constants, task) -> 0``, or another number to refuse.

    ``constants`` is the address of its kernel's words, ``task`` that of what ``core/task_memory.py`` describes. It must
    write every row of every output unless it refuses; then the task runs through the cell's module.
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    @functools.cached_property
    def _compiled(self) -> Any:
        made = CFunc(self._function, (_SIGNATURE.args, _SIGNATURE.return_type), {}, {"error_model": "numpy"})
        made.enable_caching()
        watch_callees(made, self._function)
        made.compile()
        return made

    @property
    def address(self) -> int:
        """Where the C function lies."""
        address: int = self._compiled.address
        return address


class HostKernel(NamedTuple):
    """A cell's kernel with its constants.

    Attributes:
        function: what runs.
        inputs, outputs: the rows that it reads and writes, in its order; ragged inputs too.
        words: its constants: sizes, and addresses of what is in ``keeps``.
        keeps: what must live as long as the kernel.
    """

    function: HostFunction
    inputs: Mapping[str, RowSpec]
    outputs: Mapping[str, RowSpec]
    words: NDArray[np.int64]
    keeps: object

    def run(self, num_rows: int, inputs: Mapping[str, torch.Tensor | RaggedRows]) -> dict[str, torch.Tensor] | None:
        """One step on contiguous CPU tensors with these rows; None if the kernel refuses."""
        sizes = np.array([num_rows])
        given, offsets = [], []
        for name in self.inputs:
            value = inputs[name]
            given.append(value.values if isinstance(value, RaggedRows) else value)
            offsets.append(value.offsets.data_ptr() if isinstance(value, RaggedRows) else 0)
        outputs = {name: torch.empty(num_rows, *spec.shape, dtype=spec.dtype) for name, spec in self.outputs.items()}
        addresses = [value.data_ptr() for value in (*given, *outputs.values())]
        words = np.array([1, num_rows, sizes.ctypes.data, *addresses, *offsets])
        call = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(self.function.address)
        return outputs if call(self.words.ctypes.data, words.ctypes.data) == 0 else None


def find_kernel(
    module: object, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec], carry: Mapping[str, str]
) -> HostKernel | None:
    """The kernel of a cell's module if it has one that does just what the cell does; compiles it.

    In a run of several steps it has one row a chain for what it names alike among its inputs and outputs, and one a
    step for its other inputs: so these must be what the cell carries. Raises DefinitionError if ``host_kernel`` raises.
    """
    if numba.config.DISABLE_JIT or not isinstance(module, nn.Module) or not hasattr(module, "host_kernel"):
        return None
    if is_changed(module, "host_kernel"):
        return None
    make: Callable[[], HostKernel | None] = getattr(module, "host_kernel")  # noqa: B009 - a module's own attributes
    try:
        with torch.inference_mode():
            kernel = make()
        if kernel is None or dict(kernel.inputs) != dict(inputs) or dict(kernel.outputs) != dict(outputs):
            return None
        if {name: name for name, spec in inputs.items() if outputs.get(name) == spec} != dict(carry):
            return None
        _ = kernel.function.address
    except Exception as error:
        raise DefinitionError(f"{type(module).__name__}.host_kernel raised {type(error).__name__}: {error}") from error
    return kernel


def is_changed(module: object, kernel: str) -> bool:
    """Whether a module may compute something else than the class whose method ``kernel`` it has.

    So for a subclass, which may have changed anything (it may name the method anew), for a parametrized module, and
    for hooks.
    """
    if kernel not in vars(type(module)) or {"forward", "steps"} & vars(module).keys():
        return True
    return isinstance(module, nn.Module) and bool(module._forward_hooks or module._forward_pre_hooks)
