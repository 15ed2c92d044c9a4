"""The next token of each row of logits as the row's request asks for it: what a language model's cell does at its end.

    logits += bias;  penalties of the tokens so far;  no end before ``min_tokens``;  nothing that a mask does not allow
    weights = exp(logits / temperature) of those that top-k, then top-p, then min-p leave
    token: the highest logit, or where the running sum of weights passes a uniform number of (seed, position)

What a request asks for are rows that stay the same at every step (``Asked``), so that one task has rows of all kinds.
The random number of a row is a hash of its request's seed and of the row's place in the text. So the same seed gives
the same tokens in any batch, chunks and worker, and after a suspension. The tokens so far are a state of their own that
grows by one int32 a row.

Log-probabilities are the model's own, before anything is changed. On a CPU all is one compiled call (``_sampling.py``),
for which logits of 16 bits become float32; elsewhere it is the plain torch below, which waits for no device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cellrt import DefinitionError, PagedRows, RowSpec, Spans, grows, rows, span, token
from cellrt.cells import _sampling as compiled
from cellrt.cells._weights import is_eager, is_fusable
from cellrt.cells.output import LEAST_TEMPERATURE, uniform
from cellrt.numbers import as_integer

HALVES = torch.bfloat16, torch.float16


@dataclass(frozen=True)
class SamplingLimits:
    """The most that a request may ask of a language model that samples: rows of this many numbers are kept for each.

    Attributes:
        biases: tokens with a bias.
        stops: stop tokens.
        logprobs: likeliest tokens that are told of each step.
    """

    biases: int = 300
    stops: int = 16
    logprobs: int = 20

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if (as_integer(value) or 0) < 1:
                raise DefinitionError(f"SamplingLimits: expected {name} as an integer of at least 1, got {value!r}")


class Asked(NamedTuple):
    """The sampling parameters of the rows' requests.

    Attributes:
        settings: float64 ``[rows, NUM_SETTINGS]``, in the order of ``_sampling.py``.
        seed: int64 ``[rows]``.
        stops: int32 ``[rows, most]``, of which the settings say how many count.
        biases: float32 ``[rows, most, 2]``: tokens, and what is added to their logits.
        mask: int32 ``[rows, words]``: of each word's 32 tokens a bit, the lowest first, whether they are allowed. The
            settings say whether it counts.
    """

    settings: Tensor
    seed: Tensor
    stops: Tensor
    biases: Tensor
    mask: Tensor


class SampledToken(NamedTuple):
    """The outputs of a step of a language model that samples.

    Attributes:
        token: int64 ``[rows]``.
        logprob: float32 ``[rows]``: its log-probability, of the model's own distribution.
        stop: bool ``[rows]``: whether it ends the text.
        top_token: int64 ``[rows, most]``: the likeliest tokens, as many as the request asks for, then -1.
        top_logprob: float32 ``[rows, most]``: theirs, then minus infinity.
    """

    token: Tensor
    logprob: Tensor
    stop: Tensor
    top_token: Tensor
    top_logprob: Tensor


def mask_words(vocabulary: int) -> int:
    """Return how many words the mask of this many tokens has."""
    return -(-vocabulary // compiled.MASK_BITS)


def sampling_inputs(limits: SamplingLimits, page_size: int, vocabulary: int) -> dict[str, RowSpec]:
    """Return the inputs of a cell that samples, beside its own: the tokens so far, the rows' steps, and ``Asked``."""
    return {
        "history": grows(dtype=torch.int32, page_size=page_size),
        "spans": span(),
        "settings": rows(compiled.NUM_SETTINGS, dtype=torch.float64),
        "seed": token,
        "stops": rows(limits.stops, dtype=torch.int32),
        "biases": rows(limits.biases, 2),
        "mask": rows(mask_words(vocabulary), dtype=torch.int32),
    }


def sampling_outputs(limits: SamplingLimits) -> dict[str, RowSpec]:
    """Return the outputs of a cell that samples: ``SampledToken``."""
    return {
        "token": token,
        "logprob": rows(),
        "stop": rows(dtype=torch.bool),
        "top_token": rows(limits.logprobs, dtype=torch.int64),
        "top_logprob": rows(limits.logprobs),
    }


