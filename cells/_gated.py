"""The parts that LSTM and GRU cells share: parameters in torch's layout, and one step and whole runs on every path.

A family (``lstm.py``, ``gru.py``) says in class attributes how it differs from the other. ``_gated_cells.py`` has the
four kinds of cells that each of them has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import linear

from cellrt import DefinitionError, RowSpec, rows
from cellrt.cells._fused import can_fuse
from cellrt.cells._weights import (
    Derived,
    check_float32_on_cpu,
    check_shape,
    is_fusable,
    own_parameter,
    pack_recurrent,
    pack_with_bias,
    packed_linear,
)
from cellrt.definition.compiled_form import CompiledForm, TaskFunction
from cellrt.products.packed import PackedWeight

States = tuple[Tensor, ...]


class TaskFunctions(NamedTuple):
    """The functions that run whole tasks of a family, by the inputs beside the states: ``_host.py``."""

    of_inputs: TaskFunction
    of_gates: TaskFunction
    of_tokens: TaskFunction
    of_embedded_tokens: TaskFunction


class GatedModule(nn.Module):
    """A module with the parameters of torch's recurrent cells: ``weight_ih``, ``bias_ih`` if it multiplies inputs, and
    ``weight_hh``, ``bias_hh`` if it multiplies states; the gates one below the other.

    Attributes:
        gates: the number of gates of a unit.
        states: their names, in order.
        torch_cell, torch_layers: what has such weights.
        update: the pointwise half of a step in plain torch: ``(gates, hidden, *states)`` -> the states after it, from
            the two halves of the sums, ``[rows, gates * hidden_size]`` each.
        run, run_inputs: whole runs, by addresses: ``_recurrence.py``.
        functions: whole tasks.
    """

    gates: ClassVar[int]
    states: ClassVar[tuple[str, ...]]
    torch_cell: ClassVar[type[nn.Module]]
    torch_layers: ClassVar[type[nn.RNNBase]]
    update: ClassVar[Callable[..., States]]
    run: ClassVar[Callable[..., None]]
    run_inputs: ClassVar[Callable[..., None]]
    functions: ClassVar[TaskFunctions]

    weight_ih: nn.Parameter
    weight_hh: nn.Parameter
    bias_ih: nn.Parameter | None
    bias_hh: nn.Parameter | None

    def __init__(self, input_size: int | None, hidden_size: int, bias: bool, *, is_recurrent: bool) -> None:
        super().__init__()
        self.input_size = input_size
        self.hidden_size = hidden_size
        bound = 1 / math.sqrt(hidden_size)
        widths = {"ih": input_size, "hh": hidden_size if is_recurrent else None}
        for half, width in widths.items():
            if width is not None:
                rows = self.gates * hidden_size
                self.register_parameter(
                    f"weight_{half}", nn.Parameter(torch.empty(rows, width).uniform_(-bound, bound))
                )
                offset = nn.Parameter(torch.empty(rows).uniform_(-bound, bound)) if bias else None
                self.register_parameter(f"bias_{half}", offset)
        self._packed_ih = Derived(pack_with_bias)
        self._packed_hh = Derived(pack_recurrent(self.gates))

    def packed_ih(self) -> tuple[PackedWeight, Tensor]:
        """Return the packed input half and its bias."""
        return self._packed_ih.of(own_parameter(self, "weight_ih"), own_parameter(self, "bias_ih"))

    def packed_hh(self) -> tuple[PackedWeight, Tensor]:
        """Return the packed recurrent half and its bias."""
        return self._packed_hh.of(own_parameter(self, "weight_hh"), own_parameter(self, "bias_hh"))

    def input_gates(self, x: Tensor) -> Tensor:
        """``x`` ``[rows, input_size]`` times the input weight, plus its bias: ``[rows, gates * hidden_size]``."""
        if not is_fusable(x):
            return linear(x, self.weight_ih, self.bias_ih)
        weight, bias = self.packed_ih()
        check_shape("x", x, (x.shape[0], weight.depth))
        return packed_linear(x, weight, bias)

    def take_weights(self, module: nn.Module, suffix: str = "") -> None:
        """Copy those weights of a torch module that this one has; ``suffix`` is behind their names there."""
        for name, parameter in list(self.named_parameters(recurse=False)):
            value = getattr(module, name + suffix).detach().clone()
            if value.shape != parameter.shape:
                raise DefinitionError(f"{name} has shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
            setattr(self, name, nn.Parameter(value))

    def extra_repr(self) -> str:
        """Return the sizes, for ``repr``."""
        return f"input_size={self.input_size}, hidden_size={self.hidden_size}"

    def _state_rows(self) -> dict[str, RowSpec]:
        return dict.fromkeys(self.states, rows(self.hidden_size))

    def _can_fuse(
        self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec], given: Mapping[str, RowSpec]
    ) -> bool:
        """Return whether a step kernel takes these rows: those ``given``, and the states."""
        return can_fuse(self, inputs, outputs, {**given, **self._state_rows()}, self._state_rows())

    def _plain_step(self, gates: Tensor, *states: Tensor) -> States:
        return type(self).update(gates, linear(states[0], self.weight_hh, self.bias_hh), *states)

    def _plain_steps(self, batch_sizes: Sequence[int], gates: Tensor, states: States) -> States:
        return unroll(batch_sizes, self._plain_step, gates, states)

    def _check(self, sizes: NDArray[np.int64], rows: int, states: States) -> None:
        """Raise ValueError unless packed inputs of ``rows`` rows, and the states, fit the rows of each step."""
        check_rows(sizes, rows)
        self.check_states(int(sizes[0]), states)

    def check_states(self, rows: int, states: States) -> None:
        """Raise ValueError unless these are the states of ``rows`` rows."""
        expected = (rows, self.hidden_size)
        for name, state in zip(self.states, states, strict=True):
            check_shape(name, state, expected)

    def _run_gates(self, sizes: NDArray[np.int64], gates: Tensor, token: Tensor | None, states: States) -> States:
        """Return the compiled run over ``gates`` (packed, or a table whose rows ``token`` names)."""
        rows = gates.shape[0] if token is None else token.shape[0]
        self._check(sizes, rows, states)
        check_float32_on_cpu("the table of gates", gates)
        check_shape("gates", gates, (gates.shape[0], self.gates * self.hidden_size))
        (weight, bias), gates = self.packed_hh(), gates.contiguous()
        given = [state.contiguous() for state in states]
        made = [state.new_empty(rows, self.hidden_size) for state in states]
        type(self).run(
            sizes,
            gates.data_ptr(),
            0 if token is None else token.data_ptr(),
            weight.address,
            bias.data_ptr(),
            *[state.data_ptr() for state in given],
            *[state.data_ptr() for state in made],
            self.hidden_size,
        )
        return tuple(made)

    def _run_inputs(self, sizes: NDArray[np.int64], x: Tensor, states: States) -> States:
        """Return the compiled run over inputs ``x``, packed."""
        self._check(sizes, x.shape[0], states)
        x_weight, x_bias = self.packed_ih()
        check_shape("x", x, (x.shape[0], x_weight.depth))
        (weight, bias), x = self.packed_hh(), x.contiguous()
        given = [state.contiguous() for state in states]
        made = [state.new_empty(x.shape[0], self.hidden_size) for state in states]
        type(self).run_inputs(
            sizes,
            x.data_ptr(),
            x_weight.depth,
            x_weight.address,
            x_bias.data_ptr(),
            weight.address,
            bias.data_ptr(),
            *[state.data_ptr() for state in given],
            *[state.data_ptr() for state in made],
            self.hidden_size,
        )
        return tuple(made)

    def _form(self, function: TaskFunction, given: dict[str, RowSpec], words: list[int], keeps: object) -> CompiledForm:
        """Return a form with the packed recurrent half behind ``words``."""
        weight, bias = self.packed_hh()
        state = self._state_rows()
        words = [*words, weight.address, bias.data_ptr(), self.hidden_size]
        return CompiledForm(
            function, given | state, state, np.array(words), (weight, bias, keeps), is_batch_invariant=True
        )


def check_batch_sizes(batch_sizes: Sequence[int]) -> NDArray[np.int64]:
    """Return the rows of each step as an array; ValueError unless there is a step and they are positive and never
    increase.
    """
    sizes = np.array(batch_sizes, np.int64)
    if sizes.size == 0 or sizes[-1] < 1 or (sizes.size > 1 and bool((sizes[1:] > sizes[:-1]).any())):
        raise ValueError(f"batch_sizes must be positive and must not increase: {list(batch_sizes)}")
    return sizes


def check_rows(sizes: NDArray[np.int64], rows: int) -> None:
    """Raise ValueError unless packed inputs of ``rows`` rows fit the rows of each step."""
    total = int(sizes.sum()) if sizes.size > 1 else int(sizes[0])
    if total != rows:
        raise ValueError(f"batch_sizes sum to {total}, but the step inputs have {rows} rows")


def unroll(
    batch_sizes: Sequence[int],
    step: Callable[..., tuple[Tensor, ...]],
    inputs: Tensor | None,
    states: Sequence[Tensor],
) -> tuple[Tensor, ...]:
    """Return the steps-first form by calling ``step(inputs?, *states)`` once a step; return what the steps return,
    packed.

    The first results of a step are the states of the next.
    """
    results: list[tuple[Tensor, ...]] = []
    start = 0
    for size in batch_sizes:
        given = [] if inputs is None else [inputs[start : start + size]]
        results.append(step(*given, *(state[:size] for state in states)))
        states = results[-1][: len(states)]
        start += size
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))
