"""Tree-LSTM cells for leaves, and for nodes of a fixed number of children in order (Tai, Socher and Manning 2015).

``NaryTreeLSTMCell`` and ``BinaryTreeLSTMCell`` (section 3.2, equations 9 to 14), for a node with input x and n children
k in order, l among them:

    i   = sigmoid(W_i x + sum of U_il h_l  + b_i)
    f_k = sigmoid(W_f x + sum of U_fkl h_l + b_fk)
    o   = sigmoid(W_o x + sum of U_ol h_l  + b_o)
    u   = tanh   (W_u x + sum of U_ul h_l  + b_u)
    c   = i u + sum of f_k c_k
    h   = o tanh(c)

(The paper has one b_f for all f_k: equal ones here.) Without an input size the terms in x are left out: inner nodes of
a constituency tree have no input. ``TreeLSTMLeaf`` is a node without children, so without f. ``child_sum_tree_lstm.py``
has nodes of any number of children.

``weight_ih`` has the rows of W_i, W_o, W_u, W_f one below the other; ``weight_hh`` those of U_i, U_o, U_u, U_f1, ...,
U_fn, each with a column for each unit of each child; ``bias`` is laid out as the gates of ``weight_hh`` (of a leaf, as
those of ``weight_ih``).

Weights of any floating type. Which path runs, and on which thread, is as in ``lstm.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from cellrt import DefinitionError, RowSpec, rows
from cellrt.cells._fused import can_fuse, fused_tree_lstm
from cellrt.cells._host import TOKEN, tree_leaf, tree_leaf_embedded, tree_leaf_tokens, tree_nary
from cellrt.cells._tree import leaf_step, nary_step
from cellrt.cells._tree_state import TreeState, finish, new_parameter, pack, state_rows
from cellrt.cells._weights import Derived, are_float32_on_cpu, check_shape, is_eager, is_fusable
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.fused import reads_spans

if TYPE_CHECKING:
    from cellrt.definition.fused import StepRows

MAX_CHILDREN = 8
"""Most children of an n-ary cell."""


class TreeLSTMLeaf(nn.Module):
    """A leaf: ``x`` ``[rows, input_size]`` -> ``TreeState``."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.weight_ih = new_parameter(hidden_size, 3 * hidden_size, input_size)
        self.bias = new_parameter(hidden_size, 3 * hidden_size)
        self._packed = Derived(partial(pack, units=hidden_size))

    def forward(self, x: Tensor) -> TreeState:
        """Return the states. Raise ValueError for a wrong shape."""
        return self._state_of(x)

    def _state_of(self, x: Tensor) -> TreeState:
        if not (is_fusable(x) and x.shape[0]):
            i, o, u = linear(x, self.weight_ih, self.bias).chunk(3, dim=-1)
            return finish(i, o, u, 0.0)
        check_shape("x", x, (x.shape[0], self.input_size))
        weight, bias = self._packed.of(self.weight_ih, self.bias)
        x = x.contiguous()
        h, c = (x.new_empty(x.shape[0], self.hidden_size) for _ in range(2))
        panels, depth = weight.address, weight.depth
        leaf_step(
            x.shape[0], x.data_ptr(), depth, panels, bias.data_ptr(), h.data_ptr(), c.data_ptr(), self.hidden_size
        )
        return TreeState(h, c)

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form, for float32."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        weight, bias = self._packed.of(self.weight_ih, self.bias)
        words = np.array([weight.depth, weight.address, bias.data_ptr(), self.hidden_size])
        return CompiledForm(
            tree_leaf,
            {"x": rows(weight.depth)},
            state_rows(self.hidden_size),
            words,
            (weight, bias),
            is_batch_invariant=True,
        )

    def extra_repr(self) -> str:
        """Return the sizes, for ``repr``."""
        return f"input_size={self.input_size}, hidden_size={self.hidden_size}"


