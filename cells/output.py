"""The step from a decoder's state to its next token: projection to logits, greedy choice, sampling.

Sampling takes its randomness as inputs: the ``seed`` of the request and the number of the ``step`` are hashed to one
uniform number, which picks from the cumulative distribution. The hash is the mixing function of SplitMix64 (Steele, Lea
and Flood 2014). So a row's token depends on its own logits, seed and step alone: not on other rows of the batch, nor on
what ran before. Greedy choice takes the lowest of equal tokens on the fused path (see ``lstm.py``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Integral, Real
from typing import TYPE_CHECKING, NamedTuple, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from cellrt import DefinitionError, RowSpec
from cellrt.cells._fused import can_fuse, can_sample, choose_rows, sample_rows, vectors
from cellrt.cells._host import STOP, TOKEN, choose_best
from cellrt.cells._made_apart import making_apart
from cellrt.cells._recurrence import project_best
from cellrt.cells._weights import (
    Derived,
    are_float32_on_cpu,
    check_shape,
    compiled_linear,
    is_fusable,
    own_parameter,
    pack_with_bias,
    packed_linear,
)
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.fused import reads_spans
from cellrt.products.packed import PackedWeight

if TYPE_CHECKING:
    from cellrt.definition.fused import StepRows

NEVER = -1
"""A value for ``end_token``: no token ends the sequence."""
LEAST_TEMPERATURE = 1e-30
"""A smaller one chooses as this does, and would be zero in float32."""


# The constants of SplitMix64 as signed numbers: int64 products and sums wrap around.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


class Logits(NamedTuple):
    """``logits`` ``[rows, num_tokens]``, not normalised."""

    logits: Tensor


class Choice(NamedTuple):
    """The ``token`` chosen, int64 ``[rows]``, and whether it ends the sequence, ``stop``, bool ``[rows]``."""

    token: Tensor
    stop: Tensor


class _Linear(nn.Module):
    """The weights of a linear layer, ``weight`` ``[num_tokens, hidden_size]`` and ``bias``, as torch lays them out."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, hidden_size: int, num_tokens: int, bias: bool) -> None:
        super().__init__()
        bound = 1 / math.sqrt(hidden_size)
        self.weight = nn.Parameter(torch.empty(num_tokens, hidden_size).uniform_(-bound, bound))
        self.register_parameter("bias", nn.Parameter(torch.empty(num_tokens).uniform_(-bound, bound)) if bias else None)
        self._packed = Derived(pack_with_bias)

    def take_weights(self, module: nn.Linear) -> None:
        """Copy the weights of a torch layer."""
        self.weight = nn.Parameter(module.weight.detach().clone())
        self.bias = None if module.bias is None else nn.Parameter(module.bias.detach().clone())

    def packed(self) -> tuple[PackedWeight, Tensor]:
        """Return the packed weight and its bias."""
        return self._packed.of(own_parameter(self, "weight"), own_parameter(self, "bias"))

    def logits(self, h: Tensor) -> Tensor:
        """``h`` ``[rows, hidden_size]`` to ``[rows, num_tokens]``."""
        if not is_fusable(h) or not h.shape[0]:
            return linear(h, self.weight, self.bias)
        weight, bias = self.packed()
        check_shape("h", h, (h.shape[0], weight.depth))
        return packed_linear(h, weight, bias)