def ends_of(end_token: int | Sequence[int]) -> tuple[int, ...]:
    """Return the tokens that end a text, of one or several. Raise DefinitionError for anything else."""
    given = [end_token] if as_integer(end_token) is not None else list(end_token)  # type: ignore[arg-type]
    found = tuple(number for each in given if (number := as_integer(each)) is not None)
    if not found or len(found) < len(given):
        raise DefinitionError(f"end_token: expected a token, or a list of at least one, got {end_token!r}")
    return found


def new_tokens(count: int, limits: SamplingLimits, device: torch.device) -> SampledToken:
    """Return new outputs of this many rows, not chosen yet."""
    numbers = torch.zeros(count, dtype=torch.int64, device=device)
    stop = torch.zeros(count, dtype=torch.bool, device=device)
    tops = torch.full((count, limits.logprobs), -1, dtype=torch.int64, device=device)
    return SampledToken(numbers, numbers.float(), stop, tops, torch.full(tops.shape, -math.inf, device=device))


def words_of(
    asked: Asked, history: PagedRows, steps: Tensor, made: SampledToken, ends: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the words that ``sample_rows`` takes for a task whose tensors are contiguous."""
    words = np.zeros(compiled.NUM_WORDS, np.int64)
    words[compiled.SETTINGS : compiled.STEPS] = [each.data_ptr() for each in asked]
    paged = history.pages.data_ptr(), history.tables.data_ptr(), history.tables.shape[1], history.page_size
    words[compiled.STEPS : compiled.POSITIONS] = [steps.data_ptr(), *paged]
    words[compiled.POSITIONS], words[compiled.NODES] = history.positions.data_ptr(), history.nodes.data_ptr()
    words[compiled.TOKEN : compiled.MOST_STOPS] = [each.data_ptr() for each in made]
    most = asked.stops.shape[1], asked.biases.shape[1], made.top_token.shape[1]
    words[compiled.MOST_STOPS : compiled.NUM_WORDS] = [*most, ends.ctypes.data, len(ends)]
    return words


def are_plain(asked: Asked, history: PagedRows, spans: Spans) -> bool:
    """Return whether compiled code can read these: contiguous, on a CPU, of the types that it knows."""
    numbers = history.tables, history.positions, history.nodes, history.pages, spans.positions, asked.stops
    given = [(each, torch.int32) for each in numbers]
    given += [
        (asked.mask, torch.int32),
        (asked.settings, torch.float64),
        (asked.seed, torch.int64),
        (asked.biases, torch.float32),
    ]
    return all(each.is_cpu and each.dtype is dtype and each.is_contiguous() for each, dtype in given)


def sample(
    logits: Tensor,
    chosen: Tensor,
    asked: Asked,
    history: PagedRows,
    spans: Spans,
    ends: Sequence[int],
    limits: SamplingLimits,
) -> SampledToken:
    """Return the next token of those rows of a task of which there are logits ``[chosen, tokens]``.

    Args:
        logits: the logits of the rows ``chosen``, int64.
        asked: the options of all rows.
        history: the tokens of each text, int32, those of the rows among them.
        spans: the rows' steps in their request.
        ends: the tokens that end a text.
        limits: those of the cell.
    """
    if logits.is_cpu and logits.dtype in HALVES:
        logits = logits.float()
    if not is_fusable(logits) or not are_plain(asked, history, spans):
        return _sample_plainly(logits, chosen, asked, history, spans, ends, limits)
    made, logits, chosen = new_tokens(len(asked.seed), limits, logits.device), logits.contiguous(), chosen.contiguous()
    end_tokens = np.array(ends, np.int64)
    words = words_of(asked, history, spans.positions, made, end_tokens)
    compiled.sample_rows_alone(logits.data_ptr(), *logits.shape, chosen.data_ptr(), words)
    return made


def _sample_plainly(
    logits: Tensor,
    chosen: Tensor,
    asked: Asked,
    history: PagedRows,
    spans: Spans,
    ends: Sequence[int],
    limits: SamplingLimits,
) -> SampledToken:
    """Sample as ``sample`` does, in torch. Every row takes every branch, so that no value is copied from the device."""
    settings, seed, stops, biases, mask = (each[chosen] for each in asked)
    counts = settings.nan_to_num().floor().clamp(min=0)
    position, width = history.positions[chosen].long(), logits.shape[1]
    prompt = settings[:, compiled.PROMPT].nan_to_num().clamp(-(2.0**31), 2.0**31).long()
    step = (spans.positions[chosen] - prompt + 1).clamp(min=0)
    own = logits.float()
    best = own.amax(1)
    is_out = ~_allowed(mask, width) & (settings[:, compiled.HAS_MASK, None] > 0)
    greedy = own.masked_fill(is_out, -math.inf).argmax(1)
    scale = -(own - best[:, None]).exp().sum(1).log()
    ending = _ending(counts, stops, ends, width)
    changed = _penalised(_biased(own, counts, biases), settings, history, chosen, position, step)
    is_early = step < settings[:, compiled.MIN_TOKENS]
    changed = changed.masked_fill(is_early[:, None] & ending.any(1) | is_out, -math.inf)
    highest, likeliest = changed.max(1)
    likeliest = torch.where(highest > -math.inf, likeliest, greedy)
    drawn = _drawn(changed - highest[:, None], settings, uniform(seed, position))
    is_drawn = (settings[:, compiled.TEMPERATURE] > 0) & (drawn >= 0)
    picked = torch.where(is_drawn, drawn, likeliest)
    logprob = scale + (own.gather(1, picked[:, None])[:, 0] - best)
    own_end = ending[:, 0] & ~(settings[:, compiled.IGNORES_END] > 0)[:, None] | ending[:, 1]
    stop = own_end.gather(1, picked[:, None])[:, 0]
    count = min(limits.logprobs, width)
    top = own.topk(count, dim=1)
    is_wanted = torch.arange(count, device=own.device) < counts[:, compiled.NUM_LOGPROBS, None]
    made = new_tokens(len(asked.seed), limits, logits.device)
    top_token, top_logprob = made.top_token[chosen], made.top_logprob[chosen]
    top_token[:, :count] = torch.where(is_wanted, top.indices, -1)
    top_logprob[:, :count] = torch.where(is_wanted, scale[:, None] + (top.values - best[:, None]), -math.inf)
    found = picked, logprob, stop, top_token, top_logprob
    return SampledToken(*(value.index_put((chosen,), own) for value, own in zip(made, found)))


def _ending(counts: Tensor, stops: Tensor, ends: Sequence[int], width: int) -> Tensor:
    """Return which tokens ``[rows, 2, tokens]`` are end tokens of the model, and stop tokens of the request."""
    found = torch.zeros(len(stops), 2, width + 1, dtype=torch.bool, device=stops.device)
    for end in ends:
        if 0 <= end < width:
            found[:, 0, end] = True
    count = torch.arange(stops.shape[1], device=stops.device) < counts[:, compiled.NUM_STOPS, None]
    places = torch.where(count & (stops >= 0) & (stops < width), stops, width).long()
    found[:, 1].scatter_(1, places, True)
    return found[:, :, :width]


def _allowed(mask: Tensor, width: int) -> Tensor:
    """Return the bits of masks, bool ``[rows, tokens]``."""
    bits = torch.arange(compiled.MASK_BITS, dtype=torch.int32, device=mask.device)
    return ((mask[:, :, None] >> bits) & 1).flatten(1)[:, :width] > 0


def _biased(logits: Tensor, counts: Tensor, biases: Tensor) -> Tensor:
    width = logits.shape[1]
    count = torch.arange(biases.shape[1], device=biases.device) < counts[:, compiled.NUM_BIASES, None]
    tokens, added = biases[..., 0].nan_to_num().clamp(0, width), biases[..., 1]
    places = torch.where(count, tokens.long(), width)
    total = torch.zeros(len(logits), width + 1, device=logits.device)
    return logits + total.scatter_add(1, places, added)[:, :width]


def _penalised(
    logits: Tensor, settings: Tensor, history: PagedRows, chosen: Tensor, position: Tensor, step: Tensor
) -> Tensor:
    """Return the logits, those of tokens so far divided for repetition, less for each time in the answer."""
    width, size = logits.shape[1], history.page_size
    pages = history.tables[history.nodes[chosen].long()].long()
    tokens = history.pages[pages].flatten(1).long()
    place = torch.arange(pages.shape[1] * size, device=logits.device)
    is_there = (place <= position[:, None]) & (tokens >= 0) & (tokens < width)
    places = torch.where(is_there, tokens, width)
    nothing = torch.zeros(len(logits), width + 1, device=logits.device)
    is_made = (place > (position - step)[:, None]).float()
    times = nothing.scatter_add(1, places, is_made)[:, :width]
    is_seen = nothing.scatter(1, places, 1.0)[:, :width] > 0
    repetition, presence, frequency = (
        settings[:, which, None].float() for which in (compiled.REPETITION, compiled.PRESENCE, compiled.FREQUENCY)
    )
    divided = torch.where(logits > 0, logits / repetition, logits * repetition)
    logits = torch.where(is_seen & (repetition > 0), divided, logits)
    return logits - frequency * times - torch.where(times > 0, presence, 0)


def _drawn(below: Tensor, settings: Tensor, number: Tensor) -> Tensor:
    """Return the token where the running sum of weights passes ``number`` of their sum; ``below`` is how far each logit
    is below the highest. -1 where nothing is left: what was given are no numbers.
    """
    width = below.shape[1]
    temperature = settings[:, compiled.TEMPERATURE, None].clamp(min=LEAST_TEMPERATURE)
    scaled = (below / temperature).float()
    falling = scaled.sort(1, descending=True).values
    top_k = settings[:, compiled.TOP_K, None].nan_to_num()
    top_k = torch.where((top_k >= 1) & (top_k < width), top_k, width).long()
    weights = falling.exp().double() * (falling >= falling.gather(1, top_k - 1))
    before = weights.cumsum(1) - weights
    top_p = settings[:, compiled.TOP_P, None]
    is_out = (weights == 0) | ((top_p < 1) & (before >= top_p * weights.sum(1, keepdim=True)))
    least = falling.masked_fill(is_out, math.inf).amin(1, keepdim=True)
    kept = scaled.exp().double()
    kept = kept * (scaled >= least) * (kept >= settings[:, compiled.MIN_P, None].clamp(max=1))
    sums = kept.cumsum(1)
    place = torch.searchsorted(sums, (number * sums[:, -1])[:, None], right=True)[:, 0]
    return torch.where(sums[:, -1] > 0, place.clamp(max=width - 1), -1)


class Sampler(nn.Module):
    """The end of a step of a decoder of your own: from logits to tokens, as each request asks.

    Args:
        vocabulary: how many tokens there are.
        end_token: the one that ends a text, or several.
        limits: the most that a request may ask for.

    A cell that ends so has the inputs of ``inputs`` beside its own, its outputs are a ``SampledToken``, and its module
    has an attribute ``vocabulary``.
    """

    def __init__(self, vocabulary: int, end_token: int | Sequence[int], limits: SamplingLimits | None = None) -> None:
        super().__init__()
        self.vocabulary, self.ends, self.limits = vocabulary, ends_of(end_token), limits or SamplingLimits()

    def inputs(self, page_size: int = 16) -> dict[str, RowSpec]:
        """Return the inputs of the cell beside its own, with the tokens so far in pages of ``page_size``."""
        return sampling_inputs(self.limits, page_size, self.vocabulary)

    def forward(
        self,
        logits: Tensor,
        token: Tensor,
        history: PagedRows,
        spans: Spans,
        settings: Tensor,
        seed: Tensor,
        stops: Tensor,
        biases: Tensor,
        mask: Tensor,
    ) -> SampledToken:
        """``logits`` ``[rows, vocabulary]`` of the rows' ``token`` int64 ``[rows]``, which are appended to ``history``;
        the rest: see ``Asked``."""
        history.append(token.to(torch.int32))
        asked = Asked(settings, seed, stops, biases, mask)
        if token.is_cpu and is_eager(token):
            chosen = spans.is_read.nonzero()[:, 0]
            logits = logits[chosen]
        else:
            chosen = torch.arange(len(token), device=token.device)
        return sample(logits, chosen, asked, history, spans, self.ends, self.limits)