class EmbeddingTreeLSTMLeaf(TreeLSTMLeaf):
    """A leaf of a token: ``token`` int64 ``[rows]`` -> ``TreeState``.

    A leaf depends on its token alone: with ``fold``, the states of all tokens (twice ``num_embeddings * hidden_size``
    numbers) are computed once, and a call only looks them up.
    """

    def __init__(self, num_embeddings: int, embedding_size: int, hidden_size: int, *, fold: bool = True) -> None:
        super().__init__(embedding_size, hidden_size)
        self.embedding = nn.Embedding(num_embeddings, embedding_size)
        self.fold = fold
        self._states = Derived(_leaf_states)

    def forward(self, token: Tensor) -> TreeState:
        """Return the states. Raise IndexError for a token outside the embedding."""
        if self.fold and is_eager(token, self.embedding.weight):
            h, c = self._states.of(self.embedding.weight, self.weight_ih, self.bias)
            return TreeState(embedding(token, h), embedding(token, c))
        return self._state_of(embedding(token, self.embedding.weight))

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form, for float32."""
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
            return CompiledForm(
                tree_leaf_embedded,
                {"token": TOKEN},
                state_rows(self.hidden_size),
                words,
                keeps,
                is_batch_invariant=True,
            )
        h, c = self._states.of(self.embedding.weight, self.weight_ih, self.bias)
        words = np.array([h.data_ptr(), c.data_ptr(), self.embedding.num_embeddings, self.hidden_size])
        return CompiledForm(
            tree_leaf_tokens, {"token": TOKEN}, state_rows(self.hidden_size), words, (h, c), is_batch_invariant=True
        )


def _leaf_states(table: Tensor, weight: Tensor, bias: Tensor) -> TreeState:
    """Return the states that each row of an embedding gives, a few thousand at a time."""
    parts = []
    for part in table.split(4096):
        i, o, u = linear(part, weight, bias).chunk(3, dim=-1)
        parts.append(finish(i, o, u, 0.0))
    return TreeState(torch.cat([part.h for part in parts]), torch.cat([part.c for part in parts]))


class NaryTreeLSTMCell(nn.Module):
    """A node of ``num_children`` (1 to 8) children in order: states ``h_0``, ``c_0``, ``h_1``, ... ``[rows,
    hidden_size]``, and ``x`` ``[rows, input_size]`` unless ``input_size`` is None -> ``TreeState``."""

    weight_ih: nn.Parameter | None

    def __init__(self, num_children: int, input_size: int | None, hidden_size: int) -> None:
        super().__init__()
        if not 1 <= num_children <= MAX_CHILDREN:
            raise DefinitionError(f"expected 1 to {MAX_CHILDREN} children, got {num_children}")
        self.num_children, self.input_size, self.hidden_size = num_children, input_size, hidden_size
        rows = (3 + num_children) * hidden_size
        self.weight_hh = new_parameter(hidden_size, rows, num_children * hidden_size)
        self.bias = new_parameter(hidden_size, rows)
        shape = None if input_size is None else (4 * hidden_size, input_size)
        self.register_parameter("weight_ih", shape and new_parameter(hidden_size, *shape))
        self._packed_hh = Derived(partial(pack, units=hidden_size))
        self._packed_ih = Derived(partial(pack, bias=None, units=hidden_size))

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
        """Return the states. Give h and c of the first ``num_children`` children, and no others.

        Raise ValueError for a wrong shape.
        """
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
        return finish(i, o, u, kept)

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form, for float32."""
        return self._form([f"{state}_{child}" for state in "hc" for child in range(self.num_children)])

    def _form(self, names: Sequence[str]) -> CompiledForm | None:
        """Return a form that reads inputs of these names: h of each child, then c of each."""
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
        return CompiledForm(
            tree_nary, given, state_rows(self.hidden_size), words, (weight, bias, keeps), is_batch_invariant=True
        )

    def extra_repr(self) -> str:
        """Return the sizes, for ``repr``."""
        return f"num_children={self.num_children}, input_size={self.input_size}, hidden_size={self.hidden_size}"


class BinaryTreeLSTMCell(NaryTreeLSTMCell):
    """A node of two children: states ``h_left``, ``c_left``, ``h_right``, ``c_right`` ``[rows, hidden_size]``, and
    ``x`` ``[rows, input_size]`` unless ``input_size`` is None -> ``TreeState``."""

    def __init__(self, input_size: int | None, hidden_size: int) -> None:
        super().__init__(2, input_size, hidden_size)
        self._fused = fused_tree_lstm()

    def forward(  # type: ignore[override]
        self, h_left: Tensor, c_left: Tensor, h_right: Tensor, c_right: Tensor, x: Tensor | None = None
    ) -> TreeState:
        """Run one step. Raise ValueError for a wrong shape."""
        return self._state_of((h_left, h_right), (c_left, c_right), x)

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form, for float32."""
        return self._form(("h_left", "h_right", "c_left", "c_right"))

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return whether ``run_rows`` takes these rows, with the weights where they are."""
        given = {name: rows(self.hidden_size) for name in ("h_left", "c_left", "h_right", "c_right")}
        if self.weight_ih is not None:
            given["x"] = rows(self.weight_ih.shape[1])
        return can_fuse(self, inputs, outputs, given, state_rows(self.hidden_size))

    @reads_spans
    def run_rows(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> None:
        """One step by the fused kernel, rows of arenas to rows of arenas (``cellrt/definition/fused.py``)."""
        self._fused.run(self, inputs, outputs)
