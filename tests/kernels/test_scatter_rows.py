"""Scatter: several arenas of different rows in one launch, against indexing in plain Python."""

import pytest
import torch

from cellrt.kernels.scatter_rows import scatter_rows
from tests.kernels.ahead import compile_everywhere, needs_compiler, recorded_launches

CAPACITY = 600
MIXED = [((192,), torch.float32), ((), torch.int64), ((7, 3), torch.bfloat16), ((), torch.bool)]
DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
]
UNTOUCHED = -7
COUNTS = [(1, 1, 1, 1), (0, 5, 33, 2), (512, 512, 512, 512)]


def random_rows(rows: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(2, (rows, *shape), device=device).bool()
    values = torch.randint(-100, 100, (rows, *shape), device=device)
    return values.abs().to(dtype) if dtype == torch.uint8 else values.to(dtype)


def fill(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like this one, of NaNs where its dtype has them."""
    if tensor.is_floating_point():
        return torch.full_like(tensor, torch.nan)
    return torch.full_like(tensor, 1 if tensor.dtype == torch.bool else 77)


def random_index(count: int, capacity: int) -> list[int]:
    """Different rows in random order: the first and the last of the arena, and one negative, as far as they fit."""
    inner = (torch.randperm(capacity - 2) + 1).tolist()
    return [-1 if k == 2 else row for k, row in enumerate([capacity - 1, 0, *inner][:count])]


def assert_same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def table(ranges: list[tuple[int, ...]], padding: int, device: str) -> torch.Tensor:
    """The ranges in the records of a task's buffer, which have other words as well."""
    records = torch.full((len(ranges), len(ranges[0]) + padding), UNTOUCHED, dtype=torch.int32)
    records[:, 1 : 1 + len(ranges[0])] = torch.tensor(ranges, dtype=torch.int32)
    return records.to(device)[:, 1 : 1 + len(ranges[0])]


def check_scatter(device: str, counts: tuple[int, ...], in_table: bool) -> None:
    arenas = [fill(random_rows(CAPACITY, shape, dtype, device)) for shape, dtype in MIXED]
    values = [random_rows(count + 3, shape, dtype, device) for count, (shape, dtype) in zip(counts, MIXED, strict=True)]
    expected = [arena.clone() for arena in arenas]
    buffer, ranges = [UNTOUCHED] * 5, []
    for k, count in enumerate(counts):
        rows, positions = random_index(count, CAPACITY), torch.randperm(count + 3)[:count].tolist()
        is_in_order = k == 1
        for item, (row, position) in enumerate(zip(rows, positions, strict=True)):
            if row >= 0:
                expected[k][row] = values[k][item if is_in_order else position]
        ranges.append((count, -1 if is_in_order else len(buffer), len(buffer) + count))
        buffer += [*positions, *rows]
    on_device = torch.tensor(buffer, dtype=torch.int32, device=device)
    scatter_rows(arenas, on_device, table(ranges, 2, device) if in_table else ranges, values)
    for arena, wanted in zip(arenas, expected, strict=True):
        assert_same(arena, wanted)


@pytest.mark.parametrize("in_table", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_mixed_arenas(device: str, counts: tuple[int, ...], in_table: bool) -> None:
    check_scatter(device, counts, in_table)


@pytest.mark.parametrize("in_table", [False, True])
@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_mixed_arenas_by_the_reference(counts: tuple[int, ...], in_table: bool) -> None:
    check_scatter("cpu", counts, in_table)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_of_every_dtype_and_odd_size_come_back(device: str, dtype: torch.dtype) -> None:
    for size in (1, 5, 64, 1025):
        values, index = (
            random_rows(3, (size,), dtype, device),
            torch.tensor([8, 0, 3], dtype=torch.int32, device=device),
        )
        arena = torch.zeros_like(values[:1].expand(9, size))
        scatter_rows([arena], index, [(3, -1, 0)], [values])
        assert_same(arena[index.long()], values)
        assert not arena[[1, 2, 4, 5, 6, 7]].any()


def test_bits_of_nan_are_kept(device: str) -> None:
    values = torch.tensor([[0x7FC12345], [-0x3EDCBB]], dtype=torch.int32, device=device)
    arena = torch.zeros_like(values)
    index = torch.tensor([1, 0], dtype=torch.int32, device=device)
    scatter_rows([arena.view(torch.float32)], index, [(2, -1, 0)], [values.view(torch.float32)])
    assert arena.tolist() == values.flip(0).tolist()


def good() -> dict[str, object]:
    return {
        "arenas": [torch.zeros(4, 3)],
        "buffer": torch.zeros(6, dtype=torch.int32),
        "ranges": [(2, -1, 4)],
        "values": [torch.zeros(2, 3)],
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arenas": []}, "as many arenas as values are needed, got 0 and 1"),
        ({"values": [torch.zeros(2, 4)]}, r"\(3,\) cannot be exchanged with values"),
        ({"values": [torch.zeros(2, 3).half()]}, "cannot be exchanged with values of torch.float16"),
        ({"values": [torch.zeros(3, 2).T]}, "must be contiguous"),
        ({"values": [torch.zeros(1, 3)]}, "2 rows do not fit in values of 1"),
        ({"buffer": torch.zeros(6)}, "buffer must be contiguous int32"),
        ({"ranges": [(2, -1, 5)]}, "outside of the buffer of 6"),
        ({"ranges": [(2, 0)]}, "a count and 2 positions, got 1"),
        ({"ranges": [(1, -1, 1)] * 2}, "1 tensors need 1 ranges, got 2"),
        ({"ranges": torch.zeros(1, 2, dtype=torch.int32)}, r"must be int32 \[1, 3\]"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, object], message: str) -> None:
    scatter_rows(**good())
    with pytest.raises(ValueError, match=message):
        scatter_rows(**{**good(), **changed})


@needs_compiler
@pytest.mark.parametrize("in_table", [False, True])
def test_kernels_compile_and_move_16_bytes_at_once(in_table: bool) -> None:
    from cellrt.kernels.scatter_rows import triton as scatter

    arenas = [torch.empty(CAPACITY, *shape, dtype=dtype) for shape, dtype in MIXED]
    values = [arena[:512] for arena in arenas]
    buffer = torch.empty(9000, dtype=torch.int32)
    with recorded_launches() as launches:
        triples = [(count, start, start) for count, start in [(512, 17), (1, 16), (33, 0), (512, 600)]]
        scatter.scatter_rows(arenas, buffer, table(triples, 2, "cpu") if in_table else triples, values)
    for compiled in compile_everywhere(launches):
        assert compiled.stack_bytes == 0
        assert "ld.global.v4.b32" in compiled.ptx and "st.global.v4.b32" in compiled.ptx


@needs_compiler
@pytest.mark.parametrize("in_table", [False, True])
def test_one_compiled_kernel_serves_all_ranges(in_table: bool) -> None:
    from cellrt.kernels.scatter_rows import triton as scatter

    arena, buffer = torch.empty(CAPACITY, 192), torch.empty(9000, dtype=torch.int32)
    with recorded_launches() as launches:
        for count, start in [(512, 17), (1, 16), (16, 0), (5, 1)]:
            triple = [(count, -1 if count == 5 else start, start + 1)]
            scatter.scatter_rows([arena], buffer, table(triple, count, "cpu") if in_table else triple, [arena[:512]])
    assert len({launch.key for launch in launches}) == 1
