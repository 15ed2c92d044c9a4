"""Rows of a table that numbers name, by kernel and reference."""

from __future__ import annotations

import pytest
import torch

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.table_rows import reference, table_rows
from tests.kernels.ahead import compile_everywhere, needs_compiler, recorded_launches

NUMBERS = [3, -1, 7, 8, 1 << 40, 0, -(1 << 40), 6]
EXPECTED = [3, 7, 7, 7, 7, 0, 7, 6]


@pytest.mark.parametrize("is_reference", [False, True])
@pytest.mark.parametrize("count", [1, 8, 300])
def test_what_names_no_row_names_the_last(device: str, count: int, is_reference: bool) -> None:
    run = reference.table_rows if is_reference else table_rows
    values, rows = torch.tensor([0, *NUMBERS], device=device), 1 + torch.arange(count, device=device) % 8
    assert run(ArenaRows(values, rows), 7).tolist() == [EXPECTED[k % 8] for k in range(count)]


@pytest.mark.parametrize("is_reference", [False, True])
def test_rows_outside_a_span_are_not_read(device: str, is_reference: bool) -> None:
    run = reference.table_rows if is_reference else table_rows
    far = 1 << 30
    rows = torch.tensor([far, -1, 0, 1, 2, far], device=device)
    found = run(ArenaRows(torch.tensor(NUMBERS, device=device), rows, 4, torch.tensor([2, 3], device=device)), 7)
    assert found[2:5].tolist() == EXPECTED[:3] and len(found) == 6


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"numbers must be contiguous torch.int64"):
        table_rows(ArenaRows(torch.zeros(3), torch.arange(3)), 7)


@needs_compiler
def test_it_compiles_everywhere_and_spills_nothing() -> None:
    from cellrt.kernels.table_rows import triton

    numbers = torch.zeros(4, dtype=torch.int64)
    with recorded_launches() as launches:
        triton.table_rows(ArenaRows(numbers, numbers, 4, numbers[:2]), 7)
        triton.table_rows(ArenaRows(numbers, numbers), 7)
    for compiled in compile_everywhere(launches):
        assert compiled.stack_bytes == 0
