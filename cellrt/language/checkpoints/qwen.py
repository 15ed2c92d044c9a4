"""Qwen 2, 2.5 and 3: Llama with biases of queries, keys and values, or with norms of their heads."""

from __future__ import annotations

from cellrt.language.checkpoints.config import Config
from cellrt.language.checkpoints.found import Found
from cellrt.language.checkpoints.llama import of_llamas_form
from cellrt.language.checkpoints.weights import Weights


def qwen2(config: Config, weights: Weights) -> Found:
    """Return the description of a ``Qwen2ForCausalLM``; a window of some layers only is not supported."""
    config.expect("use_sliding_window", False)
    return of_llamas_form(config, weights, has_bias=True)


def qwen3(config: Config, weights: Weights) -> Found:
    """Return the description of a ``Qwen3ForCausalLM``."""
    config.expect("use_sliding_window", False)
    config.expect("attention_bias", False)
    return of_llamas_form(config, weights, norms_heads=True)
