"""Mistral: Llama's form with sliding-window attention."""

from __future__ import annotations

from cellrt.language.checkpoints.config import MOST_TOKENS, Config
from cellrt.language.checkpoints.found import Found
from cellrt.language.checkpoints.llama import of_llamas_form
from cellrt.language.checkpoints.weights import Weights


def mistral(config: Config, weights: Weights) -> Found:
    """Return the description of a ``MistralForCausalLM``."""
    window = config.count("sliding_window", most=MOST_TOKENS) if "sliding_window" in config else 0
    return of_llamas_form(config, weights, window=window)
