"""Why a number of rows is fixed, in torch's words; and what does the same for any number."""

from __future__ import annotations

import pytest
import torch

import cellrt
from cellrt.definition.aot.program import export_step
from cellrt.definition.aot.refusal import NotCompiledError, Reason

CHOOSING = {"x": (5, 6), "chosen": cellrt.rows(3, dtype=torch.int64)}


@pytest.mark.parametrize(
    ("function", "inputs", "said"),
    [
        (
            lambda x, chosen: torch.take_along_dim(x, chosen[:, :, None], 1),
            CHOOSING,
            r"torch says: You marked rows as dynamic but your code specialized it to be a constant \(7\)$",
        ),
        (
            lambda x: 2 * x if x.shape[0] > 3 else -x,
            {"x": (4,)},
            r"torch says: Not all values of rows .* satisfy the generated guard 4 <= ",
        ),
    ],
    ids=["an operator that does", "a choice by rows"],
)
def test_what_torch_says_of_the_rows_is_handed_on_in_short(function, inputs, said) -> None:
    with pytest.raises(NotCompiledError, match=said) as refused:
        export_step(cellrt.cell(function, inputs, name="fixed"))
    assert refused.value.reason is Reason.FIXED_ROWS
    assert len(refused.value.detail) < 200 and "\n" not in str(refused.value)


def test_gather_chooses_for_any_number_of_rows() -> None:
    def choose(x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        return x.gather(1, chosen[:, :, None].expand(-1, -1, 6))

    made = cellrt.cell(choose, CHOOSING)
    x, chosen = torch.randn(4, 5, 6), torch.randint(5, (4, 3))
    assert torch.equal(made.run(x, chosen)[0], torch.take_along_dim(x, chosen[:, :, None], 1))
    assert export_step(made).least_rows == 1
