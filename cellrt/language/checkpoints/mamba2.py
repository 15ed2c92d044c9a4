"""Mamba 2: linear recurrent layers, whose state has a fixed size."""

from __future__ import annotations

import math
from functools import partial

from cellrt import DefinitionError
from cellrt.cells.mamba2 import Mamba2, Mamba2Sizes, recurrent_language_model
from cellrt.language.checkpoints.config import MOST_TOKENS, Config
from cellrt.language.checkpoints.found import Found, decoder
from cellrt.language.checkpoints.weights import Plan, Weights
from cellrt.unfolders.recurrent_completion import complete_recurrent

NAMES = {
    "embedding.weight": "backbone.embeddings.weight",
    "norm.weight": "backbone.norm_f.weight",
    "head.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "norm": "norm",
    "project": "mixer.in_proj",
    "gated_norm": "mixer.norm",
    "out": "mixer.out_proj",
    "conv": "mixer.conv1d.weight",
    "conv_bias": "mixer.conv1d.bias",
    "dt_bias": "mixer.dt_bias",
    "log_a": "mixer.A_log",
    "d": "mixer.D",
}
"""The names in checkpoints of ``transformers``, by the names in ``Mamba2``."""
CONTEXT = 1 << 20
"""The most tokens of a context. It is arbitrary, as the model's state does not grow."""
SAMPLING = partial(recurrent_language_model, sampling=True)


def mamba2(config: Config, weights: Weights) -> Found:
    """Return the description of a ``Mamba2ForCausalLM``."""
    config.expect("hidden_act", "silu")
    least, most = _dt_limits(config)
    sizes = Mamba2Sizes(
        vocabulary=config.count("vocab_size", most=MOST_TOKENS),
        hidden=config.count("hidden_size"),
        layers=config.count("num_hidden_layers", most=len(weights)),
        heads=config.count("num_heads", most=1 << 14),
        head_dim=config.count("head_dim", most=1 << 14),
        state=config.count("state_size", most=1 << 14),
        groups=config.count("n_groups", 8, most=1 << 14),
        kernel=config.count("conv_kernel", 4, least=2, most=1 << 10),
        epsilon=config.number("layer_norm_epsilon", 1e-5),
        bias=config.flag("use_bias"),
        conv_bias=config.flag("use_conv_bias", True),
        least_dt=least,
        most_dt=most,
        wide_residual=config.flag("residual_in_fp32", True),
        is_tied=config.flag("tie_word_embeddings"),
    )
    if sizes.heads % sizes.groups or sizes.inner != config.number("expand", 2) * sizes.hidden:
        raise DefinitionError(
            f"{config.where}: expected num_heads a multiple of n_groups, and num_heads x head_dim = expand x "
            f"hidden_size, got {sizes.heads} and {sizes.groups}, {sizes.head_dim} and {sizes.hidden}"
        )
    own = weights.renamed(lambda name: name.replace("backbone.embedding.", "backbone.embeddings."))
    tied = {"head.weight": "embedding.weight"} if sizes.is_tied else {}
    plan = Plan(lambda: Mamba2(sizes), _checkpoint_name, own, tied=tied)
    own.refuse_others(*[r"lm_head\.weight" for _ in tied])
    return decoder(sizes.vocabulary, CONTEXT, plan, SAMPLING, complete_recurrent)


def _dt_limits(config: Config) -> tuple[float, float]:
    """Return the least and the most dt; ``transformers`` writes infinity as an object."""
    limits = config.values.get("time_step_limit")
    if limits is None:
        return 0.0, math.inf
    listed = (
        [math.inf if one == {"__float__": "Infinity"} else one for one in limits] if isinstance(limits, list) else []
    )
    if len(listed) != 2 or not all(type(one) in (float, int) and one >= 0 for one in listed):
        raise DefinitionError(f"{config.where}, time_step_limit: expected two numbers, got {limits!r:.80}")
    return float(listed[0]), float(listed[1])


def _checkpoint_name(name: str) -> str:
    if not name.startswith("layers."):
        return NAMES[name]
    _, number, part, *kind = name.split(".")
    return ".".join([f"backbone.layers.{number}", LAYER_NAMES[part], *kind])
