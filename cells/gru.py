"""GRU cells (Cho et al. 2014), in the form of cuDNN and torch: the reset gate acts behind the hidden product.

For one row with input x and state h, weights W and b of the gates r (reset), z (update), n (candidate):

    r  = sigmoid(W_ir x + b_ir + W_hr h + b_hr)
    z  = sigmoid(W_iz x + b_iz + W_hz h + b_hz)
    n  = tanh   (W_in x + b_in + r (W_hn h + b_hn))
    h' = (1 - z) n + z h

Parameters have the names and the layout of `torch.nn.GRUCell`. `GRUCell` is the whole of it; `GRUInput` and
`GRURecurrent` are its two halves; `EmbeddingGRUCell` takes tokens. Which path runs, and on which thread, is as in
`lstm.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from cellrt.cells._fused import can_fuse, fused_gru, vectors
from cellrt.cells._gated import (
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
from cellrt.cells._host import TOKEN, gru_embedded, gru_gates, gru_inputs, gru_tokens
from cellrt.cells._recurrence import gru_run, gru_run_inputs
from cellrt.definition.host_kernel import HostFunction, HostKernel
from cellrt.definition.spec import RowSpec, rows

if TYPE_CHECKING:
    from cellrt.definition.fused import IndexedRows


class GRUState(NamedTuple):
    """The state after a step: `h` `[rows, hidden_size]`."""

    h: Tensor


class GRUGates(NamedTuple):
    """The input half of the gates r, z, n: `[rows, 3 * hidden_size]`."""

    gates: Tensor


def update_state(gates: Tensor, hidden: Tensor, h: Tensor) -> GRUState:
    """The pointwise half of a step in plain torch; `gates` and `hidden` are the two halves `[rows, 3 *
    hidden_size]`."""
    input_r, input_z, input_n = gates.chunk(3, dim=-1)
    hidden_r, hidden_z, hidden_n = hidden.chunk(3, dim=-1)
    r, z = torch.sigmoid(input_r + hidden_r), torch.sigmoid(input_z + hidden_z)
    n = torch.tanh(input_n + r * hidden_n)
    return GRUState(n + z * (h - n))


class _GRU(GatedModule):
    """What the cells with a recurrent half share."""

    gates = 3
    torch_cell, torch_layers = nn.GRUCell, nn.GRU

    def _plain_step(self, gates: Tensor, h: Tensor) -> GRUState:
        return update_state(gates, linear(h, self.weight_hh, self.bias_hh), h)

    def _check(self, sizes: NDArray[np.int64], rows: int, h: Tensor) -> None:
        check_rows(sizes, rows)
        check_shape("h", h, (int(sizes[0]), self.hidden_size))

    def _run_gates(self, sizes: NDArray[np.int64], gates: Tensor, token: Tensor | None, h: Tensor) -> GRUState:
        """The fused run over `gates` (packed, or a table whose rows `token` names)."""
        rows = gates.shape[0] if token is None else token.shape[0]
        self._check(sizes, rows, h)
        check_float32_on_cpu("the table of gates", gates)
        check_shape("gates", gates, (gates.shape[0], 3 * self.hidden_size))
        weight, bias = self.packed_hh()
        gates, h = gates.contiguous(), h.contiguous()
        h_out = h.new_empty(rows, self.hidden_size)
        gru_run(
            sizes,
            gates.data_ptr(),
            0 if token is None else token.data_ptr(),
            weight.address,
            bias.data_ptr(),
            h.data_ptr(),
            h_out.data_ptr(),
            self.hidden_size,
        )
        return GRUState(h_out)

    def _run_inputs(self, sizes: NDArray[np.int64], x: Tensor, h: Tensor) -> GRUState:
        """The fused run over inputs `x`, packed."""
        self._check(sizes, x.shape[0], h)
        x_weight, x_bias = self.packed_ih()
        check_shape("x", x, (x.shape[0], x_weight.depth))
        weight, bias = self.packed_hh()
        x, h = x.contiguous(), h.contiguous()
        h_out = h.new_empty(x.shape[0], self.hidden_size)
        gru_run_inputs(
            sizes,
            x.data_ptr(),
            x_weight.depth,
            x_weight.address,
            x_bias.data_ptr(),
            weight.address,
            bias.data_ptr(),
            h.data_ptr(),
            h_out.data_ptr(),
            self.hidden_size,
        )
        return GRUState(h_out)

    def _kernel(self, function: HostFunction, given: dict[str, RowSpec], words: list[int], keeps: object) -> HostKernel:
        """A kernel with the packed recurrent half behind `words`."""
        weight, bias = self.packed_hh()
        state = {"h": rows(self.hidden_size)}
        words = [*words, weight.address, bias.data_ptr(), self.hidden_size]
        return HostKernel(function, given | state, state, np.array(words), (weight, bias, keeps))


class GRUCell(_GRU):
    """One GRU step: `x` `[rows, input_size]`, `h` `[rows, hidden_size]` -> `GRUState`.

    The steps-first form takes `x` packed as in `torch.nn.utils.rnn.PackedSequence`.
    """

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, bias, is_recurrent=True)
        self._fused = fused_gru()

    @classmethod
    def from_torch(cls, module: nn.GRUCell | nn.GRU) -> Self:
        """A cell with the weights of a torch cell, or of a torch GRU of one layer in one direction.

        Raises DefinitionError for any other module.
        """
        source = check_torch_module(module, nn.GRUCell, nn.GRU)
        cell = cls(source.input_size, source.hidden_size, source.bias)
        cell.take_weights(source)
        return cell

    def forward(self, x: Tensor, h: Tensor) -> GRUState:
        """One step; raises ValueError for a wrong shape."""
        if x.shape[0] and is_fusable(x, h):
            return self._run_inputs(np.array([x.shape[0]]), x, h)
        return self._plain_step(linear(x, self.weight_ih, self.bias_ih), h)

    def steps(self, batch_sizes: Sequence[int], *, x: Tensor, h: Tensor) -> GRUState:
        """`len(batch_sizes)` steps; the state after each of them, packed."""
        sizes = check_batch_sizes(batch_sizes)
        if is_fusable(x, h):
            return self._run_inputs(sizes, x, h)
        self._check(sizes, x.shape[0], h)
        return GRUState(*unroll(batch_sizes, self._plain_step, self.input_gates(x), (h,)))

    def host_kernel(self) -> HostKernel | None:
        """The compiled form of `steps`, for float32."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        weight, bias = self.packed_ih()
        words = [weight.depth, weight.address, bias.data_ptr()]
        return self._kernel(gru_inputs, {"x": rows(weight.depth)}, words, (weight, bias))

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Whether `run_rows` takes these rows, with the weights where they are."""
        state = vectors(h=self.hidden_size)
        return can_fuse(self, inputs, outputs, vectors(x=self.weight_ih.shape[1]) | state, state)

    def run_rows(self, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]) -> None:
        """One step by the fused kernel, rows of arenas to rows of arenas (`cellrt/definition/fused.py`)."""
        self._fused.run(self, inputs, outputs)


class GRUInput(GatedModule):
    """The input half of a GRU: `x` `[rows, input_size]` -> `GRUGates`; feeds `GRURecurrent`."""

    gates = 3

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, bias, is_recurrent=False)

    @classmethod
    def from_torch(cls, module: nn.GRUCell | nn.GRU) -> Self:
        """The input half of a torch module; see `GRUCell.from_torch`."""
        source = check_torch_module(module, nn.GRUCell, nn.GRU)
        cell = cls(source.input_size, source.hidden_size, source.bias)
        cell.take_weights(source)
        return cell

    def forward(self, x: Tensor) -> GRUGates:
        """The gates' sums over the input, its bias included."""
        return GRUGates(self.input_gates(x))

    def host_kernel(self) -> HostKernel | None:
        """The compiled form of `forward`, for float32."""
        return self.input_kernel("gates")


