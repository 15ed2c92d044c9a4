"""Indices that a module refuses are refused by its compiled form, which would read other memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cellrt
from cellrt.definition.aot.form import compile_cell
from cellrt.definition.aot.program import export_step
from cellrt.definition.aot.store import LibraryStore


class Selecting(nn.Module):
    """Operators that refuse an index below zero, which compiled code takes from the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(20.0).view(5, 4))

    def forward(self, i: Tensor) -> Tensor:
        ones, zeros = torch.ones(i.shape[0], 4), torch.zeros(5, 4)
        added = zeros.index_add(0, i, ones).sum() + zeros.index_copy(0, i, ones).sum()
        return self.table.index_select(0, i) + 0 * added


@pytest.mark.slow
@pytest.mark.parametrize("index", [-1, -5, 5, 1 << 40])
def test_an_index_that_the_module_refuses_is_refused(tmp_path, index):
    cell = cellrt.cell(Selecting(), {"i": cellrt.token})
    form = compile_cell(cell, LibraryStore(tmp_path))
    inputs = {"i": torch.tensor([0, 4])}
    assert torch.equal(form.run(2, inputs)["output"], cell.run(*inputs.values())[0])
    assert form.run(2, {"i": torch.tensor([0, index])}) is None


def test_indices_that_the_module_refuses_are_masked_before_they_are_used():
    names = [node.name for node in export_step(cellrt.cell(Selecting(), {"i": cellrt.token})).program.graph.nodes]
    assert sum(name.startswith("masked_fill") for name in names) == 3
