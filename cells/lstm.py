"""LSTM cells (Hochreiter and Schmidhuber 1997; with the forget gate of Gers, Schmidhuber and Cummins 2000).

For one row with input x and state (h, c), weights W and b of the gates i (input), f (forget), g (candidate),
o (output):

    i = sigmoid(W_ii x + b_ii + W_hi h + b_hi)
    f = sigmoid(W_if x + b_if + W_hf h + b_hf)
    g = tanh   (W_ig x + b_ig + W_hg h + b_hg)
    o = sigmoid(W_io x + b_io + W_ho h + b_ho)
    c' = f c + i g
    h' = o tanh(c')

Parameters have the names and the layout of `torch.nn.LSTMCell`. `LSTMCell` is the whole of it; `LSTMInput`
and `LSTMRecurrent` are its two halves, because the sums over x need no state and can be batched over all
steps; `EmbeddingLSTMCell` takes tokens.

Under `torch.no_grad` or `torch.inference_mode`, float32 on a CPU runs in kernels of our own on the calling
thread, with a packed copy of the weights made at the first call. All else (other devices and types,
gradients, export) is plain torch. Any number of threads may call the same cell at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from cellrt.cells._fused import can_fuse, fold_with_end, fused_lstm, gates_of_tokens, vectors
from cellrt.cells._gated import (
    Derived,
    EmbeddedModule,
    GatedModule,
    are_float32_on_cpu,
    check_batch_sizes,
    check_float32_on_cpu,
    check_rows,
    check_shape,
    check_torch_module,
    is_fusable,
    unroll,
)
from cellrt.cells._host import TOKEN, lstm_embedded, lstm_gates, lstm_inputs, lstm_tokens
from cellrt.cells._recurrence import lstm_run, lstm_run_inputs
from cellrt.definition.host_kernel import HostFunction, HostKernel
from cellrt.definition.spec import RowSpec, rows

if TYPE_CHECKING:
    from cellrt.definition.fused import IndexedRows, RunSizes
    from cellrt.kernels.arena_rows import ArenaRows


class LSTMState(NamedTuple):
    """The state after a step: `h` and `c`, each `[rows, hidden_size]`."""

    h: Tensor
    c: Tensor


class LSTMGates(NamedTuple):
    """The input half of the gates i, f, g, o: `[rows, 4 * hidden_size]`."""

    gates: Tensor


def update_state(sums: Tensor, c: Tensor) -> LSTMState:
    """The pointwise half of a step in plain torch: `sums` `[rows, 4 * hidden_size]` of the gates, state
    `c`."""
    i, f, g, o = sums.chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return LSTMState(torch.sigmoid(o) * torch.tanh(c), c)


class _LSTM(GatedModule):
    """What the cells with a recurrent half share."""

    gates = 4
    torch_cell, torch_layers = nn.LSTMCell, nn.LSTM

    def _plain_step(self, gates: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        return update_state(gates + linear(h, self.weight_hh, self.bias_hh), c)

    def _check(self, sizes: NDArray[np.int64], rows: int, h: Tensor, c: Tensor) -> None:
        check_rows(sizes, rows)
        self.check_states(int(sizes[0]), h, c)

    def check_states(self, rows: int, h: Tensor, c: Tensor) -> None:
        """Raise ValueError unless these are the states of `rows` rows."""
        check_shape("h", h, (rows, self.hidden_size))
        check_shape("c", c, (rows, self.hidden_size))

    def _run_gates(
        self, sizes: NDArray[np.int64], gates: Tensor, token: Tensor | None, h: Tensor, c: Tensor
    ) -> LSTMState:
        """The fused run over `gates` (packed, or a table whose rows `token` names)."""
        rows = gates.shape[0] if token is None else token.shape[0]
        self._check(sizes, rows, h, c)
        check_float32_on_cpu("the table of gates", gates)
        check_shape("gates", gates, (gates.shape[0], 4 * self.hidden_size))
        weight, bias = self.packed_hh()
        gates, h, c = gates.contiguous(), h.contiguous(), c.contiguous()
        h_out, c_out = h.new_empty(rows, self.hidden_size), c.new_empty(rows, self.hidden_size)
        lstm_run(
            sizes,
            gates.data_ptr(),
            0 if token is None else token.data_ptr(),
            weight.address,
            bias.data_ptr(),
            h.data_ptr(),
            c.data_ptr(),
            h_out.data_ptr(),
            c_out.data_ptr(),
            self.hidden_size,
        )
        return LSTMState(h_out, c_out)

    def _run_inputs(self, sizes: NDArray[np.int64], x: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """The fused run over inputs `x`, packed."""
        self._check(sizes, x.shape[0], h, c)
        x_weight, x_bias = self.packed_ih()
        check_shape("x", x, (x.shape[0], x_weight.depth))
        weight, bias = self.packed_hh()
        x, h, c = x.contiguous(), h.contiguous(), c.contiguous()
        h_out, c_out = (state.new_empty(x.shape[0], self.hidden_size) for state in (h, c))
        lstm_run_inputs(
            sizes,
            x.data_ptr(),
            x_weight.depth,
            x_weight.address,
            x_bias.data_ptr(),
            weight.address,
            bias.data_ptr(),
            h.data_ptr(),
            c.data_ptr(),
            h_out.data_ptr(),
            c_out.data_ptr(),
            self.hidden_size,
        )
        return LSTMState(h_out, c_out)

    def _kernel(self, function: HostFunction, given: dict[str, RowSpec], words: list[int], keeps: object) -> HostKernel:
        """A kernel with the packed recurrent half behind `words`."""
        weight, bias = self.packed_hh()
        state = {"h": rows(self.hidden_size), "c": rows(self.hidden_size)}
        words = [*words, weight.address, bias.data_ptr(), self.hidden_size]
        return HostKernel(function, given | state, state, np.array(words), (weight, bias, keeps))


class LSTMCell(_LSTM):
    """One LSTM step: `x` `[rows, input_size]`, `h` and `c` `[rows, hidden_size]` -> `LSTMState`.

    The steps-first form takes `x` packed as in `torch.nn.utils.rnn.PackedSequence`.
    """

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, bias, is_recurrent=True)
        self._fused = fused_lstm()

    @classmethod
    def from_torch(cls, module: nn.LSTMCell | nn.LSTM) -> Self:
        """A cell with the weights of a torch cell, or of a torch LSTM of one layer in one direction.

        Raises DefinitionError for any other module.
        """
        source = check_torch_module(module, nn.LSTMCell, nn.LSTM)
        cell = cls(source.input_size, source.hidden_size, source.bias)
        cell.take_weights(source)
        return cell

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """One step; raises ValueError for a wrong shape."""
        if x.shape[0] and is_fusable(x, h, c):
            return self._run_inputs(np.array([x.shape[0]]), x, h, c)
        return self._plain_step(linear(x, self.weight_ih, self.bias_ih), h, c)

    def steps(self, batch_sizes: Sequence[int], *, x: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """`len(batch_sizes)` steps; the state after each of them, packed."""
        sizes = check_batch_sizes(batch_sizes)
        if is_fusable(x, h, c):
            return self._run_inputs(sizes, x, h, c)
        self._check(sizes, x.shape[0], h, c)
        return LSTMState(*unroll(batch_sizes, self._plain_step, self.input_gates(x), (h, c)))

    def host_kernel(self) -> HostKernel | None:
        """The compiled form of `steps`, for float32."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        weight, bias = self.packed_ih()
        words = [weight.depth, weight.address, bias.data_ptr()]
        return self._kernel(lstm_inputs, {"x": rows(weight.depth)}, words, (weight, bias))

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Whether `run_rows` takes these rows, with the weights where they are."""
        state = vectors(h=self.hidden_size, c=self.hidden_size)
        return can_fuse(self, inputs, outputs, vectors(x=self.weight_ih.shape[1]) | state, state)

    def run_rows(self, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]) -> None:
        """One step by the fused kernel, rows of arenas to rows of arenas (`cellrt/definition/fused.py`)."""
        self._fused.run(self, inputs, outputs)

    def run_chain_rows(
        self, sizes: RunSizes, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]
    ) -> bool:
        """A run by the chain kernel, if it takes these weights."""
        return self._fused.run_chain(self, sizes, inputs, outputs)


class LSTMInput(GatedModule):
    """The input half of an LSTM: `x` `[rows, input_size]` -> `LSTMGates`; feeds `LSTMRecurrent`."""

    gates = 4

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, bias, is_recurrent=False)

    @classmethod
    def from_torch(cls, module: nn.LSTMCell | nn.LSTM) -> Self:
        """The input half of a torch module; see `LSTMCell.from_torch`."""
        source = check_torch_module(module, nn.LSTMCell, nn.LSTM)
        cell = cls(source.input_size, source.hidden_size, source.bias)
        cell.take_weights(source)
        return cell

    def forward(self, x: Tensor) -> LSTMGates:
        """The gates' sums over the input, its bias included."""
        return LSTMGates(self.input_gates(x))

    def host_kernel(self) -> HostKernel | None:
        """The compiled form of `forward`, for float32."""
        return self.input_kernel("gates")