class GRURecurrent(_GRU):
    """The recurrent half of a GRU: `gates` `[rows, 3 * hidden_size]` from `GRUInput`, `h` -> `GRUState`."""

    def __init__(self, hidden_size: int, bias: bool = True) -> None:
        super().__init__(None, hidden_size, bias, is_recurrent=True)
        self._fused = fused_gru()

    @classmethod
    def from_torch(cls, module: nn.GRUCell | nn.GRU) -> Self:
        """The recurrent half of a torch module; see `GRUCell.from_torch`."""
        source = check_torch_module(module, nn.GRUCell, nn.GRU)
        cell = cls(source.hidden_size, source.bias)
        cell.take_weights(source)
        return cell

    def forward(self, gates: Tensor, h: Tensor) -> GRUState:
        """One step; raises ValueError for a wrong shape."""
        if gates.shape[0] and is_fusable(gates, h):
            return self._run_gates(np.array([gates.shape[0]]), gates, None, h)
        return self._plain_step(gates, h)

    def steps(self, batch_sizes: Sequence[int], *, gates: Tensor, h: Tensor) -> GRUState:
        """`len(batch_sizes)` steps; the state after each of them, packed."""
        sizes = check_batch_sizes(batch_sizes)
        if is_fusable(gates, h):
            return self._run_gates(sizes, gates, None, h)
        self._check(sizes, gates.shape[0], h)
        return GRUState(*unroll(batch_sizes, self._plain_step, gates, (h,)))

    def host_kernel(self) -> HostKernel | None:
        """The compiled form of `steps`, for float32."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        return self._kernel(gru_gates, {"gates": rows(3 * self.hidden_size)}, [], None)

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Whether `run_rows` takes these rows, with the weights where they are."""
        state = vectors(h=self.hidden_size)
        return can_fuse(self, inputs, outputs, vectors(gates=3 * self.hidden_size) | state, state)

    def run_rows(self, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]) -> None:
        """One step by the fused kernel, rows of arenas to rows of arenas (`cellrt/definition/fused.py`)."""
        self._fused.run(self, inputs, outputs)


