"""Attention over a ragged number of encoder outputs, and decoders with it.

A node's `memory` is any number of rows m_1 ... m_n, such as the outputs of an encoder, declared with `cellrt.ragged`.
With a query q, one per node, attention is

    a_j     = exp(score(q, m_j)) / sum_k exp(score(q, m_k))
    context = sum_j a_j m_j

Luong, Pham and Manning (2015), equation 7, with the scores of equation 8:

    dot      q . m_j                        `DotAttention()`
    general  q . W m_j                      `DotAttention(query_size, memory_size)`

Bahdanau, Cho and Bengio (2015), equations 5 and 6, with the score of appendix A.1.2:

    additive v . tanh(W q + U m_j)          `AdditiveAttention`

U m_j does not depend on the query, so `AttentionKeys` may compute it once, as a cell of its own at each encoder step.

Each memory row is read by its own node alone, without padding and without a loop over nodes. Scores and softmax are
float32 (float64 for float64) whatever the type of the rows. A node with no memory has context zero.

A query may have several rows a node, one after the other: `query` `[nodes * beams, size]` with `memory` of `nodes`
nodes. So the hypotheses of a beam search share one memory.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding_bag, linear

from cellrt.cells._gated import Derived, is_fusable, pack_with_bias, packed_linear
from cellrt.cells.gru import GRUCell
from cellrt.cells.lstm import LSTMCell
from cellrt.cells.output import ProjectionArgmax
from cellrt.definition.spec import RaggedRows, RowSpec, ragged, rows
from cellrt.errors import DefinitionError


class Context(NamedTuple):
    """What attention read: `context` `[rows, memory_size]`."""

    context: Tensor


class Key(NamedTuple):
    """What a memory row is found by: `key` `[rows, key_size]`."""

    key: Tensor


class AttentionGRUState(NamedTuple):
    """After a step of a GRU decoder: the `token` chosen (int64 `[rows]`), whether it ends the sequence (`stop`, bool
    `[rows]`), `h`, and `attended`, the state with what it attended to; both `[rows, hidden_size]`."""

    token: Tensor
    stop: Tensor
    h: Tensor
    attended: Tensor


class AttentionLSTMState(NamedTuple):
    """As `AttentionGRUState`, with the LSTM's `c` `[rows, hidden_size]`."""

    token: Tensor
    stop: Tensor
    h: Tensor
    c: Tensor
    attended: Tensor


def _nodes_of(memory: RaggedRows) -> Tensor:
    """The node of each memory row: int64 `[total]`."""
    offsets, total = memory.offsets, memory.values.shape[0]
    nodes = torch.arange(offsets.shape[0] - 1, device=offsets.device)
    return torch.repeat_interleave(nodes, offsets.diff(), output_size=total)


def _queries_of(query: Tensor, memory: RaggedRows, nodes: Tensor) -> Tensor:
    """The queries that each memory row meets, as wide as the softmax is computed: `[total, beams, size]`."""
    wide = query.to(torch.promote_types(query.dtype, torch.float32))
    beams: Tensor = wide.unflatten(0, (memory.offsets.shape[0] - 1, -1))
    return beams.index_select(0, nodes)


def _read(scores: Tensor, memory: RaggedRows, nodes: Tensor) -> Tensor:
    """The context `[nodes * beams, memory_size]` under `scores` `[total, beams]`."""
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
    """Dot attention; with sizes, the general form with a learned `weight` `[query_size, memory_size]`.

    `h` `[rows, query_size]`, `memory` ragged `[memory_size]` -> `Context`. Without a weight both sizes are the same.
    """

    def __init__(self, query_size: int | None = None, memory_size: int | None = None) -> None:
        super().__init__()
        if (query_size is None) != (memory_size is None):
            raise DefinitionError("DotAttention: expected both sizes for a learned weight, or none")
        self.weight: nn.Parameter | None = None
        if query_size is not None and memory_size is not None:
            self.weight = nn.Parameter(nn.init.xavier_uniform_(torch.empty(query_size, memory_size)))

    def forward(self, h: Tensor, memory: RaggedRows) -> Context:
        """The context of each query."""
        query = h if self.weight is None else h @ self.weight
        nodes = _nodes_of(memory)
        scores = _queries_of(query, memory, nodes).mul_(memory.values[:, None]).sum(-1)
        return Context(_read(scores, memory, nodes))