class LSTMRecurrent(_LSTM):
    """The recurrent half of an LSTM: `gates` `[rows, 4 * hidden_size]` from `LSTMInput`, `h`, `c` ->
    `LSTMState`."""

    def __init__(self, hidden_size: int, bias: bool = True) -> None:
        super().__init__(None, hidden_size, bias, is_recurrent=True)
        self._fused = fused_lstm()

    @classmethod
    def from_torch(cls, module: nn.LSTMCell | nn.LSTM) -> Self:
        """The recurrent half of a torch module; see `LSTMCell.from_torch`."""
        source = check_torch_module(module, nn.LSTMCell, nn.LSTM)
        cell = cls(source.hidden_size, source.bias)
        cell.take_weights(source)
        return cell

    def forward(self, gates: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """One step; raises ValueError for a wrong shape."""
        if gates.shape[0] and is_fusable(gates, h, c):
            return self._run_gates(np.array([gates.shape[0]]), gates, None, h, c)
        return self._plain_step(gates, h, c)

    def steps(self, batch_sizes: Sequence[int], *, gates: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """`len(batch_sizes)` steps; the state after each of them, packed."""
        sizes = check_batch_sizes(batch_sizes)
        if is_fusable(gates, h, c):
            return self._run_gates(sizes, gates, None, h, c)
        self._check(sizes, gates.shape[0], h, c)
        return LSTMState(*unroll(batch_sizes, self._plain_step, gates, (h, c)))

    def host_kernel(self) -> HostKernel | None:
        """The compiled form of `steps`, for float32."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        return self._kernel(lstm_gates, {"gates": rows(4 * self.hidden_size)}, [], None)

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Whether `run_rows` takes these rows, with the weights where they are."""
        state = vectors(h=self.hidden_size, c=self.hidden_size)
        return can_fuse(self, inputs, outputs, vectors(gates=4 * self.hidden_size) | state, state)

    def run_rows(self, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]) -> None:
        """One step by the fused kernel, rows of arenas to rows of arenas (`cellrt/definition/fused.py`)."""
        self._fused.run(self, inputs, outputs)

    def run_chain_rows(
        self, sizes: RunSizes, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]
    ) -> bool:
        """A run by the chain kernel, if it takes these weights."""
        return self._fused.run_chain(self, sizes, inputs, outputs)


