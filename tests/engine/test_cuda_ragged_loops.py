"""Loops that read any number of rows of others at each step run in their fused form, padded, and share captures."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.fused import SpannedRows, reads_ragged, reads_spans
from cellrt.definition.spec import RaggedRows, ragged
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.executor import DeviceOptions
from cellrt.worker.device.placement import PlacedCell
from tests.engine.helpers import WAIT_S, assert_same, close_and_check
from tests.engine.test_cuda_chains import write
from tests.engine.test_cuda_device import stub, stub_engines  # noqa: F401 - fixtures
from tests.engine.test_cuda_fused_loops import place, serving
from tests.engine.test_cuda_loops import MOST_STEPS, NUMBER, Counted, ahead, count_freely
from tests.engine.test_cuda_ragged import taken
from tests.engine.test_cuda_worker import FEW, OPTIONS, device_engine, serve


def sums_of(memory: RaggedRows) -> Tensor:
    """Of each node's rows, without a look at any number."""
    nodes = len(memory.offsets) - 1
    node = torch.bucketize(
        torch.arange(len(memory.values), device=memory.values.device), memory.offsets[1:], right=True
    )
    return memory.values.new_zeros(nodes + 1, 2).index_add_(0, node, memory.values)[:nodes]


class Attends(nn.Module):
    """Counts up to ``end``, and adds what its rows sum up to at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.fused = 0, 0

    def __deepcopy__(self, memo: object) -> Attends:
        return self

    def forward(self, n: Tensor, h: Tensor, end: Tensor, memory: RaggedRows) -> Counted:
        self.plain += n.device.type != "meta"
        if n.device.type == "meta":
            return count_freely(n, h, end)
        return count_freely(n, h + sums_of(memory), end)

    @reads_spans
    @reads_ragged
    def run_rows(self, inputs: dict[str, SpannedRows | RaggedRows], outputs: dict[str, SpannedRows]) -> None:
        self.fused += 1
        memory = inputs["memory"]
        given = {name: taken(value) for name, value in inputs.items() if name != "memory"}
        n, h, end = (given[name].values[given[name].rows.clamp(min=0)] for name in ("n", "h", "end"))
        for name, value in count_freely(n, h + sums_of(memory), end)._asdict().items():
            write(taken(outputs[name]), value)


def make(module: nn.Module) -> Cell:
    return cell(module, {"n": NUMBER, "h": (2,), "end": NUMBER, "memory": ragged(2)}, max_batch=8)


def model_of(made: Cell, encodes: bool) -> Unfolder:
    """Requests: a number to count to, and how many rows there are, which another cell makes or the request brings."""
    double = cell(lambda x: 2 * x, {"x": (2,)}, name="double", max_batch=16)

    def unfold(graph, request):
        end, count = request
        rows = torch.linspace(0, 1, 2 * count).view(count, 2)
        memory = [double(x=row) for row in rows] if encodes else rows
        loop = graph.loop(made, max_steps=MOST_STEPS, until="stop", end=end, memory=memory)
        return {"every": loop.h, "n": loop.last.n}

    return Unfolder("attend", unfold, (3, 2))


@FEW
@given(
    requests=st.lists(st.tuples(st.integers(0, MOST_STEPS + 2), st.integers(0, 9)), min_size=1, max_size=12),
    count=st.integers(0, 3),
    workers=st.integers(1, 2),
    runs=st.booleans(),
    options=OPTIONS,
    encodes=st.booleans(),
)
def test_loops_that_attend_give_what_their_steps_give_one_by_one(requests, count, workers, runs, options, encodes):
    module = Attends()
    made = make(module)
    model = model_of(made, encodes)
    engine = device_engine("dry", workers, options, settings=ahead(count, runs=runs, join_budget_s=1.0, min_run_s=1.0))
    expected = [run_one_by_one(model, request) for request in requests]
    try:
        engine.register(model, warm_up=runs)
        place(engine, made)
        module.plain = module.fused = 0
        for _ in range(2):  # the second time what was captured is repeated
            for result, future in zip(expected, engine.submit_many(model.name, requests)):
                assert_same(future.result(WAIT_S), result)
        engine.check()
    finally:
        close_and_check(engine)
    if workers == 1:  # rows of another worker go through the plain form
        assert module.fused > 0 and module.plain == 0


def test_loops_that_attend_to_any_number_of_rows_share_captures():
    module = Attends()
    made = make(module)
    model = model_of(made, encodes=True)
    requests = [(MOST_STEPS, count) for count in range(1, 13)]
    expected = [run_one_by_one(model, request) for request in requests]
    with serving(model, ahead(1, runs=False), ring_bytes=1 << 18) as engine:
        place(engine, made)
        module.plain = 0
        for first in range(len(requests)):
            for result, future in zip(expected[first:], engine.submit_many("attend", requests[first:])):
                assert_same(future.result(WAIT_S), result)
        counts = engine.statistics()["workers"][1]
    assert counts["captures"] <= 15 and counts["replayed"] > 5 * counts["captures"] and module.plain == 0


@pytest.mark.parametrize("encodes", [False, True])
@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.slow
def test_captured_loops_that_attend_race_with_nothing(stub_engines, direct, encodes):  # noqa: F811
    options = DeviceOptions(ring_bytes=1 << 16, capture_after=1, direct=direct, fused=True)
    engine = device_engine("dry", 1, options, settings=ahead(2, runs=False), debug=True)
    model = model_of(make(Attends()), encodes)
    engine.register(model, warm_up=False)
    for _ in range(2):
        serve(engine, model, [(3, 1), (0, 7), (7, 0), (9, 5)])
    counts = engine.statistics()["workers"][1]
    close_and_check(engine)
    assert stub_engines.races == []
    assert (stub_engines.num_launched > 0) == direct
    assert counts["replayed"] > 5 and counts["unfused"] == 0


class Scattered(TorchDispatchMode):
    """Counts what is put into arenas."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function.overloadpacket is torch.ops.aten.index_copy_
        return function(*args, **(kwargs or {}))


def test_a_plain_step_is_timed_with_what_a_task_does_around_it():
    """As the fused one does it, with which it is compared."""
    placed = PlacedCell(make(Attends()), torch.device("cpu"))
    with torch.inference_mode(), Scattered() as seen:
        placed.plain_step(4)()
        assert seen.count == len(placed.cell.outputs)
        placed.fused_step(4)()
