"""Beam search (Graves 2012; Sutskever, Vinyals and Le 2014, section 3.2) as cells: one row is one request's whole beam.

``BeamStart`` spreads a state over the beams, ``BeamStep`` is the step of a loop, ``BeamEnd`` picks the best sequences;
``cellrt.unfolders.beam_search`` puts them together. A step extends each hypothesis by every token and keeps the
``beams`` best of all of these. One that has ended stays among them, unchanged, as long as it is good enough.

Hypotheses are compared by the sum of the log-probabilities of their tokens, the end token included, divided by
((5 + tokens) / 6) ** length_penalty (Wu et al. 2016, equation 14, without the coverage term). Of equal ones, that of
the better hypothesis before wins, then that with the better logit, then that with the lower token; so the outcome
depends neither on the device nor on other rows of the batch.

The tokens so far travel with the beam and are reordered at each step, as its states are. The alternative, to put
out parents and tokens at each step and to follow them back at the end, would save that copy (8 bytes a token, where the
states are kilobytes a beam), but the steps of a loop can only be results: it would leave the way back to each client.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from cellrt import DefinitionError, PagedRows, RaggedRows, RowSpec, as_spec, rows
from cellrt.cells._weights import is_eager
from cellrt.cells.row_layers import likeliest

BEAM_NAMES = ("token", "score", "length", "tokens")
"""The inputs and outputs of a ``BeamStep`` that are its own."""


class BestSequences(NamedTuple):
    """The best sequences of each row, the best first: ``tokens`` int64 ``[rows, best, max_steps]``, filled up with the
    end token; ``length`` int64 ``[rows, best]``, its tokens (the end token included); and ``score`` float32 ``[rows,
    best]``, its log-probability under the length penalty, minus infinity if there are fewer sequences than that."""

    tokens: Tensor
    length: Tensor
    score: Tensor


class BeamStart(nn.Module):
    """Spreads states over the beams: each ``[rows, *shape]`` -> ``[rows, beams, *shape]``, with the same name."""

    def __init__(self, states: Sequence[str], beams: int) -> None:
        super().__init__()
        self.states, self.beams = tuple(states), beams

    def forward(self, *states: Tensor) -> dict[str, Tensor]:
        """Return the states in the order of their names."""
        return {
            name: state[:, None].expand(-1, self.beams, *state.shape[1:]).contiguous()
            for name, state in zip(self.states, states, strict=True)
        }


class BeamStep(nn.Module):
    """A step of a beam search around any scorer.

    Args:
        scorer: a decoder of this package, or any module (or function) called by keyword with ``token`` int64 ``[n]``,
            its states ``[n, *shape]`` and its constants, which returns a dict of ``logits`` ``[n, num_tokens]`` (they
            may be log-probabilities) and the states after it, by name. It is called for n = rows * beams, a row's beams
            one after the other; a ragged input and pages come as they are, one node a row.
        inputs: the scorer's inputs for one hypothesis, as for ``cellrt.cell``: ``token`` and the others by name.
        beams: hypotheses kept.
        end_token: ends a sequence.
        max_steps: the most tokens of a sequence, the end token included.
        best: sequences wanted; the search ends when these cannot change any more.
        length_penalty: 0 is none; Wu et al. use 0.6 to 0.7.
        constants: inputs that the scorer does not return; ragged ones and pages always are.

    A cell of it is ``cellrt.cell(step, step.input_specs())``. It takes and returns ``token`` int64 ``[rows, beams]``,
    ``score`` float32 ``[rows, beams]`` (the sum of log-probabilities; minus infinity where there is no hypothesis),
    ``length`` int64 ``[rows, beams]``, ``tokens`` int64 ``[rows, beams, max_steps]`` and the states ``[rows, beams,
    *shape]``, and returns ``stop`` bool ``[rows]``. A search starts with ``start_token`` and ``start_score``; the rest
    starts with zeros. The hypotheses are in order, the best first.

    Raises DefinitionError.
    """

    def __init__(
        self,
        scorer: Callable[..., Any],
        inputs: Mapping[str, object],
        *,
        beams: int,
        end_token: int,
        max_steps: int,
        best: int = 1,
        length_penalty: float = 0.0,
        constants: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if not 1 <= best <= beams or max_steps < 1 or length_penalty < 0:
            raise DefinitionError(
                "BeamStep: expected 1 <= best <= beams, max_steps of at least 1 and no negative length_penalty, got "
                f"best={best}, beams={beams}, max_steps={max_steps}, length_penalty={length_penalty}"
            )
        others = {name: as_spec(name, spec) for name, spec in inputs.items() if name != "token"}
        clashes = sorted({*others} & {*BEAM_NAMES, "stop"})
        if clashes or "token" not in inputs:
            raise DefinitionError(
                f"BeamStep: the scorer's inputs must have 'token' and none of {[*BEAM_NAMES[1:], 'stop']}, got "
                f"{list(inputs)}"
            )
        unknown = sorted({*constants} - {*others})
        if unknown:
            raise DefinitionError(f"BeamStep: constants {unknown} are not inputs of the scorer: {list(inputs)}")
        self.scorer, self.others = scorer, others
        self.states = tuple(
            name for name, spec in others.items() if not (spec.ragged or spec.page_size or name in constants)
        )
        self.beams, self.end_token, self.max_steps = beams, end_token, max_steps
        self.best, self.length_penalty = best, length_penalty

    def input_specs(self) -> dict[str, RowSpec]:
        """Return the inputs for ``cellrt.cell``."""
        specs = {
            "token": rows(self.beams, dtype=torch.int64),
            "score": rows(self.beams),
            "length": rows(self.beams, dtype=torch.int64),
            "tokens": rows(self.beams, self.max_steps, dtype=torch.int64),
        }
        for name, spec in self.others.items():
            specs[name] = RowSpec((self.beams, *spec.shape), spec.dtype) if name in self.states else spec
        return specs

    def start_token(self, token: int) -> Tensor:
        """Return the ``token`` row of the first step: ``[beams]``."""
        return torch.full((self.beams,), token, dtype=torch.int64, device="cpu")

    def start_score(self) -> Tensor:
        """Return the ``score`` row of the first step, when there is one hypothesis only: ``[beams]``."""
        return torch.tensor([0.0] + [-torch.inf] * (self.beams - 1), dtype=torch.float32, device="cpu")

    def forward(
        self, token: Tensor, score: Tensor, length: Tensor, tokens: Tensor, *others: Tensor | RaggedRows | PagedRows
    ) -> dict[str, Tensor]:
        """Run one step; ``others`` are the scorer's inputs in the order of ``input_specs``."""
        given = {name: self._flat(name, value) for name, value in zip(self.others, others, strict=True)}
        scored = _score(self.scorer, token.flatten(), given)
        has_ended = (token == self.end_token) & (length > 0)
        chances, choices = self._extend(scored["logits"], has_ended)
        sums = score[..., None] + chances
        lengths = torch.where(has_ended, length, length + 1)
        ranks = sums / self._penalty(lengths)[..., None]
        order = ranks.flatten(1).sort(dim=1, descending=True, stable=True).indices[:, : self.beams]
        parent = order // self.beams
        token, score = choices.flatten(1).gather(1, order), sums.flatten(1).gather(1, order)
        place = length.gather(1, parent).clamp(max=self.max_steps - 1)
        length, has_ended = lengths.gather(1, parent), has_ended.gather(1, parent)
        tokens = tokens.gather(1, parent[..., None].expand_as(tokens))
        written = torch.where(has_ended, tokens.gather(2, place[..., None])[..., 0], token)
        tokens = tokens.scatter(2, place[..., None], written[..., None])
        first = torch.arange(parent.shape[0], device=parent.device)[:, None] * self.beams
        flat_parent = (first + parent).flatten()
        states = {
            name: scored[name].index_select(0, flat_parent).unflatten(0, (-1, self.beams)) for name in self.states
        }
        stop = self._is_over(token, score, length)
        return {"token": token, "score": score, "length": length, "tokens": tokens, "stop": stop, **states}

    def _flat(self, name: str, value: Tensor | RaggedRows | PagedRows) -> Tensor | RaggedRows | PagedRows:
        """Return a scorer's input with a row for each hypothesis."""
        if isinstance(value, RaggedRows | PagedRows):
            return value
        return value.flatten(0, 1) if name in self.states else value.repeat_interleave(self.beams, 0)

    def _extend(self, logits: Tensor, has_ended: Tensor) -> tuple[Tensor, Tensor]:
        """Return log-probabilities and tokens of each hypothesis's ``beams`` best continuations: ``[rows, beams,
        beams]``.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        highest, choices = best_of(logits, self.beams)
        chances = (highest - highest[:, :1] + likeliest(logits)[1][:, None]).float().unflatten(0, (-1, self.beams))
        only = torch.full((self.beams,), -torch.inf, dtype=torch.float32, device=logits.device)
        only[0] = 0.0
        choices = choices.unflatten(0, (-1, self.beams)).masked_fill(has_ended[..., None], self.end_token)
        return torch.where(has_ended[..., None], only, chances), choices

    def _is_over(self, token: Tensor, score: Tensor, length: Tensor) -> Tensor:
        """Return whether the wanted sequences are certain: they have ended, and none that goes on can come to outrank
        them.
        """
        has_ended = (token == self.end_token) | (score == -torch.inf)
        last = (score / self._penalty(length))[:, self.best - 1, None]
        reach = score / self._penalty(torch.full_like(length, self.max_steps))
        over: Tensor = has_ended[:, : self.best].all(dim=1) & (has_ended | (reach <= last)).all(dim=1)
        return over

    def _penalty(self, length: Tensor) -> Tensor:
        return _penalty(length, self.max_steps, self.length_penalty)


class BeamEnd(nn.Module):
    """The ``best`` of a beam's sequences: ``tokens`` ``[rows, beams, max_steps]``, ``score`` and ``length`` ``[rows,
    beams]`` of the last step -> ``BestSequences``."""

    def __init__(self, best: int, end_token: int, length_penalty: float = 0.0) -> None:
        super().__init__()
        self.best, self.end_token, self.length_penalty = best, end_token, length_penalty

    def forward(self, tokens: Tensor, score: Tensor, length: Tensor) -> BestSequences:
        """Cut the beams off and fill their tokens up."""
        tokens, score, length = tokens[:, : self.best], score[:, : self.best], length[:, : self.best]
        is_past = torch.arange(tokens.shape[2], device=tokens.device) >= length[..., None]
        is_missing = score == -torch.inf
        return BestSequences(
            tokens.masked_fill(is_past | is_missing[..., None], self.end_token),
            length.masked_fill(is_missing, 0),
            score / _penalty(length, tokens.shape[2], self.length_penalty),
        )


def best_of(values: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the ``count`` highest of each row ``[rows, n]`` in order and their indices; of equal ones the first comes
    first.

    With fewer than ``count`` columns above minus infinity, the rest is minus infinity. ``torch.topk`` does not say
    which of equal values it takes, so on a CPU its choice is used only where all are different.
    """
    if values.is_cpu and is_eager(values) and count < values.shape[1]:
        highest, indices = values.topk(count + 1, dim=1)
        if bool((highest[:, :-1] > highest[:, 1:]).all()):
            return highest[:, :-1], indices[:, :-1]
    values, found = values.clone(), []
    for _ in range(count):
        found.append(values.max(dim=1, keepdim=True))
        indices = found[-1].indices
        # Of a number instead of a tensor, what is compiled does not check the indices.
        values.scatter_(1, indices, values.new_full(indices.shape, -torch.inf))
    return torch.cat([pair.values for pair in found], 1), torch.cat([pair.indices for pair in found], 1)


def _penalty(length: Tensor, most: int, exponent: float) -> Tensor:
    """Return the divisor of a score of ``length`` tokens, at most ``most``.

    It comes from a table: the bits of torch's powers depend on where in a batch they stand.
    """
    return torch.tensor(_penalties(most, exponent), dtype=torch.float32, device=length.device)[length]


@functools.cache
def _penalties(most: int, exponent: float) -> list[float]:
    return [((5 + length) / 6) ** exponent for length in range(most + 1)]


def _score(scorer: Any, token: Tensor, given: Mapping[str, Tensor | RaggedRows | PagedRows]) -> Mapping[str, Tensor]:
    """Return the logits and states of a scorer: from its ``scores``, or from calling it."""
    scored: Mapping[str, Tensor] = getattr(scorer, "scores", scorer)(token=token, **given)
    if "logits" not in scored:
        raise ValueError(f"BeamStep: expected 'logits' among what the scorer returns, got {list(scored)}")
    return scored
