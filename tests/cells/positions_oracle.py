"""The published formulas of scaled rotary positions and of T5's relative positions, number by number."""

from __future__ import annotations

import math


def plain_frequencies(head_dim: int, base: float) -> list[float]:
    """Su et al. 2021, section 3.2.2."""
    return [base ** (-2 * k / head_dim) for k in range(head_dim // 2)]


def llama3_frequencies(
    head_dim: int, base: float, factor: float, original: int, low: float = 1.0, high: float = 4.0
) -> list[float]:
    """As ``apply_scaling`` of Meta's reference of Llama 3.1 has them: by wavelengths."""
    longest_kept, shortest_scaled = original / high, original / low
    made = []
    for frequency in plain_frequencies(head_dim, base):
        wavelength = 2 * math.pi / frequency
        if wavelength < longest_kept:
            made.append(frequency)
        elif wavelength > shortest_scaled:
            made.append(frequency / factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            made.append((1 - smooth) * frequency / factor + smooth * frequency)
    return made


def yarn_frequencies(
    head_dim: int, base: float, factor: float, original: int, beta_fast: float = 32.0, beta_slow: float = 1.0
) -> list[float]:
    """Peng et al. 2023, section 3.2, as their code has it: its ramp lies between whole numbers of frequencies."""

    def number_with(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(base))

    first = max(math.floor(number_with(beta_fast)), 0)
    last = min(math.ceil(number_with(beta_slow)), head_dim - 1)
    made = []
    for k, frequency in enumerate(plain_frequencies(head_dim, base)):
        scaled = min(max((k - first) / ((last - first) or 0.001), 0.0), 1.0)
        made.append(scaled * frequency / factor + (1 - scaled) * frequency)
    return made


def yarn_amplitude(factor: float) -> float:
    """The square root of 1 / t of Peng et al. 2023, equation 22."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


def turned_pair(left: float, right: float, angle: float, amplitude: float) -> tuple[float, float]:
    """A pair of a head's numbers, turned."""
    cos, sin = math.cos(angle), math.sin(angle)
    return amplitude * (left * cos - right * sin), amplitude * (left * sin + right * cos)


def t5_bucket(distance: int, buckets: int, max_distance: int, *, both_ways: bool) -> int:
    """That of a key so far behind the query (Raffel et al. 2020): as ``_relative_position_bucket`` of its code, but in
    whole numbers: log(a) / log(b) * n has reached k where a ** n has reached b ** k."""
    first, back = 0, -distance
    if both_ways:
        buckets //= 2
        if back < 0:
            first = buckets
        back = abs(back)
    back = max(back, 0)
    exact = buckets // 2
    if back < exact:
        return first + back
    rest, k = buckets - exact, 0
    while k < rest - 1 and back**rest * exact ** (k + 1) >= max_distance ** (k + 1) * exact**rest:
        k += 1
    return first + exact + k
