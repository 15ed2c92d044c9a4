"""The table of tolerances lets pass what tensor cores give, imitated here in NumPy, and nothing that is wrong."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.kernels.tolerances import ARITHMETIC, KINDS, Kind, served_tolerance, tolerance

ROWS, HIDDEN = 48, 32
Numbers = NDArray[np.float64]


def cut(values: NDArray[np.floating], bits: int) -> Numbers:
    """Numbers towards zero to so many bits behind the first, in float64."""
    mantissa, exponent = np.frexp(np.asarray(values, np.float64))
    return np.ldexp(np.trunc(mantissa * 2.0 ** (bits + 1)), exponent - bits - 1)


def cut_tf32(values: NDArray[np.floating]) -> Numbers:
    return cut(values, 10)


def add_groups(sums: Numbers, a: Numbers, b: Numbers, group: int) -> Numbers:
    """``sums + a @ b`` as a tensor core adds: a group of products at once, cut off to float32."""
    for start in range(0, a.shape[1], group):
        sums = cut(sums + a[:, start : start + group] @ b[start : start + group], 23)
    return sums


def product(kind: Kind, a: NDArray[np.float32], b: NDArray[np.float32]) -> Numbers:
    """The product as a device gives it."""
    group = ARITHMETIC[kind].group
    zero = np.zeros((len(a), b.shape[1]))
    if kind == (torch.float32, "ieee"):
        sums = np.zeros(zero.shape, np.float32)
        for depth in range(a.shape[1]):
            sums += np.outer(a[:, depth], b[depth])
        return sums.astype(np.float64)
    if kind[1] == "tf32x3":
        large_a, large_b = cut_tf32(a), cut_tf32(b)
        small_a, small_b = cut_tf32(a - large_a), cut_tf32(b - large_b)
        sums = add_groups(add_groups(zero, small_a, large_b, group), large_a, small_b, group)
        return add_groups(sums, large_a, large_b, group)
    if kind[1] == "tf32":
        return add_groups(zero, cut_tf32(a), cut_tf32(b), group)
    return add_groups(zero, a.astype(np.float64), b.astype(np.float64), group)


def step(sums: Numbers, c: Numbers) -> Numbers:
    """The pointwise half of an LSTM: h and c side by side."""
    i, f, g, o = np.split(sums, 4, axis=1)
    c = c / (1 + np.exp(-f)) + np.tanh(g) / (1 + np.exp(-i))
    return np.concatenate([np.tanh(c) / (1 + np.exp(-o)), c], axis=1)


def errors(kind: Kind, depth: int, lost: int = 0) -> Numbers:
    """How far a step is from the exact one, in units of its tolerance; the last ``lost`` products are left out."""
    generator = np.random.default_rng(depth)
    a = generator.standard_normal((ROWS, depth)).astype(np.float32)
    b = (generator.standard_normal((depth, 4 * HIDDEN)) * depth**-0.5).astype(np.float32)
    if kind[0] != torch.float32:
        a, b = (torch.from_numpy(each).to(kind[0]).float().numpy() for each in (a, b))
    bias, c = generator.standard_normal((1, 4 * HIDDEN)), generator.standard_normal((ROWS, HIDDEN))
    exact = step(a.astype(np.float64) @ b.astype(np.float64) + bias, c)
    found = step(product(kind, a[:, : depth - lost], b[: depth - lost]) + bias, c)
    absolute, relative = tolerance(kind, depth)
    return np.abs(found - exact) / (absolute + relative * np.abs(exact))


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("depth", [32, 500, 1024, 3072])
def test_what_a_device_gives_passes(kind: Kind, depth: int) -> None:
    assert errors(kind, depth).max() < 1


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("depth", [32, 500, 1024, 3072])
def test_a_sum_that_lost_a_block_does_not(kind: Kind, depth: int) -> None:
    assert errors(kind, depth, lost=16).max() > 2


@pytest.mark.parametrize("depth", [500, 1024])
def test_one_product_of_tf32_does_not_pass_for_three(depth: int) -> None:
    one, three = (tolerance((torch.float32, precision), depth)[0] for precision in ("tf32", "tf32x3"))
    assert errors((torch.float32, "tf32"), depth).max() * one > 1.5 * three


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_more_products_and_steps_may_err_more(kind: Kind) -> None:
    assert tolerance(kind, 64)[0] < tolerance(kind, 1024)[0] <= tolerance(kind, 1024, steps=5)[0]
    assert served_tolerance(kind, 64, 2) > tolerance(kind, 64)[0]
