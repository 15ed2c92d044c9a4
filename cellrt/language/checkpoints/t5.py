"""T5, also of version 1.1 and Flan: an encoder-decoder with relative positions."""

from __future__ import annotations

from typing import Any

from cellrt import Unfolder
from cellrt.cells.t5 import T5, T5Sizes
from cellrt.cells.transformer_stack import EncoderDecoder, encoder_decoder_cells
from cellrt.language.checkpoints.config import MOST_TOKENS, Config
from cellrt.language.checkpoints.found import Found
from cellrt.language.checkpoints.weights import Plan, Weights
from cellrt.unfolders import transduce

ATTENTION = {"query": "q", "key": "k", "value": "v", "out": "o", "relative": "relative_attention_bias"}
PLAIN, GATED = {"mlp.up": "wi", "mlp.down": "wo"}, {"mlp.gate": "wi_0", "mlp.up": "wi_1", "mlp.down": "wo"}
SHARED = "shared.weight"
NOT_WEIGHTS = r"(encoder|decoder)\.embed_tokens\.weight"


def t5(config: Config, weights: Weights) -> Found:
    """Return the description of a ``T5ForConditionalGeneration``."""
    is_gated = config.expect("feed_forward_proj", "relu", "gated-gelu") == "gated-gelu"
    hidden, layers = config.count("d_model"), config.count("num_layers", most=len(weights))
    is_scaled = config.flag("scale_decoder_outputs", config.flag("tie_word_embeddings", True))
    shared: dict[str, Any] = {
        "vocabulary": config.count("vocab_size", most=MOST_TOKENS),
        "positions": config.count("n_positions", 512, most=MOST_TOKENS),
        "hidden": hidden,
        "inner": config.count("d_ff"),
        "heads": config.count("num_heads", most=1 << 14),
        "head_dim": config.count("d_kv", most=1 << 14),
        "buckets": config.count("relative_attention_num_buckets", 32, least=4, most=1 << 14),
        "max_distance": config.count("relative_attention_max_distance", 128, most=1 << 20),
        "is_gated": is_gated,
        "epsilon": config.number("layer_norm_epsilon", 1e-6),
    }
    encoder = T5Sizes(**shared, layers=layers)
    num_layers = config.count("num_decoder_layers", layers, most=len(weights))
    decoder = T5Sizes(**shared, layers=num_layers, scale=hidden**-0.5 if is_scaled else 1.0)
    has_head = "lm_head.weight" in weights
    tied = {"decoder.embedding.weight": "encoder.embedding.weight"}
    tied |= {} if has_head else {"head.weight": "encoder.embedding.weight"}
    plan = Plan(lambda: T5(encoder, decoder), lambda name: _their_name(name, is_gated), weights, tied=tied)
    weights.refuse_others(NOT_WEIGHTS)
    start = config.token("decoder_start_token_id")
    longest, first = encoder.positions, 0 if start is None else start

    def cells(
        module: T5, end_token: int, *, name: str, page_size: int = 16, max_batch: int = 64, max_batch_rows: int = 1024
    ) -> EncoderDecoder:
        own = {"name": name, "page_size": page_size, "max_batch": max_batch}
        rows = max(max_batch_rows, longest)
        parts = module.encoder, module.decoder, module.head
        return encoder_decoder_cells(*parts, end_token, **own, max_batch_rows=rows)  # type: ignore[arg-type]

    def unfold(name: str, made: EncoderDecoder, *, max_steps: int = min(256, longest)) -> Unfolder:
        return transduce(name, made, start=first, max_steps=max_steps)

    return Found("encoder-decoder", encoder.vocabulary, longest, plan, cells, unfold)


def _their_name(name: str, is_gated: bool) -> str:
    part, _, kind = name.rpartition(".")
    if part == "head":
        return "lm_head.weight"
    if part.endswith(".embedding"):
        return SHARED
    stack, _, part = part.partition(".")
    if part == "norm":
        return f"{stack}.final_layer_norm.weight"
    _, number, part = part.split(".", 2)
    last = 2 if stack == "decoder" else 1
    if part == "attention.relative":  # all layers have the first one's
        return f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    norms = {"attention_norm": 0, "cross_norm": 1, "mlp_norm": last}
    if part in norms:
        return f"{stack}.block.{number}.layer.{norms[part]}.layer_norm.weight"
    own, _, projection = part.partition(".")
    if own == "mlp":
        return f"{stack}.block.{number}.layer.{last}.DenseReluDense.{(GATED if is_gated else PLAIN)[part]}.{kind}"
    theirs = "0.SelfAttention" if own == "attention" else "1.EncDecAttention"
    return f"{stack}.block.{number}.layer.{theirs}.{ATTENTION[projection]}.{kind}"
