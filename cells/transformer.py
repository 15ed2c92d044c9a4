"""Layers of Transformers over ragged rows: any number of rows of each node, without padding.

Linear layers and norms see plain rows ``[sum of rows, hidden]``; attention alone looks at whose rows are whose
(``Spans``), and at the keys and values that the node has (``Pages``). So one layer serves the chunk of a prompt, a
single step and a whole sentence, in one batch (ORCA section 3.2, "selective batching").

    norm first:  x = x + attention(norm(x));  x = x + cross(norm(x));  x = x + mlp(norm(x))
    norm last:   x = norm(x + attention(x));  x = norm(x + cross(x));  x = norm(x + mlp(x))

(Vaswani et al. 2017 has the norm last; Xiong et al. 2020 compare.) Norms are torch's: ``nn.LayerNorm``, ``nn.RMSNorm``.

For inference in float32 on a CPU the linear layers keep a second, packed copy of their weights (``packed.py``) and run
on the calling thread. A row's bits are then the same in any batch and however its span is cut, through all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn
from torch.nn.functional import gelu, relu, silu

from cellrt import DefinitionError
from cellrt.cells._made_apart import making_apart
from cellrt.cells.attention import Linear
from cellrt.cells.paged_attention import Mask, Pages, Spans, append_pages, attend_rows, paged_attention
from cellrt.cells.positions import RelativePositions, RotaryPositions
from cellrt.cells.row_layers import gate_with_silu

Activation = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Heads:
    """The sizes of an attention.

    Attributes:
        hidden: numbers of a row.
        heads: the number of heads of the query.
        kv_heads: the number of heads of keys and values; each serves several neighbouring heads of the query. None:
            as many as ``heads``.
        head_dim: None: hidden / heads.
        bias: whether the query, key and value have one; ``out_bias``: whether the output has.
        scale: the factor of the scores; None: 1 / sqrt(head_dim).
    """

    hidden: int
    heads: int
    kv_heads: int | None = None
    head_dim: int | None = None
    bias: bool = False
    out_bias: bool = False
    scale: float | None = None

    def __post_init__(self) -> None:
        """Raise DefinitionError for heads that cannot be shared evenly."""
        if self.heads % self.num_kv_heads or (self.head_dim is None and self.hidden % self.heads):
            raise DefinitionError(
                f"Heads: expected heads a multiple of kv_heads and, without head_dim, a divisor of hidden, got {self}"
            )

    @property
    def num_kv_heads(self) -> int:
        """``kv_heads``, or ``heads`` without."""
        return self.heads if self.kv_heads is None else self.kv_heads

    @property
    def size(self) -> int:
        """Numbers of a head."""
        return self.hidden // self.heads if self.head_dim is None else self.head_dim


class Attention(nn.Module):
    """The base of self-attention and cross-attention: the four projections, ``[rows, hidden]`` to heads and back."""

    def __init__(self, sizes: Heads, memory_size: int | None = None) -> None:
        super().__init__()
        self.sizes = sizes
        given = sizes.hidden if memory_size is None else memory_size
        self.query = Linear(sizes.hidden, sizes.heads * sizes.size, bias=sizes.bias)
        self.key = Linear(given, sizes.num_kv_heads * sizes.size, bias=sizes.bias)
        self.value = Linear(given, sizes.num_kv_heads * sizes.size, bias=sizes.bias)
        self.out = Linear(sizes.heads * sizes.size, sizes.hidden, bias=sizes.out_bias)

    def _heads(self, rows: Tensor) -> Tensor:
        heads: Tensor = rows.unflatten(1, (-1, self.sizes.size))
        return heads

    def _read(self, query: Tensor, pages: Pages, spans: Spans, mask: Mask) -> Tensor:
        read: Tensor = self.out(paged_attention(query, pages, spans, mask, scale=self.sizes.scale).flatten(1))
        return read


class SelfAttention(Attention):
    """Attention of a node's rows over all that the node has so far; grouped heads (Ainslie et al. 2023).

    With ``Pages`` the rows' keys and values are first written there, at their positions, in place. Without, for
    encoders, the rows are all that there is. ``norm_heads`` makes a norm for the heads of queries and keys, as Qwen 3
    has.
    """

    def __init__(
        self,
        sizes: Heads,
        *,
        causal: bool = True,
        window: int = 0,
        rotary: RotaryPositions | None = None,
        relative: RelativePositions | None = None,
        norm_heads: Callable[[int], nn.Module] | None = None,
    ) -> None:
        super().__init__(sizes)
        self.causal, self.window = causal, window
        self.rotary, self.relative = rotary, relative
        self.query_norm = None if norm_heads is None else norm_heads(sizes.size)
        self.key_norm = None if norm_heads is None else norm_heads(sizes.size)

    def forward(self, x: Tensor, spans: Spans, pages: Pages | None = None) -> Tensor:
        """``[rows, hidden]`` -> ``[rows, hidden]``."""
        query, key, value = self._heads(self.query(x)), self._heads(self.key(x)), self._heads(self.value(x))
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None:
            query, key = self.rotary(query, key, spans.positions)
        mask = Mask(self.causal, self.window, None if self.relative is None else self.relative())
        if pages is None:
            read: Tensor = self.out(attend_rows(query, key, value, spans, mask, scale=self.sizes.scale).flatten(1))
            return read
        append_pages(pages, spans, key, value)
        return self._read(query, pages, spans, mask)


class CrossAttention(Attention):
    """Attention of a node's rows over all rows of a memory, such as an encoder's outputs.

    ``memory`` makes the memory's keys and values, once for all steps; they may lie in pages too (``append_pages``).
    """

    def memory(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return key and value ``[rows, kv_heads, head_dim]`` of rows ``[rows, memory_size]``."""
        return self._heads(self.key(rows)), self._heads(self.value(rows))

    def forward(self, x: Tensor, spans: Spans, pages: Pages) -> Tensor:
        """``[rows, hidden]`` -> ``[rows, hidden]``; positions play no part."""
        return self._read(self._heads(self.query(x)), pages, spans, Mask(causal=False))