class Projection(_Linear):
    """A linear layer from states to logits: ``h`` ``[rows, hidden_size]`` -> ``Logits``."""

    def __init__(self, hidden_size: int, num_tokens: int, bias: bool = True) -> None:
        super().__init__(hidden_size, num_tokens, bias)

    @classmethod
    @making_apart
    def from_torch(cls, module: nn.Linear) -> Self:
        """Return the weights of a torch layer."""
        made = cls(module.in_features, module.out_features, module.bias is not None)
        made.take_weights(module)
        return made

    def forward(self, h: Tensor) -> Logits:
        """Raise ValueError for a wrong shape."""
        return Logits(self.logits(h))

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form, for float32."""
        return compiled_linear("h", "logits", *self.packed()) if are_float32_on_cpu(*self.parameters()) else None


class Argmax(nn.Module):
    """The most likely token: ``logits`` ``[rows, num_tokens]`` -> ``Choice``; ``stop`` where it is ``end_token``."""

    def __init__(self, end_token: int = NEVER) -> None:
        super().__init__()
        self.end_token = end_token

    def forward(self, logits: Tensor) -> Choice:
        """Return the token with the largest logit of each row."""
        token = logits.argmax(dim=-1)
        return Choice(token, token == self.end_token)


class ProjectionArgmax(_Linear):
    """Projection and greedy choice in one: ``h`` ``[rows, hidden_size]`` -> ``Choice``, without keeping the logits."""

    def __init__(self, hidden_size: int, num_tokens: int, end_token: int = NEVER, bias: bool = True) -> None:
        super().__init__(hidden_size, num_tokens, bias)
        self.end_token = end_token

    @classmethod
    @making_apart
    def from_torch(cls, module: nn.Linear, end_token: int = NEVER) -> Self:
        """Return the weights of a torch layer."""
        made = cls(module.in_features, module.out_features, end_token, module.bias is not None)
        made.take_weights(module)
        return made

    def forward(self, h: Tensor) -> Choice:
        """Raise ValueError for a wrong shape."""
        return self.choose(h)

    def choose(self, h: Tensor) -> Choice:
        """Return the choice as ``forward`` does, without the hooks of a module."""
        token = self._best(h) if is_fusable(h) and h.shape[0] else self.logits(h).argmax(dim=-1)
        return Choice(token, token == self.end_token)

    def _best(self, h: Tensor) -> Tensor:
        weight, bias = self.packed()
        rows = h.shape[0]
        check_shape("h", h, (rows, weight.depth))
        h, token = h.contiguous(), h.new_empty(rows, dtype=torch.int64)
        project_best(
            h.data_ptr(),
            rows,
            weight.depth,
            weight.address,
            bias.data_ptr(),
            weight.units,
            token.data_ptr(),
        )
        return token

    def compiled_form(self) -> CompiledForm | None:
        """Return the compiled form, for float32."""
        if not are_float32_on_cpu(*self.parameters()):
            return None
        weight, bias = self.packed()
        words = np.array([weight.depth, weight.address, bias.data_ptr(), weight.units, self.end_token])
        outputs = {"token": TOKEN, "stop": STOP}
        return CompiledForm(
            choose_best, {"h": RowSpec((weight.depth,))}, outputs, words, (weight, bias), is_batch_invariant=True
        )

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return whether ``run_rows`` takes these rows, with the weights where they are."""
        return can_fuse(self, inputs, outputs, vectors(h=self.weight.shape[1]), {"token": TOKEN, "stop": STOP})

    @reads_spans
    def run_rows(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> None:
        """One step by the fused kernel, rows of arenas to rows of arenas (``cellrt/definition/fused.py``)."""
        choose_rows(self.weight, self.bias, self.end_token, inputs, outputs)


class Sample(nn.Module):
    """A random token: ``logits`` ``[rows, num_tokens]``, ``seed`` and ``step`` int64 ``[rows]`` -> ``Choice``.

    Args:
        end_token: the token that ends a sequence.
        temperature: logits are divided by it; above 0 (for 0, use ``Argmax``).
        top_k: only the ``top_k`` most likely tokens, and those as likely as the last of them; 0: all.
        top_p: only the most likely tokens that together reach this probability, and those as likely as the last of
            them; 1: all. It acts on what ``top_k`` leaves.

    Logits that are NaN or infinite make no distribution, and any token may come of them: have the cell that makes them
    promise ``finite``. Raises DefinitionError for a value out of range.
    """

    def __init__(self, end_token: int = NEVER, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> None:
        super().__init__()
        given: list[tuple[object, type]] = [(temperature, Real), (top_p, Real), (top_k, Integral)]
        are_numbers = all(isinstance(value, kind) and not isinstance(value, bool) for value, kind in given)
        if not are_numbers or not 0 < temperature < math.inf or top_k < 0 or not 0 < top_p <= 1:
            raise DefinitionError(
                "Sample: expected temperature > 0, a whole number top_k >= 0 and 0 < top_p <= 1, got "
                f"{temperature!r}, {top_k!r}, {top_p!r}"
            )
        self.end_token, self.temperature = end_token, max(float(temperature), LEAST_TEMPERATURE)
        self.top_k, self.top_p = int(top_k), float(top_p)

    def forward(self, logits: Tensor, seed: Tensor, step: Tensor) -> Choice:
        """Return the token where the cumulative distribution passes the row's uniform number."""
        weights = self.probabilities(logits).to(torch.float64)
        cumulative = weights.cumsum(dim=-1)
        target = uniform(seed, step)[:, None] * cumulative[:, -1:]
        token = torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=logits.shape[-1] - 1)
        return Choice(token, token == self.end_token)

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the distribution that is sampled from: float32 ``[rows, num_tokens]``, zero for tokens that are left
        out.
        """
        logits = logits.float()
        scaled = (logits - logits.amax(dim=-1, keepdim=True)) / self.temperature  # which overflows for no temperature
        if 0 < self.top_k < logits.shape[-1]:
            least = scaled.topk(self.top_k, dim=-1).values[:, -1:]
            scaled = scaled.masked_fill(scaled < least, -math.inf)
        probabilities = scaled.softmax(dim=-1)
        if self.top_p == 1:
            return probabilities
        falling = probabilities.sort(dim=-1, descending=True).values
        before = falling.cumsum(dim=-1) - falling
        least = falling.masked_fill(before >= self.top_p, math.inf).amin(dim=-1, keepdim=True)
        return probabilities.masked_fill(probabilities < least, 0)

    def can_run_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return whether ``run_rows`` takes these rows, and there is a device for it."""
        return can_sample(inputs, outputs)

    @reads_spans
    def run_rows(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> None:
        """One step by the sampling kernels, rows of arenas to rows of arenas (``cellrt/definition/fused.py``)."""
        sample_rows(self.end_token, self.temperature, self.top_k, self.top_p, inputs, outputs)


def uniform(seed: Tensor, step: Tensor) -> Tensor:
    """Return a number of (0, 1) for each pair of int64 ``seed`` and ``step`` ``[rows]``: float64, 48 random bits."""
    bits = _mix(_mix(seed) + step * _GOLDEN)
    return (_shift(bits, 16).to(torch.float64) + 0.5) / 2**48


def _shift(bits: Tensor, count: int) -> Tensor:
    """Shift right, zeros coming in; torch's own keeps the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _mix(bits: Tensor) -> Tensor:
    bits = bits + _GOLDEN
    bits = (bits ^ _shift(bits, 30)) * _FIRST
    bits = (bits ^ _shift(bits, 27)) * _SECOND
    return bits ^ _shift(bits, 31)
