"""Steps that read any number of rows of others are padded with further nodes, and share captures: as a user's plain
torch, and as a form that reads ragged rows."""

from __future__ import annotations

import random
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cellrt import cells
from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.fused import SpannedRows, reads_ragged, reads_spans
from cellrt.definition.spec import RaggedRows, ragged, rows, token
from cellrt.engine.engine import Engine
from cellrt.errors import CellError
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.executor import DeviceOptions
from tests.engine.helpers import close_and_check
from tests.engine.test_cuda_chains import write
from tests.engine.test_cuda_device import stub, stub_engines  # noqa: F401 - fixtures
from tests.engine.test_cuda_loops import MOST_STEPS, Counted, ahead, count_freely
from tests.engine.test_cuda_ragged import taken
from tests.engine.test_cuda_ragged_loops import make as make_loop_cell
from tests.engine.test_cuda_ragged_loops import model_of as loops_of
from tests.engine.test_cuda_worker import FEW, OPTIONS, device_engine, on_every_device, serve

MOST_ROWS = 12
REQUESTS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), min_size=1, max_size=8)
"""Of each request how many rows each of its nodes reads."""


class Picked(NamedTuple):
    out: Tensor


def nodes_of(items: RaggedRows) -> Tensor:
    """The node of each row; all of them are of some."""
    nodes = torch.arange(len(items.offsets) - 1, device=items.offsets.device)
    return torch.repeat_interleave(nodes, items.offsets.diff(), output_size=len(items.values))


def pick(which: Tensor, items: RaggedRows, others: RaggedRows) -> Picked:
    """The sum of a node's rows, and one of them, which it has if it has any."""
    sums = items.values.new_zeros(len(which), 2).index_add_(0, nodes_of(items), items.values + 2 * others.values)
    first, end = items.offsets[:-1], items.offsets[1:]
    place = (first + which).clamp(max=max(0, len(items.values) - 1))
    one = items.values.index_select(0, place) if len(items.values) else sums
    return Picked(torch.where((first + which < end)[:, None], one + sums, sums))


class Strict(nn.Module):
    """The same of nodes that have the row that they ask for; it notes who has not, and how many nodes there were."""

    def __init__(self) -> None:
        super().__init__()
        self.wrong, self.sizes = 0, set[tuple[int, int]]()

    def __deepcopy__(self, memo: object) -> Strict:
        return self

    def forward(self, which: Tensor, items: RaggedRows, others: RaggedRows) -> Picked:
        if which.device.type != "meta":
            counts = items.offsets.numpy()[1:] - items.offsets.numpy()[:-1]
            self.wrong += int(((which.numpy() >= counts) & (counts + which.numpy() > 0)).sum())
            self.wrong += items.offsets.numpy()[-1] != len(items.values)
            self.sizes.add((len(which), len(items.values)))
        return pick(which, items, others)


