"""Decoders of the Llama family: Llama, SmolLM, Mistral, Qwen (Touvron et al. 2023).

x = embedding(token);  each layer: norm first, rotary positions, grouped heads, SwiGLU;  logits = head(norm(x))
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from cellrt import DefinitionError
from cellrt.cells._llama_stack import LayerSizes, LayerWeights, has_one_call, run_all
from cellrt.cells._weights import check_tokens, is_fusable_half, is_token
from cellrt.cells.attention import Linear
from cellrt.cells.paged_attention import Pages, Spans, TracedLayers
from cellrt.cells.positions import RotaryPositions, Scaling
from cellrt.cells.row_layers import RMSNorm
from cellrt.cells.transformer import GatedMLP, Heads, SelfAttention, TransformerLayer


@dataclass(frozen=True)
class LlamaSizes:
    """The sizes of a model.

    Attributes:
        vocabulary, hidden, inner, layers, heads, kv_heads, head_dim: sizes; head_dim None: hidden / heads.
        epsilon: the epsilon of the norms.
        rotary_base, scaling: the base of the rotary positions, and their scaling.
        window: how far a row looks back (Mistral); 0: to the beginning.
        is_tied: the head is the embedding.
        has_bias: queries, keys and values have a bias (Qwen 2).
        norms_heads: the heads of queries and keys have norms (Qwen 3).
    """

    vocabulary: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int | None = None
    epsilon: float = 1e-5
    rotary_base: float = 10_000.0
    scaling: Scaling | None = None
    window: int = 0
    is_tied: bool = False
    has_bias: bool = False
    norms_heads: bool = False

    @property
    def attention(self) -> Heads:
        """The sizes of a layer's attention."""
        return Heads(self.hidden, self.heads, self.kv_heads, self.head_dim, bias=self.has_bias)


class LlamaLayers(nn.ModuleList):
    """Layers one behind the other: rows ``[rows, hidden]`` -> the same shape, in one compiled call where that goes."""

    def __init__(self, sizes: LlamaSizes, layers: Iterable[TransformerLayer]) -> None:
        super().__init__(layers)
        self.weights = LayerWeights()
        self.layer_sizes = LayerSizes(sizes.attention, sizes.inner, sizes.epsilon, sizes.window)

    def forward(self, x: Tensor, spans: Spans, pages: Sequence[Pages] | TracedLayers) -> Tensor:
        """``pages`` has those of each layer; the rows' keys and values are written there. It may change ``x``."""
        first: Any = self[0]
        is_plain = type(first.mlp.up) is Linear  # what keeps int8 is not packed
        if isinstance(pages, TracedLayers) or not is_plain or not has_one_call(x, spans, pages):
            for layer, paged in zip(self, pages):
                x = layer(x, spans, paged)
            return x
        words, _ = self.weights.of(self)
        turns = first.attention.rotary.turns_up_to(int(spans.positions.max()))  # all layers' are the same
        return run_all(words, self.layer_sizes, turns, x, spans, pages)


class Llama(nn.Module):
    """The whole stack: tokens int ``[rows]`` -> the last layer's normed rows ``[rows, hidden]``; ``logits`` makes
    logits of those of them that are needed.

    ``layers`` holds the same as single layers, for a model that runs one at a time.
    """

    def __init__(self, sizes: LlamaSizes) -> None:
        super().__init__()
        self.sizes = sizes
        norm = partial(RMSNorm, sizes.hidden, eps=sizes.epsilon)
        heads = sizes.attention
        rotary = RotaryPositions(heads.size, sizes.rotary_base, sizes.scaling)
        norm_heads = partial(RMSNorm, eps=sizes.epsilon) if sizes.norms_heads else None

        def layer() -> TransformerLayer:
            attention = SelfAttention(heads, window=sizes.window, rotary=rotary, norm_heads=norm_heads)
            return TransformerLayer(attention, GatedMLP(sizes.hidden, sizes.inner), norm)

        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = LlamaLayers(sizes, (layer() for _ in range(sizes.layers)))
        self.norm = norm()
        self.head = Linear(sizes.hidden, sizes.vocabulary, bias=False)
        if sizes.is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, spans: Spans, pages: Sequence[Pages] | TracedLayers) -> Tensor:
        """``pages`` has those of each layer, which may share one table; the rows are written there.

        Raise DefinitionError for another number of them.
        """
        if len(pages) != len(self.layers):
            raise DefinitionError(f"Llama: expected pages of {len(self.layers)} layers, got {len(pages)}")
        is_in_head = (
            self.sizes.is_tied and is_token(tokens) and is_fusable_half(self.embedding.weight, self.head.weight)
        )
        x = self.head.weight_rows(check_tokens(tokens, self.embedding)) if is_in_head else self.embedding(tokens)
        normed: Tensor = self.norm(self.layers(x, spans, pages))
        return normed

    def logits(self, rows: Tensor) -> Tensor:
        """``[rows, hidden]`` of ``forward`` -> ``[rows, vocabulary]``."""
        logits: Tensor = self.head(rows)
        return logits

    def new_pages(self, count: int, page_size: int) -> list[tuple[Tensor, Tensor]]:
        """Return zeros for keys and values of each layer: ``[count, page_size, kv_heads, head_dim]``."""
        heads, like = self.sizes.attention, self.embedding.weight
        shape = count, page_size, heads.num_kv_heads, heads.size
        return [(like.new_zeros(shape), like.new_zeros(shape)) for _ in self.layers]
