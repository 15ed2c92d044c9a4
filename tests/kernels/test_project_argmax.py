"""Projection and argmax in one, against the argmax of logits in float64."""

from typing import Any

import pytest
import torch

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.project_argmax import Projection, project_argmax, reference
from tests.kernels.ahead import compile_everywhere, needs_compiler, recorded_launches
from tests.kernels.projections import (
    CAPACITY,
    UNTOUCHED,
    exact_logits,
    in_order,
    launch_arguments,
    outputs,
    some_rows,
    whole_numbers,
)

SIZES = [(1, 5, 3), (3, 16, 1), (37, 70, 301)]
FULL_BATCH = (512, 32, 130)
TYPES = [
    *((torch.float32, "ieee"), (torch.float32, "tf32"), (torch.float32, "tf32x3")),
    *((torch.bfloat16, "ieee"), (torch.float16, "ieee")),
]


def check_exact(device: str, sizes: tuple[int, int, int], dtype: torch.dtype, precision: Any) -> None:
    num_rows, hidden, vocabulary = sizes
    torch.manual_seed(num_rows)
    values = whole_numbers(CAPACITY, hidden + 3, dtype=dtype, device=device)[:, :hidden]
    weight = whole_numbers(vocabulary, hidden, dtype=dtype, device=device)
    bias = whole_numbers(vocabulary, dtype=dtype, device=device)
    h = ArenaRows(values, some_rows(num_rows, device))
    projection = Projection(weight, bias, vocabulary // 2, precision)
    tokens, stops = outputs(num_rows, device)
    project_argmax(h, projection, in_order(tokens), in_order(stops))
    best = exact_logits(h, projection).argmax(dim=1)
    is_row = h.rows.cpu() >= 0
    assert tokens.tolist() == torch.where(is_row, best, UNTOUCHED).tolist()
    assert stops.tolist() == torch.where(is_row, best == vocabulary // 2, True).tolist()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize(("dtype", "precision"), TYPES)
def test_tokens_are_exact(device: str, sizes: tuple[int, int, int], dtype: torch.dtype, precision: str) -> None:
    check_exact(device, sizes, dtype, precision)


@pytest.mark.parametrize("is_reference", [False, True])
@pytest.mark.parametrize(("first", "count", "most"), [(0, 3, 40), (7, 33, 70), (2, 0, 5)])
def test_the_device_says_how_many_rows_there_are(
    device: str, first: int, count: int, most: int, is_reference: bool
) -> None:
    """Those of a span alone; the others are not read: they name rows that are not there."""
    run = reference.project_argmax if is_reference else project_argmax
    rows = torch.full((first + most,), 1 << 30, device=device)
    rows[first : first + count] = some_rows(count, device)
    span = torch.tensor([first, count], device=device)
    projection = Projection(torch.eye(CAPACITY, device=device)[:30].contiguous())
    values = torch.eye(CAPACITY, device=device).roll(1, 0)
    (tokens, stops), (expected, others) = outputs(most, device), outputs(count, device)
    to = torch.cat([torch.zeros(first, dtype=torch.int64), torch.arange(most)]).to(device)
    made = (ArenaRows(arena, to, most, span) for arena in (tokens, stops))
    run(ArenaRows(values, rows, most, span), projection, *made)
    project_argmax(ArenaRows(values, rows[first : first + count]), projection, in_order(expected), in_order(others))
    assert tokens.tolist() == [*expected.tolist(), *[UNTOUCHED] * (most - count)]
    assert stops.tolist() == [*others.tolist(), *[True] * (most - count)]


def test_negative_rows_are_not_written(device: str) -> None:
    tokens, stops = outputs(4, device)
    h = ArenaRows(torch.eye(CAPACITY, device=device), torch.arange(3, device=device))
    to = [
        ArenaRows(arena, torch.tensor(rows, device=device))
        for arena, rows in ((tokens, [3, -1, 0]), (stops, [-1, 2, 1]))
    ]
    project_argmax(h, Projection(torch.eye(CAPACITY, device=device), stop_token=1), *to)
    assert tokens.tolist() == [2, UNTOUCHED, UNTOUCHED, 0]
    assert stops.tolist() == [True, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_of_a_full_batch_are_exact(device: str, dtype: torch.dtype) -> None:
    check_exact(device, FULL_BATCH, dtype, "tf32")


@pytest.mark.parametrize("sizes", [*SIZES, FULL_BATCH], ids=str)
def test_tokens_of_the_reference_are_exact(sizes: tuple[int, int, int]) -> None:
    check_exact("cpu", sizes, torch.bfloat16, "ieee")


def test_without_bias_and_stop_token_into_int32(device: str) -> None:
    values, weight = torch.eye(CAPACITY, device=device), torch.eye(CAPACITY, device=device)[:30].contiguous()
    rows = torch.tensor([29, 0, 13], dtype=torch.int64, device=device)
    tokens, stops = outputs(3, device, torch.int32)
    project_argmax(ArenaRows(values, rows), Projection(weight), in_order(tokens), in_order(stops))
    assert tokens.tolist() == [29, 0, 13]
    assert not stops.any()


def best_token(logits: list[float], device: str) -> int:
    """The token chosen by these logits, given as a bias."""
    bias = torch.tensor(logits, device=device)
    h = ArenaRows(torch.zeros(1, 16, device=device), torch.zeros(1, dtype=torch.int32, device=device))
    tokens, stops = outputs(1, device)
    project_argmax(h, Projection(torch.zeros(len(logits), 16, device=device), bias), in_order(tokens), in_order(stops))
    return int(tokens[0])


def test_lowest_of_equal_tokens_wins_across_parts(device: str) -> None:
    logits = [-2.0] * 400
    assert best_token(logits, device) == 0
    logits[7] = logits[130] = logits[399] = -1.0
    assert best_token(logits, device) == 7
    assert best_token([-0.0, 0.0], device) == best_token([0.0, -0.0], device) == 0


def test_infinities_and_nans_are_ordered_as_in_torch(device: str) -> None:
    low = -torch.inf
    assert best_token([low] * 200, device) == 0
    assert best_token([low] * 150 + [-3e38, low], device) == 150
    assert best_token([1.0, torch.inf, 3e38], device) == 1
    assert best_token([1.0, torch.inf, *[0.0] * 200, torch.nan, torch.nan], device) == 202


def good() -> dict[str, Any]:
    tokens, stops = outputs(2, "cpu")
    h = ArenaRows(torch.zeros(4, 8), torch.zeros(2, dtype=torch.int32))
    return {
        "h": h,
        "projection": Projection(torch.zeros(5, 8), torch.zeros(5), 1),
        "token": in_order(tokens),
        "stop": in_order(stops),
    }


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"projection": Projection(torch.zeros(8, 5).T)}, r"weight must be contiguous \[vocabulary, hidden\]"),
        ({"projection": Projection(torch.zeros(5, 8).double())}, "of float32, bfloat16 or float16, got torch.float64"),
        ({"projection": Projection(torch.zeros(5, 8), torch.zeros(4))}, r"bias must be torch.float32 \[5\]"),
        ({"projection": Projection(torch.zeros(5, 9))}, "rows of 9 contiguous numbers"),
        ({"projection": Projection(torch.zeros(5, 8).half())}, "the same dtype"),
        ({"projection": Projection(torch.zeros(5, 8), stop_token=5)}, "stop token 5 is not in the vocabulary of 5"),
        ({"projection": Projection(torch.zeros(5, 8), precision="fast")}, "precision must be one of ieee"),
        ({"token": in_order(torch.zeros(3, dtype=torch.int64))}, "token must name 2 rows, got 3"),
        ({"stop": in_order(torch.zeros(2))}, "stop must be contiguous torch.bool"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str) -> None:
    project_argmax(**good())
    with pytest.raises(ValueError, match=message):
        project_argmax(**{**good(), **changed})


def check_compiled(num_rows: int, dtype: torch.dtype, precision: str) -> None:
    from cellrt.kernels.project_argmax import triton as kernel

    with recorded_launches() as launches:
        kernel.project_argmax(*launch_arguments(num_rows, dtype, precision), *map(in_order, outputs(num_rows, "cpu")))
    assert len(launches) == 2
    for compiled in compile_everywhere(launches):
        assert compiled.stack_bytes == 0, compiled.name


@needs_compiler
def test_full_batch_compiles_without_spills() -> None:
    check_compiled(512, torch.bfloat16, "ieee")


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 32, 64, 512])
@pytest.mark.parametrize(("dtype", "precision"), TYPES)
def test_every_tile_compiles_without_spills(dtype: torch.dtype, precision: str, num_rows: int) -> None:
    check_compiled(num_rows, dtype, precision)
