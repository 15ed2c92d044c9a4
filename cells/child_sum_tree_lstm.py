"""Tree-LSTM cells for nodes of any number of children (Tai, Socher and Manning 2015, section 3.1, equations 2 to 8).

For a node with input x and any number of children k:

    h~  = sum of h_k
    i   = sigmoid(W_i x + U_i h~ + b_i)
    f_k = sigmoid(W_f x + U_f h_k + b_f)
    o   = sigmoid(W_o x + U_o h~ + b_o)
    u   = tanh   (W_u x + U_u h~ + b_u)
    c   = i u + sum of f_k c_k
    h   = o tanh(c)

``weight_ih`` has the rows of W_i, W_o, W_u, W_f one below the other, ``weight_hh`` those of U_i, U_o, U_u, U_f;
``bias`` is laid out like them.

Weights of any floating type. Which path runs, and on which thread, is as in ``lstm.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from cellrt import RaggedRows, RowSpec, ragged, rows
from cellrt.cells._host import TOKEN, tree_child_sum
from cellrt.cells._tree import are_offsets, child_sum_step, pack_padded, pad_gates
from cellrt.cells._tree_state import TreeState, finish, new_parameter, pack, state_rows
from cellrt.cells._weights import (
    Derived,
    are_float32_on_cpu,
    check_float32_on_cpu,
    check_shape,
    check_tokens,
    is_fusable,
    is_token,
)
from cellrt.definition.compiled_form import CompiledForm
from cellrt.products.packed import PackedWeight


class ChildSumTreeLSTMCell(nn.Module):
    """A node of any number of children: ``x`` ``[rows, input_size]``, their states ``h`` and ``c`` ragged ->
    ``TreeState``.

    ``h`` and ``c`` have equal offsets. A leaf is a row without children.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.weight_ih = new_parameter(hidden_size, 4 * hidden_size, input_size)
        self.weight_hh = new_parameter(hidden_size, 4 * hidden_size, hidden_size)
        self.bias = new_parameter(hidden_size, 4 * hidden_size)
        self._packed_ih = Derived(partial(pack, units=hidden_size))
        self._packed_hh = Derived(partial(_pack_child_sum, units=hidden_size))

    def forward(self, x: Tensor, h: RaggedRows, c: RaggedRows) -> TreeState:
        """Run one step. Raise ValueError for a wrong shape, or offsets that differ."""
        return self._state_of(x, h, c)

    def _state_of(self, x: Tensor, h: RaggedRows, c: RaggedRows) -> TreeState:
        if not (x.shape[0] and is_fusable(x, h.values, c.values)):
            return self._plain(linear(x, self.weight_ih, self.bias), h, c)
        check_shape("x", x, (x.shape[0], self.weight_ih.shape[1]))
        x = x.contiguous()
        weight, bias = self._packed_ih.of(self.weight_ih, self.bias)
        inputs = (x.data_ptr(), weight.depth, weight.address, bias.data_ptr(), 0, 0)
        return self._run_fused(x.shape[0], inputs, h, c)

    def _run_fused(self, rows: int, inputs: tuple[int, ...], h: RaggedRows, c: RaggedRows) -> TreeState:
        """Return the fused step; ``inputs`` say where the input half comes from, as in ``child_sum_step``."""
        units, total = self.hidden_size, h.values.shape[0]
        check_shape("h.values", h.values, (total, units))
        check_shape("c.values", c.values, (total, units))
        offsets, others = (value.offsets.to("cpu", torch.int64).contiguous() for value in (h, c))
        check_shape("h.offsets", offsets, (rows + 1,))
        check_shape("c.offsets", others, (rows + 1,))
        if not are_offsets(offsets.data_ptr(), others.data_ptr(), rows, total):
            raise ValueError(f"expected equal offsets of h and c from 0 to {total}, got {offsets} and {others}")
        weight, f_weight, zeros = self._packed_hh.of(self.weight_hh)
        h_values, c_values = h.values.contiguous(), c.values.contiguous()
        h_out, c_out = (h_values.new_empty(rows, units) for _ in range(2))
        child_sum_step(
            rows,
            *inputs,
            offsets.data_ptr(),
            h_values.data_ptr(),
            c_values.data_ptr(),
            weight.address,
            f_weight.address,
            zeros.data_ptr(),
            h_out.data_ptr(),
            c_out.data_ptr(),
            units,
        )
        return TreeState(h_out, c_out)

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form, for float32."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        weight, bias = self._packed_ih.of(self.weight_ih, self.bias)
        inputs = [weight.depth, weight.address, bias.data_ptr(), 0, 0]
        return self._form({"x": rows(weight.depth)}, inputs, (weight, bias))

    def _form(self, given: dict[str, RowSpec], inputs: Sequence[int], keeps: object) -> CompiledForm:
        """Return a form; ``inputs`` say where the input half comes from, as in ``_host.tree_child_sum``."""
        weight, f_weight, zeros = self._packed_hh.of(self.weight_hh)
        words = np.array([*inputs, weight.address, f_weight.address, zeros.data_ptr(), self.hidden_size])
        given = given | {"h": ragged(self.hidden_size), "c": ragged(self.hidden_size)}
        keeps = weight, f_weight, zeros, keeps
        return CompiledForm(tree_child_sum, given, state_rows(self.hidden_size), words, keeps, is_batch_invariant=True)

    def _plain(self, gates: Tensor, h: RaggedRows, c: RaggedRows) -> TreeState:
        """Return the step in plain torch from the input half of the gates; children are summed in at least float32."""
        counts = h.offsets.diff()
        rows = torch.arange(counts.shape[0], device=counts.device)
        parent = torch.repeat_interleave(rows, counts, output_size=h.values.shape[0])
        no_sum = gates.new_zeros(
            gates.shape[0], self.hidden_size, dtype=torch.promote_types(gates.dtype, torch.float32)
        )
        h_sum = no_sum.index_add(0, parent, h.values.to(no_sum.dtype)).to(gates.dtype)
        weight, f_weight = self.weight_hh.split([3 * self.hidden_size, self.hidden_size])
        given, given_f = gates.split([3 * self.hidden_size, self.hidden_size], dim=-1)
        i, o, u = (given + linear(h_sum, weight)).chunk(3, dim=-1)
        forget = torch.sigmoid(given_f.index_select(0, parent) + linear(h.values, f_weight))
        kept = no_sum.index_add(0, parent, (forget * c.values).to(no_sum.dtype))
        return finish(i, o, u, kept.to(gates.dtype))

    def extra_repr(self) -> str:
        """Return the sizes, for ``repr``."""
        return f"input_size={self.input_size}, hidden_size={self.hidden_size}"