class Fused(nn.Module):
    """The same for rows of arenas; what it gives tells who computed it."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = 0

    def __deepcopy__(self, memo: object) -> Fused:
        return self

    def forward(self, which: Tensor, items: RaggedRows, others: RaggedRows) -> Picked:
        self.plain += which.device.type != "meta"
        return pick(which, items, others)

    @reads_spans
    @reads_ragged
    def run_rows(self, inputs: dict[str, SpannedRows | RaggedRows], outputs: dict[str, SpannedRows]) -> None:
        which, items, others = taken(inputs["which"]), inputs["items"], inputs["others"]
        numbers = which.values[which.rows.clamp(min=0)]
        rows = torch.arange(len(items.values), device=items.values.device)
        nodes = torch.bucketize(rows, items.offsets[1:], right=True)
        sums = items.values.new_zeros(len(numbers) + 1, 2)
        sums = sums.index_add_(0, nodes.clamp(max=len(numbers)), items.values + 2 * others.values)[:-1]
        place = items.offsets[:-1] + numbers
        one = items.values[place.clamp(max=max(0, len(items.values) - 1))] if len(items.values) else sums
        write(taken(outputs["out"]), torch.where((place < items.offsets[1:])[:, None], one + sums, sums))


def make(module: object, **options: object) -> Cell:
    options.setdefault("max_batch", MOST_ROWS)
    return cell(module, {"which": token, "items": ragged(2), "others": ragged(2)}, name="pick", **options)


def model_of(made: Cell, encodes: bool) -> Unfolder:
    """A node for each number of a request, which reads so many rows of the request, or what a cell makes of them."""
    double = cell(lambda x: 2 * x, {"x": (2,)}, name="double", max_batch=64)

    def unfold(graph, counts):
        nodes = []
        for count in counts:
            given = torch.linspace(0, 1, 2 * count).view(count, 2)
            items = [double(x=row) for row in given] if encodes else given
            nodes.append(made(which=max(0, count - 1), items=items, others=given))
        return {str(number): node.out for number, node in enumerate(nodes)}

    return Unfolder("pick", unfold, [2, 1])


def one_by_one(options: DeviceOptions | None = None, device: str = "dry", **others: object) -> Engine:
    options = options or DeviceOptions(ring_bytes=1 << 18, capture_after=1, fused=True)
    return device_engine(device, 1, options, settings=SchedulerSettings(runs=False), **others)


def counts_of(engine: Engine) -> dict[str, int]:
    return engine.statistics()["workers"][1]


@FEW
@given(
    REQUESTS, st.integers(1, 2), OPTIONS, st.booleans(), st.sampled_from([pick, Fused]), st.sampled_from([(), (4, 12)])
)
def test_ragged_steps_give_what_they_give_one_by_one(requests, workers, options, encodes, kind, sizes):
    made = make(pick if kind is pick else Fused(), batch_sizes=sizes)
    model = model_of(made, encodes)
    engine = device_engine("dry", workers, options, settings=SchedulerSettings(runs=False))
    try:
        engine.register(model, warm_up=False)
        for _ in range(2):  # the second time what was captured is repeated
            serve(engine, model, requests)
        engine.check()
    finally:
        close_and_check(engine)


def of_many_sizes(rng: random.Random, most: int) -> list[list[int]]:
    return [[rng.randint(1, 5) for _ in range(rng.randint(1, most))] for _ in range(3)]


@pytest.mark.parametrize("encodes", [False, True])
@pytest.mark.parametrize("kind", [pick, Fused])
def test_ragged_steps_of_nearby_sizes_share_captures(kind, encodes):
    module, rng = pick if kind is pick else Fused(), random.Random(1)
    model = model_of(make(module), encodes)
    engine = one_by_one()
    engine.register(model, warm_up=False)
    for _ in range(60):
        serve(engine, model, of_many_sizes(rng, 3))
    counts = counts_of(engine)
    close_and_check(engine)
    assert 0 < counts["captures"] <= 60 and counts["replayed"] > 2 * counts["eager"]
    assert counts["captures_refused"] == counts["unfused"] == 0


def test_further_nodes_have_the_rows_that_the_last_one_has():
    """What their other inputs say of these is true, and every row is of a node."""
    module, rng = Strict(), random.Random(2)
    model = model_of(make(module), encodes=False)
    engine = one_by_one()
    engine.register(model, warm_up=False)
    module.wrong, module.sizes = 0, set()
    for _ in range(20):
        serve(engine, model, of_many_sizes(rng, 3))
    close_and_check(engine)
    assert module.wrong == 0 and len(module.sizes) > 5


class Looks(nn.Module):
    """Looks at values; notes how many nodes it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[int] = []

    def __deepcopy__(self, memo: object) -> Looks:
        return self

    def forward(self, which: Tensor, items: RaggedRows, others: RaggedRows) -> Picked:
        if which.device.type != "meta":
            self.nodes.append(len(which))
            assert items.offsets[-1].item() >= 0
        return pick(which, items, others)


class Refuses(Looks):
    """Refuses nodes that are told apart from others: only the padding has them."""

    def forward(self, which: Tensor, items: RaggedRows, others: RaggedRows) -> Picked:
        if which.device.type != "meta":
            self.nodes.append(len(which))
            counts = items.offsets.numpy()[1:] - items.offsets.numpy()[:-1]
            if ((which.numpy() != counts - 1) & (counts != 2)).any():  # the trial has two each
                raise CellError("no such node")
        return pick(which, items, others)


@pytest.mark.parametrize("kind", [Looks, Refuses])
def test_a_cell_that_cannot_be_captured_or_padded_is_padded_no_more(kind):
    module = kind()
    model = model_of(make(module), encodes=False)
    engine = one_by_one()
    engine.register(model, warm_up=False)
    for _ in range(4):
        serve(engine, model, [[3]])
    module.nodes.clear()
    serve(engine, model, [[3]])
    counts = counts_of(engine)
    close_and_check(engine)
    assert 1 in module.nodes and 2 not in module.nodes and counts["captures"] == 0


