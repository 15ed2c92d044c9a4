"""What is given to a compiled form with pages and spans holds together, or is refused with the input's name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import cellrt
from cellrt import DefinitionError
from cellrt.definition.examples import random_nodes
from cellrt.definition.form_inputs import check_inputs
from cellrt.definition.spec import RowSpec

SPECS: dict[str, RowSpec] = {
    "x": cellrt.rows(4),
    "text": cellrt.span(),
    "kv": cellrt.grows(2, page_size=2),
}
ROWS = 6
Change = Callable[[Any], dict[str, Any]]


def nodes_of_three_rows(seed: int = 0) -> dict[str, Any]:
    """Two of them, behind five others."""
    return dict(zip(SPECS, random_nodes(SPECS.values(), 2, 3, 5, torch.Generator().manual_seed(seed))))


def test_what_holds_together_is_taken() -> None:
    check_inputs(SPECS, ROWS, nodes_of_three_rows())


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("kv", lambda kv: {"offsets": kv.offsets.long()}, r"expected 3 offsets of int32\[\], got int64\[3\]"),
        ("kv", lambda kv: {"offsets": kv.offsets + 1}, r"expected offsets that rise from 0 to 6, got \[1, 4, 7\]"),
        ("kv", lambda kv: {"offsets": 0 * kv.offsets}, r"expected offsets that rise from 0 to 6, got \[0, 0, 0\]"),
        ("kv", lambda kv: {"tables": kv.tables + 1}, "expected tables of pages 0 to 7"),
        ("kv", lambda kv: {"tables": kv.tables[:1]}, r"expected 2 tables of int32\[4\], got int32\[1, 4\]"),
        ("kv", lambda kv: {"tables": kv.tables[:, 0]}, r"expected 2 tables of int32\[1\], got int32\[2\]"),
        ("kv", lambda kv: {"lengths": kv.lengths + 1}, "expected lengths from 0 to 8, for which its tables have room"),
        ("kv", lambda kv: {"positions": kv.positions + 1}, "expected positions within its lengths"),
        ("kv", lambda kv: {"positions": kv.positions - 9}, "expected positions from 0 on"),
        ("kv", lambda kv: {"nodes": 1 - kv.nodes}, "expected each row's node by its offsets as nodes"),
        ("kv", lambda kv: {"pages": kv.pages.double()}, r"expected 8 pages of .*float32\[2, 2\], got float64"),
        ("kv", lambda kv: {"pages": kv.pages.mT.contiguous().mT}, "expected contiguous pages on the CPU"),
        ("kv", lambda kv: {"page_dim": 1}, "expected page_dim 0, got 1"),
        ("kv", lambda kv: {"is_read": kv.is_read.int()}, r"expected 6 flags is_read of bool\[\], got int32\[6\]"),
        ("text", lambda text: {"positions": text.positions[:5]}, r"expected 6 positions of int32\[\], got int32\[5\]"),
    ],
)
def test_a_part_that_does_not_fit_is_named(name: str, change: Change, said: str) -> None:
    inputs = nodes_of_three_rows()
    inputs[name] = inputs[name]._replace(**change(inputs[name]))
    with pytest.raises(DefinitionError, match=f"input '{name}': {said}"):
        check_inputs(SPECS, ROWS, inputs)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kv", torch.zeros(8, 2, 2), r"input 'kv': expected growing pages of 2 float32\[2\], got Tensor"),
        ("text", None, "input 'text': expected partial span, got NoneType"),
        ("x", nodes_of_three_rows()["text"], r"input 'x': expected float32\[4\], got Spans"),
        ("text", random_nodes([cellrt.span()], 3, 2, 0, torch.Generator())[0], "expected the same nodes of each input"),
    ],
)
def test_something_else_is_named(name: str, value: Any, said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        check_inputs(SPECS, ROWS, {**nodes_of_three_rows(), name: value})
