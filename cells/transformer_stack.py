"""Transformers with learned positions, as cells: encoders of sentences, and encoder-decoders.

    rows = scale * embedding(token) + positions(position), then all layers

(Vaswani et al. 2017; Devlin et al. 2019.) Rows of an encoder attend to all rows of their sequence. An encoder takes
whole sequences, without padding: a task has any number of them, one after the other. The keys and values that a
decoder's cross-attention reads are computed once, after the encoder's last layer, and kept in pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from torch import Tensor, nn
from torch.nn.functional import gelu, normalize

import cellrt
from cellrt import Cell, PagedRows, cell, grows, span, token
from cellrt import pages as read_pages
from cellrt.cells._made_apart import made_apart
from cellrt.cells.attention import Linear
from cellrt.cells.language_models import NextToken, pages_of_layers
from cellrt.cells.paged_attention import Pages, Spans, TracedLayer, append_pages
from cellrt.cells.row_layers import likeliest
from cellrt.cells.transformer import MLP, Activation, CrossAttention, Heads, SelfAttention, TransformerLayer

Pooling = Literal["mean", "first"]


@dataclass(frozen=True)
class StackSizes:
    """The sizes of a stack.

    Attributes:
        vocabulary, positions, hidden, inner, layers, heads: sizes; ``positions`` is the longest sequence.
        activation: the activation between a layer's two linear maps.
        epsilon: the epsilon of the layer norms.
        scale: the factor of the embedding.
        norms_first: True if rows pass through a layer norm before the first layer, as in BERT.
    """

    vocabulary: int
    positions: int
    hidden: int
    inner: int
    layers: int
    heads: int
    activation: Activation = gelu
    epsilon: float = 1e-5
    scale: float = 1.0
    norms_first: bool = False

    @property
    def attention(self) -> Heads:
        """The sizes of a layer's attention."""
        return Heads(self.hidden, self.heads, bias=True, out_bias=True)


class SizesOfStack(Protocol):
    """The interface of every stack's sizes."""

    @property
    def positions(self) -> int:
        """The longest sequence."""

    @property
    def layers(self) -> int:
        """The number of layers."""

    @property
    def attention(self) -> Heads:
        """The sizes of a layer's attention."""


class LayerStack(nn.Module):
    """The layers of an encoder, or of a decoder with cross-attention, and the modules before and after them."""

    embedding: nn.Embedding
    layers: nn.ModuleList

    def __init__(self, sizes: SizesOfStack) -> None:
        super().__init__()
        self.sizes = sizes

    def _run(
        self,
        x: Tensor,
        spans: Spans,
        pages: Sequence[Pages | None] | None,
        memory: Sequence[Pages | None] | None,
        readers: Spans | None,
    ) -> Tensor:
        """Return the rows ``[rows, hidden]`` after all layers.

        A decoder needs ``pages``, its keys and values, and ``memory``, those of cross-attention, for each layer.
        ``readers`` is an argument of ``TransformerLayer``.
        """
        none = [None] * len(self.layers)
        for layer, own, read in zip(self.layers, pages or none, memory or none):
            x = layer(x, spans, own, read, readers)
        return x


class TransformerStack(LayerStack):
    """Layers with the norm after each part: of an encoder, or, with ``is_decoder``, causal with cross-attention."""

    def __init__(self, sizes: StackSizes, *, is_decoder: bool = False) -> None:
        super().__init__(sizes)
        self.scale = sizes.scale
        heads = sizes.attention

        def norm() -> nn.Module:
            return nn.LayerNorm(sizes.hidden, sizes.epsilon)

        def layer() -> TransformerLayer:
            cross = CrossAttention(heads) if is_decoder else None
            attention = SelfAttention(heads, causal=is_decoder)
            mlp = MLP(sizes.hidden, sizes.inner, sizes.activation)
            return TransformerLayer(attention, mlp, norm, cross=cross, norm_first=False)

        self.embedding = nn.Embedding(sizes.vocabulary, sizes.hidden)
        self.positions = nn.Embedding(sizes.positions, sizes.hidden)
        self.norm = norm() if sizes.norms_first else None
        self.layers = nn.ModuleList(layer() for _ in range(sizes.layers))

    def forward(
        self,
        tokens: Tensor,
        spans: Spans,
        pages: Sequence[Pages | None] | None = None,
        memory: Sequence[Pages | None] | None = None,
        readers: Spans | None = None,
    ) -> Tensor:
        """Return the rows ``[rows, hidden]`` after all layers, for ``tokens`` int64 ``[rows]``.

        The other arguments are those of ``_run``.
        """
        x: Tensor = self.embedding(tokens) * self.scale + self.positions(spans.positions)
        if self.norm is not None:
            x = self.norm(x)
        return self._run(x, spans, pages, memory, readers)


class SentenceEncoder(nn.Module):
    """Computes an embedding of each sentence (Reimers and Gurevych 2019); every row of a sentence returns it.

    It is the mean of the encoder's rows or, with ``pooling`` "first", the row of the first token. It is scaled to
    length 1, unless ``is_normed`` is False.
    """

    def __init__(self, encoder: LayerStack, pooling: Pooling = "mean", is_normed: bool = True) -> None:
        super().__init__()
        self.encoder, self.longest_span = encoder, encoder.sizes.positions
        self.pooling, self.is_normed = pooling, is_normed

    def forward(self, token: Tensor, sentence: cellrt.Spans) -> Tensor:
        """Return the embedding of each row's sentence, ``[rows, hidden]``."""
        rows = self.encoder(token, Spans(sentence.offsets, sentence.positions))
        if self.pooling == "first":
            found: Tensor = rows[sentence.offsets[:-1].long()]
        else:
            counts = sentence.offsets.diff()
            sums = rows.new_zeros(counts.shape[0], rows.shape[1]).index_add(0, sentence.nodes, rows)
            found = sums / counts[:, None]
        found = normalize(found) if self.is_normed else found
        return found[sentence.nodes]


