"""GPT-2: learned positions, norm first. Its linear layers are stored transposed."""

from __future__ import annotations

from cellrt.cells.gpt2 import GPT2, GPT2Sizes
from cellrt.language.checkpoints.config import MOST_TOKENS, Config
from cellrt.language.checkpoints.found import Found, decoder
from cellrt.language.checkpoints.weights import Plan, Weights

NAMES = {
    "embedding": "wte",
    "positions": "wpe",
    "norm": "ln_f",
    "attention_norm": "ln_1",
    "qkv": "attn.c_attn",
    "out": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
"""The names of ``transformers`` by ours."""
TURNED = ("qkv", "out", "mlp.up", "mlp.down")
NOT_WEIGHTS = r"h\.\d+\.attn\.(masked_)?bias"
"""Tensors that are no weights: masks."""


def gpt2(config: Config, weights: Weights) -> Found:
    """Return the description of a ``GPT2LMHeadModel``."""
    config.expect("activation_function", "gelu_new", "gelu_pytorch_tanh")
    config.expect("scale_attn_weights", True)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        config.expect(name, False)
    config.expect("tie_word_embeddings", True)
    hidden = config.count("n_embd")
    sizes = GPT2Sizes(
        vocabulary=config.count("vocab_size", most=MOST_TOKENS),
        positions=config.count("n_positions", most=MOST_TOKENS),
        hidden=hidden,
        inner=config.count("n_inner", 4 * hidden, most=1 << 22),
        layers=config.count("n_layer", most=len(weights)),
        heads=config.count("n_head", most=1 << 14),
        epsilon=config.number("layer_norm_epsilon", 1e-5),
    )
    turned = frozenset(f"layers.{layer}.{part}.weight" for layer in range(sizes.layers) for part in TURNED)
    own = weights.renamed(lambda name: name.removeprefix("transformer."))
    plan = Plan(lambda: GPT2(sizes), _their_name, own, turned=turned, tied={"head.weight": "embedding.weight"})
    own.refuse_others(NOT_WEIGHTS, r"lm_head\.weight")
    return decoder(sizes.vocabulary, sizes.positions, plan)


def _their_name(name: str) -> str:
    part, _, kind = name.rpartition(".")
    if not part.startswith("layers."):
        return f"{NAMES[part]}.{kind}"
    _, number, part = part.split(".", 2)
    return f"h.{number}.{NAMES[part]}.{kind}"
