"""The memory of arenas on CPUs: zeros where nobody wrote, aligned, and nothing where nobody writes."""

from __future__ import annotations

import ctypes
import mmap
import sys

import numpy as np
import pytest
import torch

from cellrt.core.state.tables import NUM_PERMANENT
from cellrt.definition.spec import RowSpec
from cellrt.worker.arenas import Arenas

ALIGNMENT = 64
"""That of torch's own memory, which its compiled code may count on."""

TELLS_OF_PAGES = pytest.mark.skipif(sys.platform != "linux", reason="needs mincore of Linux")


def bytes_in_memory(tensor: torch.Tensor) -> int:
    """The pages of a tensor's own memory that are there: whatever else the process takes or gives back meanwhile."""
    first = tensor.data_ptr() // mmap.PAGESIZE * mmap.PAGESIZE
    size = tensor.data_ptr() + tensor.nbytes - first
    pages = np.empty(-(-size // mmap.PAGESIZE), np.uint8)
    told = ctypes.CDLL(None, use_errno=True).mincore(
        ctypes.c_void_p(first), ctypes.c_size_t(size), ctypes.c_void_p(pages.ctypes.data)
    )
    assert told == 0, ctypes.get_errno()
    return mmap.PAGESIZE * int(np.count_nonzero(pages & 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
@pytest.mark.parametrize(("shape", "count"), [((), 0), ((3,), 5), ((2, 0), 4), ((128, 64), 100)])
def test_rows_are_zeros_in_aligned_memory(dtype: torch.dtype, shape: tuple[int, ...], count: int) -> None:
    memory = Arenas().allocate(RowSpec(shape, dtype), count)
    assert (memory.dtype, memory.shape) == (dtype, (NUM_PERMANENT + count, *shape))
    assert not memory.any() and memory.data_ptr() % ALIGNMENT == 0
    assert not memory.is_inference()


@TELLS_OF_PAGES
def test_rows_that_nobody_writes_take_no_memory() -> None:
    memory = Arenas().allocate(RowSpec((1 << 20,)), 100)
    assert bytes_in_memory(memory) == 0
    memory[50] = 1
    assert memory[50].nbytes <= bytes_in_memory(memory) < memory.nbytes // 8


@TELLS_OF_PAGES
def test_rows_take_no_memory_where_others_have_left_much() -> None:
    """64 MB of small arrays, which the process keeps for what it asks for next, as the last of them is still there."""
    small = [np.ones(64 << 10, np.uint8) for _ in range(1024)]
    del small[:-1]
    assert bytes_in_memory(Arenas().allocate(RowSpec((1 << 10,)), 8 << 10)) == 0
