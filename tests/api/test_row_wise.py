"""A cell whose rows influence each other is told when its model is registered; a cell that is row-wise never is."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, ragged, rows
from cellrt.engine.engine import Engine
from tests.api.models import SIZE, model
from tests.cells.every_cell import CASES, MODES, specs_in, specs_of
from tests.effort import quickly

ROW = {"h": (SIZE,)}
MIXED = {
    "the mean of the batch": lambda h: {"y": h - h.mean(0)},
    "a softmax over the wrong dimension": lambda h: {"y": h.softmax(0)},
    "the first row for all": lambda h: {"y": h[:1].expand(len(h), SIZE)},
    "another order": lambda h: {"y": h.flip(0)},
    "the best row": lambda h: {"y": h.argmax(0).expand(len(h), SIZE)},
    "a norm over the batch": lambda h: {"y": nn.functional.batch_norm(h, None, None, training=True)},
}


@pytest.mark.parametrize("kind", MIXED)
def test_a_cell_that_mixes_its_rows_is_told(kind: str) -> None:
    made = cell(MIXED[kind], ROW, name="mixes")
    with pytest.warns(RuntimeWarning, match="cell 'mixes', output 'y': the rows of a batch influence") as told:
        assert made.check_row_wise() == ["y"]
    assert told[0].filename == __file__


def test_a_cell_that_counts_in_an_attribute_is_told_that() -> None:
    class Counts(nn.Module):
        count = 0

        def forward(self, h):
            self.count += 1
            return {"y": h + self.count}

    with pytest.warns(RuntimeWarning, match="output 'y': equal rows give other results at each call"):
        assert cell(Counts(), ROW, name="counts").check_row_wise() == ["y"]


BRANCHES = {
    "their sum": lambda h: h if h.sum() > 0 else -h,
    "the first": lambda h: h if h[0, 0] > 0 else -h,
    "any of them": lambda h: h if (h > 0).any() else -h,
    "the largest": lambda h: h if h.max() < 2 else -h,
    "how many there are": lambda h: h if h.shape[0] < 9 else -h,
}


@pytest.mark.parametrize("width", [1, 5, 32])
@pytest.mark.parametrize("kind", BRANCHES)
@pytest.mark.filterwarnings("ignore:cell")
def test_a_cell_that_branches_on_its_batch_is_told(kind: str, width: int) -> None:
    assert cell(BRANCHES[kind], {"h": (width,)}).check_row_wise() == ["output"]


def test_only_the_outputs_that_are_mixed_are_named() -> None:
    made = cell(lambda h: {"sum": h.cumsum(0), "twice": 2 * h}, ROW)
    with pytest.warns(RuntimeWarning, match="output 'sum'"):
        assert made.check_row_wise() == ["sum"]


def test_ragged_rows_of_other_nodes_are_found() -> None:
    def total(x: torch.Tensor, h: RaggedRows) -> torch.Tensor:
        return x + h.values.sum(0)

    with pytest.warns(RuntimeWarning, match="cell 'total'"):
        cell(total, {"x": (SIZE,), "h": ragged(SIZE)}).check_row_wise()


def test_padding_counts_as_company() -> None:
    made = cell(MIXED["the mean of the batch"], ROW, batch_sizes=[4, 8])
    with pytest.warns(RuntimeWarning):
        made.check_row_wise()


def refuse(h: torch.Tensor) -> torch.Tensor:
    if h.device.type == "cpu" and h.any():
        raise ValueError("zeros, please")
    return h - h.mean(0)


def leave(h: torch.Tensor) -> torch.Tensor:
    if h.device.type == "cpu" and h.any():
        raise SystemExit(3)
    return h - h.mean(0)


@pytest.mark.parametrize(
    "made",
    [
        cell(nn.BatchNorm1d(SIZE), {"input": (SIZE,)}),
        cell(lambda h: (h * torch.inf, h / 0, h * 0 / 0), ROW, name="not finite"),
        cell(lambda h: h - h.mean(0), ROW, max_batch=1, name="one row at a time"),
        cell(refuse, ROW),
        cell(leave, ROW),
    ],
    ids=lambda made: made.name,
)
def test_no_other_cell_is_told(made: Cell) -> None:
    assert made.check_row_wise() == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_rounding_of_half_precision_is_no_influence(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(256, 256).to(dtype)

    def rounded(h: torch.Tensor) -> dict[str, torch.Tensor]:
        """The order of the sum, and so the last bits, are others in a batch."""
        parts = (h.shape[0] > 1) + 1
        states = h
        for _ in range(4):
            pieces = zip(states.chunk(parts, 1), layer.weight.chunk(parts, 1))
            states = torch.tanh(sum(a @ b.T for a, b in pieces))  # type: ignore[arg-type]
        return {"state": states, "best": states.argmax(1)}

    made = cell(rounded, {"h": rows(256, dtype=dtype)})
    inputs = torch.randn(3, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert not torch.equal(made.run(inputs)[0][:1], made.run(inputs[:1])[0])
    assert made.check_row_wise() == []


@pytest.mark.parametrize("mode", quickly(["fused"], of=["fused", "bfloat16"]))
def test_every_ready_made_cell_passes(mode: str) -> None:
    dtype = MODES[mode].dtype
    for name, case in CASES.items():
        module = case.make()
        specs = specs_in(dtype, specs_of(case, module))
        assert cell(module.to(dtype) if isinstance(module, nn.Module) else module, specs).check_row_wise() == [], name


def test_the_check_draws_no_number_of_anybody_else() -> None:
    made = cell(lambda h: h + torch.rand(h.shape), ROW)
    before = torch.random.get_rng_state()
    with pytest.warns(RuntimeWarning, match="random on purpose"):
        made.check_row_wise()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_registration_tells_each_new_cell_once(engine: Engine) -> None:
    mixes = cell(MIXED["the mean of the batch"], ROW, name="mixes")
    first, second = (model(lambda graph, h: {"y": mixes(h=h).y}, torch.ones(SIZE), name=name) for name in ("a", "b"))
    with pytest.warns(RuntimeWarning, match="cell 'mixes', output 'y'") as told:
        engine.register(first)
    assert told[0].filename == __file__
    engine.register(second)


def test_registration_without_warm_up_runs_no_cell(engine: Engine) -> None:
    mixes = cell(MIXED["the mean of the batch"], ROW)
    engine.register(model(lambda graph, h: {"y": mixes(h=h).y}, torch.ones(SIZE)), warm_up=False)


def never(h: torch.Tensor) -> torch.Tensor:
    if h.device.type != "meta":
        raise ValueError("not today")
    return h


RAISING = {
    "weights of another dtype": (lambda: nn.Linear(SIZE, SIZE).double(), "and on zeros: .*weights of float64, and no"),
    "half weights": (lambda: nn.Linear(SIZE, SIZE).half(), "and on zeros: .*weights of float16, and no"),
    "no weights": (lambda: nn.Linear(SIZE, SIZE, device="meta"), "and on zeros: .*device meta, and so have no values"),
    "all rows": (lambda: never, "and on zeros: ValueError: not today. Requests"),
    "some rows": (lambda: refuse, r"of \(h: float32\[\d+\]\): ValueError: zeros, please"),
}


@pytest.mark.parametrize("kind", RAISING)
def test_registration_tells_once_of_a_cell_that_raises(engine: Engine, kind: str) -> None:
    make, told_of = RAISING[kind]
    raises = cell(make(), ROW, name="raises")
    first, second = (
        model(lambda graph, h: {"y": raises(h=h).output}, torch.ones(SIZE), name=f"{kind} {k}") for k in range(2)
    )
    with pytest.warns(RuntimeWarning, match="cell 'raises' raised on random rows .*" + told_of) as told:
        engine.register(first)
    assert [each.filename for each in told] == [__file__]
    engine.register(second)
