"""Attention over a ragged number of encoder outputs; ``attention_decoder.py`` has decoders with it.

A node's ``memory`` is any number of rows m_1 ... m_n, such as the outputs of an encoder, declared with
``cellrt.ragged``. With a query q, one per node, attention is

    a_j     = exp(score(q, m_j)) / sum_k exp(score(q, m_k))
    context = sum_j a_j m_j

Luong, Pham and Manning (2015), equation 7, with the scores of equation 8:

    dot      q . m_j                        ``DotAttention()``
    general  q . W m_j                      ``DotAttention(query_size, memory_size)``

Bahdanau, Cho and Bengio (2015), equations 5 and 6, with the score of appendix A.1.2:

    additive v . tanh(W q + b + U m_j)      ``AdditiveAttention``, b if asked for

U m_j does not depend on the query, so ``AttentionKeys`` may compute it once, as a cell of its own at each encoder step.

Each memory row is read by its own node alone, without padding and without a loop over nodes. Scores and softmax are
float32 (float64 for float64) whatever the type of the rows. A node with no memory has context zero.

A query may have several rows a node, one after the other: ``query`` ``[nodes * beams, size]`` with ``memory`` of
``nodes`` nodes. So the hypotheses of a beam search share one memory.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, linear

from cellrt import DefinitionError, RaggedRows
from cellrt.cells._made_apart import making_apart
from cellrt.cells._weights import (
    Derived,
    half_linear,
    is_fusable,
    is_fusable_half,
    pack_half_with_bias,
    pack_with_bias,
    packed_linear,
)


class Context(NamedTuple):
    """The result of attention: ``context`` ``[rows, memory_size]``."""

    context: Tensor


class Key(NamedTuple):
    """The key of each memory row, which queries are compared with: ``key`` ``[rows, key_size]``."""

    key: Tensor


def _nodes_of(memory: RaggedRows) -> Tensor:
    """Return the node of each memory row: int64 ``[total]``."""
    offsets, total = memory.offsets, memory.values.shape[0]
    nodes = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return torch.repeat_interleave(nodes, offsets.diff(), output_size=total)


def _queries_of(query: Tensor, memory: RaggedRows, nodes: Tensor) -> Tensor:
    """Return the queries that each memory row meets, as wide as the softmax is computed: ``[total, beams, size]``."""
    wide = query.to(torch.promote_types(query.dtype, torch.float32))
    beams: Tensor = wide.unflatten(0, (memory.offsets.shape[0] - 1, -1))
    return beams.index_select(0, nodes)


def _read(scores: Tensor, memory: RaggedRows, nodes: Tensor) -> Tensor:
    """Return the context ``[nodes * beams, memory_size]`` under ``scores`` ``[total, beams]``."""
    values, offsets = memory.values, memory.offsets
    highest = torch.segment_reduce(scores, "max", offsets=offsets, unsafe=True)
    exps = (scores - highest.index_select(0, nodes)).exp()
    sums = torch.segment_reduce(exps, "sum", offsets=offsets, unsafe=True)
    weights = (exps / sums.index_select(0, nodes)).to(values.dtype)
    # A bag is a weighted sum of rows, computed without the products in between: first every node's for the first of
    # its beams, then for the second, and so on.
    total, beams = values.shape[0], scores.shape[1]
    starts = torch.arange(beams, device=offsets.device)[:, None] * total
    bags = embedding_bag(
        torch.arange(total, device=offsets.device).repeat(beams),
        values,
        (starts + offsets[:-1]).flatten(),
        mode="sum",
        per_sample_weights=weights.t().flatten(),
    )
    context: Tensor = bags.unflatten(0, (beams, -1)).transpose(0, 1).flatten(0, 1)
    return context


class DotAttention(nn.Module):
    """Dot attention; with sizes, the general form with a learned ``weight`` ``[query_size, memory_size]``.

    ``h`` ``[rows, query_size]``, ``memory`` ragged ``[memory_size]`` -> ``Context``. Without a weight both sizes are
    the same.
    """

    def __init__(self, query_size: int | None = None, memory_size: int | None = None) -> None:
        super().__init__()
        if (query_size is None) != (memory_size is None):
            raise DefinitionError("DotAttention: expected both sizes for a learned weight, or none")
        self.weight: nn.Parameter | None = None
        if query_size is not None and memory_size is not None:
            self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(query_size, memory_size)))

    @classmethod
    @making_apart
    def from_torch(cls, module: nn.Linear) -> Self:
        """Return the general form with the weight of a torch layer that was applied to the memory's rows.

        A bias of it would add the same to every score of a query, so it is left out.
        """
        made = cls(module.out_features, module.in_features)
        made.weight = nn.Parameter(module.weight.detach().clone())
        return made

    def forward(self, h: Tensor, memory: RaggedRows) -> Context:
        """Return the context of each query."""
        query = h if self.weight is None else h @ self.weight
        nodes = _nodes_of(memory)
        scores = _queries_of(query, memory, nodes).mul_(memory.values[:, None]).sum(-1)
        return Context(_read(scores, memory, nodes))


class AdditiveAttention(nn.Module):
    """Additive attention: ``h`` ``[rows, query_size]``, ``memory`` ragged ``[memory_size]`` -> ``Context``.

    With a third input, ``keys`` ragged ``[key_size]``, made of the memory's rows by ``AttentionKeys(attention)``, the
    keys are not computed again at every step.
    """

    def __init__(self, query_size: int, memory_size: int, key_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.query = Linear(query_size, key_size, bias)
        self.key = Linear(memory_size, key_size, bias=False)
        self.score = nn.Parameter(torch.randn(key_size) / key_size**0.5)

    @classmethod
    @making_apart
    def from_torch(cls, query: nn.Linear, key: nn.Linear, score: nn.Linear) -> Self:
        """Return attention with the weights of torch layers: W of the query, U of the memory, v to one number.

        W and U may have biases, whose sum the query gets; one of v would add the same to every score: it is left out.
        Raise DefinitionError if they do not fit each other.
        """
        key_size = query.out_features
        if key.out_features != key_size or score.weight.shape != (1, key_size):
            raise DefinitionError(
                f"AdditiveAttention: expected query and key of one size, and score from it to 1, got {query}, {key}, "
                f"{score}"
            )
        biases = [layer.bias.detach() for layer in (query, key) if layer.bias is not None]
        made = cls(query.in_features, key.in_features, key_size, bias=bool(biases))
        made.query.weight = nn.Parameter(query.weight.detach().clone())
        made.key.weight = nn.Parameter(key.weight.detach().clone())
        made.score = nn.Parameter(score.weight.detach()[0].clone())
        if biases:
            made.query.bias = nn.Parameter(torch.stack(biases).sum(0))
        return made

    def forward(self, h: Tensor, memory: RaggedRows, keys: RaggedRows | None = None) -> Context:
        """Return the context of each query."""
        nodes = _nodes_of(memory)
        key = self.key(memory.values) if keys is None else keys.values
        sums = _queries_of(self.query(h), memory, nodes).add_(key[:, None])
        return Context(_read(sums.tanh_() @ self.score.to(sums.dtype), memory, nodes))


class AttentionKeys(nn.Module):
    """The keys of additive attention, a cell to be called on each encoder output: ``h`` ``[rows, memory_size]`` ->
    ``Key``.

    It has a copy of the weights of the attention that is to read them.
    """

    def __init__(self, attention: AdditiveAttention) -> None:
        super().__init__()
        if not isinstance(attention, AdditiveAttention):
            raise DefinitionError(f"AttentionKeys: expected AdditiveAttention, got {type(attention).__name__}")
        self.project = Linear(attention.key.in_features, attention.key.out_features, bias=False)
        self.project.weight = nn.Parameter(attention.key.weight.detach().clone())

    def forward(self, h: Tensor) -> Key:
        """Return the key of each row."""
        return Key(self.project(h))


class Linear(nn.Linear):
    """``torch.nn.Linear``, with the packed product on the fused path (see ``lstm.py``)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self._packed, self._packed_half = Derived(pack_with_bias), Derived(pack_half_with_bias)

    def forward(self, input: Tensor) -> Tensor:
        """``input`` ``[rows, in_features]`` -> ``[rows, out_features]``."""
        if is_fusable(input) and self._fits(input):
            return packed_linear(input, *self._packed.of(self.weight, self.bias))
        if is_fusable_half(input, self.weight, self.bias) and self._fits(input):
            return half_linear(input, *self._packed_half.of(self.weight, self.bias))
        return linear(input, self.weight, self.bias)

    def _fits(self, input: Tensor) -> bool:
        """Return whether this has rows of the layer; asked last, as an export must not look at the number of rows."""
        return input.ndim == 2 and input.shape[0] > 0 and input.shape[1] == self.in_features

    def weight_rows(self, numbers: Tensor) -> Tensor:
        """Return the weights ``[rows, in_features]`` of these outputs; in 16 bits packed ones, if these are in use.

        So a weight that is looked up, too, need not be in memory twice.
        """
        if not is_fusable_half(self.weight, self.weight):
            return self.weight[numbers]
        values = self._packed_half.of(self.weight, self.bias)[0].values
        return values[numbers // values.shape[2], :, numbers % values.shape[2]]