class SourceEncoder(nn.Module):
    """An encoder that appends to ``memory`` the keys and values for a decoder: rows ``[layers, 2, heads, size]``."""

    def __init__(self, encoder: LayerStack, readers: Sequence[CrossAttention]) -> None:
        super().__init__()
        self.encoder, self.readers = encoder, nn.ModuleList(readers)
        self.longest_span = encoder.sizes.positions

    def forward(self, token: Tensor, source: cellrt.Spans, memory: PagedRows) -> Tensor:
        """Return the encoder's last rows ``[rows, hidden]``."""
        rows: Tensor = self.encoder(token, Spans(source.offsets, source.positions))
        places = Spans(memory.offsets, memory.positions)
        pages: Sequence[Pages | TracedLayer] = pages_of_layers(memory)
        for reader, own in zip(self.readers, pages):
            append_pages(own, places, *_memory_of(reader, rows))
        return rows


def _memory_of(reader: nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
    if not isinstance(reader, CrossAttention):
        raise TypeError(f"expected a CrossAttention, got {type(reader).__name__}")
    return reader.memory(rows)


class GreedyDecoder(nn.Module):
    """A decoder's step, which chooses the likeliest next token."""

    def __init__(self, decoder: LayerStack, head: nn.Module, end_token: int) -> None:
        super().__init__()
        self.decoder, self.head, self.end_token = decoder, head, end_token
        self.longest_span = decoder.sizes.positions

    def forward(self, token: Tensor, kv: PagedRows, memory: PagedRows) -> NextToken:
        """Return the next token of each row.

        ``token`` is int64 ``[rows]``; rows of ``kv`` and ``memory`` are ``[layers, 2, heads, size]``.
        """
        spans = Spans(kv.offsets, kv.positions)
        rows = self.decoder(token, spans, pages_of_layers(kv), pages_of_layers(memory))
        best, logprob = likeliest(self.head(rows))
        return NextToken(best, logprob, best == self.end_token)


class EncoderDecoder(NamedTuple):
    """The two cells of an encoder-decoder.

    Attributes:
        encoder: has the inputs ``token``, ``source`` and ``memory``, to which it appends.
        decoder: has the inputs ``token``, ``kv``, to which it appends, and ``memory``, which it reads; its outputs are
            those of ``NextToken``.
    """

    encoder: Cell
    decoder: Cell


def sentence_encoder(
    encoder: LayerStack,
    *,
    name: str = "sentence encoder",
    pooling: Pooling = "mean",
    is_normed: bool = True,
    max_batch: int = 64,
    max_batch_rows: int = 1024,
) -> Cell:
    """Return a cell that computes an embedding of each sentence, by ``SentenceEncoder``.

    Its inputs are ``token`` and ``sentence``, a span that is never cut; its output is ``output``.
    ``max_batch`` and ``max_batch_rows`` are the most sentences and tokens of a task; no sentence may be longer.
    """
    inputs = {"token": token, "sentence": span(whole=True)}
    module = SentenceEncoder(encoder, pooling, is_normed).eval()
    return cell(module, inputs, name=name, max_batch=max_batch, max_batch_rows=max_batch_rows)


def encoder_decoder_cells(
    encoder: LayerStack,
    decoder: LayerStack,
    head: nn.Linear,
    end_token: int,
    *,
    name: str = "transformer",
    page_size: int = 16,
    max_batch: int = 64,
    max_batch_rows: int = 1024,
) -> EncoderDecoder:
    """Return the cells of an encoder-decoder; weights are copied.

    Args:
        encoder, decoder: the stacks; the second was made with ``is_decoder``.
        head: maps the decoder's rows to logits.
        end_token: the token that ends a text.
        name: the beginning of the cells' names.
        page_size: the tokens of a page.
        max_batch, max_batch_rows: the most requests and tokens of a task; no source may be longer.
    """
    own: nn.Module = head
    if type(head) is nn.Linear:
        with made_apart():
            own = Linear(head.in_features, head.out_features, head.bias is not None).to(head.weight.dtype)
            own.load_state_dict(head.state_dict())
    heads = decoder.sizes.attention
    row = decoder.sizes.layers, 2, heads.num_kv_heads, heads.size
    dtype = decoder.embedding.weight.dtype
    growing, read = (make(*row, dtype=dtype, page_size=page_size, page_dim=2) for make in (grows, read_pages))
    readers = [part for part in decoder.modules() if isinstance(part, CrossAttention)]
    return EncoderDecoder(
        cell(
            SourceEncoder(encoder, readers).eval(),
            {"token": token, "source": span(whole=True), "memory": growing},
            name=f"{name} encoder",
            max_batch=max_batch,
            max_batch_rows=max_batch_rows,
        ),
        cell(
            GreedyDecoder(decoder, own, end_token).eval(),
            {"token": token, "kv": growing, "memory": read},
            name=f"{name} decoder",
            max_batch=max_batch,
            max_batch_rows=max_batch_rows,
        ),
    )
