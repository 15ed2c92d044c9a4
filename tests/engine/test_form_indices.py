"""Indices that a module refuses are refused by its compiled form, which would read other memory."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import cellrt
from cellrt.definition.aot.form import compile_cell
from cellrt.definition.aot.refusal import NotCompiledError
from cellrt.definition.aot.step_program import export_step
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
def test_an_index_that_the_module_refuses_is_refused_without_a_word(tmp_path, capfd, index):
    cell = cellrt.cell(Selecting(), {"i": cellrt.token})
    form = compile_cell(cell, LibraryStore(tmp_path))
    inputs = {"i": torch.tensor([0, 4])}
    assert torch.equal(form.run(2, inputs)["output"], cell.run(*inputs.values())[0])
    capfd.readouterr()
    assert form.run(2, {"i": torch.tensor([0, index])}) is None
    assert capfd.readouterr().err == ""


def test_indices_that_the_module_refuses_are_masked_before_they_are_used():
    names = [node.name for node in export_step(cellrt.cell(Selecting(), {"i": cellrt.token})).program.graph.nodes]
    assert sum(name.startswith("masked_fill") for name in names) == 3


class LargestOf(nn.Module):
    """The largest of each node's rows, or zero if it has none, by one operator or the other."""

    def __init__(self, by_index: bool) -> None:
        super().__init__()
        self.by_index = by_index

    def forward(self, memory: cellrt.RaggedRows) -> Tensor:
        values, zeros = memory.values, torch.zeros(memory.offsets.shape[0] - 1, 4)
        owner = torch.repeat_interleave(memory.offsets.diff(), output_size=values.shape[0])
        if self.by_index:
            return zeros.index_reduce(0, owner, values, "amax", include_self=False)
        return zeros.scatter_reduce(0, owner[:, None].expand(-1, 4), values, "amax", include_self=False)


def largest_of(by_index: bool) -> cellrt.Cell:
    return cellrt.cell(LargestOf(by_index), {"memory": cellrt.ragged(4)}, name="largest")


@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
def test_what_is_refused_names_what_does_the_same_and_is_not():
    with pytest.raises(NotCompiledError, match=r'; index_reduce\(0, owner, values, "amax"\) compiles'):
        export_step(largest_of(by_index=False))
    assert export_step(largest_of(by_index=True)).least_rows == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:index_reduce:UserWarning")
def test_the_largest_of_each_nodes_rows_is_right_compiled(tmp_path):
    form = compile_cell(largest_of(by_index=True), LibraryStore(tmp_path))
    memory = cellrt.RaggedRows(torch.randn(9, 4), torch.tensor([0, 2, 2, 9]))
    made = form.run(3, {"memory": memory})
    assert made is not None and torch.equal(made["output"], LargestOf(by_index=False)(memory))