class AdditiveAttention(nn.Module):
    """Additive attention: `h` `[rows, query_size]`, `memory` ragged `[memory_size]` -> `Context`.

    With a third input, `keys` ragged `[key_size]`, made of the memory's rows by `AttentionKeys(attention)`, the keys
    are not computed again at every step.
    """

    def __init__(self, query_size: int, memory_size: int, key_size: int) -> None:
        super().__init__()
        self.query = Linear(query_size, key_size, bias=False)
        self.key = Linear(memory_size, key_size, bias=False)
        self.score = nn.Parameter(torch.randn(key_size) / key_size**0.5)

    def forward(self, h: Tensor, memory: RaggedRows, keys: RaggedRows | None = None) -> Context:
        """The context of each query."""
        nodes = _nodes_of(memory)
        key = self.key(memory.values) if keys is None else keys.values
        sums = _queries_of(self.query(h), memory, nodes).add_(key[:, None])
        return Context(_read(sums.tanh_() @ self.score.to(sums.dtype), memory, nodes))


class AttentionKeys(nn.Module):
    """The keys of additive attention, a cell to be called on each encoder output: `h` `[rows, memory_size]` -> `Key`.

    It has a copy of the weights of the attention that is to read them.
    """

    def __init__(self, attention: AdditiveAttention) -> None:
        super().__init__()
        self.project = Linear(attention.key.in_features, attention.key.out_features, bias=False)
        self.project.weight = nn.Parameter(attention.key.weight.detach().clone())

    def forward(self, h: Tensor) -> Key:
        """The key of each row."""
        return Key(self.project(h))


class Linear(nn.Linear):
    """`torch.nn.Linear`, with the packed product on the fused path (see `lstm.py`)."""

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self._packed = Derived(pack_with_bias)

    def forward(self, input: Tensor) -> Tensor:
        """`input` `[rows, in_features]` -> `[rows, out_features]`."""
        if input.shape[0] and input.shape[-1] == self.in_features and is_fusable(input):
            return packed_linear(input, *self._packed.of(self.weight, self.bias))
        return linear(input, self.weight, self.bias)


