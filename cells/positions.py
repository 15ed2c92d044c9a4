"""Positions of rows in a Transformer: rotary, learned, sinusoidal and relative.

All take the rows' own positions, int32 or int64 ``[rows]``, so rows of different sequences may lie together in any
order.
"""

from __future__ import annotations

import math
from collections import deque
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from cellrt import DefinitionError
from cellrt.cells._row_kernels import fill_turns, turn_rows
from cellrt.cells._weights import Derived, is_eager, is_fusable

TURNS_AT_ONCE = 1024
"""Positions whose angles are computed together."""


class Scaling(Protocol):
    """A change of rotary frequencies for contexts longer than a model was trained with."""

    @property
    def factor(self) -> float:
        """The factor by which the context is longer."""

    @property
    def amplitude(self) -> float:
        """The number that rotated queries and keys are multiplied by."""

    def kept(self, frequencies: Tensor, base: float) -> Tensor:
        """Return how much of each frequency ``[head_dim / 2]`` stays, from 0 (divided by the factor) to 1
        (unchanged).
        """


class LinearScaling(NamedTuple):
    """Every position is divided by the factor (Chen et al. 2023)."""

    factor: float
    amplitude: float = 1.0

    def kept(self, frequencies: Tensor, base: float) -> Tensor:
        """Return zeros: no frequency stays as it was."""
        return torch.zeros_like(frequencies)


class Llama3Scaling(NamedTuple):
    """The scaling of Llama 3.1, by the number of turns that a frequency makes in the original context.

    Frequencies with at least ``high`` turns stay, those with at most ``low`` are divided, and those between are
    interpolated.
    """

    factor: float
    original_context: int
    low: float = 1.0
    high: float = 4.0
    amplitude: float = 1.0

    def kept(self, frequencies: Tensor, base: float) -> Tensor:
        """Return how much of each frequency stays, by its number of turns."""
        turns = self.original_context * frequencies / (2 * math.pi)
        return ((turns - self.low) / (self.high - self.low)).clamp(0, 1)


class YarnScaling(NamedTuple):
    """YaRN (Peng et al. 2023), as Qwen uses it: as above, but linear in the number of the frequency, between whole
    ones; and scores are raised with the factor."""

    factor: float
    original_context: int
    low: float = 1.0
    high: float = 32.0

    @property
    def amplitude(self) -> float:
        """Section 3.4."""
        return 0.1 * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def kept(self, frequencies: Tensor, base: float) -> Tensor:
        """Return how much of each frequency stays, by its number."""
        count = len(frequencies)

        def number(turns: float) -> float:
            return count * math.log(self.original_context / (turns * 2 * math.pi)) / math.log(base)

        first = max(math.floor(number(self.high)), 0)
        last = min(math.ceil(number(self.low)), 2 * count - 1)
        numbers = torch.arange(count, dtype=torch.float32, device=frequencies.device)
        return 1 - ((numbers - first) / max(last - first, 1e-3)).clamp(0, 1)


