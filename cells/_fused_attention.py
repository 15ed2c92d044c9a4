"""The attention of decoders on a GPU, behind their layers, with weights as the kernels read them.

It reads the encoder's rows and combines the result with the state.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from cellrt import RaggedRows
from cellrt.cells._fused import chosen_precision, fold_with_end, project_rows
from cellrt.cells._weights import Derived
from cellrt.cells.attention import AdditiveAttention, DotAttention, Linear
from cellrt.kernels.arena_rows import ArenaRows

if TYPE_CHECKING:
    from cellrt.definition.fused import StepRows


class FusedReading:
    """The weights of one decoder, laid out when they are first needed."""

    def __init__(self) -> None:
        self._table, self._halves, self._turned = Derived(_fold_part), Derived(_split), Derived(_turn)

    def table(self, embedding: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the part of the first layer's gates that each token's embedding gives: see ``fold_with_end``."""
        return self._table.of(embedding, weight, bias)

    def read(
        self, attention: DotAttention | AdditiveAttention, h: StepRows, memory: RaggedRows, keys: RaggedRows | None
    ) -> Tensor:
        """Return the context of each row of ``h``, in order."""
        from cellrt.kernels.ragged_attention import Memory, ragged_attention

        span = ArenaRows(*h).span
        if isinstance(attention, AdditiveAttention):
            query = project_rows(attention.query.weight, attention.query.bias, h)
            key = linear(memory.values, attention.key.weight) if keys is None else keys.values
            return ragged_attention(query, Memory(memory.values, memory.offsets, key, attention.score), span)
        rows = Memory(memory.values, memory.offsets)
        if attention.weight is None:
            return ragged_attention(ArenaRows(*h), rows, span)
        return ragged_attention(project_rows(self._turned.of(attention.weight), None, h), rows, span)

    def combine(self, combine: Linear, context: Tensor, h: StepRows, out: StepRows, is_read: bool) -> StepRows:
        """Return the attended rows, of an arena; where these may be none (``is_read`` is false), others in order."""
        from cellrt.kernels.combine_rows import Combination, combine_rows

        halves = Combination(*self._halves.of(combine.weight), combine.bias, chosen_precision())
        if is_read:
            combine_rows(context, ArenaRows(*h), halves, ArenaRows(*out))
            return out
        made = combine.weight.new_empty(len(context), len(combine.weight))
        combine_rows(context, ArenaRows(*h), halves, ArenaRows(*out), made)
        return h._replace(values=made, rows=torch.arange(len(made), device=made.device))


def fits(attention: object, memory_size: int) -> bool:
    """Return whether the kernel takes such an attention: one of these kinds, of rows that are not too wide."""
    from cellrt.kernels.ragged_attention import MOST_NUMBERS

    if type(attention) is AdditiveAttention:
        return max(memory_size, len(attention.score)) <= MOST_NUMBERS
    return type(attention) is DotAttention and memory_size <= MOST_NUMBERS


def _fold_part(embedding: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return fold_with_end(embedding, weight[:, : embedding.shape[1]], bias)


def _split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return the part that multiplies the context, and that which multiplies a state of as many numbers as there are
    rows.
    """
    width = weight.shape[1] - len(weight)
    return weight[:, :width].contiguous(), weight[:, width:].contiguous()


def _turn(weight: Tensor) -> Tensor:
    return weight.T.contiguous()
