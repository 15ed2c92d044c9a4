"""A model's registration builds every form of its kernels that serving launches: nothing is compiled while it serves.

Launches are recorded, not run; their keys are those by which Triton keeps what it compiled.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from cellrt.definition.define import cell
from cellrt.definition.fused import IndexedRows, RunSizes, SpannedRows
from cellrt.definition.spans import PagedRows
from cellrt.definition.spec import RaggedRows, RowSpec, grows
from cellrt.kernels import lstm_chain, tiles
from cellrt.kernels.loop_rows import LoopTask, begin, go_on
from cellrt.kernels.paged_attention import Pages, Spans, append_pages, paged_attention
from cellrt.worker.build_forms import build_forms, classes_of_rows
from cellrt.worker.device.placement import PlacedCell
from tests.cells.test_run_rows import CASES, CHAINS, STATE
from tests.kernels.ahead import launches_for_the_host, needs_compiler

CPU = torch.device("cpu")
MOST = 600
HEADS, KV_HEADS = 8, 4
SERVED = [1, 2, 3, 15, 16, 17, 31, 33, 64, 65, 100, 128, 129, 255, 257, 300, 511, 512, 513, 600]


@pytest.fixture
def words() -> Tensor:
    """A task's words, in which every list of rows begins somewhere."""
    return torch.arange(8 * MOST)


