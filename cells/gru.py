"""GRU cells (Cho et al. 2014), in the form of cuDNN and torch: the reset gate acts behind the hidden product.

For one row with input x and state h, weights W and b of the gates r (reset), z (update), n (candidate):

    r  = sigmoid(W_ir x + b_ir + W_hr h + b_hr)
    z  = sigmoid(W_iz x + b_iz + W_hz h + b_hz)
    n  = tanh   (W_in x + b_in + r (W_hn h + b_hn))
    h' = (1 - z) n + z h

Parameters have the names and the layout of ``torch.nn.GRUCell``. ``GRUCell`` is the whole of it; ``GRUInput`` and
``GRURecurrent`` are its two halves; ``EmbeddingGRUCell`` takes tokens. Which path runs, and on which thread, is as in
``lstm.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from cellrt import RowSpec
from cellrt.cells._fused import fused_gru
from cellrt.cells._gated import GatedModule, TaskFunctions
from cellrt.cells._gated_cells import InputHalf, RecurrentHalf, TokenCell, WholeCell
from cellrt.cells._host import gru_embedded, gru_gates, gru_inputs, gru_tokens
from cellrt.cells._recurrence import gru_run, gru_run_inputs
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.fused import reads_spans

if TYPE_CHECKING:
    from cellrt.definition.fused import StepRows


class GRUState(NamedTuple):
    """The state after a step: ``h`` ``[rows, hidden_size]``."""

    h: Tensor


class GRUGates(NamedTuple):
    """The input half of the gates r, z, n: ``[rows, 3 * hidden_size]``."""

    gates: Tensor


def update_state(gates: Tensor, hidden: Tensor, h: Tensor) -> GRUState:
    """Return the pointwise half of a step in plain torch, from the sums over input and state, ``[rows, 3 *
    hidden_size]``.
    """
    input_r, input_z, input_n = gates.chunk(3, dim=-1)
    hidden_r, hidden_z, hidden_n = hidden.chunk(3, dim=-1)
    r, z = torch.sigmoid(input_r + hidden_r), torch.sigmoid(input_z + hidden_z)
    n = torch.tanh(input_n + r * hidden_n)
    return GRUState(n + z * (h - n))


class _GRU(GatedModule):
    """The attributes that make a gated cell a GRU."""

    gates, states = 3, ("h",)
    torch_cell, torch_layers = nn.GRUCell, nn.GRU
    update, run, run_inputs = staticmethod(update_state), staticmethod(gru_run), staticmethod(gru_run_inputs)
    functions = TaskFunctions(gru_inputs, gru_gates, gru_tokens, gru_embedded)


class GRUCell(_GRU, WholeCell):
    """One GRU step: ``x`` ``[rows, input_size]``, ``h`` ``[rows, hidden_size]`` -> ``GRUState``.

    The steps-first form takes ``x`` packed as in ``torch.nn.utils.rnn.PackedSequence``.
    """

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, bias)
        self._fused = fused_gru()

    def forward(self, x: Tensor, h: Tensor) -> GRUState:
        """Run one step. Raise ValueError for a wrong shape."""
        return GRUState(*self._step(x, (h,)))

    def steps(self, batch_sizes: Sequence[int], *, x: Tensor, h: Tensor) -> GRUState:
        """``len(batch_sizes)`` steps; the state after each of them, packed."""
        return GRUState(*self._steps(batch_sizes, x, (h,)))

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form of ``steps``, for float32."""
        return self._compiled()

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return whether ``run_rows`` takes these rows, with the weights where they are."""
        return self._takes(inputs, outputs)

    @reads_spans
    def run_rows(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> None:
        """One step by the fused kernel, rows of arenas to rows of arenas (``cellrt/definition/fused.py``)."""
        self._fused.run(self, inputs, outputs)


class GRUInput(_GRU, InputHalf):
    """The input half of a GRU: ``x`` ``[rows, input_size]`` -> ``GRUGates``; feeds ``GRURecurrent``."""

    def forward(self, x: Tensor) -> GRUGates:
        """Return the gates' sums over the input, its bias included."""
        return GRUGates(self.input_gates(x))

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form of ``forward``, for float32."""
        return self._compiled()


class GRURecurrent(_GRU, RecurrentHalf):
    """The recurrent half of a GRU: ``gates`` ``[rows, 3 * hidden_size]`` from ``GRUInput``, ``h`` -> ``GRUState``."""

    def __init__(self, hidden_size: int, bias: bool = True) -> None:
        super().__init__(hidden_size, bias)
        self._fused = fused_gru()

    def forward(self, gates: Tensor, h: Tensor) -> GRUState:
        """Run one step. Raise ValueError for a wrong shape."""
        return GRUState(*self._step(gates, (h,)))

    def steps(self, batch_sizes: Sequence[int], *, gates: Tensor, h: Tensor) -> GRUState:
        """``len(batch_sizes)`` steps; the state after each of them, packed."""
        return GRUState(*self._steps(batch_sizes, gates, (h,)))

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form of ``steps``, for float32."""
        return self._compiled()

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return whether ``run_rows`` takes these rows, with the weights where they are."""
        return self._takes(inputs, outputs)

    @reads_spans
    def run_rows(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> None:
        """One step by the fused kernel, rows of arenas to rows of arenas (``cellrt/definition/fused.py``)."""
        self._fused.run(self, inputs, outputs)


class EmbeddingGRUCell(_GRU, TokenCell):
    """A GRU step on tokens: ``token`` int64 ``[rows]``, ``h`` ``[rows, hidden_size]`` -> ``GRUState``.

    With ``fold``, the table ``embedding @ W_x + b`` (``num_embeddings * 3 * hidden_size`` numbers) is computed
    once, and a step only looks up a row of it.
    """

    def __init__(
        self, num_embeddings: int, embedding_size: int, hidden_size: int, bias: bool = True, *, fold: bool = True
    ) -> None:
        super().__init__(num_embeddings, embedding_size, hidden_size, bias, fold=fold)
        self._fused = fused_gru(is_recurrent=True)

    def forward(self, token: Tensor, h: Tensor) -> GRUState:
        """Run one step. Raise ValueError for a wrong shape, IndexError for a token outside the embedding."""
        return GRUState(*self._step(token, (h,)))

    def steps(self, batch_sizes: Sequence[int], *, token: Tensor, h: Tensor) -> GRUState:
        """``len(batch_sizes)`` steps on packed tokens; the state after each of them, packed."""
        return GRUState(*self._steps(batch_sizes, token, (h,)))

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form of ``steps``, for float32."""
        return self._compiled()

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return whether ``run_rows`` takes these rows, with the weights where they are: only with ``fold``."""
        return self._takes_tokens(inputs, outputs)

    @reads_spans
    def run_rows(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> None:
        """One step by the fused kernel, which reads the folded table; NaN for tokens outside the embedding."""
        self._fused.run(self, self.with_gates(inputs), outputs)
