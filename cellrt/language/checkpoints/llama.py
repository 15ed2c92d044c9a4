"""Llama, SmolLM and others of their form: norm first, rotary positions, grouped heads, SwiGLU."""

from __future__ import annotations

from cellrt import DefinitionError
from cellrt.cells.llama import Llama, LlamaSizes
from cellrt.cells.llama_weights import TRANSFORMERS, their_name
from cellrt.cells.positions import LinearScaling, Llama3Scaling, Scaling, YarnScaling
from cellrt.language.checkpoints.config import MOST_TOKENS, Config
from cellrt.language.checkpoints.found import Found, decoder
from cellrt.language.checkpoints.weights import Plan, Weights

NOT_WEIGHTS = r".*rotary_emb\.inv_freq"


def llama(config: Config, weights: Weights) -> Found:
    """Return the description of a ``LlamaForCausalLM``."""
    config.expect("attention_bias", False)
    config.expect("mlp_bias", False)
    return of_llamas_form(config, weights)


def of_llamas_form(
    config: Config, weights: Weights, *, window: int = 0, has_bias: bool = False, norms_heads: bool = False
) -> Found:
    """Return the description of a model of this form.

    ``window``, ``has_bias``, ``norms_heads``: see ``LlamaSizes``.
    """
    config.expect("hidden_act", "silu")
    base, scaling = _rotary_of(config)
    heads = config.count("num_attention_heads", most=1 << 14)
    sizes = LlamaSizes(
        vocabulary=config.count("vocab_size", most=MOST_TOKENS),
        hidden=config.count("hidden_size"),
        inner=config.count("intermediate_size"),
        layers=config.count("num_hidden_layers", most=len(weights)),
        heads=heads,
        kv_heads=config.count("num_key_value_heads", heads, most=heads),
        head_dim=config.count("head_dim", most=1 << 14) if "head_dim" in config else None,
        epsilon=config.number("rms_norm_eps", 1e-6),
        rotary_base=base,
        scaling=scaling,
        window=window,
        is_tied=config.flag("tie_word_embeddings"),
        has_bias=has_bias,
        norms_heads=norms_heads,
    )
    return of_sizes(sizes, config.count("max_position_embeddings", most=MOST_TOKENS), weights, TRANSFORMERS)


def of_sizes(sizes: LlamaSizes, context: int, weights: Weights, whose: int) -> Found:
    """Return the description of a model of these sizes.

    ``whose``: the naming of its weights, as in ``llama_weights.py``.
    """
    tied = {"head.weight": "embedding.weight"} if sizes.is_tied else {}
    plan = Plan(lambda: Llama(sizes), lambda name: their_name(name, whose), weights, tied=tied)
    weights.refuse_others(NOT_WEIGHTS, *[their_name(name, whose).replace(".", r"\.") for name in tied])
    return decoder(sizes.vocabulary, context, plan)


def _rotary_of(config: Config) -> tuple[float, Scaling | None]:
    """Return the base and the scaling of rotary positions, as versions 4 and 5 of ``transformers`` write them."""
    own = config.part("rope_parameters" if "rope_parameters" in config else "rope_scaling")
    base = own.number("rope_theta", config.number("rope_theta", 10_000.0))
    own.expect("partial_rotary_factor", config.expect("partial_rotary_factor", 1.0, 1), 1.0, 1)
    kind = own.text("rope_type", own.text("type", "default"))
    if kind == "default":
        return base, None
    factor = own.number("factor", least=0.0, most=1e6)
    known = config.count("max_position_embeddings", most=MOST_TOKENS)
    if kind == "linear":
        return base, LinearScaling(factor)
    if kind == "llama3":
        low, high = own.number("low_freq_factor"), own.number("high_freq_factor")
        if high <= low:
            raise DefinitionError(f"{own.where}: expected high_freq_factor above low_freq_factor, got {high} and {low}")
        context = own.count("original_max_position_embeddings", most=MOST_TOKENS)
        return base, Llama3Scaling(factor, context, low, high)
    if kind == "yarn":
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            own.expect(name, None)
        own.expect("truncate", True)
        context = own.count("original_max_position_embeddings", known, most=MOST_TOKENS)
        return base, YarnScaling(factor, context, own.number("beta_slow", 1.0), own.number("beta_fast", 32.0))
    raise DefinitionError(f"{own.where}: expected rope_type default, linear, llama3 or yarn, got {kind!r}")
