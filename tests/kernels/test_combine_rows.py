"""Two rows into one by kernel and reference, against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.combine_rows import Combination, combine_rows, reference
from tests.effort import quickly
from tests.kernels.ahead import compile_everywhere, needs_compiler, recorded_launches
from tests.kernels.test_project_argmax import TYPES
from tests.kernels.tolerances import tolerance

SIZES = [(1, 5, 3, 4), (37, 70, 33, 65), (5, 32, 32, 32)]
"""Rows, and numbers of a, b and the result."""


def check(device: str, sizes: tuple[int, int, int, int], dtype: torch.dtype, precision: Any, run: Any) -> None:
    """A third of the rows of ``b`` are none, a third of those of ``out``; the arenas' other rows stay as they are."""
    count, a_size, b_size, size = sizes
    torch.manual_seed(count)
    a = torch.randn(count, a_size).to(device, dtype)
    weight_a, weight_b = (
        (torch.randn(size, each) / (a_size + b_size) ** 0.5).to(device, dtype) for each in (a_size, b_size)
    )
    bias = torch.randn(size).to(device, dtype)
    values = torch.randn(count + 2, b_size + 3).to(device, dtype)[:, :b_size]
    rows, to = (torch.randperm(count + 2, device=device)[:count] for _ in range(2))
    rows[1::3], to[2::3] = -1, -1
    out, in_order = (torch.full((count + 2, size), 7.0, dtype=dtype, device=device) for _ in range(2))
    in_order = in_order[:count]
    run(a, ArenaRows(values, rows), Combination(weight_a, weight_b, bias, precision), ArenaRows(out, to), in_order)
    sums = a.double() @ weight_a.double().T + values.double()[rows] @ weight_b.double().T + bias.double()
    absolute, relative = tolerance((dtype, precision), a_size + b_size)
    is_row = rows >= 0
    expected = torch.where(is_row[:, None], torch.tanh(sums), 7.0)
    torch.testing.assert_close(in_order.double(), expected, rtol=relative, atol=absolute)
    whole = torch.full_like(out, 7.0)
    whole[to[is_row & (to >= 0)]] = in_order[is_row & (to >= 0)]
    assert torch.equal(out, whole)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "precision"), quickly(TYPES[1:4], of=TYPES))
def test_rows_are_combined(device: str, sizes: tuple[int, int, int, int], dtype: torch.dtype, precision: str) -> None:
    check(device, sizes, dtype, precision, combine_rows)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_reference_combines_them(sizes: tuple[int, int, int, int]) -> None:
    check("cpu", sizes, torch.float32, "ieee", reference.combine_rows)


def test_the_device_says_how_many_rows_there_are(device: str) -> None:
    weight, span = torch.eye(4, device=device), torch.tensor([0, 2], device=device)
    far = torch.tensor([1, 0, 1 << 30], device=device)
    out, in_order = torch.full((3, 4), 7.0, device=device), torch.full((3, 4), 7.0, device=device)
    b = ArenaRows(torch.zeros(3, 4, device=device), far, 3, span)
    combine_rows(
        torch.ones(3, 4, device=device), b, Combination(weight, weight), ArenaRows(out, far, 3, span), in_order
    )
    one = torch.tanh(torch.ones(4, device=device))
    for made in (out, in_order):
        torch.testing.assert_close(made, torch.stack([one, one, torch.full_like(one, 7.0)]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("a", "message"),
    [(torch.zeros(2, 6), "a must be contiguous"), (torch.zeros(3, 5).T, "weight_a must be contiguous")],
)
def test_what_does_not_fit_is_refused(a: torch.Tensor, message: str) -> None:
    rows = ArenaRows(torch.zeros(5, 4), torch.arange(3))
    weight_a = torch.zeros(4, a.shape[1]) if message.startswith("a ") else torch.zeros(4, 7)
    with pytest.raises(ValueError, match=message):
        combine_rows(a, rows, Combination(weight_a, torch.zeros(4, 4)), rows)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("size", [1024, 1000])
@pytest.mark.parametrize(("dtype", "precision"), TYPES)
def test_every_tile_compiles_without_spills(dtype: torch.dtype, precision: Any, size: int) -> None:
    from cellrt.kernels.combine_rows import triton

    numbers, span = torch.zeros(4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    values = torch.empty(size, size, dtype=dtype, device="meta")
    for count in (16, 512):
        rows = ArenaRows(values, numbers, count, span)
        with recorded_launches() as launches:
            triton.combine_rows(values, rows, Combination(values, values, values[0], precision), rows, values)
            triton.combine_rows(values, rows, Combination(values, values, None, precision), rows, None)
        for compiled in compile_everywhere(launches):
            assert compiled.stack_bytes == 0, compiled.name
