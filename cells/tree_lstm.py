"""Tree-LSTM cells (Tai, Socher and Manning 2015): the state of a node from the states of its children.

`ChildSumTreeLSTMCell` (section 3.1, equations 2 to 8), for a node with input x and any number of children k:

    h~  = sum of h_k
    i   = sigmoid(W_i x + U_i h~ + b_i)
    f_k = sigmoid(W_f x + U_f h_k + b_f)
    o   = sigmoid(W_o x + U_o h~ + b_o)
    u   = tanh   (W_u x + U_u h~ + b_u)
    c   = i u + sum of f_k c_k
    h   = o tanh(c)

`NaryTreeLSTMCell` and `BinaryTreeLSTMCell` (section 3.2, equations 9 to 14), for n children in order, l among them:

    i   = sigmoid(W_i x + sum of U_il h_l  + b_i)
    f_k = sigmoid(W_f x + sum of U_fkl h_l + b_fk)
    o   = sigmoid(W_o x + sum of U_ol h_l  + b_o)
    u   = tanh   (W_u x + sum of U_ul h_l  + b_u)

with c and h as above. (The paper has one b_f for all f_k: equal ones here.) Without an input size the terms in x are
left out: inner nodes of a constituency tree have no input. `TreeLSTMLeaf` is a node without children, so without f.

`weight_ih` has the rows of W_i, W_o, W_u, W_f one below the other; `weight_hh` those of U_i, U_o, U_u, U_f (of
U_f1, ..., U_fn, each with a column for each unit of each child); `bias` is laid out as the gates of `weight_hh`
(of a leaf, as those of `weight_ih`).

Weights of any floating type. Which path runs, and on which thread, is as in `lstm.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from cellrt.cells._fused import can_fuse, fused_tree_lstm
from cellrt.cells._gated import (
    Derived,
    are_float32_on_cpu,
    check_float32_on_cpu,
    check_shape,
    is_eager,
    is_fusable,
)
from cellrt.cells._host import TOKEN, tree_child_sum, tree_leaf, tree_leaf_embedded, tree_leaf_tokens, tree_nary
from cellrt.cells._panels import PackedWeight
from cellrt.cells._recurrence import all_below
from cellrt.cells._tree import are_offsets, child_sum_step, leaf_step, nary_step, pack_padded, pad_gates
from cellrt.definition.host_kernel import HostKernel
from cellrt.definition.spec import RaggedRows, RowSpec, ragged, rows
from cellrt.errors import DefinitionError

if TYPE_CHECKING:
    from cellrt.definition.fused import IndexedRows

MAX_CHILDREN = 8
"""Most children of an n-ary cell."""


class TreeState(NamedTuple):
    """The state of a node: `h` and `c`, each `[rows, hidden_size]`."""

    h: Tensor
    c: Tensor


def _state_rows(units: int) -> dict[str, RowSpec]:
    return {"h": rows(units), "c": rows(units)}


def _new_parameter(hidden_size: int, *shape: int) -> nn.Parameter:
    """Uniform in +-1/sqrt(hidden_size), as torch begins its recurrent cells."""
    bound = 1 / math.sqrt(hidden_size)
    return nn.Parameter(torch.empty(*shape).uniform_(-bound, bound))


def _pack(weight: Tensor, bias: Tensor | None, units: int) -> tuple[PackedWeight, Tensor]:
    """A weight and its bias (None: zeros) for the steps of `_tree.py`."""
    check_float32_on_cpu("the weight", weight)
    if bias is None:
        bias = weight.new_zeros(weight.shape[0])
    check_float32_on_cpu("the bias", bias)
    return pack_padded(weight, units), pad_gates(bias, units).clone()


def _pack_child_sum(weight: Tensor, units: int) -> tuple[PackedWeight, PackedWeight, Tensor]:
    """The recurrent weights of i, o, u and of f, and zeros, for `child_sum_step`."""
    packed, zeros = _pack(weight[: 3 * units], None, units)
    return packed, pack_padded(weight[3 * units :], units), zeros


def _check_tokens(token: Tensor, table: nn.Embedding) -> Tensor:
    """`token` in contiguous memory; ValueError unless it is one-dimensional, IndexError if one has no embedding."""
    check_shape("token", token, (token.shape[0],))
    token = token.contiguous()
    if not all_below(token.data_ptr(), token.shape[0], table.num_embeddings):
        raise IndexError(f"a token is outside the embedding, which has {table.num_embeddings} rows")
    return token


def _is_token(token: Tensor) -> bool:
    return type(token) is Tensor and token.dtype is torch.int64 and token.is_cpu


def _finish(i: Tensor, o: Tensor, u: Tensor, kept: Tensor | float) -> TreeState:
    """The pointwise half in plain torch, from the sums of gates and what the forget gates `kept` of the children."""
    c = torch.sigmoid(i) * torch.tanh(u) + kept
    return TreeState(torch.sigmoid(o) * torch.tanh(c), c)


class TreeLSTMLeaf(nn.Module):
    """A leaf: `x` `[rows, input_size]` -> `TreeState`."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.weight_ih = _new_parameter(hidden_size, 3 * hidden_size, input_size)
        self.bias = _new_parameter(hidden_size, 3 * hidden_size)
        self._packed = Derived(partial(_pack, units=hidden_size))

    def forward(self, x: Tensor) -> TreeState:
        """The states; raises ValueError for a wrong shape."""
        return self._state_of(x)

    def _state_of(self, x: Tensor) -> TreeState:
        if not (is_fusable(x) and x.shape[0]):
            i, o, u = linear(x, self.weight_ih, self.bias).chunk(3, dim=-1)
            return _finish(i, o, u, 0.0)
        check_shape("x", x, (x.shape[0], self.input_size))
        weight, bias = self._packed.of(self.weight_ih, self.bias)
        x = x.contiguous()
        h, c = (x.new_empty(x.shape[0], self.hidden_size) for _ in range(2))
        panels, depth = weight.address, weight.depth
        leaf_step(
            x.shape[0], x.data_ptr(), depth, panels, bias.data_ptr(), h.data_ptr(), c.data_ptr(), self.hidden_size
        )
        return TreeState(h, c)

    def host_kernel(self) -> HostKernel | None:
        """The compiled form, for float32."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        weight, bias = self._packed.of(self.weight_ih, self.bias)
        words = np.array([weight.depth, weight.address, bias.data_ptr(), self.hidden_size])
        return HostKernel(tree_leaf, {"x": rows(weight.depth)}, _state_rows(self.hidden_size), words, (weight, bias))

    def extra_repr(self) -> str:
        """The sizes, for `repr`."""
        return f"input_size={self.input_size}, hidden_size={self.hidden_size}"


class EmbeddingTreeLSTMLeaf(TreeLSTMLeaf):
    """A leaf of a token: `token` int64 `[rows]` -> `TreeState`.

    A leaf depends on its token alone: with `fold`, the states of all tokens (twice `num_embeddings * hidden_size`
    numbers) are computed once, and a call only looks them up.
    """

    def __init__(self, num_embeddings: int, embedding_size: int, hidden_size: int, *, fold: bool = True) -> None:
        super().__init__(embedding_size, hidden_size)
        self.embedding = nn.Embedding(num_embeddings, embedding_size)
        self.fold = fold
        self._states = Derived(_leaf_states)

    def forward(self, token: Tensor) -> TreeState:
        """The states; raises IndexError for a token outside the embedding."""
        if self.fold and is_eager(token, self.embedding.weight):
            h, c = self._states.of(self.embedding.weight, self.weight_ih, self.bias)
            return TreeState(embedding(token, h), embedding(token, c))
        return self._state_of(embedding(token, self.embedding.weight))

    def host_kernel(self) -> HostKernel | None:
        """The compiled form, for float32."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        if not self.fold:
            table, (weight, bias) = (
                self.embedding.weight.detach().contiguous(),
                self._packed.of(self.weight_ih, self.bias),
            )
            inputs = [table.data_ptr(), table.shape[0], weight.depth]
            words = np.array([*inputs, weight.address, bias.data_ptr(), self.hidden_size])
            keeps = table, weight, bias
            return HostKernel(tree_leaf_embedded, {"token": TOKEN}, _state_rows(self.hidden_size), words, keeps)
        h, c = self._states.of(self.embedding.weight, self.weight_ih, self.bias)
        words = np.array([h.data_ptr(), c.data_ptr(), self.embedding.num_embeddings, self.hidden_size])
        return HostKernel(tree_leaf_tokens, {"token": TOKEN}, _state_rows(self.hidden_size), words, (h, c))