class _AttentionDecoder(nn.Module):
    """What the decoders share: all of a step but the recurrent cell.

    For a token y, the state h and the attended state a of the step before (Luong et al. 2015, equations 5 and 6, and
    section 3.3 for a as an input):

        h' = step([embedding(y); a], h)         without input feeding step(embedding(y), h)
        a' = tanh(W_c [context(h'); h'])
        logits = W_s a' + b_s
    """

    recurrent_cell: ClassVar[type[GRUCell] | type[LSTMCell]]
    states: ClassVar[tuple[str, ...]]

    def __init__(
        self,
        num_tokens: int,
        embedding_size: int,
        hidden_size: int,
        end_token: int,
        *,
        attention: DotAttention | AdditiveAttention | None = None,
        memory_size: int | None = None,
        input_feeding: bool = False,
    ) -> None:
        super().__init__()
        self.memory_size = hidden_size if memory_size is None else memory_size
        self.hidden_size, self.end_token, self.input_feeding = hidden_size, end_token, input_feeding
        self.embedding = nn.Embedding(num_tokens, embedding_size)
        self.recurrent = self.recurrent_cell(embedding_size + hidden_size * input_feeding, hidden_size)
        self.attention = DotAttention() if attention is None else attention
        self.combine = Linear(self.memory_size + hidden_size, hidden_size, bias=False)
        self.projection = ProjectionArgmax(hidden_size, num_tokens, end_token)

    def input_specs(self) -> dict[str, RowSpec]:
        """The inputs for `cellrt.cell`: `token`, the states, `memory`, and `keys` for additive attention.

        If the keys shall not be computed apart, leave `keys` out.
        """
        dtype = self.projection.weight.dtype
        specs = {"token": rows(dtype=torch.int64)}
        specs |= {name: rows(self.hidden_size, dtype=dtype) for name in self.states}
        if self.input_feeding:
            specs["attended"] = rows(self.hidden_size, dtype=dtype)
        specs["memory"] = ragged(self.memory_size, dtype=dtype)
        if isinstance(self.attention, AdditiveAttention):
            specs["keys"] = ragged(self.attention.key.out_features, dtype=dtype)
        return specs

    def _step(
        self,
        token: Tensor,
        state: tuple[Tensor, ...],
        attended: Tensor | None,
        memory: RaggedRows,
        keys: RaggedRows | None,
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """The states and the attended state after a step."""
        x: Tensor = self.embedding(token)
        if self.input_feeding:
            if attended is None:
                raise ValueError("the decoder feeds its attended state back, so it needs the input 'attended'")
            x = torch.cat([x, attended], dim=-1)
        state = tuple(self.recurrent(x, *state))
        given = (memory,) if keys is None else (memory, keys)
        context = self.attention(state[0], *given).context
        return state, torch.tanh(self.combine(torch.cat([context, state[0]], dim=-1)))


class AttentionGRUDecoder(_AttentionDecoder):
    """A greedy GRU decoder with attention: embedding, step, attention, projection, argmax -> `AttentionGRUState`.

    A cell of it is `cellrt.cell(decoder, decoder.input_specs())`: `token` int64 `[rows]` (the one before), `h` `[rows,
    hidden_size]`, `memory` ragged `[memory_size]`, and where they apply `attended` `[rows, hidden_size]` and `keys`
    ragged `[key_size]`. `graph.loop` carries token, h and attended.
    """

    recurrent_cell = GRUCell
    states = ("h",)

    def forward(
        self,
        token: Tensor,
        h: Tensor,
        memory: RaggedRows,
        keys: RaggedRows | None = None,
        attended: Tensor | None = None,
    ) -> AttentionGRUState:
        """One step; of equal logits the lowest token wins."""
        (h,), attended = self._step(token, (h,), attended, memory, keys)
        token, stop = self.projection(attended)
        return AttentionGRUState(token, stop, h, attended)

    def scores(
        self,
        token: Tensor,
        h: Tensor,
        memory: RaggedRows,
        keys: RaggedRows | None = None,
        attended: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """A step without the choice, for a beam search: `logits` `[rows, num_tokens]`, and the states."""
        (h,), attended = self._step(token, (h,), attended, memory, keys)
        return {"logits": self.projection.logits(attended), "h": h, "attended": attended}


class AttentionLSTMDecoder(_AttentionDecoder):
    """As `AttentionGRUDecoder`, with an LSTM and its `c` `[rows, hidden_size]` -> `AttentionLSTMState`."""

    recurrent_cell = LSTMCell
    states = ("h", "c")

    def forward(
        self,
        token: Tensor,
        h: Tensor,
        c: Tensor,
        memory: RaggedRows,
        keys: RaggedRows | None = None,
        attended: Tensor | None = None,
    ) -> AttentionLSTMState:
        """One step; of equal logits the lowest token wins."""
        (h, c), attended = self._step(token, (h, c), attended, memory, keys)
        token, stop = self.projection(attended)
        return AttentionLSTMState(token, stop, h, c, attended)

    def scores(
        self,
        token: Tensor,
        h: Tensor,
        c: Tensor,
        memory: RaggedRows,
        keys: RaggedRows | None = None,
        attended: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """A step without the choice, for a beam search: `logits` `[rows, num_tokens]`, and the states."""
        (h, c), attended = self._step(token, (h, c), attended, memory, keys)
        return {"logits": self.projection.logits(attended), "h": h, "c": c, "attended": attended}