@pytest.fixture
def has_few_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tiles differ by rows even for small cells: on many processors all have the smallest. Chains, which ask
    for themselves, have many."""
    assert lstm_chain.device_limits is tiles.device_limits
    monkeypatch.setattr("cellrt.kernels.tiles.device_limits", lambda device: (2, 232_448))


def placed_cell(name: str) -> PlacedCell:
    """The cell of a case, as a device would have it."""
    case = CASES[name]
    return PlacedCell(cell(case.make(), case.inputs, max_batch=MOST), CPU)


def served_rows(spec: RowSpec, words: Tensor, at: int, count: int) -> IndexedRows:
    """Rows of an arena, numbered by words."""
    return IndexedRows(torch.zeros((8 * MOST, *spec.shape), dtype=spec.dtype), words[at : at + count])


def spanned_rows(spec: RowSpec, words: Tensor, at: int, count: int) -> SpannedRows:
    """The same as a step has them, with a span that begins at any word."""
    return SpannedRows(*served_rows(spec, words, at, MOST), count, words[at : at + 2])


def ragged_rows(spec: RowSpec, count: int) -> RaggedRows:
    """Of so many nodes."""
    offsets = torch.zeros(count + 2, dtype=torch.int64)[1:]
    return RaggedRows(torch.zeros(count % 7, *spec.shape, dtype=spec.dtype), offsets)


@contextmanager
def nothing_compiled_after_building(name: str) -> Iterator[PlacedCell]:
    """The cell of a case, whose kernels are launched inside in forms alone that were built before."""
    with launches_for_the_host() as launches:
        placed = placed_cell(name)
        build_forms(placed)
        built = {launch.key for launch in launches}
        launches.clear()
        yield placed
    assert launches
    assert {launch.key for launch in launches} <= built


@needs_compiler
@pytest.mark.usefixtures("has_few_processors")
@pytest.mark.parametrize("name", CASES)
def test_no_step_is_compiled_while_serving(name: str, words: Tensor) -> None:
    with nothing_compiled_after_building(name) as placed:
        for count in SERVED:
            for shift in (0, 1):
                given = {
                    key: ragged_rows(spec, count) if spec.ragged else spanned_rows(spec, words, shift, count)
                    for key, spec in placed.cell.inputs.items()
                }
                made = {key: spanned_rows(spec, words, 7 + shift, count) for key, spec in placed.cell.outputs.items()}
                placed.run_rows(given, made)


@needs_compiler
@pytest.mark.parametrize("name", CHAINS)
def test_no_run_is_compiled_while_serving(name: str, words: Tensor) -> None:
    with nothing_compiled_after_building(name) as placed:
        for sizes in [(1,), (2, 1), (17,) * 5, (300, 16, 1), (600, 600)]:
            for shift in (0, 1):
                positions = sum(sizes)
                counts = {key: sizes[0] if key in STATE else positions for key in placed.cell.inputs}
                given = {key: served_rows(spec, words, shift, counts[key]) for key, spec in placed.cell.inputs.items()}
                made = {key: served_rows(spec, words, 7 + shift, positions) for key, spec in STATE.items()}
                placed.chains.run(RunSizes(sizes, words[shift : shift + len(sizes)]), given, made)


@needs_compiler
def test_no_loop_is_compiled_while_serving(words: Tensor) -> None:
    """What runs between two of its steps."""
    with nothing_compiled_after_building("EmbeddingLSTMDecoder"):
        for count in SERVED:
            flags = torch.zeros(count, dtype=torch.bool)
            task = LoopTask(words[count % 3 :], count, 3, 4, 1, count, -1, 1)
            found = begin(task, flags, flags)
            go_on(task, found, count, flags, flags)


class Attends(nn.Module):
    """Attention over all rows so far, by the operation alone."""

    def forward(self, x: Tensor, kv: PagedRows) -> Tensor:
        where = Pages(kv.pages[:, 0], kv.pages[:, 1], kv.tables, kv.lengths)
        rows = Spans(kv.offsets, kv.positions)
        append_pages(where, rows, x[:, :KV_HEADS].contiguous(), x[:, :KV_HEADS].contiguous())
        if not x.is_meta:
            kv.append(x[:, None, :KV_HEADS].repeat(1, 2, 1, 1))  # launches are recorded, not run
        return paged_attention(x, where, rows)


def node_inputs(made: PagedRows, given: list[tuple[int, int]]) -> list[Tensor | PagedRows]:
    """Nodes of so many rows each, behind so many others."""
    rows, before = (torch.tensor(numbers, dtype=torch.int32) for numbers in zip(*given))
    offsets = torch.cat([rows.new_zeros(1), rows.cumsum(0, dtype=torch.int32)])
    nodes = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(rows)
    positions = torch.arange(len(nodes), dtype=torch.int32) - (offsets[:-1] - before).repeat_interleave(rows)
    width = 1 << (int((rows + before).max()) // made.page_size).bit_length()
    kv = made._replace(
        tables=rows.new_zeros(len(rows), width),
        lengths=rows + before,
        offsets=offsets,
        nodes=nodes,
        positions=positions,
    )
    return [torch.zeros(len(nodes), HEADS, 64), kv]


@needs_compiler
@pytest.mark.parametrize("processors", [1, 8, 132])
def test_no_attention_over_pages_is_compiled_while_serving(processors: int, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = {"x": (HEADS, 64), "kv": grows(2, KV_HEADS, 64, page_dim=1)}
    with launches_for_the_host() as launches:
        monkeypatch.setattr("cellrt.kernels.paged_attention.triton.device_limits", lambda device: (processors, 232_448))
        placed = PlacedCell(cell(Attends(), inputs, max_batch=64, max_batch_rows=512), CPU)
        launches.clear()
        build_forms(placed)
        built = {launch.key for launch in launches}
        launches.clear()
        _, example = placed.cell.example_inputs(8)
        for before in (0, 15, 300, 5000, 9000):
            for rows in (1, 2, 7, 16, 17, 40, 300):
                placed.call(node_inputs(example, [(rows, before)]))
                placed.call(node_inputs(example, [(1, 3)] * 30 + [(rows, before)]))
            placed.call(node_inputs(example, [(1, before)] * 64))
    assert len(launches) > 100
    assert {launch.key for launch in launches} <= built


def test_classes_are_powers_of_two_and_the_most() -> None:
    case = CASES["GRUCell"]
    sizes = [classes_of_rows(cell(case.make(), case.inputs, max_batch=most)) for most in (1, 6, 64)]
    assert sizes == [[1], [1, 2, 4, 6], [1, 2, 4, 8, 16, 32, 64]]


def test_what_a_cell_refuses_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    placed, asked = placed_cell("GRUCell"), []

    def refuse(inputs: Mapping[str, IndexedRows], outputs: object) -> None:
        asked.append(len(next(iter(inputs.values())).rows))
        raise ValueError("zeros")

    monkeypatch.setattr(placed, "run_rows", refuse)
    build_forms(placed)
    assert asked == classes_of_rows(placed.cell)


def test_of_a_plain_cell_nothing_is_run() -> None:
    placed = placed_cell("GRUCell")
    placed.run_rows = None
    with launches_for_the_host() as launches:
        build_forms(placed)
    assert not launches
