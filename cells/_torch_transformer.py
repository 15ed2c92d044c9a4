"""Transformer layers with the weights of torch's own."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import gelu, relu

from cellrt import DefinitionError
from cellrt.cells.transformer import MLP, CrossAttention, Heads, SelfAttention, TransformerLayer


def layer_from_torch(layer: nn.TransformerEncoderLayer | nn.TransformerDecoderLayer) -> TransformerLayer:
    """A layer with a copy of the weights of a torch layer, in evaluation mode.

    That of an encoder sees all rows of its node, that of a decoder is causal and has cross-attention. `batch_first`
    plays no part.

    Raises DefinitionError for another activation than relu and gelu.
    """
    if layer.activation not in (relu, gelu) and not isinstance(layer.activation, nn.ReLU | nn.GELU):
        raise DefinitionError(f"layer_from_torch: expected the activation relu or gelu, got {layer.activation}")
    is_decoder = isinstance(layer, nn.TransformerDecoderLayer)
    bias = layer.linear1.bias is not None
    sizes = Heads(layer.linear1.in_features, layer.self_attn.num_heads, bias=bias, out_bias=bias)
    made = TransformerLayer(
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


def _named(part: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"{part}.{name}": value for name, value in state.items()}


def _attention_state(source: nn.MultiheadAttention) -> dict[str, Tensor]:
    """Query, key and value are one weight there."""
    state = {"out." + name: value for name, value in source.out_proj.state_dict().items()}
    for name, joined in (("weight", source.in_proj_weight), ("bias", source.in_proj_bias)):
        if joined is not None:
            state |= {f"{part}.{name}": rows for part, rows in zip(("query", "key", "value"), joined.detach().chunk(3))}
    return state