class EmbeddingChildSumTreeLSTMCell(ChildSumTreeLSTMCell):
    """A child-sum node with a token: ``token`` int64 ``[rows]``, ``h`` and ``c`` ragged -> ``TreeState``.

    With ``fold``, the table ``embedding @ W + b`` (``num_embeddings * 4 * hidden_size`` numbers) is computed once, and
    a step only looks up a row of it.
    """

    def __init__(self, num_embeddings: int, embedding_size: int, hidden_size: int, *, fold: bool = True) -> None:
        super().__init__(embedding_size, hidden_size)
        self.embedding = nn.Embedding(num_embeddings, embedding_size)
        self.fold = fold
        self._table = Derived(partial(_fold_padded, units=hidden_size))

    def forward(self, token: Tensor, h: RaggedRows, c: RaggedRows) -> TreeState:
        """Run one step. Raise ValueError for a wrong shape, IndexError for a token outside the embedding."""
        if not (self.fold and token.shape[0] and is_token(token) and is_fusable(h.values, c.values)):
            return self._state_of(embedding(token, self.embedding.weight), h, c)
        token = check_tokens(token, self.embedding)
        table = self._table.of(self.embedding.weight, self.weight_ih, self.bias)
        return self._run_fused(token.shape[0], (0, 0, 0, 0, table.data_ptr(), token.data_ptr()), h, c)

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form, for float32."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        if self.fold:
            table = self._table.of(self.embedding.weight, self.weight_ih, self.bias)
            return self._form({"token": TOKEN}, [0, 0, 0, table.data_ptr(), table.shape[0]], table)
        table, (weight, bias) = (
            self.embedding.weight.detach().contiguous(),
            self._packed_ih.of(self.weight_ih, self.bias),
        )
        inputs = [weight.depth, weight.address, bias.data_ptr(), table.data_ptr(), table.shape[0]]
        return self._form({"token": TOKEN}, inputs, (table, weight, bias))


def _fold_padded(table: Tensor, weight: Tensor, bias: Tensor, units: int) -> Tensor:
    """Return the input half of the gates that each row of an embedding gives, padded: ``[num_embeddings, 4 *
    padded]``.
    """
    check_float32_on_cpu("the embedding", table)
    return linear(table, pad_gates(weight, units), pad_gates(bias, units)).contiguous()


def _pack_child_sum(weight: Tensor, units: int) -> tuple[PackedWeight, PackedWeight, Tensor]:
    """Return the recurrent weights of i, o, u and of f, and zeros, for ``child_sum_step``."""
    packed, zeros = pack(weight[: 3 * units], None, units)
    return packed, pack_padded(weight[3 * units :], units), zeros
