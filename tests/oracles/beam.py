"""Beam search in plain Python, one hypothesis at a time; and the best of all sequences there are."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Advance = Callable[[int, Any], tuple[torch.Tensor, Any]]
"""From the token before and a state to the logits ``[num_tokens]`` of the next token and the state after."""


class Hypothesis(NamedTuple):
    """A sequence of tokens, its log-probability, and the state of the model after it."""

    tokens: tuple[int, ...]
    score: float
    state: Any


def rank(tokens: tuple[int, ...], score: float, length_penalty: float) -> float:
    """Wu et al. 2016, equation 14, without coverage."""
    return float(score / ((5 + len(tokens)) / 6) ** length_penalty)


def log_probabilities(logits: torch.Tensor) -> list[float]:
    values = logits.double().tolist()
    highest = max(values)
    total = highest + math.log(sum(math.exp(value - highest) for value in values))
    return [value - total for value in values]


def search(
    advance: Advance, state: Any, start: int, end: int, beams: int, max_steps: int, length_penalty: float = 0.0
) -> list[Hypothesis]:
    """The hypotheses left after ``max_steps`` steps, or when all have ended; the best first."""
    kept = [Hypothesis((), 0.0, state)]
    for _ in range(max_steps):
        extended = []
        for hypothesis in kept:
            if hypothesis.tokens and hypothesis.tokens[-1] == end:
                extended.append(hypothesis)
                continue
            before = hypothesis.tokens[-1] if hypothesis.tokens else start
            logits, after = advance(before, hypothesis.state)
            for token, chance in enumerate(log_probabilities(logits)):
                extended.append(Hypothesis((*hypothesis.tokens, token), hypothesis.score + chance, after))
        extended.sort(key=lambda each: -rank(each.tokens, each.score, length_penalty))
        kept = extended[:beams]
        if all(hypothesis.tokens[-1] == end for hypothesis in kept):
            break
    return kept


def all_sequences(
    advance: Advance, state: Any, start: int, end: int, num_tokens: int, max_steps: int, length_penalty: float
) -> list[tuple[tuple[int, ...], float]]:
    """Every sequence that ends with the end token or has ``max_steps`` tokens without it, with its rank; best first."""
    found: list[tuple[tuple[int, ...], float]] = []
    for length in range(1, max_steps + 1):
        for tokens in itertools.product(range(num_tokens), repeat=length):
            if end in tokens[:-1] or (tokens[-1] != end and length < max_steps):
                continue
            current, score = state, 0.0
            for before, token in zip((start, *tokens), tokens):
                logits, current = advance(before, current)
                score += log_probabilities(logits)[token]
            found.append((tokens, rank(tokens, score, length_penalty)))
    return sorted(found, key=lambda each: -each[1])