@pytest.mark.parametrize("requests", [[[2] * MOST_ROWS], [[1] * 7 + [60]]])
def test_steps_are_not_padded_where_there_is_no_further_node_or_it_would_have_too_many_rows(requests):
    module = Strict()
    model = model_of(make(module), encodes=False)
    engine = one_by_one()
    engine.register(model, warm_up=False)
    module.sizes.clear()
    serve(engine, model, requests)
    close_and_check(engine)
    assert (len(requests[0]), sum(requests[0])) in module.sizes


def plain_loops(encodes: bool) -> Unfolder:
    """Of a user's cell that sums its rows at each step, in plain torch."""
    return loops_of(make_loop_cell(Sums()), encodes)


class Sums(nn.Module):
    """See ``Attends``: the plain form alone."""

    def forward(self, n: Tensor, h: Tensor, end: Tensor, memory: RaggedRows) -> Counted:
        if n.device.type == "meta":
            return count_freely(n, h, end)
        return count_freely(n, h + torch.zeros_like(h).index_add_(0, nodes_of(memory), memory.values), end)


@pytest.mark.parametrize("encodes", [False, True])
def test_loops_of_a_users_plain_cell_share_captures(encodes):
    model = plain_loops(encodes)
    options = DeviceOptions(ring_bytes=1 << 18, capture_after=1)
    engine = device_engine("dry", 1, options, settings=ahead(1, runs=False))
    engine.register(model, warm_up=False)
    requests = [(MOST_STEPS, count) for count in range(1, 8)]
    for _ in range(3):
        for request in requests:
            serve(engine, model, [request])
    counts = counts_of(engine)
    close_and_check(engine)
    assert 0 < counts["captures"] <= 12 and counts["replayed"] > counts["eager"]


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize("kind", [pick, Fused])
@pytest.mark.slow
def test_captured_ragged_steps_race_with_nothing(stub_engines, kind, direct):  # noqa: F811
    made, rng = make(pick if kind is pick else Fused()), random.Random(3)
    engine = one_by_one(DeviceOptions(ring_bytes=1 << 16, capture_after=1, direct=direct, fused=True), debug=True)
    for encodes in (False, True):
        model = model_of(made, encodes)
        engine.register(model, warm_up=False)
        for _ in range(8):
            serve(engine, model, of_many_sizes(rng, 3))
        assert counts_of(engine)["captures"] > 2  # of the only cell, at first
        engine.unregister(model.name)
    counts = counts_of(engine)
    close_and_check(engine)
    assert stub_engines.races == []
    assert (stub_engines.num_launched > 0) == direct and counts["replayed"] > 2


@on_every_device
def test_ready_made_cells_with_ragged_inputs_share_captures(device):
    """Trees of any number of children, and attention to any number of leaves, in plain torch."""
    torch.manual_seed(0)
    tree = cell(
        cells.ChildSumTreeLSTMCell(2, 4).double(),
        {"x": rows(2, dtype=torch.float64)} | {name: ragged(4, dtype=torch.float64) for name in ("h", "c")},
        max_batch=MOST_ROWS,
    )
    attention = cell(
        cells.DotAttention().double(),
        {"h": rows(4, dtype=torch.float64), "memory": ragged(4, dtype=torch.float64)},
        max_batch=MOST_ROWS,
    )

    def unfold(graph, count):
        leaves = [tree(x=torch.full((2,), k, dtype=torch.float64), h=[], c=[]) for k in range(count)]
        states = [leaf.h for leaf in leaves]
        root = tree(x=torch.ones(2, dtype=torch.float64), h=states, c=[leaf.c for leaf in leaves])
        return {"context": attention(h=root.h, memory=states).context}

    model, engine = Unfolder("trees", unfold, 2), one_by_one(device=device)
    engine.register(model, warm_up=False)
    for count in (*range(1, 11), *range(1, 11)):
        serve(engine, model, [count])
    counts = counts_of(engine)
    close_and_check(engine)
    assert 0 < counts["captures"] < 25 and counts["captures_refused"] == 0 and counts["replayed"] > counts["captures"]
