"""What a cell sees of a state in pages: rows are appended where they belong, and read in order."""

from __future__ import annotations

import pytest
import torch

from cellrt import PagedRows
from cellrt.definition.bits import DTYPES

PAGE_SIZE, LENGTHS, NEW = 3, (7, 2, 4), (2, 1, 3)


def paged_rows(dtype: torch.dtype, shape: tuple[int, ...], page_dim: int) -> PagedRows:
    """Three nodes, whose rows end with new ones, in pages that lie anywhere."""
    sizes = [*shape[:page_dim], PAGE_SIZE, *shape[page_dim:]]
    tables = torch.tensor([[6, 1, 4], [3, 0, 0], [0, 5, 0]], dtype=torch.int32)
    positions = [row for length, new in zip(LENGTHS, NEW) for row in range(length - new, length)]
    nodes = [node for node, new in enumerate(NEW) for _ in range(new)]
    offsets, lengths = torch.tensor([0, *NEW]).cumsum(0).int(), torch.tensor(LENGTHS).int()
    of_rows = torch.tensor(nodes).int(), torch.tensor(positions).int(), torch.ones(len(nodes), dtype=torch.bool)
    return PagedRows(torch.zeros((7, *sizes), dtype=dtype), tables, lengths, offsets, *of_rows, page_dim)


@pytest.mark.parametrize("served", [True, False], ids=["served", "tried"])
@pytest.mark.parametrize(("shape", "page_dim"), [((), 0), ((4,), 0), ((2, 4), 1), ((2, 3, 4), 2)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_appended_behind_those_of_their_nodes(dtype, shape, page_dim, served):
    with torch.inference_mode(served):
        state = paged_rows(dtype, shape, page_dim)
        values = torch.randint(1, 100, (sum(NEW), *shape)).to(dtype)
        state.append(values)
        for node, (length, new, own) in enumerate(zip(LENGTHS, NEW, values.split(NEW))):
            rows = state.rows_of(node)
            assert rows.shape == (length, *shape)
            assert torch.equal(rows[length - new :], own) and not rows[: length - new].any()
        assert state.pages.count_nonzero() == values.count_nonzero()


@pytest.mark.parametrize(
    "make", [lambda rows: rows.t().contiguous().t(), lambda rows: rows.flip(0), lambda rows: -rows]
)
def test_what_is_appended_may_lie_in_memory_as_it_likes(make):
    values = torch.arange(1.0, 1 + 4 * sum(NEW)).view(-1, 4)
    with torch.inference_mode():
        state = paged_rows(torch.float32, (4,), 0)
        state.append(make(values))
    expected = paged_rows(torch.float32, (4,), 0)
    expected.append(make(values).clone())
    assert torch.equal(state.pages, expected.pages)


def test_rows_of_a_weight_can_be_appended():
    weight = torch.nn.Parameter(torch.ones(sum(NEW), 4))
    with torch.inference_mode():
        state = paged_rows(torch.float32, (4,), 0)
        state.append(weight)
    assert state.pages.sum() == weight.numel()


@pytest.mark.parametrize("served", [True, False])
@pytest.mark.parametrize(
    ("values", "raised"),
    [
        (torch.zeros(sum(NEW), 5), ValueError),
        (torch.zeros(1, 4), ValueError),
        (torch.zeros(sum(NEW), 4, dtype=torch.float64), RuntimeError),
    ],
)
def test_other_rows_are_refused(values, raised, served):
    with torch.inference_mode(served):
        state = paged_rows(torch.float32, (4,), 0)
        with pytest.raises(raised):
            state.append(values)
        assert not state.pages.any()
