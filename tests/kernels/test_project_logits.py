"""Projection to logits, against logits in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.project_logits import Projection, project_logits, reference
from tests.kernels.ahead import compile_everywhere, needs_compiler, recorded_launches
from tests.kernels.projections import CAPACITY, exact_logits, launch_arguments, some_rows, whole_numbers
from tests.kernels.test_project_argmax import SIZES, TYPES


def check_exact(device: str, sizes: tuple[int, int, int], dtype: torch.dtype, precision: Any) -> None:
    num_rows, hidden, vocabulary = sizes
    torch.manual_seed(num_rows)
    values = whole_numbers(CAPACITY, hidden + 3, dtype=dtype, device=device)[:, :hidden]
    weight = whole_numbers(vocabulary, hidden, dtype=dtype, device=device)
    projection = Projection(weight, whole_numbers(vocabulary, dtype=dtype, device=device), None, precision)
    h = ArenaRows(values, some_rows(num_rows, device))
    logits = torch.full((num_rows, vocabulary), 77.0, dtype=dtype, device=device)
    project_logits(h, projection, logits)
    expected = torch.where((h.rows.cpu() >= 0)[:, None], exact_logits(h, projection), 77.0)
    assert torch.equal(logits.cpu().double(), expected)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "precision"), TYPES)
def test_logits_are_exact(device: str, sizes: tuple[int, int, int], dtype: torch.dtype, precision: str) -> None:
    check_exact(device, sizes, dtype, precision)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_logits_of_the_reference_are_exact(sizes: tuple[int, int, int]) -> None:
    check_exact("cpu", sizes, torch.bfloat16, "ieee")


@pytest.mark.parametrize("is_reference", [False, True])
@pytest.mark.parametrize(("first", "count", "most"), [(0, 3, 40), (7, 33, 70), (2, 0, 5)])
def test_the_device_says_how_many_rows_there_are(
    device: str, first: int, count: int, most: int, is_reference: bool
) -> None:
    """Those of a span alone, in order from 0 on; the others are not read: they name rows that are not there."""
    run = reference.project_logits if is_reference else project_logits
    rows = torch.full((first + most,), 1 << 30, device=device)
    rows[first : first + count] = torch.arange(count, device=device) % CAPACITY
    values, weight = torch.eye(CAPACITY, device=device), torch.eye(CAPACITY, device=device)[:30].contiguous()
    logits = torch.full((most, 30), 77.0, device=device)
    run(ArenaRows(values, rows, most, torch.tensor([first, count], device=device)), Projection(weight), logits)
    assert torch.equal(logits[:count], values[:count, :30])
    assert (logits[count:] == 77).all()


@pytest.mark.parametrize("logits", [torch.zeros(3, 5), torch.zeros(2, 5).half(), torch.zeros(5, 2).T], ids=str)
def test_what_does_not_fit_is_refused(logits: torch.Tensor) -> None:
    h = ArenaRows(torch.zeros(4, 8), torch.zeros(2, dtype=torch.int32))
    project_logits(h, Projection(torch.zeros(5, 8)), torch.zeros(2, 5))
    with pytest.raises(ValueError, match="logits must be contiguous torch.float32 .2, 5."):
        project_logits(h, Projection(torch.zeros(5, 8)), logits)


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 32, 64, 512])
@pytest.mark.parametrize(("dtype", "precision"), TYPES)
def test_every_tile_compiles_without_spills(dtype: torch.dtype, precision: str, num_rows: int) -> None:
    from cellrt.kernels.project_logits import triton as kernel

    logits = torch.empty(num_rows, 50_001, dtype=dtype, device="meta")
    with recorded_launches() as launches:
        kernel.project_logits(*launch_arguments(num_rows, dtype, precision), logits)
    assert len(launches) == 1
    for compiled in compile_everywhere(launches):
        assert compiled.stack_bytes == 0, compiled.name
