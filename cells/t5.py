"""T5 (Raffel et al. 2020): an encoder-decoder with relative positions, the norm first, and no biases.

x = embedding(token);  each layer;  norm(x);  scores of a layer's own rows have a number for their distance added
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.nn.functional import relu

from cellrt.cells.attention import Linear
from cellrt.cells.gpt2 import gelu_new
from cellrt.cells.paged_attention import Pages, Spans
from cellrt.cells.positions import RelativePositions
from cellrt.cells.row_layers import RMSNorm
from cellrt.cells.transformer import MLP, CrossAttention, GatedMLP, Heads, SelfAttention, TransformerLayer
from cellrt.cells.transformer_stack import LayerStack


@dataclass(frozen=True)
class T5Sizes:
    """The sizes of the encoder or of the decoder.

    Attributes:
        vocabulary, hidden, inner, layers, heads, head_dim: sizes.
        positions: the longest sequence that is taken.
        buckets, max_distance: the parameters of the relative positions (``RelativePositions``).
        is_gated: whether the two linear layers are three, with GELU, as in version 1.1; else with ReLU.
        epsilon: the epsilon of the norms.
        scale: the factor of the rows behind the last norm.
    """

    vocabulary: int
    positions: int
    hidden: int
    inner: int
    layers: int
    heads: int
    head_dim: int
    buckets: int = 32
    max_distance: int = 128
    is_gated: bool = False
    epsilon: float = 1e-6
    scale: float = 1.0

    @property
    def attention(self) -> Heads:
        """The sizes of a layer's attention; scores are not scaled."""
        return Heads(self.hidden, self.heads, head_dim=self.head_dim, scale=1.0)


class T5Stack(LayerStack):
    """The layers of an encoder, or with ``is_decoder`` causal and with cross-attention; as ``TransformerStack``."""

    def __init__(self, sizes: T5Sizes, *, is_decoder: bool = False) -> None:
        super().__init__(sizes)
        heads, norm = sizes.attention, partial(RMSNorm, sizes.hidden, eps=sizes.epsilon)
        relative = RelativePositions(sizes.heads, sizes.buckets, sizes.max_distance, both_ways=not is_decoder)

        def layer() -> TransformerLayer:
            mlp = GatedMLP(sizes.hidden, sizes.inner, gelu_new) if sizes.is_gated else _plain(sizes)
            attention = SelfAttention(heads, causal=is_decoder, relative=relative)
            return TransformerLayer(attention, mlp, norm, cross=CrossAttention(heads) if is_decoder else None)

        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.layers = nn.ModuleList(layer() for _ in range(sizes.layers))
        self.norm, self.scale = norm(), sizes.scale

    def forward(
        self,
        tokens: Tensor,
        spans: Spans,
        pages: Sequence[Pages | None] | None = None,
        memory: Sequence[Pages | None] | None = None,
        readers: Spans | None = None,
    ) -> Tensor:
        """Return tokens int64 ``[rows]`` -> ``[rows, hidden]``."""
        rows: Tensor = self.norm(self._run(self.embedding(tokens), spans, pages, memory, readers))
        return rows if self.scale == 1.0 else rows * self.scale


def _plain(sizes: T5Sizes) -> MLP:
    return MLP(sizes.hidden, sizes.inner, relu, bias=False)


class T5(nn.Module):
    """An encoder and a decoder, which share their embedding, and the head."""

    def __init__(self, encoder: T5Sizes, decoder: T5Sizes) -> None:
        super().__init__()
        self.encoder, self.decoder = T5Stack(encoder), T5Stack(decoder, is_decoder=True)
        self.head = Linear(decoder.hidden, decoder.vocabulary, bias=False)
