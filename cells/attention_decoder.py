"""Decoders with attention, greedy.

For a token y, the states of the layers and the attended state a of the step before (Luong et al. 2015, equations 5 and
6, and section 3.3 for a as an input):

    h' = layers([embedding(y); a], h)       without input feeding layers(embedding(y), h)
    a' = tanh(W_c [context(h'); h'])        h' is that of the top layer
    logits = W_s a' + b_s

A cell of one is ``cellrt.cell(decoder, decoder.input_specs())``: ``token`` int64 ``[rows]`` (the one before), the
states, ``memory`` ragged ``[memory_size]``, and where they apply ``attended`` ``[rows, hidden_size]`` and ``keys``
ragged ``[key_size]``. ``graph.loop`` carries token, states and attended. See ``decoder.py`` for what a decoder returns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self, cast

import torch
from torch import Tensor, nn

from cellrt import DefinitionError, RaggedRows, RowSpec, ragged, rows
from cellrt.cells._decoding import Decoder, check_parts
from cellrt.cells._fused import MAX_GATES_BYTES, can_fuse, fed_step, gates_of_tokens, of_layer
from cellrt.cells._fused_attention import FusedReading, fits
from cellrt.cells._host import STOP, TOKEN
from cellrt.cells._made_apart import making_apart
from cellrt.cells._weights import copy_embedding
from cellrt.cells.attention import AdditiveAttention, DotAttention, Linear
from cellrt.cells.gru import GRUCell
from cellrt.cells.lstm import LSTMCell
from cellrt.definition.fused import reads_outputs, reads_ragged, reads_spans

if TYPE_CHECKING:
    from cellrt.definition.fused import StepRows

Attention = DotAttention | AdditiveAttention


class _AttentionDecoder(Decoder):
    """The base of the decoders with attention: all of a step but the kind of the layers.

    Args:
        num_tokens, embedding_size, hidden_size, end_token, num_layers: see ``EmbeddingLSTMDecoder``.
        attention: default ``DotAttention()``, for which ``memory_size`` must be ``hidden_size``.
        memory_size: the size of the encoder's rows; default ``hidden_size``.
        input_feeding: whether the attended state is an input of the next step.
        return_logits, return_logprobs: see ``decoder.py``.

    Raises DefinitionError for sizes that do not fit.
    """

    def __init__(
        self,
        num_tokens: int,
        embedding_size: int,
        hidden_size: int,
        end_token: int,
        bias: bool = True,
        *,
        num_layers: int = 1,
        attention: Attention | None = None,
        memory_size: int | None = None,
        input_feeding: bool = False,
        return_logits: bool = False,
        return_logprobs: bool = False,
    ) -> None:
        super().__init__(hidden_size, end_token, return_logits, return_logprobs)
        self.memory_size = hidden_size if memory_size is None else memory_size
        self.input_feeding = input_feeding
        self.embedding = nn.Embedding(num_tokens, embedding_size)
        self.recurrent = self.recurrent_cell(embedding_size + hidden_size * input_feeding, hidden_size, bias)
        self.attention = DotAttention() if attention is None else attention
        self.combine = Linear(self.memory_size + hidden_size, hidden_size, bias=False)
        self.add_top(num_tokens, num_layers, bias)
        self._fused_first, self._fused_reading = fed_step(self.states, embedding_size), FusedReading()
        _check_attention(type(self).__name__, self.attention, hidden_size, self.memory_size)

    @classmethod
    @making_apart
    def from_torch(
        cls,
        table: nn.Embedding,
        module: Any,
        combine: nn.Linear,
        projection: nn.Linear,
        end_token: int,
        *,
        attention: Attention | None = None,
        return_logits: bool = False,
        return_logprobs: bool = False,
    ) -> Self:
        """Return a decoder with copies of the weights of torch modules, of any one floating dtype.

        Args:
            table: the embedding of the tokens.
            module: an LSTM (for a GRU decoder a GRU) of any number of layers, or a torch cell. Its dropout is off. If
                it reads ``embedding_dim + hidden_size`` numbers, the attended state is fed back behind the embedding.
            combine: W_c, from ``memory_size + hidden_size`` (the context first) to ``hidden_size``; it may have a bias.
            projection: W_s, from ``hidden_size`` to as many tokens as ``table`` has.
            attention: such as ``AdditiveAttention.from_torch(...)``; default ``DotAttention()``.
            end_token, return_logits, return_logprobs: as of the class.

        Raise DefinitionError for other modules, and for those that do not fit each other.
        """
        num_layers = check_parts(cls, table, module, projection, combine, *([] if attention is None else [attention]))
        width, size = table.embedding_dim, module.hidden_size
        if module.input_size not in (width, width + size):
            raise DefinitionError(
                f"{cls.__name__}: expected a module that reads {width} (the embedding), or {width + size} (and the "
                f"attended state), got {module}"
            )
        if combine.out_features != size or combine.in_features <= size:
            raise DefinitionError(
                f"{cls.__name__}: expected combine from memory_size + {size} to {size}, got {combine}"
            )
        made = cls(
            table.num_embeddings,
            width,
            size,
            end_token,
            module.bias,
            num_layers=num_layers,
            attention=attention,
            memory_size=combine.in_features - size,
            input_feeding=module.input_size != width,
            return_logits=return_logits,
            return_logprobs=return_logprobs,
        )
        made.embedding.weight = copy_embedding(table)
        made.combine.weight = nn.Parameter(combine.weight.detach().clone())
        made.combine.bias = None if combine.bias is None else nn.Parameter(combine.bias.detach().clone())
        made._take_weights(made.recurrent, module, projection)
        return made

    def input_specs(self) -> dict[str, RowSpec]:
        """Return the inputs for ``cellrt.cell``: ``token``, the states, ``memory``, and ``keys`` for additive
        attention.

        If the keys shall not be computed apart, leave ``keys`` out.
        """
        specs, dtype = super().input_specs(), self.projection.weight.dtype
        if self.input_feeding:
            specs["attended"] = rows(self.hidden_size, dtype=dtype)
        specs["memory"] = ragged(self.memory_size, dtype=dtype)
        if isinstance(self.attention, AdditiveAttention):
            specs["keys"] = ragged(self.attention.key.out_features, dtype=dtype)
        return specs

    def _advance(self, token: Tensor, inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
        x: Tensor = self.embedding(token)
        attended, memory, keys = (inputs.get(name) for name in ("attended", "memory", "keys"))
        if not isinstance(memory, RaggedRows) or memory.values.shape[1:] != (self.memory_size,):
            got = tuple(memory.values.shape[1:]) if isinstance(memory, RaggedRows) else type(memory).__name__
            raise ValueError(f"{type(self).__name__}: expected memory as ragged rows of {self.memory_size}, got {got}")
        if self.input_feeding:
            if attended is None:
                raise ValueError(
                    f"{type(self).__name__}: it feeds its attended state back, but there is no input 'attended'"
                )
            x = torch.cat([x, attended], dim=-1)
        states, h = self._layers(self.recurrent, x, inputs)
        context = self.attention(h, memory, *(() if keys is None else (keys,))).context
        attended = torch.tanh(self.combine(torch.cat([context, h], dim=-1)))
        return {**states, "attended": attended}, attended

    def takes_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return whether ``run_rows`` takes these rows, as ``Decoder.takes_rows`` says."""
        state, size = RowSpec(self._state_shape), self.hidden_size
        made = {"token": TOKEN, "stop": STOP, **dict.fromkeys(self.states, state), "attended": rows(size)}
        given = {name: spec for name, spec in self.input_specs().items() if name != "keys" or name in inputs}
        gates, dtype = self.recurrent.weight_ih.shape[0], self.projection.weight.dtype
        has_asked, others = self.are_asked_for(outputs)
        table_bytes = (self.embedding.num_embeddings + 1) * gates * dtype.itemsize
        return (
            has_asked
            and table_bytes <= MAX_GATES_BYTES
            and not any(module._forward_hooks or module._forward_pre_hooks for module in self.modules())
            and fits(self.attention, self.memory_size)
            and can_fuse(self, inputs, others, given, made)
        )

    def advance_rows(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> StepRows:
        """Advance the rows by a step, with a kernel a layer, one to read the encoder, and one to combine it with the
        state.
        """
        given, made = ({name: of_layer(each[name], 0) for name in self.states} for each in (inputs, outputs))
        first, reading, others = self.recurrent, self._fused_reading, cast(Any, inputs)
        table = reading.table(self.embedding.weight, first.weight_ih, first.bias_ih)
        fed = {"x": inputs["attended"]} if self.input_feeding else {}
        self._fused_first.run(first, {"gates": gates_of_tokens(table, inputs["token"]), **fed, **given}, made)
        top = self._advance_others(inputs, outputs)
        context = reading.read(self.attention, top, others["memory"], others.get("keys"))
        return reading.combine(self.combine, context, top, outputs["attended"], self.input_feeding)


def _check_attention(decoder: str, attention: object, hidden_size: int, memory_size: int) -> None:
    """Raise DefinitionError unless the attention takes these queries and rows."""
    if isinstance(attention, AdditiveAttention):
        sizes = [attention.query.in_features, attention.key.in_features]
    elif isinstance(attention, DotAttention):
        sizes = [memory_size] * 2 if attention.weight is None else [*attention.weight.shape]
    else:
        raise DefinitionError(
            f"{decoder}: expected DotAttention or AdditiveAttention as attention, got {type(attention).__name__}"
        )
    if sizes != [hidden_size, memory_size]:
        raise DefinitionError(
            f"{decoder}: expected attention with queries of {hidden_size} to rows of {memory_size}, got {attention} "
            f"with queries of {sizes[0]} to rows of {sizes[1]}"
        )


class AttentionGRUDecoder(_AttentionDecoder):
    """A GRU decoder with attention: gives ``token`` int64 ``[rows]``, ``stop`` bool ``[rows]``, ``h``, ``attended``."""

    recurrent_cell, states = GRUCell, GRUCell.states

    def forward(
        self,
        token: Tensor,
        h: Tensor,
        memory: RaggedRows,
        keys: RaggedRows | None = None,
        attended: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Run one step; of equal logits the lowest token wins on the fused path."""
        return self._step(token, {"h": h, "memory": memory, "keys": keys, "attended": attended})

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return whether ``run_rows`` takes these rows, with the weights where they are."""
        return self.takes_rows(inputs, outputs)

    @reads_spans
    @reads_outputs
    @reads_ragged
    def run_rows(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> None:
        """One step of a loop by the fused kernels (``cellrt/definition/fused.py``)."""
        self.choose_rows(self.advance_rows(inputs, outputs), outputs)


class AttentionLSTMDecoder(_AttentionDecoder):
    """An LSTM decoder with attention: as ``AttentionGRUDecoder``, with the LSTM's ``c``."""

    recurrent_cell, states = LSTMCell, LSTMCell.states

    def forward(
        self,
        token: Tensor,
        h: Tensor,
        c: Tensor,
        memory: RaggedRows,
        keys: RaggedRows | None = None,
        attended: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """Run one step; of equal logits the lowest token wins on the fused path."""
        return self._step(token, {"h": h, "c": c, "memory": memory, "keys": keys, "attended": attended})

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return whether ``run_rows`` takes these rows, with the weights where they are."""
        return self.takes_rows(inputs, outputs)

    @reads_spans
    @reads_outputs
    @reads_ragged
    def run_rows(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> None:
        """One step of a loop by the fused kernels (``cellrt/definition/fused.py``)."""
        self.choose_rows(self.advance_rows(inputs, outputs), outputs)
