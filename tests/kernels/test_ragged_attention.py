"""Attention over ragged rows by kernel and reference, against the ready-made cells."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from cellrt import RaggedRows, cells
from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.ragged_attention import MOST_NUMBERS, Memory, ragged_attention, reference
from tests.effort import quickly
from tests.kernels.ahead import Launch, compile_everywhere, needs_compiler, recorded_launches

LENGTHS = [3, 0, 1, 40, 17]
SIZES = [(5, 5), (130, 130), (24, 7)]
"""Of a row and of its key; of additive scores where they differ."""
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def memory_of(size: int, key_size: int, dtype: torch.dtype, device: str) -> Memory:
    """Nodes of these lengths, with rows behind the last that nobody owns."""
    total = sum(LENGTHS) + 3
    values = torch.randn(total, size).to(device, dtype)
    offsets = torch.tensor([0, *LENGTHS], device=device).cumsum(0)
    if size == key_size:
        return Memory(values, offsets)
    return Memory(
        values, offsets, torch.randn(total, key_size).to(device, dtype), torch.randn(key_size).to(device, dtype)
    )


def expected_of(query: Tensor, memory: Memory) -> Tensor:
    """By the ready-made cells, in float64."""
    values, offsets, keys, score = (None if each is None else each.cpu() for each in memory)
    rows = RaggedRows(values[: sum(LENGTHS)].double(), offsets)
    with torch.no_grad():
        if keys is None:
            return cells.DotAttention()(query.cpu().double(), rows).context
        attention = cells.AdditiveAttention(len(score), values.shape[1], len(score)).double()
        attention.query.weight.copy_(torch.eye(len(score)))
        attention.score.copy_(score)
        return attention(query.cpu().double(), rows, RaggedRows(keys[: sum(LENGTHS)].double(), offsets)).context


def check(device: str, sizes: tuple[int, int], dtype: torch.dtype, run: Any, in_arena: bool) -> None:
    torch.manual_seed(sizes[0])
    memory = memory_of(*sizes, dtype, device)
    query = torch.randn(len(LENGTHS), sizes[1]).to(device, dtype)
    given: ArenaRows | Tensor = query
    if in_arena:
        index = torch.tensor([4, 9, 0, 2, 6], device=device)
        values = torch.full((10, sizes[1] + 3), torch.nan, dtype=dtype, device=device)
        values[index, : sizes[1]] = query
        given = ArenaRows(values[:, : sizes[1]], index)
    made = run(given, memory, None)
    assert made.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(made.cpu().double(), expected_of(query, memory), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("in_arena", [False, True])
@pytest.mark.parametrize("dtype", quickly([torch.float32, torch.bfloat16], of=list(TOLERANCE)))
def test_the_kernel_reads_what_the_cell_reads(
    device: str, sizes: tuple[int, int], dtype: torch.dtype, in_arena: bool
) -> None:
    check(device, sizes, dtype, ragged_attention, in_arena)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("in_arena", [False, True])
def test_the_reference_reads_what_the_cell_reads(sizes: tuple[int, int], in_arena: bool) -> None:
    check("cpu", sizes, torch.float32, reference.ragged_attention, in_arena)


def test_spans_and_negative_rows_are_minded(device: str) -> None:
    """Nodes behind the last have no rows, and their queries are not there."""
    torch.manual_seed(1)
    memory = memory_of(6, 6, torch.float32, device)
    query = torch.randn(5, 6, device=device)
    index = torch.tensor([0, -1, 2, 1 << 30, 1 << 30], device=device)
    made = ragged_attention(
        ArenaRows(query, index, 5, torch.tensor([0, 3], device=device)), memory, torch.tensor([0, 3], device=device)
    )
    expected = ragged_attention(query, memory)
    torch.testing.assert_close(made[[0, 2]], expected[[0, 2]])


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"values": torch.zeros(4, 6).T}, "values must be contiguous"),
        ({"values": torch.zeros(6, 4).double()}, "of the query's dtype"),
        ({"keys": torch.zeros(5, 4)}, r"keys must be contiguous \[6, 4\]"),
        ({"offsets": torch.zeros(3)}, "offsets must be contiguous int64"),
        ({"offsets": torch.zeros(4, dtype=torch.int64)}, "query must have a row for each of 3 nodes, got 2"),
        ({"score": torch.zeros(5)}, r"score must be torch.float32 \[4\]"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Tensor], message: str) -> None:
    good: dict[str, Any] = {
        "values": torch.zeros(6, 4),
        "offsets": torch.tensor([0, 2, 6]),
        "keys": None,
        "score": None,
    }
    ragged_attention(torch.zeros(2, 4), Memory(**good))
    with pytest.raises(ValueError, match=message):
        ragged_attention(torch.zeros(2, 4), Memory(**{**good, **changed}))


def launched(size: int, key_size: int, dtype: torch.dtype, in_arena: bool) -> list[Launch]:
    from cellrt.kernels.ragged_attention import triton

    values, keys = (torch.empty(64, width, dtype=dtype, device="meta") for width in (size, key_size))
    score = torch.empty(key_size, dtype=dtype, device="meta")
    numbers, span = torch.zeros(5, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    memory = Memory(values, numbers) if size == key_size else Memory(values, numbers, keys, score)
    query = ArenaRows(keys, numbers[:4], 4, span) if in_arena else keys[:4]
    with recorded_launches() as launches:
        triton.ragged_attention(query, memory, span)
    return launches


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize(
    "sizes",
    [(16, 16), (256, 256), (512, 512), (1000, 1000), (1024, 1024), (1024, 512), (2048, 1024), (MOST_NUMBERS,) * 2],
    ids=str,
)
def test_it_compiles_without_spills(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    for in_arena in (False, True):
        for compiled in compile_everywhere(launched(*sizes, dtype, in_arena)):
            assert compiled.stack_bytes == 0, compiled