class _EmbeddingGRU(EmbeddedModule, _GRU):
    """What the cells on tokens share."""

    def _token_step(self, sizes: NDArray[np.int64], token: Tensor, h: Tensor) -> GRUState:
        """The fused run over packed tokens."""
        if self.fold:
            return self._run_gates(sizes, self.folded(), self.check_tokens(token), h)
        return self._run_inputs(sizes, embedding(token, self.embedding.weight), h)


class EmbeddingGRUCell(_EmbeddingGRU):
    """A GRU step on tokens: `token` int64 `[rows]`, `h` `[rows, hidden_size]` -> `GRUState`.

    With `fold`, the table `embedding @ W_x + b` (`num_embeddings * 3 * hidden_size` numbers) is computed
    once, and a step only looks up a row of it.
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

    @classmethod
    def from_torch(cls, table: nn.Embedding, module: nn.GRUCell | nn.GRU, *, fold: bool = True) -> Self:
        """A cell with the weights of a torch embedding and of a torch module; see `GRUCell.from_torch`."""
        source = check_torch_module(module, nn.GRUCell, nn.GRU)
        cell = cls(table.num_embeddings, table.embedding_dim, source.hidden_size, source.bias, fold=fold)
        cell.take_weights(source)
        cell.take_embedding(table)
        return cell

    def forward(self, token: Tensor, h: Tensor) -> GRUState:
        """One step; raises ValueError for a wrong shape and IndexError for a token outside the embedding."""
        if token.shape[0] and self.is_fusable_with(token, h):
            return self._token_step(np.array([token.shape[0]]), token, h)
        return self._plain_step(self.token_gates(token), h)

    def steps(self, batch_sizes: Sequence[int], *, token: Tensor, h: Tensor) -> GRUState:
        """`len(batch_sizes)` steps on packed tokens; the state after each of them, packed."""
        sizes = check_batch_sizes(batch_sizes)
        if self.is_fusable_with(token, h):
            return self._token_step(sizes, token, h)
        self._check(sizes, token.shape[0], h)
        return GRUState(*unroll(batch_sizes, self._plain_step, self.token_gates(token), (h,)))

    def host_kernel(self) -> HostKernel | None:
        """The compiled form of `steps`, for float32."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        if self.fold:
            table = self.folded()
            return self._kernel(gru_tokens, {"token": TOKEN}, [table.data_ptr(), table.shape[0]], table)
        table, (weight, bias) = self.embedding.weight.detach().contiguous(), self.packed_ih()
        words = [table.data_ptr(), table.shape[0], weight.depth, weight.address, bias.data_ptr()]
        return self._kernel(gru_embedded, {"token": TOKEN}, words, (table, weight, bias))
