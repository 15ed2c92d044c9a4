"""The compiled form of a cell: what runs its tasks on a CPU without Python. The interface for authors of one.

Python's interpreter lock is what several workers and clients of one process wait for, and a step of a few small rows
takes less time than the torch calls around it. So a module may have, beside its ``forward``, a method
``compiled_form() -> CompiledForm | None``: a function that Numba compiles, which sees addresses alone. A CPU worker
then gathers a task's rows, calls the function and scatters what it wrote in one compiled call
(``worker/cpu/run_task.py``). The module stays the cell's definition, and runs whatever the function refuses.
``docs/compiled-forms.md`` shows how to write one.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray
from torch import nn

from cellrt.definition.attention_operator import APPEND, ATTEND
from cellrt.definition.form_inputs import check_inputs
from cellrt.definition.snapshot import is_settled
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec, plain
from cellrt.definition.task_memory import BATCH_SIZES, FIRST_INPUT, POSITIONS, STEPS
from cellrt.definition.traced_pages import KERNELS, TracedPages, attend_span, implement, is_traced
from cellrt.errors import DefinitionError
from cellrt.native.jit import c_function, nogil, nogil_part
from cellrt.native.memory import as_pointer, read_float, read_int, read_word, read_words, start_of, write_word

__all__ = [
    "APPEND",
    "ATTEND",
    "BATCH_SIZES",
    "DONE",
    "FIRST_INPUT",
    "KERNELS",
    "POSITIONS",
    "REFUSED",
    "STEPS",
    "USES_HAND_WRITTEN",
    "CompiledForm",
    "TaskFunction",
    "TracedPages",
    "array_at",
    "as_pointer",
    "attend_span",
    "batch_sizes",
    "implement",
    "is_settled",
    "is_traced",
    "nogil",
    "nogil_part",
    "port_address",
    "read_float",
    "read_int",
    "read_word",
    "read_words",
    "start_of",
    "write_word",
]

HAND_WRITTEN_VARIABLE = "CELLRT_HAND_WRITTEN"
"""The environment variable that turns hand-written CPU kernels ``on`` (so they are) or ``off``."""


def uses_hand_written(setting: str) -> bool:
    """Return whether the variable's value says so. Raise DefinitionError for another one than ``on`` and ``off``."""
    if setting not in ("on", "off"):
        raise DefinitionError(f"{HAND_WRITTEN_VARIABLE} must be 'on' or 'off', got {setting!r}")
    return setting == "on"


USES_HAND_WRITTEN = uses_hand_written(os.environ.get(HAND_WRITTEN_VARIABLE, "on"))
"""True if this process uses compiled forms that are written by hand.

If not, no module's ``compiled_form`` is asked, and ready-made cells compute in plain torch. So the worth of their
kernels can be measured.
"""

DONE, REFUSED = 0, 1
"""The return values of a task function."""
_SIGNATURE = numba.int64(numba.int64, numba.int64)


class TaskFunction:
    """A function ``(constants, task) -> DONE`` or ``REFUSED``, which Numba compiles when it is first needed.

    Both arguments are addresses of int64 words. ``constants`` are those of its ``CompiledForm``. At ``task`` lie

    - ``STEPS``: how many successive steps the task takes;
    - ``POSITIONS``: how many rows the inputs and outputs of all steps have;
    - ``BATCH_SIZES``: the address of int64 ``[steps]``: step s takes the first rows, never more than the step before;
    - from ``FIRST_INPUT`` on: the address of each input, of each output, and then for each input that of its int64
      offsets ``[positions + 1]`` if it is ragged.

    Inputs and outputs are contiguous rows, packed step by step: ``[positions, *shape]``. State has the same name and
    rows among inputs and outputs. As an input it is the ``[batch_sizes[0], *shape]`` rows before the first step.
    After that, each step reads what the step before wrote to the output.

    It must write every row of every output unless it refuses, and must not write to an input, which may be where others
    read. Where it cannot go on (a token that does not exist), it returns REFUSED, and the task runs through the module,
    which says what is wrong. It is called without Python's lock, by several threads at once.
    """

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    @functools.cached_property
    def _compiled(self) -> Any:
        return c_function(self._function, _SIGNATURE)

    @property
    def address(self) -> int:
        """The address of the C function."""
        address: int = self._compiled.address
        return address

    @functools.cached_property
    def _called(self) -> Callable[[int, int], int]:
        return ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(self.address)

    def call(self, constants: int, task: int) -> int:
        """Call it with two addresses, from Python; return DONE or REFUSED."""
        return self._called(constants, task)


