"""The four kinds of LSTM and GRU cells: the whole step, its two halves, and the step on tokens.

Each cell of a family names its compiled and fused forms in methods of its own: a subclass of it, which may compute
something else, shall not have them (``cellrt/definition/compiled_form.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import embedding, linear

from cellrt import DefinitionError, RowSpec, rows
from cellrt.cells._fused import fold_with_end, gates_of_tokens, vectors
from cellrt.cells._gated import GatedModule, States, check_batch_sizes
from cellrt.cells._host import TOKEN
from cellrt.cells._made_apart import making_apart
from cellrt.cells._torch_layers import find_layer
from cellrt.cells._weights import (
    Derived,
    are_float32_on_cpu,
    check_one_dtype,
    check_tokens,
    compiled_linear,
    copy_embedding,
    fold_table,
    is_eager,
    is_fusable,
    is_token,
    own_parameter,
)
from cellrt.definition.compiled_form import CompiledForm

if TYPE_CHECKING:
    from cellrt.definition.fused import StepRows
    from cellrt.kernels.arena_rows import ArenaRows


class WholeCell(GatedModule):
    """A step on inputs ``x``."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, bias, is_recurrent=True)

    @classmethod
    @making_apart
    def from_torch(cls, module: nn.Module, *, layer: int | None = None, reverse: bool = False) -> Self:
        """Return a cell with copies of the weights of a torch cell, or of a layer of torch's layers.

        Args:
            module: a torch cell or layers of this kind, in any floating dtype.
            layer: which one, from 0; None: the only one.
            reverse: the direction of it that runs backwards.

        Raise DefinitionError for any other module, and for a layer or direction that it does not have.
        """
        source = find_layer(cls, module, layer, reverse)
        made = cls(source.input_size, source.hidden_size, source.bias)
        made.take_weights(module, source.suffix)
        return made

    def _step(self, x: Tensor, states: States) -> States:
        if x.shape[0] and is_fusable(x, *states):
            return self._run_inputs(np.array([x.shape[0]]), x, states)
        return self._plain_step(linear(x, self.weight_ih, self.bias_ih), *states)

    def _steps(self, batch_sizes: Sequence[int], x: Tensor, states: States) -> States:
        sizes = check_batch_sizes(batch_sizes)
        if is_fusable(x, *states):
            return self._run_inputs(sizes, x, states)
        self._check(sizes, x.shape[0], states)
        return self._plain_steps(batch_sizes, self.input_gates(x), states)

    def _compiled(self) -> CompiledForm | None:
        if not are_float32_on_cpu(*self.parameters()):
            return None
        weight, bias = self.packed_ih()
        words = [weight.depth, weight.address, bias.data_ptr()]
        return self._form(self.functions.of_inputs, {"x": rows(weight.depth)}, words, (weight, bias))

    def _takes(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        return self._can_fuse(inputs, outputs, vectors(x=self.weight_ih.shape[1]))


class InputHalf(GatedModule):
    """The sums over the input."""

    def __init__(self, input_size: int, hidden_size: int, bias: bool = True) -> None:
        super().__init__(input_size, hidden_size, bias, is_recurrent=False)

    @classmethod
    @making_apart
    def from_torch(cls, module: nn.Module, *, layer: int | None = None, reverse: bool = False) -> Self:
        """Return the input half of a torch module; see ``LSTMCell.from_torch``."""
        source = find_layer(cls, module, layer, reverse)
        made = cls(source.input_size, source.hidden_size, source.bias)
        made.take_weights(module, source.suffix)
        return made

    def _compiled(self) -> CompiledForm | None:
        if not are_float32_on_cpu(*self.parameters()):
            return None
        return compiled_linear("x", "gates", *self.packed_ih())


class RecurrentHalf(GatedModule):
    """A step on the sums of an ``InputHalf``."""

    def __init__(self, hidden_size: int, bias: bool = True) -> None:
        super().__init__(None, hidden_size, bias, is_recurrent=True)

    @classmethod
    @making_apart
    def from_torch(cls, module: nn.Module, *, layer: int | None = None, reverse: bool = False) -> Self:
        """Return the recurrent half of a torch module; see ``LSTMCell.from_torch``."""
        source = find_layer(cls, module, layer, reverse)
        made = cls(source.hidden_size, source.bias)
        made.take_weights(module, source.suffix)
        return made

    def _step(self, gates: Tensor, states: States) -> States:
        if gates.shape[0] and is_fusable(gates, *states):
            return self._run_gates(np.array([gates.shape[0]]), gates, None, states)
        return self._plain_step(gates, *states)

    def _steps(self, batch_sizes: Sequence[int], gates: Tensor, states: States) -> States:
        sizes = check_batch_sizes(batch_sizes)
        if is_fusable(gates, *states):
            return self._run_gates(sizes, gates, None, states)
        self._check(sizes, gates.shape[0], states)
        return self._plain_steps(batch_sizes, gates, states)

    def _compiled(self) -> CompiledForm | None:
        if not are_float32_on_cpu(*self.parameters()):
            return None
        return self._form(self.functions.of_gates, {"gates": rows(self.gates * self.hidden_size)}, [], None)

    def _takes(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        return self._can_fuse(inputs, outputs, vectors(gates=self.gates * self.hidden_size))


class TokenCell(GatedModule):
    """A step on tokens; ``fold`` says whether gates come from a table instead of a product."""

    def __init__(
        self, num_embeddings: int, embedding_size: int, hidden_size: int, bias: bool = True, *, fold: bool = True
    ) -> None:
        super().__init__(embedding_size, hidden_size, bias, is_recurrent=True)
        self.embedding = nn.Embedding(num_embeddings, embedding_size)
        self.fold = fold
        self._table, self._ended_table = Derived(fold_table), Derived(fold_with_end)

    @classmethod
    @making_apart
    def from_torch(
        cls,
        table: nn.Embedding,
        module: nn.Module,
        *,
        fold: bool = True,
        layer: int | None = None,
        reverse: bool = False,
    ) -> Self:
        """Return a cell with copies of the weights of a torch embedding and of a torch module; see
        ``LSTMCell.from_torch``.
        """
        source = find_layer(cls, module, layer, reverse)
        check_one_dtype(cls.__name__, module, table)
        if source.input_size != table.embedding_dim:
            raise DefinitionError(
                f"{cls.__name__}: the module reads rows of {source.input_size}, the embedding has {table}"
            )
        made = cls(table.num_embeddings, table.embedding_dim, source.hidden_size, source.bias, fold=fold)
        made.take_weights(module, source.suffix)
        made.embedding.weight = copy_embedding(table)
        return made

    def is_fusable_with(self, token: Tensor, *states: Tensor) -> bool:
        """Return whether the compiled kernels can take these tokens and states."""
        return is_token(token) and is_fusable(*states)

    def folded(self) -> Tensor:
        """Return the gates of every token ``[num_embeddings, gates * hidden_size]``."""
        names = "weight_ih", "bias_ih"
        return self._table.of(own_parameter(self.embedding, "weight"), *(own_parameter(self, name) for name in names))

    def with_gates(self, inputs: Mapping[str, StepRows]) -> dict[str, StepRows | ArenaRows]:
        """Return the inputs of a fused step, with rows of the table of gates in place of the token's."""
        table = self._ended_table.of(self.embedding.weight, self.weight_ih, self.bias_ih)
        states = {name: inputs[name] for name in self.states}
        return {"gates": gates_of_tokens(table, inputs["token"]), **states}

    def _takes_tokens(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return whether a step kernel takes these rows: only with ``fold``."""
        return self.fold and self._can_fuse(inputs, outputs, {"token": TOKEN})

    def _token_gates(self, token: Tensor) -> Tensor:
        """Return the input half of the gates in plain torch."""
        if self.fold and is_eager(token, self.embedding.weight):
            return embedding(token, self.folded())
        return linear(embedding(token, self.embedding.weight), self.weight_ih, self.bias_ih)

    def _step(self, token: Tensor, states: States) -> States:
        if token.shape[0] and self.is_fusable_with(token, *states):
            return self._run_tokens(np.array([token.shape[0]]), token, states)
        return self._plain_step(self._token_gates(token), *states)

    def _steps(self, batch_sizes: Sequence[int], token: Tensor, states: States) -> States:
        sizes = check_batch_sizes(batch_sizes)
        if self.is_fusable_with(token, *states):
            return self._run_tokens(sizes, token, states)
        self._check(sizes, token.shape[0], states)
        return self._plain_steps(batch_sizes, self._token_gates(token), states)

    def _run_tokens(self, sizes: NDArray[np.int64], token: Tensor, states: States) -> States:
        """Return the compiled run over packed tokens."""
        if self.fold:
            return self._run_gates(sizes, self.folded(), check_tokens(token, self.embedding), states)
        return self._run_inputs(sizes, embedding(token, self.embedding.weight), states)

    def _compiled(self) -> CompiledForm | None:
        if not are_float32_on_cpu(*self.parameters()):
            return None
        functions = self.functions
        if self.fold:
            table = self.folded()
            return self._form(functions.of_tokens, {"token": TOKEN}, [table.data_ptr(), table.shape[0]], table)
        table, (weight, bias) = self.embedding.weight.detach().contiguous(), self.packed_ih()
        words = [table.data_ptr(), table.shape[0], weight.depth, weight.address, bias.data_ptr()]
        return self._form(functions.of_embedded_tokens, {"token": TOKEN}, words, (table, weight, bias))
