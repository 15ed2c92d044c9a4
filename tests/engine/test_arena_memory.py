"""The memory of arenas on CPUs: zeros where nobody wrote, aligned, and nothing where nobody writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cellrt.core.state.tables import NUM_PERMANENT
from cellrt.definition.spec import RowSpec
from cellrt.worker.arenas import ALIGNMENT, Arenas


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize(("shape", "count"), [((), 0), ((3,), 5), ((2, 0), 4), ((128, 64), 100)])
def test_rows_are_zeros_in_aligned_memory(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> None:
    memory = Arenas().allocate(RowSpec(shape, dtype), count)
    assert (memory.dtype, memory.shape) == (dtype, (NUM_PERMANENT + count, *shape))
    assert not memory.any() and memory.data_ptr() % ALIGNMENT == 0
    assert not memory.is_inference()


def test_rows_that_nobody_writes_take_no_memory() -> None:
    before = resident_bytes()
    memory = Arenas().allocate(RowSpec((1 << 20,)), 100)
    assert resident_bytes() - before < memory.nbytes // 8