class EmbeddingLSTMCell(EmbeddedModule, _LSTM):
    """An LSTM step on tokens: `token` int64 `[rows]`, `h` and `c` `[rows, hidden_size]` -> `LSTMState`.

    With `fold`, the table `embedding @ W_x + b` (`num_embeddings * 4 * hidden_size` numbers) is computed
    once, and a step only looks up a row of it: half the arithmetic of a step is gone.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_size: int,
        hidden_size: int,
        bias: bool = True,
        *,
        fold: bool = True,
    ) -> None:
        super().__init__(embedding_size, hidden_size, bias, is_recurrent=True)
        self.add_embedding(num_embeddings, embedding_size, fold)
        self._fused = fused_lstm(is_recurrent=True)
        self._ended_table = Derived(fold_with_end)

    @classmethod
    def from_torch(cls, table: nn.Embedding, module: nn.LSTMCell | nn.LSTM, *, fold: bool = True) -> Self:
        """A cell with the weights of a torch embedding and of a torch module; see `LSTMCell.from_torch`."""
        source = check_torch_module(module, nn.LSTMCell, nn.LSTM)
        cell = cls(table.num_embeddings, table.embedding_dim, source.hidden_size, source.bias, fold=fold)
        cell.take_weights(source)
        cell.take_embedding(table)
        return cell

    def forward(self, token: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """One step; raises ValueError for a wrong shape and IndexError for a token outside the embedding."""
        if token.shape[0] and self.is_fusable_with(token, h, c):
            return self._run_tokens(np.array([token.shape[0]]), token, h, c)
        return self._plain_step(self.token_gates(token), h, c)

    def steps(self, batch_sizes: Sequence[int], *, token: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """`len(batch_sizes)` steps on packed tokens; the state after each of them, packed."""
        sizes = check_batch_sizes(batch_sizes)
        if self.is_fusable_with(token, h, c):
            return self._run_tokens(sizes, token, h, c)
        self._check(sizes, token.shape[0], h, c)
        return LSTMState(*unroll(batch_sizes, self._plain_step, self.token_gates(token), (h, c)))

    def host_kernel(self) -> HostKernel | None:
        """The compiled form of `steps`, for float32."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        if self.fold:
            table = self.folded()
            return self._kernel(lstm_tokens, {"token": TOKEN}, [table.data_ptr(), table.shape[0]], table)
        table, (weight, bias) = self.embedding.weight.detach().contiguous(), self.packed_ih()
        words = [table.data_ptr(), table.shape[0], weight.depth, weight.address, bias.data_ptr()]
        return self._kernel(lstm_embedded, {"token": TOKEN}, words, (table, weight, bias))

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Whether `run_rows` takes these rows, with the weights where they are: only with `fold`."""
        state = vectors(h=self.hidden_size, c=self.hidden_size)
        return self.fold and can_fuse(self, inputs, outputs, {"token": TOKEN} | state, state)

    def run_rows(self, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]) -> None:
        """One step by the fused kernel, which reads the folded table; NaN for tokens outside the embedding."""
        self._fused.run(self, self._with_gates(inputs), outputs)

    def run_chain_rows(
        self, sizes: RunSizes, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]
    ) -> bool:
        """A run by the chain kernel, if it takes these weights; NaN as in `run_rows`."""
        return self._fused.run_chain(self, sizes, self._with_gates(inputs), outputs)

    def _with_gates(self, inputs: Mapping[str, IndexedRows]) -> dict[str, IndexedRows | ArenaRows]:
        table = self._ended_table.of(self.embedding.weight, self.weight_ih, self.bias_ih)
        return {"gates": gates_of_tokens(table, inputs["token"]), "h": inputs["h"], "c": inputs["c"]}

    def _run_tokens(self, sizes: NDArray[np.int64], token: Tensor, h: Tensor, c: Tensor) -> LSTMState:
        """The fused run over packed tokens."""
        if self.fold:
            return self._run_gates(sizes, self.folded(), self.check_tokens(token), h, c)
        return self._run_inputs(sizes, embedding(token, self.embedding.weight), h, c)
