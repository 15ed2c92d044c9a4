"""How close a kernel's results must be to the reference's: one table, per type and depth, by error analysis.

A gate's sum has ``depth`` products of numbers of about 1 and weights that are scaled so that the sum is of about 1 too.
It is wrong by

- the products' own error, relative to the sum: none for 16-bit types and for float32 in full; TF32 cuts each factor
  off behind 10 bits, on average half a unit of 2**-10 of each; three TF32 products leave out the product of what was
  cut off, and cut that off, too: three times 2**-22;
- the additions, relative to the largest partial sum. Rounded to nearest, they err at random: at most a few times
  sqrt(depth) * 2**-24 (Higham and Mary, "A new approach to probabilistic rounding error analysis", 2019, theorem 2.4);
  so does the reference. A tensor core cuts off once for each group of products that it adds at once, always towards
  zero (Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021, section 4), so these errors add up.

The pointwise half makes of a sum's error at most ``AMPLIFICATION`` times as much, and errs by itself by the exponential
of the device. What is written is rounded once more, perhaps the other way: one unit in the last place of its type.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from cellrt.kernels.gate_weights import Precision

Kind = tuple[torch.dtype, Precision]
KINDS: list[Kind] = [
    (torch.float32, "ieee"),
    (torch.float32, "tf32x3"),
    (torch.float32, "tf32"),
    (torch.bfloat16, "ieee"),
    (torch.float16, "ieee"),
]
MAGNITUDE = 4.0
"""Of sums at which gates still move."""
AMPLIFICATION = 2.5
"""c' = f c + i g moves by |c| / 4 + |g| / 4 + 1 times a sum's error, with |c| up to 4 and |g| up to 1."""
POINTWISE = 2e-6
DEVIATIONS = 4.0
"""The lambda of Higham and Mary."""


class Arithmetic(NamedTuple):
    """Of a product: its relative error, how many products are added at once (0: one, rounded to nearest), how often."""

    product: float
    group: int
    passes: int


ARITHMETIC = {
    (torch.float32, "ieee"): Arithmetic(0.0, 0, 1),
    (torch.float32, "tf32x3"): Arithmetic(3 * 2.0**-22, 8, 3),
    (torch.float32, "tf32"): Arithmetic(2.0**-10, 8, 1),
    (torch.bfloat16, "ieee"): Arithmetic(0.0, 16, 1),
    (torch.float16, "ieee"): Arithmetic(0.0, 16, 1),
}
UNITS = {torch.float32: 0.0, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
"""The last place of what is written, relative to it; of float32 it is less than what else is wrong."""


def tolerance(kind: Kind, depth: int, steps: int = 1) -> tuple[float, float]:
    """The largest error, absolute and relative, of a state after so many steps of gates with ``depth`` products.

    After several steps a last place that was rounded the other way (at numbers up to 1) has been carried on.
    """
    arithmetic, unit = ARITHMETIC[kind], UNITS[kind[0]]
    additions = DEVIATIONS * math.sqrt(depth) * 2.0**-24  # the reference's, and those of float32 in full
    if arithmetic.group:
        additions += arithmetic.passes * math.ceil(depth / arithmetic.group) * 2.0**-23
    else:
        additions *= math.sqrt(2)
    absolute = AMPLIFICATION * MAGNITUDE * (arithmetic.product + additions) + POINTWISE
    return (absolute, unit) if steps == 1 else (max(steps * absolute, unit), unit)


def served_tolerance(kind: Kind, depth: int, steps: int) -> float:
    """The largest error, absolute or relative, beside a plain form that rounds its sums to the type of its rows."""
    return steps * tolerance(kind, depth)[0] + AMPLIFICATION * MAGNITUDE * UNITS[kind[0]] / 2
