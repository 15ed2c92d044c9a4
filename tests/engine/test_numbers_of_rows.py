"""One compiled form takes any number of rows and nodes: it gives what its module gives, and memory stays what it is."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import cellrt
from cellrt import RaggedRows
from cellrt.definition.aot.form import compile_cell
from cellrt.definition.aot.store import LibraryStore
from cellrt.definition.examples import random_nodes
from tests.engine.test_resident_memory import resident_bytes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
    pytest.mark.timeout(600),  # for the compilers
]

WIDTH, LONGEST, CALLS = 4, 4_000, 300_000
ALLOWED_BYTES = 16 << 20
"""A handle of one tensor left behind by each call is more."""
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


class OfParts(nn.Module):
    """The sum of each node's rows, and the largest of them, by torch's operator for that."""

    def forward(self, memory: RaggedRows) -> dict[str, Tensor]:
        values, offsets = memory.values, memory.offsets
        return {
            "sum": torch.segment_reduce(values, "sum", offsets=offsets, axis=0, initial=0.0),
            "most": torch.segment_reduce(values, "max", offsets=offsets, axis=0, initial=0.0),
        }


@pytest.mark.parametrize("counts", [[3], [1], [0], [2, 0, 5], [0, 0, 0], [1, 0], [4] * 64, [k % 5 for k in range(33)]])
def test_segment_reduce_of_ragged_rows(ragged_form, counts: list[int]) -> None:
    offsets = torch.tensor([0, *counts]).cumsum(0)
    values = torch.randn(int(offsets[-1]), WIDTH, generator=torch.Generator().manual_seed(len(counts)))
    made = ragged_form.run(len(counts), {"memory": RaggedRows(values, offsets)})
    assert made is not None
    for node, part in enumerate(values.split(counts)):
        torch.testing.assert_close(made["sum"][node], part.sum(0), **CLOSE)
        torch.testing.assert_close(made["most"][node], torch.cat([torch.zeros(1, WIDTH), part]).amax(0))


@pytest.fixture(scope="module")
def ragged_form(tmp_path_factory: pytest.TempPathFactory):
    made = cellrt.cell(OfParts(), {"memory": cellrt.ragged(WIDTH)}, max_batch=64)
    return compile_cell(made, LibraryStore(tmp_path_factory.mktemp("cache")))


def less_the_mean(x: Tensor, text: cellrt.Spans) -> Tensor:
    """Each row less the mean of its node's rows."""
    means = torch.segment_reduce(x, "mean", offsets=text.offsets.long(), axis=0)
    return x - means[text.nodes]


def test_segment_reduce_of_spans_of_one_node_and_of_several(tmp_path) -> None:
    made = cellrt.cell(less_the_mean, {"x": (WIDTH,), "text": cellrt.span(whole=True)}, max_batch=64)
    form = compile_cell(made, LibraryStore(tmp_path))
    for nodes, rows in ((1, 1), (1, 2), (1, 9), (2, 1), (2, 3), (3, 1), (7, 5), (40, 1)):
        x, text = random_nodes(made.inputs.values(), nodes, rows, 0, torch.Generator().manual_seed(nodes))
        found = form.run(nodes * rows, {"x": x, "text": text})
        assert found is not None
        parts = x.view(nodes, rows, WIDTH)
        torch.testing.assert_close(found["output"].view_as(parts), parts - parts.mean(1, keepdim=True), **CLOSE)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="this system does not tell what lies in memory")
def test_calls_with_thousands_of_row_counts_leave_no_memory_behind(tmp_path) -> None:
    """Counts from 1 to 4,000, the logarithm evenly drawn, so that all come and most are small."""
    torch.manual_seed(0)
    made = cellrt.cell(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), {"input": (WIDTH,)}, max_batch=LONGEST)
    form, x = compile_cell(made, LibraryStore(tmp_path)), torch.randn(LONGEST, WIDTH)
    (expected,) = made.run(x)
    drawn = np.exp(np.random.default_rng(0).uniform(0, np.log(LONGEST + 1), CALLS)).astype(int).clip(1, LONGEST)
    before = 0
    for number, count in enumerate(drawn.tolist()):
        outputs = form.run(count, {"input": x[:count]})
        assert outputs is not None
        if number % 100 == 0:
            torch.testing.assert_close(outputs["output"], expected[:count], **CLOSE)
        if number == CALLS // 5:
            before = resident_bytes()
    assert len(set(drawn.tolist())) > 0.99 * LONGEST
    assert resident_bytes() - before < ALLOWED_BYTES