def _leaf_states(table: Tensor, weight: Tensor, bias: Tensor) -> TreeState:
    """The states that each row of an embedding gives, a few thousand at a time."""
    parts = []
    for part in table.split(4096):
        i, o, u = linear(part, weight, bias).chunk(3, dim=-1)
        parts.append(_finish(i, o, u, 0.0))
    return TreeState(torch.cat([part.h for part in parts]), torch.cat([part.c for part in parts]))


class NaryTreeLSTMCell(nn.Module):
    """A node of `num_children` (1 to 8) children in order: states `h_0`, `c_0`, `h_1`, ... `[rows, hidden_size]`, and
    `x` `[rows, input_size]` unless `input_size` is None -> `TreeState`."""

    weight_ih: nn.Parameter | None

    def __init__(self, num_children: int, input_size: int | None, hidden_size: int) -> None:
        super().__init__()
        if not 1 <= num_children <= MAX_CHILDREN:
            raise DefinitionError(f"expected 1 to {MAX_CHILDREN} children, got {num_children}")
        self.num_children, self.input_size, self.hidden_size = num_children, input_size, hidden_size
        rows = (3 + num_children) * hidden_size
        self.weight_hh = _new_parameter(hidden_size, rows, num_children * hidden_size)
        self.bias = _new_parameter(hidden_size, rows)
        shape = None if input_size is None else (4 * hidden_size, input_size)
        self.register_parameter("weight_ih", shape and _new_parameter(hidden_size, *shape))
        self._packed_hh = Derived(partial(_pack, units=hidden_size))
        self._packed_ih = Derived(partial(_pack, bias=None, units=hidden_size))

    def forward(
        self,
        h_0: Tensor,
        c_0: Tensor,
        h_1: Tensor | None = None,
        c_1: Tensor | None = None,
        h_2: Tensor | None = None,
        c_2: Tensor | None = None,
        h_3: Tensor | None = None,
        c_3: Tensor | None = None,
        h_4: Tensor | None = None,
        c_4: Tensor | None = None,
        h_5: Tensor | None = None,
        c_5: Tensor | None = None,
        h_6: Tensor | None = None,
        c_6: Tensor | None = None,
        h_7: Tensor | None = None,
        c_7: Tensor | None = None,
        x: Tensor | None = None,
    ) -> TreeState:
        """The states of `num_children` children and no others are given. Raises ValueError for a wrong shape."""
        h = [value for value in (h_0, h_1, h_2, h_3, h_4, h_5, h_6, h_7) if value is not None]
        c = [value for value in (c_0, c_1, c_2, c_3, c_4, c_5, c_6, c_7) if value is not None]
        return self._state_of(h, c, x)

    def _state_of(self, h: Sequence[Tensor], c: Sequence[Tensor], x: Tensor | None) -> TreeState:
        if (x is None) != (self.input_size is None) or not len(h) == len(c) == self.num_children:
            raise ValueError(
                f"expected {self.num_children} children and {'no' if self.input_size is None else 'an'} input x, got "
                f"{len(h)} h, {len(c)} c and {'no' if x is None else 'an'} x"
            )
        rows = h[0].shape[0]
        given = () if x is None else (x,)
        if rows and is_fusable(*h, *c, *given):
            return self._run_fused(rows, h, c, x)
        return self._plain(h, c, x)

    def _run_fused(self, rows: int, h: Sequence[Tensor], c: Sequence[Tensor], x: Tensor | None) -> TreeState:
        units = self.hidden_size
        states = [value.contiguous() for value in (*h, *c)]
        for k, value in enumerate(states):
            check_shape(f"{'hc'[k // len(h)]} of child {k % len(h)}", value, (rows, units))
        weight, bias = self._packed_hh.of(self.weight_hh, self.bias)
        inputs = (0, 0, 0, 0)
        if x is not None and self.weight_ih is not None:
            check_shape("x", x, (rows, self.weight_ih.shape[1]))
            x = x.contiguous()
            x_weight, x_bias = self._packed_ih.of(self.weight_ih)
            inputs = (x.data_ptr(), x_weight.depth, x_weight.address, x_bias.data_ptr())
        h_out, c_out = (states[0].new_empty(rows, units) for _ in range(2))
        nary_step(
            rows,
            np.array([value.data_ptr() for value in states]),
            weight.address,
            bias.data_ptr(),
            *inputs,
            h_out.data_ptr(),
            c_out.data_ptr(),
            units,
        )
        return TreeState(h_out, c_out)

    def _plain(self, h: Sequence[Tensor], c: Sequence[Tensor], x: Tensor | None) -> TreeState:
        sums = linear(torch.cat(list(h), dim=-1), self.weight_hh, self.bias)
        i, o, u, *forget = sums.chunk(3 + len(h), dim=-1)
        if x is not None and self.weight_ih is not None:
            x_i, x_o, x_u, x_f = linear(x, self.weight_ih).chunk(4, dim=-1)
            i, o, u, forget = i + x_i, o + x_o, u + x_u, [f + x_f for f in forget]
        kept = torch.sigmoid(forget[0]) * c[0]
        for f, state in zip(forget[1:], c[1:], strict=True):
            kept = kept + torch.sigmoid(f) * state
        return _finish(i, o, u, kept)

    def host_kernel(self) -> HostKernel | None:
        """The compiled form, for float32."""
        return self._kernel([f"{state}_{child}" for state in "hc" for child in range(self.num_children)])

    def _kernel(self, names: Sequence[str]) -> HostKernel | None:
        """A kernel that reads inputs of these names: h of each child, then c of each."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        weight, bias = self._packed_hh.of(self.weight_hh, self.bias)
        given = {name: rows(self.hidden_size) for name in names}
        inputs, keeps = [0, 0, 0], None
        if self.weight_ih is not None:
            keeps = x_weight, x_bias = self._packed_ih.of(self.weight_ih)
            inputs = [x_weight.depth, x_weight.address, x_bias.data_ptr()]
            given["x"] = rows(x_weight.depth)
        words = np.array([self.num_children, weight.address, bias.data_ptr(), *inputs, self.hidden_size])
        return HostKernel(tree_nary, given, _state_rows(self.hidden_size), words, (weight, bias, keeps))

    def extra_repr(self) -> str:
        """The sizes, for `repr`."""
        return f"num_children={self.num_children}, input_size={self.input_size}, hidden_size={self.hidden_size}"


class BinaryTreeLSTMCell(NaryTreeLSTMCell):
    """A node of two children: states `h_left`, `c_left`, `h_right`, `c_right` `[rows, hidden_size]`, and `x`
    `[rows, input_size]` unless `input_size` is None -> `TreeState`."""

    def __init__(self, input_size: int | None, hidden_size: int) -> None:
        super().__init__(2, input_size, hidden_size)
        self._fused = fused_tree_lstm()

    def forward(  # type: ignore[override]
        self, h_left: Tensor, c_left: Tensor, h_right: Tensor, c_right: Tensor, x: Tensor | None = None
    ) -> TreeState:
        """One step; raises ValueError for a wrong shape."""
        return self._state_of((h_left, h_right), (c_left, c_right), x)

    def host_kernel(self) -> HostKernel | None:
        """The compiled form, for float32."""
        return self._kernel(("h_left", "h_right", "c_left", "c_right"))

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Whether `run_rows` takes these rows, with the weights where they are."""
        given = {name: rows(self.hidden_size) for name in ("h_left", "c_left", "h_right", "c_right")}
        if self.weight_ih is not None:
            given["x"] = rows(self.weight_ih.shape[1])
        return can_fuse(self, inputs, outputs, given, _state_rows(self.hidden_size))

    def run_rows(self, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]) -> None:
        """One step by the fused kernel, rows of arenas to rows of arenas (`cellrt/definition/fused.py`)."""
        self._fused.run(self, inputs, outputs)