class MLP(nn.Module):
    """Two linear layers and what is between: ``[rows, hidden]`` -> ``[rows, hidden]``; GELU unless another is given."""

    def __init__(self, hidden: int, inner: int, activation: Activation = gelu, bias: bool = True) -> None:
        super().__init__()
        self.activation = activation
        self.up, self.down = Linear(hidden, inner, bias=bias), Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, row by row."""
        result: Tensor = self.down(self.activation(self.up(x)))
        return result


class GatedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` (Shazeer 2020); SwiGLU unless another activation is given."""

    def __init__(self, hidden: int, inner: int, activation: Activation = silu, bias: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.gate, self.up = Linear(hidden, inner, bias=bias), Linear(hidden, inner, bias=bias)
        self.down = Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's output, row by row."""
        gate, up = self.gate(x), self.up(x)
        inner = gate_with_silu(gate, up) if self.activation is silu else self.activation(gate) * up
        result: Tensor = self.down(inner)
        return result


class TransformerLayer(nn.Module):
    """A layer of an encoder, of a decoder alone, or (with ``cross``) of an encoder-decoder.

    ``norm`` makes each of its norms. Which it is, and how it knows positions, its ``attention`` decides.
    """

    def __init__(
        self,
        attention: SelfAttention,
        mlp: nn.Module,
        norm: Callable[[], nn.Module],
        *,
        cross: CrossAttention | None = None,
        norm_first: bool = True,
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.attention, self.attention_norm = attention, norm()
        self.cross, self.cross_norm = cross, None if cross is None else norm()
        self.mlp, self.mlp_norm = mlp, norm()

    @classmethod
    @making_apart
    def from_torch(cls, layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> Self:
        """Return a layer with a copy of the weights of a torch layer, in evaluation mode.

        That of an encoder sees all rows of its node, that of a decoder is causal and has cross-attention.
        ``batch_first`` plays no part.

        Raise DefinitionError for another activation than relu and gelu.
        """
        if layer.activation not in (relu, gelu) and not isinstance(layer.activation, nn.ReLU | nn.GELU):
            raise DefinitionError(
                f"TransformerLayer.from_torch: expected the activation relu or gelu, got {layer.activation}"
            )
        is_decoder = isinstance(layer, nn.TransformerDecoderLayer)
        bias = layer.linear1.bias is not None
        sizes = Heads(layer.linear1.in_features, layer.self_attn.num_heads, bias=bias, out_bias=bias)
        made = cls(
            SelfAttention(sizes, causal=is_decoder),
            MLP(sizes.hidden, layer.linear1.out_features, layer.activation, bias),
            lambda: nn.LayerNorm(sizes.hidden, layer.norm1.eps, bias=bias),
            cross=CrossAttention(sizes) if is_decoder else None,
            norm_first=layer.norm_first,
        ).to(layer.linear1.weight.dtype)
        sources: dict[str, nn.Module] = {"mlp.up": layer.linear1, "mlp.down": layer.linear2}
        sources |= {"attention_norm": layer.norm1, "mlp_norm": layer.norm2}
        state = _named("attention", _attention_state(layer.self_attn))
        if isinstance(layer, nn.TransformerDecoderLayer):
            sources |= {"cross_norm": layer.norm2, "mlp_norm": layer.norm3}
            state |= _named("cross", _attention_state(layer.multihead_attn))
        for part, source in sources.items():
            state |= _named(part, source.state_dict())
        made.load_state_dict(state)
        return made.eval()

    def forward(
        self,
        x: Tensor,
        spans: Spans,
        pages: Pages | None = None,
        memory: Pages | None = None,
        readers: Spans | None = None,
    ) -> Tensor:
        """``[rows, hidden]`` -> ``[rows, hidden]``; ``pages`` are its own, ``memory`` those that ``cross`` reads.

        ``readers``: whose rows are whose there, unless as in ``spans``.
        """
        x = self._add(x, self.attention_norm, self.attention, spans, pages)
        if self.cross is not None and self.cross_norm is not None:
            x = self._add(x, self.cross_norm, self.cross, spans if readers is None else readers, memory)
        return self._add(x, self.mlp_norm, self.mlp)

    def _add(self, x: Tensor, norm: nn.Module, part: nn.Module, *others: Any) -> Tensor:
        if self.norm_first:
            result: Tensor = x + part(norm(x), *others)
        else:
            result = norm(x + part(x, *others))
        return result


def _named(part: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{part}.{name}": value for name, value in state.items()}


def _attention_state(source: nn.MultiheadAttention) -> dict[str, Tensor]:
    """Split the one weight of query, key and value."""
    state = {"out." + name: value for name, value in source.out_proj.state_dict().items()}
    for name, joined in (("weight", source.in_proj_weight), ("bias", source.in_proj_bias)):
        if joined is not None:
            state |= {f"{part}.{name}": rows for part, rows in zip(("query", "key", "value"), joined.detach().chunk(3))}
    return state
