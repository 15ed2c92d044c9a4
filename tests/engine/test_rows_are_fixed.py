"""Why and where a number of rows is fixed, in torch's words; and what does the same for any number."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor

import cellrt
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.aot.step_program import export_step

CHOOSING = {"x": (5, 6), "chosen": cellrt.rows(3, dtype=torch.int64)}
NUMBERS = {"x": (4,)}


def take(x: Tensor, chosen: Tensor) -> Tensor:
    return torch.take_along_dim(x, chosen[:, :, None], 1)


def choose_by_rows(x: Tensor) -> Tensor:
    return 2 * x if x.shape[0] > 3 else -x


def sum_parts(memory: cellrt.RaggedRows) -> Tensor:
    return torch.stack([part.sum(0) for part in memory.values.split(memory.offsets.diff().tolist())])


def go_through_a_list(x: Tensor) -> Tensor:
    return torch.tensor(x.tolist())


def solve(x: Tensor) -> Tensor:
    return torch.linalg.solve(torch.eye(4) + x[:, :, None], torch.ones(4, 1)).flatten(1)


def count_by_len(x: Tensor) -> Tensor:
    return x + torch.zeros(len(x), 4)


ONE_NUMBER = r"torch says: You marked rows( \+ 1)? as dynamic but your code specialized it to be a constant \([78]\)"


@pytest.mark.parametrize(
    ("function", "inputs", "said", "line"),
    [
        (take, CHOOSING, ONE_NUMBER, "return torch.take_along_dim(x, chosen[:, :, None], 1)"),
        (
            choose_by_rows,
            NUMBERS,
            r"torch says: Not all values of rows in the specified range satisfy the generated guard 4 <= rows",
            "return 2 * x if x.shape[0] > 3 else -x",
        ),
        (
            solve,
            NUMBERS,
            r"torch says: Not all values of rows .* satisfy the generated guard rows != 4",
            "return torch.linalg.solve(torch.eye(4) + x[:, :, None], torch.ones(4, 1)).flatten(1)",
        ),
        (
            sum_parts,
            {"memory": cellrt.ragged(4)},
            ONE_NUMBER,
            "return torch.stack([part.sum(0) for part in memory.values.split(memory.offsets.diff().tolist())])",
        ),
        (go_through_a_list, NUMBERS, ONE_NUMBER, "return torch.tensor(x.tolist())"),
        (
            count_by_len,
            NUMBERS,
            r"as len\(tensor\) does, and x\.shape\[0\] does not",
            "return x + torch.zeros(len(x), 4)",
        ),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_fixes_the_rows_is_told_with_the_line_of_it(function, inputs, said, line) -> None:
    where = rf"at test_rows_are_fixed\.py:\d+: {re.escape(line)}$"
    with pytest.raises(NotCompiledError, match=rf"^{Reason.FIXED_ROWS}: {said}, {where}") as refused:
        export_step(cellrt.cell(function, inputs, name="fixed"))
    assert refused.value.reason is Reason.FIXED_ROWS
    assert len(refused.value.detail) < 250 and "\n" not in str(refused.value)


def test_gather_chooses_for_any_number_of_rows() -> None:
    def choose(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return x.gather(1, chosen[:, :, None].expand(-1, -1, 6))

    made = cellrt.cell(choose, CHOOSING)
    x, chosen = torch.randn(4, 5, 6), torch.randint(5, (4, 3))
    assert torch.equal(made.run(x, chosen)[0], torch.take_along_dim(x, chosen[:, :, None], 1))
    assert export_step(made).least_rows == 1
