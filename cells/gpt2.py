"""GPT-2 (Radford et al. 2019): a decoder with learned positions and the norm first.

x = embedding(token) + positions(position);  each layer: attention, then two linear layers;  logits = head(norm(x))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import gelu

from cellrt.cells.attention import Linear
from cellrt.cells.paged_attention import Pages, Spans, TracedLayer, append_pages, paged_attention
from cellrt.cells.transformer import MLP, Heads

gelu_new = partial(gelu, approximate="tanh")


@dataclass(frozen=True)
class GPT2Sizes:
    """The sizes of a model; ``positions`` is the longest text, ``epsilon`` of the norms."""

    vocabulary: int
    positions: int
    hidden: int
    inner: int
    layers: int
    heads: int
    epsilon: float = 1e-5

    @property
    def attention(self) -> Heads:
        """The sizes of a layer's attention."""
        return Heads(self.hidden, self.heads, bias=True, out_bias=True)


class GPT2Layer(nn.Module):
    """Rows ``[rows, hidden]`` -> the same; queries, keys and values are one product."""

    def __init__(self, sizes: GPT2Sizes) -> None:
        super().__init__()
        self.heads = sizes.heads
        self.attention_norm = nn.LayerNorm(sizes.hidden, sizes.epsilon)
        self.qkv, self.out = Linear(sizes.hidden, 3 * sizes.hidden), Linear(sizes.hidden, sizes.hidden)
        self.mlp_norm = nn.LayerNorm(sizes.hidden, sizes.epsilon)
        self.mlp = MLP(sizes.hidden, sizes.inner, gelu_new)

    def forward(self, x: Tensor, spans: Spans, pages: Pages | TracedLayer) -> Tensor:
        """Return the rows behind the layer; append their keys and values to ``pages``."""
        parts = self.qkv(self.attention_norm(x)).unflatten(1, (3, self.heads, -1))
        query, key, value = (part.contiguous() for part in parts.unbind(1))
        append_pages(pages, spans, key, value)
        x = x + self.out(paged_attention(query, pages, spans).flatten(1))
        made: Tensor = x + self.mlp(self.mlp_norm(x))
        return made


class GPT2(nn.Module):
    """The whole stack, as ``Llama`` is: tokens int ``[rows]`` -> normed rows ``[rows, hidden]``; the head is the
    embedding."""

    def __init__(self, sizes: GPT2Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = nn.Embedding(sizes.positions, sizes.hidden)
        self.layers = nn.ModuleList(GPT2Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.hidden, sizes.epsilon)
        self.head = Linear(sizes.hidden, sizes.vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, spans: Spans, pages: Sequence[Pages | TracedLayer]) -> Tensor:
        """``pages`` has those of each layer. Raise IndexError for a position that has no vector."""
        x: Tensor = self.embedding(tokens) + self.positions(spans.positions)
        for layer, own in zip(self.layers, pages, strict=True):
            x = layer(x, spans, own)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, rows: Tensor) -> Tensor:
        """``[rows, hidden]`` of ``forward`` -> ``[rows, vocabulary]``."""
        logits: Tensor = self.head(rows)
        return logits