class RotaryPositions(nn.Module):
    """Rotary positions (Su et al. 2021): pairs of numbers of a head are turned by angles that grow with the position.

    Number k of a head makes a pair with number k + head_dim / 2, as in ``transformers``; files of llama.cpp have
    another order. The scores of a query and a key then depend on how far apart they are.
    """

    frequencies: Tensor

    def __init__(self, head_dim: int, base: float = 10_000.0, scaling: Scaling | None = None) -> None:
        super().__init__()
        if head_dim % 2:
            raise DefinitionError(f"RotaryPositions: expected an even head_dim, got {head_dim}")
        frequencies = 1.0 / base ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        self.amplitude = 1.0
        if scaling is not None:
            kept = scaling.kept(frequencies, base)
            frequencies = frequencies * kept + frequencies / scaling.factor * (1 - kept)
            self.amplitude = scaling.amplitude
        self.register_buffer("frequencies", frequencies, persistent=False)
        self._turns = Derived(self._first_turns)

    def forward(self, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return both ``[rows, heads, head_dim]``, turned; angles are computed in float32."""
        if is_fusable(query, key) and positions.dtype is torch.int32 and len(positions):
            turns, positions = self.turns_up_to(int(positions.max())), positions.contiguous()
            return _turn_compiled(query, positions, turns), _turn_compiled(key, positions, turns)
        angles = (positions.float()[:, None] * self.frequencies)[:, None]
        cos, sin = ((turn * self.amplitude).to(query.dtype) for turn in (angles.cos(), angles.sin()))
        return _turn(query, cos, sin), _turn(key, cos, sin)

    def turns_up_to(self, position: int) -> Tensor:
        """Return cosines and sines ``[positions, 2, head_dim / 2]``, kept for the positions that were met."""
        known = self._turns.of(self.frequencies)
        if position >= len(known[-1]):
            known.append(self._make_turns(position + 1))
        return known[-1]

    def _make_turns(self, count: int) -> Tensor:
        frequencies = self.frequencies.float()  # those of a module in 16 bits may be such, too
        count, half = -(-count // TURNS_AT_ONCE) * TURNS_AT_ONCE, len(frequencies)
        turns = torch.empty(count, 2, half, dtype=torch.float32, device="cpu")
        fill_turns(frequencies.data_ptr(), half, self.amplitude, count, turns.data_ptr())
        return turns

    def _first_turns(self, frequencies: Tensor) -> deque[Tensor]:
        return deque([self._make_turns(1)], maxlen=1)


def _turn_compiled(x: Tensor, positions: Tensor, turns: Tensor) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    rows, heads, size = x.shape
    turn_rows(x.data_ptr(), positions.data_ptr(), rows, heads, size // 2, turns.data_ptr(), out.data_ptr())
    return out


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class LearnedPositions(nn.Embedding):
    """A learned vector for each of the first positions: int ``[rows]`` -> ``[rows, size]``."""

    def forward(self, positions: Tensor) -> Tensor:
        """Raise IndexError for a position that has none."""
        return super().forward(positions)


class SinusoidalPositions(nn.Module):
    """Sines and cosines of any position (Vaswani et al. 2017, section 3.5): int ``[rows]`` -> ``[rows, size]``.

    Sine and cosine of a frequency are neighbours as in the paper, or all sines come first (``halves``).
    """

    frequencies: Tensor

    def __init__(self, size: int, base: float = 10_000.0, halves: bool = False) -> None:
        super().__init__()
        if size % 2:
            raise DefinitionError(f"SinusoidalPositions: expected an even size, got {size}")
        frequencies = torch.exp(torch.arange(0, size, 2, dtype=torch.float32) * (-math.log(base) / size))
        self.halves = halves
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, positions: Tensor) -> Tensor:
        """Return the rows normed, in float32."""
        angles = positions.float()[:, None] * self.frequencies
        if self.halves:
            return torch.cat([angles.sin(), angles.cos()], -1)
        return torch.stack([angles.sin(), angles.cos()], -1).flatten(1)


class RelativePositions(nn.Module):
    """T5's relative positions (Raffel et al. 2020, section 2.1): scores get a number for their head and distance added.

    Distances share ``buckets``: small ones have one each, larger ones in ranges that grow, and all from
    ``max_distance`` on the last. With ``both_ways``, for encoders, half of the buckets are for keys after the query.
    ``weight`` is ``[buckets, heads]``. Layers of a stack may share one.
    """

    def __init__(self, heads: int, buckets: int = 32, max_distance: int = 128, both_ways: bool = False) -> None:
        super().__init__()
        self.buckets, self.max_distance, self.both_ways = buckets, max_distance, both_ways
        self.weight = nn.Parameter(torch.randn(buckets, heads) / math.sqrt(heads))
        self._table = Derived(self._look_up)

    def forward(self) -> Tensor:
        """Return the biases of all distances, as ``Mask.bias`` has them: float32 ``[heads, 2 * max_distance + 1]``."""
        if not is_eager(self.weight):
            return self._look_up(self.weight)
        return self._table.of(self.weight)

    def _look_up(self, weight: Tensor) -> Tensor:
        reach = self.max_distance
        buckets = self._bucket(torch.arange(-reach, reach + 1, device=weight.device))
        return weight[buckets].float().t().contiguous()

    def _bucket(self, distance: Tensor) -> Tensor:
        buckets, first = self.buckets, torch.zeros_like(distance)
        if self.both_ways:
            buckets //= 2
            first = (distance > 0) * buckets
            distance = distance.abs()
        else:
            distance = (-distance).clamp(min=0)
        exact = buckets // 2
        # Distance 0 has no logarithm, and needs none.
        grown = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        large = (exact + (grown * (buckets - exact)).long()).clamp(max=buckets - 1)
        return first + torch.where(distance < exact, distance, large)