class CompiledForm(NamedTuple):
    """A function without Python that computes the same as a module: the result of the method ``compiled_form``.

    It is asked once, when the cell is first registered with CPU workers, of the cell's own copy of the module. It is
    used only if inputs and outputs are those of the cell, and the names in both are just what the cell carries. It is
    not used for a module with hooks, nor for a subclass, which may compute something else. A subclass may name the
    method again: ``compiled_form = Base.compiled_form``.

    Attributes:
        function: what runs.
        inputs, outputs: the specs of the rows that it reads and writes, in its order; ragged inputs too.
        constants: int64: what ``function`` gets the address of, such as sizes and the addresses of weights.
        keeps: what must live as long as the form: the tensors whose addresses are in ``constants``.
        origin: who made it.
        is_batch_invariant: rows were seen to give the same bits alone and together; False also where nobody looked.
    """

    function: TaskFunction
    inputs: Mapping[str, RowSpec]
    outputs: Mapping[str, RowSpec]
    constants: NDArray[np.int64]
    keeps: object
    origin: str = "written by hand"
    is_batch_invariant: bool = False

    def run(self, num_rows: int, inputs: Mapping[str, CellInput]) -> dict[str, torch.Tensor] | None:
        """Run one step on contiguous CPU tensors with these rows; None if the function refuses.

        Raise DefinitionError for other inputs than the form reads.
        """
        call, outputs = self.bind(num_rows, inputs)
        return outputs if call() == DONE else None

    def bind(self, num_rows: int, inputs: Mapping[str, CellInput]) -> tuple[Callable[[], int], dict[str, torch.Tensor]]:
        """Return a call that can be repeated and returns DONE or REFUSED, and the tensors that it writes to.

        The arguments are those of ``run``.
        """
        check_inputs(self.inputs, num_rows, inputs)
        sizes = np.array([num_rows])
        given, offsets = [], []
        for name in self.inputs:
            value = plain(inputs[name])
            given.append(value.values if isinstance(value, RaggedRows) else value)
            offsets.append(value.offsets.data_ptr() if isinstance(value, RaggedRows) else 0)
        outputs = {
            name: torch.empty(num_rows, *spec.shape, dtype=spec.dtype, device="cpu")
            for name, spec in self.outputs.items()
        }
        addresses = [value.data_ptr() for value in (*given, *outputs.values())]
        words = np.array([1, num_rows, sizes.ctypes.data, *addresses, *offsets])
        function = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)(self.function.address)
        constants, task, held = self.constants.ctypes.data, words.ctypes.data, (sizes, words, given, inputs)

        def call() -> int:
            done: int = function(constants, task)
            return done if held else REFUSED

        return call, outputs


@nogil_part
def array_at(address, shape, dtype):  # type: ignore[no-untyped-def]
    """Return the array of this shape and NumPy dtype at an address; for task functions."""
    return carray(as_pointer(address), shape, dtype)


@nogil_part
def port_address(task, port):  # type: ignore[no-untyped-def]
    """Return the address of an input or, after all inputs, of an output; for task functions."""
    return read_word(task, FIRST_INPUT + port)


@nogil_part
def batch_sizes(task):  # type: ignore[no-untyped-def]
    """Return the number of rows of each step, int64 ``[steps]``; for task functions."""
    return carray(as_pointer(read_word(task, BATCH_SIZES)), read_word(task, STEPS), np.int64)


def find_compiled_form(
    module: object, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec], carry: Mapping[str, str]
) -> CompiledForm | None:
    """Return the compiled form of a cell's module if it has one that does just what the cell does; compile it.

    Raise DefinitionError if the module's ``compiled_form`` raises.
    """
    if numba.config.DISABLE_JIT or not USES_HAND_WRITTEN:
        return None
    if not isinstance(module, nn.Module) or not hasattr(module, "compiled_form"):
        return None
    if is_changed(module, "compiled_form"):
        return None
    make: Callable[[], CompiledForm | None] = getattr(module, "compiled_form")  # noqa: B009 - a module's own attributes
    try:
        with torch.inference_mode():
            form = make()
        if form is None or dict(form.inputs) != dict(inputs) or dict(form.outputs) != dict(outputs):
            return None
        has_spans = any(spec.has_nodes for spec in inputs.values())  # these carry nothing by themselves
        if not has_spans and {name: name for name, spec in inputs.items() if outputs.get(name) == spec} != dict(carry):
            return None
        _ = form.function.address
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise DefinitionError(
            f"{type(module).__name__}.compiled_form raised {type(error).__name__}: {error}"
        ) from error
    return form


def is_changed(module: object, method: str) -> bool:
    """Return whether a module may compute something else than the class whose method stands for its ``forward``.

    So for a subclass, which may have changed anything (it may name the method anew), for a parametrized module, and
    for hooks.
    """
    if method not in vars(type(module)) or {"forward", "steps"} & vars(module).keys():
        return True
    return isinstance(module, nn.Module) and bool(module._forward_hooks or module._forward_pre_hooks)
