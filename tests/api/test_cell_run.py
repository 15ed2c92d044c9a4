"""A cell that is run by hand takes its inputs in order or by name, and says which of them does not fit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, ragged
from cellrt.errors import RequestError
from tests.api.models import SIZE, sum_rows

ADD = cell(lambda x, h: {"h": x + 2 * h}, {"x": (SIZE,), "h": (SIZE,)}, name="add")
TOTAL = cell(lambda items: {"sum": sum_rows(items)}, {"items": ragged(SIZE)}, name="total")
ROWS = torch.ones(2, SIZE)


def test_inputs_go_in_order_or_by_name() -> None:
    x, h = torch.randn(2, 3, SIZE)
    for made in (ADD.run(x, h), ADD.run(x, h=h), ADD.run(h=h, x=x)):
        assert torch.equal(made[0], x + 2 * h)
    assert TOTAL.run(RaggedRows(ROWS, torch.tensor([0, 2])))[0].tolist() == [[2.0] * SIZE]


@pytest.mark.parametrize(
    ("made", "inputs", "named", "told"),
    [
        (ADD, [ROWS], {}, r"'add', input 'h': missing; expected float32\[rows, 4\]"),
        (ADD, [ROWS, ROWS, ROWS], {}, r"'add': expected inputs \['x', 'h'\], got 3 in order"),
        (ADD, [ROWS], {"x": ROWS}, "'add', input 'x': given in order and by name"),
        (ADD, [ROWS], {"y": ROWS}, r"'add', input 'y': unknown; the cell has inputs \['x', 'h'\]"),
        (ADD, [ROWS, ROWS.double()], {}, r"input 'h': expected float32\[rows, 4\], got float64\[2, 4\]"),
        (ADD, [ROWS[:, 1:], ROWS], {}, r"input 'x': expected float32\[rows, 4\], got float32\[2, 3\]"),
        (ADD, [ROWS, ROWS[0]], {}, r"input 'h': expected float32\[rows, 4\], got float32\[4\]"),
        (ADD, [ROWS, None], {}, r"input 'h': expected float32\[rows, 4\], got NoneType"),
        (ADD, [ROWS, ROWS[:1]], {}, r"'add': expected as many rows of each input, got {'x': 2, 'h': 1}"),
        (TOTAL, [ROWS], {}, r"input 'items': expected cellrt.RaggedRows of float32\[rows, 4\], got float32\[2, 4\]"),
    ],
)
def test_what_does_not_fit_is_named(made: Any, inputs: list[Any], named: dict[str, Any], told: str) -> None:
    with pytest.raises(RequestError, match=f"cell .*{told}"):
        made.run(*inputs, **named)
