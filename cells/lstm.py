"""LSTM cells (Hochreiter and Schmidhuber 1997; with the forget gate of Gers, Schmidhuber and Cummins 2000).

For one row with input x and state (h, c), weights W and b of the gates i (input), f (forget), g (candidate),
o (output):

    i = sigmoid(W_ii x + b_ii + W_hi h + b_hi)
    f = sigmoid(W_if x + b_if + W_hf h + b_hf)
    g = tanh   (W_ig x + b_ig + W_hg h + b_hg)
    o = sigmoid(W_io x + b_io + W_ho h + b_ho)
    c' = f c + i g
    h' = o tanh(c')

Parameters have the names and the layout of ``torch.nn.LSTMCell``. ``LSTMCell`` is the whole of it; ``LSTMInput``
and ``LSTMRecurrent`` are its two halves, because the sums over x need no state and can be batched over all
steps; ``EmbeddingLSTMCell`` takes tokens.

Under ``torch.no_grad`` or ``torch.inference_mode``, float32 on a CPU runs in kernels of our own on the calling
thread, with a packed copy of the weights made at the first call. All else (other devices and types,
gradients, export) is plain torch. Any number of threads may call the same cell at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from cellrt import RowSpec
from cellrt.cells._fused import fused_lstm
from cellrt.cells._gated import GatedModule, TaskFunctions
from cellrt.cells._gated_cells import InputHalf, RecurrentHalf, TokenCell, WholeCell
from cellrt.cells._host import lstm_embedded, lstm_gates, lstm_inputs, lstm_tokens
from cellrt.cells._recurrence import lstm_run, lstm_run_inputs
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.fused import reads_spans

if TYPE_CHECKING:
    from cellrt.definition.fused import IndexedRows, RunSizes, StepRows


class LSTMState(NamedTuple):
    """The state after a step: ``h`` and ``c``, each ``[rows, hidden_size]``."""

    h: Tensor
    c: Tensor


class LSTMGates(NamedTuple):
    """The input half of the gates i, f, g, o: ``[rows, 4 * hidden_size]``."""

    gates: Tensor


def update_state(gates: Tensor, hidden: Tensor, h: Tensor, c: Tensor) -> LSTMState:
    """Return the pointwise half of a step in plain torch, from the sums over input and state, ``[rows, 4 *
    hidden_size]``.
    """
    i, f, g, o = (gates + hidden).chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return LSTMState(torch.sigmoid(o) * torch.tanh(c), c)


class _LSTM(GatedModule):
    """The attributes that make a gated cell an LSTM."""

    gates, states = 4, ("h", "c")
    torch_cell, torch_layers = nn.LSTMCell, nn.LSTM
    update, run, run_inputs = staticmethod(update_state), staticmethod(lstm_run), staticmethod(lstm_run_inputs)
    functions = TaskFunctions(lstm_inputs, lstm_gates, lstm_tokens, lstm_embedded)


class LSTMCell(_LSTM, WholeCell):
    """One LSTM step: ``x`` ``[rows, input_size]``, ``h`` and ``c`` ``[rows, hidden_size]`` -> ``LSTMState``.

    The steps-first form takes ``x`` packed as in ``torch.nn.utils.rnn.PackedSequence``.
    """

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, bias)
        self._fused = fused_lstm()

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """Run one step. Raise ValueError for a wrong shape."""
        return LSTMState(*self._step(x, (h, c)))

    def steps(self, batch_sizes: Sequence[int], *, x: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """``len(batch_sizes)`` steps; the state after each of them, packed."""
        return LSTMState(*self._steps(batch_sizes, x, (h, c)))

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

    @reads_spans
    def run_chain_rows(
        self, sizes: RunSizes, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]
    ) -> bool:
        """Return a run by the chain kernel, if it takes these weights."""
        return self._fused.run_chain(self, sizes, inputs, outputs)


class LSTMInput(_LSTM, InputHalf):
    """The input half of an LSTM: ``x`` ``[rows, input_size]`` -> ``LSTMGates``; feeds ``LSTMRecurrent``."""

    def forward(self, x: Tensor) -> LSTMGates:
        """Return the gates' sums over the input, its bias included."""
        return LSTMGates(self.input_gates(x))

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form of ``forward``, for float32."""
        return self._compiled()


class LSTMRecurrent(_LSTM, RecurrentHalf):
    """The recurrent half: ``gates`` ``[rows, 4 * hidden_size]`` from ``LSTMInput``, ``h``, ``c`` -> ``LSTMState``."""

    def __init__(self, hidden_size: int, bias: bool = True) -> None:
        super().__init__(hidden_size, bias)
        self._fused = fused_lstm()

    def forward(self, gates: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """Run one step. Raise ValueError for a wrong shape."""
        return LSTMState(*self._step(gates, (h, c)))

    def steps(self, batch_sizes: Sequence[int], *, gates: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """``len(batch_sizes)`` steps; the state after each of them, packed."""
        return LSTMState(*self._steps(batch_sizes, gates, (h, c)))

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

    @reads_spans
    def run_chain_rows(
        self, sizes: RunSizes, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]
    ) -> bool:
        """Return a run by the chain kernel, if it takes these weights."""
        return self._fused.run_chain(self, sizes, inputs, outputs)


class EmbeddingLSTMCell(_LSTM, TokenCell):
    """An LSTM step on tokens: ``token`` int64 ``[rows]``, ``h`` and ``c`` ``[rows, hidden_size]`` -> ``LSTMState``.

    With ``fold``, the table ``embedding @ W_x + b`` (``num_embeddings * 4 * hidden_size`` numbers) is computed
    once, and a step only looks up a row of it: half the arithmetic of a step is gone.
    """

    def __init__(
        self, num_embeddings: int, embedding_size: int, hidden_size: int, bias: bool = True, *, fold: bool = True
    ) -> None:
        super().__init__(num_embeddings, embedding_size, hidden_size, bias, fold=fold)
        self._fused = fused_lstm(is_recurrent=True)

    def forward(self, token: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """Run one step. Raise ValueError for a wrong shape, IndexError for a token outside the embedding."""
        return LSTMState(*self._step(token, (h, c)))

    def steps(self, batch_sizes: Sequence[int], *, token: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """``len(batch_sizes)`` steps on packed tokens; the state after each of them, packed."""
        return LSTMState(*self._steps(batch_sizes, token, (h, c)))

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

    @reads_spans
    def run_chain_rows(
        self, sizes: RunSizes, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]
    ) -> bool:
        """Return a run by the chain kernel, if it takes these weights; NaN as in ``run_rows``."""
        return self._fused.run_chain(self, sizes, self.with_gates(inputs), outputs)