class ChildSumTreeLSTMCell(nn.Module):
    """A node of any number of children: `x` `[rows, input_size]`, their states `h` and `c` ragged -> `TreeState`.

    `h` and `c` have equal offsets. A leaf is a row without children.
    """

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.weight_ih = _new_parameter(hidden_size, 4 * hidden_size, input_size)
        self.weight_hh = _new_parameter(hidden_size, 4 * hidden_size, hidden_size)
        self.bias = _new_parameter(hidden_size, 4 * hidden_size)
        self._packed_ih = Derived(partial(_pack, units=hidden_size))
        self._packed_hh = Derived(partial(_pack_child_sum, units=hidden_size))

    def forward(self, x: Tensor, h: RaggedRows, c: RaggedRows) -> TreeState:
        """One step; raises ValueError for a wrong shape, or offsets that differ."""
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
        """The fused step; `inputs` say where the input half comes from, as in `child_sum_step`."""
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

    def host_kernel(self) -> HostKernel | None:
        """The compiled form, for float32."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        weight, bias = self._packed_ih.of(self.weight_ih, self.bias)
        inputs = [weight.depth, weight.address, bias.data_ptr(), 0, 0]
        return self._kernel({"x": rows(weight.depth)}, inputs, (weight, bias))

    def _kernel(self, given: dict[str, RowSpec], inputs: Sequence[int], keeps: object) -> HostKernel:
        """A kernel; `inputs` say where the input half comes from, as in `_host.tree_child_sum`."""
        weight, f_weight, zeros = self._packed_hh.of(self.weight_hh)
        words = np.array([*inputs, weight.address, f_weight.address, zeros.data_ptr(), self.hidden_size])
        given = given | {"h": ragged(self.hidden_size), "c": ragged(self.hidden_size)}
        keeps = weight, f_weight, zeros, keeps
        return HostKernel(tree_child_sum, given, _state_rows(self.hidden_size), words, keeps)

    def _plain(self, gates: Tensor, h: RaggedRows, c: RaggedRows) -> TreeState:
        """The step in plain torch from the input half of the gates; children are summed in at least float32."""
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
        return _finish(i, o, u, kept.to(gates.dtype))

    def extra_repr(self) -> str:
        """The sizes, for `repr`."""
        return f"input_size={self.input_size}, hidden_size={self.hidden_size}"


class EmbeddingChildSumTreeLSTMCell(ChildSumTreeLSTMCell):
    """A child-sum node with a token: `token` int64 `[rows]`, `h` and `c` ragged -> `TreeState`.

    With `fold`, the table `embedding @ W + b` (`num_embeddings * 4 * hidden_size` numbers) is computed once, and a
    step only looks up a row of it.
    """

    def __init__(self, num_embeddings: int, embedding_size: int, hidden_size: int, *, fold: bool = True) -> None:
        super().__init__(embedding_size, hidden_size)
        self.embedding = nn.Embedding(num_embeddings, embedding_size)
        self.fold = fold
        self._table = Derived(partial(_fold_padded, units=hidden_size))

    def forward(self, token: Tensor, h: RaggedRows, c: RaggedRows) -> TreeState:
        """One step; raises ValueError for a wrong shape and IndexError for a token outside the embedding."""
        if not (self.fold and token.shape[0] and _is_token(token) and is_fusable(h.values, c.values)):
            return self._state_of(embedding(token, self.embedding.weight), h, c)
        token = _check_tokens(token, self.embedding)
        table = self._table.of(self.embedding.weight, self.weight_ih, self.bias)
        return self._run_fused(token.shape[0], (0, 0, 0, 0, table.data_ptr(), token.data_ptr()), h, c)

    def host_kernel(self) -> HostKernel | None:
        """The compiled form, for float32."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        if self.fold:
            table = self._table.of(self.embedding.weight, self.weight_ih, self.bias)
            return self._kernel({"token": TOKEN}, [0, 0, 0, table.data_ptr(), table.shape[0]], table)
        table, (weight, bias) = (
            self.embedding.weight.detach().contiguous(),
            self._packed_ih.of(self.weight_ih, self.bias),
        )
        inputs = [weight.depth, weight.address, bias.data_ptr(), table.data_ptr(), table.shape[0]]
        return self._kernel({"token": TOKEN}, inputs, (table, weight, bias))


def _fold_padded(table: Tensor, weight: Tensor, bias: Tensor, units: int) -> Tensor:
    """The input half of the gates that each row of an embedding gives, padded: `[num_embeddings, 4 * padded]`."""
    check_float32_on_cpu("the embedding", table)
    return linear(table, pad_gates(weight, units), pad_gates(bias, units)).contiguous()
