"""What a request may ask of a step, one row at a time and number by number: the oracle of ``cells/sampling.py``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from cellrt.cells import _sampling as places
from cellrt.cells.sampling import Asked, SampledToken, SamplingLimits, mask_words, sample
from cellrt.definition.spans import PagedRows, Spans

LIMITS = SamplingLimits(biases=4, stops=3, logprobs=5)
END = 2
PAGE = 4
SAME = 1e-5
"""So near to the bound of two tokens rounding decides."""


@dataclass(frozen=True)
class Wanted:
    """What a request asks for, its text so far, and how much of that is its answer."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    min_tokens: int = 0
    ignores_end: bool = False
    logprobs: int = 0
    stops: Sequence[int] = ()
    biases: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    text: Sequence[int] = (0,)
    made: int = 0
    allowed: Sequence[int] | None = None

    def settings(self) -> list[float]:
        """As the cell's input."""
        settings = [0.0] * places.NUM_SETTINGS
        for name in ("temperature", "top_k", "top_p", "min_p", "repetition", "presence", "frequency", "min_tokens"):
            settings[getattr(places, name.upper())] = getattr(self, name)
        settings[places.IGNORES_END], settings[places.NUM_LOGPROBS] = self.ignores_end, self.logprobs
        settings[places.PROMPT] = len(self.text) - self.made
        settings[places.NUM_STOPS], settings[places.NUM_BIASES] = len(self.stops), len(self.biases)
        settings[places.HAS_MASK] = self.allowed is not None
        return settings


def uniform(seed: int, step: int) -> float:
    """The random number of a seed and a step: SplitMix64, in Python's integers."""
    most = (1 << 64) - 1

    def mix(bits: int) -> int:
        bits = (bits + 0x9E3779B97F4A7C15) & most
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & most
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & most
        return bits ^ bits >> 31

    return ((mix((mix(seed & most) + step * 0x9E3779B97F4A7C15) & most) >> 16) + 0.5) / 2**48


def changed_logits(logits: Sequence[float], wanted: Wanted) -> list[float]:
    """Behind bias, penalties and ``min_tokens``."""
    found = [logit + wanted.biases.get(token, 0) for token, logit in enumerate(logits)]
    answer = wanted.text[len(wanted.text) - wanted.made :]
    for token in {*wanted.text}:
        logit = found[token]
        if wanted.repetition != 1:
            logit = logit / wanted.repetition if logit > 0 else logit * wanted.repetition
        times = answer.count(token)
        found[token] = logit - wanted.frequency * times - (wanted.presence if times else 0)
    if wanted.made < wanted.min_tokens:
        for token in (END, *wanted.stops):
            found[token] = -math.inf
    if wanted.allowed is None:
        return found
    masked = [logit if token in wanted.allowed else -math.inf for token, logit in enumerate(found)]
    if max(masked) == -math.inf:  # nothing is left: the likeliest of the model's own that are allowed
        masked[max(wanted.allowed, key=lambda token: logits[token])] = 0.0
    return masked


def probabilities(logits: Sequence[float], wanted: Wanted) -> list[float]:
    """What a token is drawn from: temperature, then top-k, top-p and min-p, all tokens as likely as the last kept."""
    logits = changed_logits(logits, wanted)
    kept = sorted(logits, reverse=True)
    if 0 < wanted.top_k < len(logits):
        kept = [logit for logit in kept if logit >= kept[wanted.top_k - 1]]
    weights = [math.exp((logit - kept[0]) / wanted.temperature) for logit in kept]
    total, before, least = math.fsum(weights), 0.0, kept[0]
    for logit, weight in zip(kept, weights):
        if (wanted.top_p < 1 and before >= wanted.top_p * total) or weight < wanted.min_p:
            break
        before, least = before + weight, logit
    found = [math.exp((logit - kept[0]) / wanted.temperature) if logit >= least else 0.0 for logit in logits]
    return [weight / math.fsum(found) for weight in found]


def tokens_at(shares: Sequence[float], number: float) -> set[int]:
    """Where the running sum passes a number, and its neighbours where rounding decides."""
    ends = np.cumsum(shares)
    likely = [min(int(np.searchsorted(ends, at, "right")), len(shares) - 1) for at in (number - SAME, number + SAME)]
    return {token for token in range(min(likely), max(likely) + 1) if shares[token] > 0}


def run(
    logits: torch.Tensor, wanted: Sequence[Wanted], chosen: Sequence[int] | None = None, device: str = "cpu"
) -> SampledToken:
    """``sample`` of rows of logits, each a node of one row; their texts lie in pages in a mixed order."""
    count, longest = len(wanted), max(len(each.text) for each in wanted)
    width = -(-longest // PAGE)
    tables = torch.randperm(count * width, generator=torch.Generator().manual_seed(0)).view(count, width).int()
    pages = torch.full((count * width, PAGE), -7, dtype=torch.int32)
    for own, each in zip(tables, wanted):
        for place, token in enumerate(each.text):
            pages[own[place // PAGE], place % PAGE] = token
    lengths = torch.tensor([len(each.text) for each in wanted], dtype=torch.int32)
    offsets, nodes = torch.arange(count + 1, dtype=torch.int32), torch.arange(count, dtype=torch.int32)
    is_read = torch.ones(count, dtype=torch.bool)
    history = PagedRows(pages, tables, lengths, offsets, nodes, lengths - 1, is_read)
    mask = torch.full((count, mask_words(logits.shape[1])), 7, dtype=torch.int32)
    for row, each in enumerate(wanted):
        if each.allowed is not None:
            flags = np.isin(np.arange(32 * mask.shape[1]), each.allowed)
            mask[row] = torch.from_numpy(np.packbits(flags, bitorder="little").view(np.int32))
    stops = torch.full((count, LIMITS.stops), -1, dtype=torch.int32)
    biases = torch.full((count, LIMITS.biases, 2), 3.0)
    for row, each in enumerate(wanted):
        stops[row, : len(each.stops)] = torch.tensor(each.stops, dtype=torch.int32)
        biases[row, : len(each.biases)] = torch.tensor(list(each.biases.items())).view(-1, 2)
    settings = torch.tensor([each.settings() for each in wanted], dtype=torch.float64)
    asked = Asked(settings, torch.tensor([each.seed for each in wanted]), stops, biases, mask)
    rows = torch.arange(count) if chosen is None else torch.tensor(chosen)
    given = history, Spans(offsets, lengths - 1, is_read), asked
    history, spans, asked = (type(each)(*(_moved(value, device) for value in each)) for each in given)
    return sample(logits.to(device), rows.to(device), asked, history, spans, [END], LIMITS)


def _moved(value: Any, device: str) -> Any:
    return value.to(device) if isinstance(value, torch.Tensor) else value
