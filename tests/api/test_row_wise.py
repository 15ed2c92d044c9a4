"""A cell whose rows influence each other is refused when its model is registered; a cell that is row-wise never is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from cellrt.cells import GRUCell
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell, load_cell
from cellrt.definition.spans import PagedRows
from cellrt.definition.spec import RaggedRows, grows, ragged, rows
from cellrt.engine.engine import Engine
from cellrt.errors import DefinitionError
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


def test_a_cell_whose_form_keeps_rows_apart_is_not_tried_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []
    monkeypatch.setattr("cellrt.engine.registration.refuse_unless_row_wise", lambda made: tried.append(made.name))
    with_form = cell(GRUCell(SIZE, SIZE), {"x": (SIZE,), "h": (SIZE,)}, name="gru")
    plain = cell(lambda h: {"y": h.tanh()}, ROW, name="plain")

    def both(graph: Any, x: torch.Tensor) -> dict[str, Any]:
        return {"y": plain(h=with_form(x=x, h=x).h).y}

    with Engine(1) as engine:
        engine.register(model(both, torch.zeros(SIZE)))
    assert tried == ["plain"]


class QuantizedGRU(nn.Module):
    """A GRU cell whose activations share one scale."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(SIZE, 16)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.cell(x, h)


def largest_of(x: torch.Tensor) -> torch.Tensor:
    return x.abs().max()


BY_SCALE = {
    "the largest": lambda x: x / largest_of(x),
    "one scale for all": lambda x: torch.round(x * 127 / largest_of(x)) * largest_of(x) / 127,
    "torch's own": lambda x: torch.fake_quantize_per_tensor_affine(x, float(largest_of(x)) / 127 + 1e-9, 0, -128, 127),
    "a limit that only large rows reach": lambda x: 2 * x if largest_of(x) > 100 else x,
    "a limit that only small rows reach": lambda x: 2 * x if x.abs().amax(1).min() < 0.01 else x,
    "rows of zeros": lambda x: x if (x != 0).any(1).all() else x + 1,
    "a clipped norm": lambda x: x * min(1.0, 50 / float(x.norm() + 1e-9)),
    "a little of the mean": lambda x: x + 0.001 * x.mean(0),
    "a damped mean": lambda x: x * (1 + 0.01 * torch.tanh(x.mean())),
    "sums that cancel out": lambda x: x.cumsum(0) - nn.functional.pad(x.cumsum(0)[:-1], (0, 0, 1, 0)),
    "sorted rows": lambda x: x.sort(0).values,
    "a norm over rows": lambda x: nn.functional.normalize(x, dim=0),
}


@pytest.mark.parametrize("kind", BY_SCALE)
def test_a_cell_that_mixes_rows_by_their_scale_is_refused(engine: Engine, kind: str) -> None:
    mixes = cell(BY_SCALE[kind], {"x": (SIZE,)}, name="mixes")
    with pytest.raises(DefinitionError, match="cell 'mixes', output 'output': the rows of a batch influence each"):
        engine.register(model(lambda graph, x: {"y": mixes(x=x).output}, torch.ones(SIZE)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["the largest", "one scale for all", "a limit that only small rows reach"])
def test_mixing_by_scale_is_found_in_every_precision(kind: str, dtype: torch.dtype) -> None:
    with pytest.warns(RuntimeWarning, match="the rows of a batch influence"):
        cell(BY_SCALE[kind], {"x": rows(SIZE, dtype=dtype)}).check_row_wise()


@pytest.mark.filterwarnings("ignore:torch.*quantiz")
@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (lambda: nn.Sequential(nn.Linear(SIZE, 16), nn.ReLU(), nn.Linear(16, 4)), {"input": (SIZE,)}),
        (QuantizedGRU, {"x": (SIZE,), "h": (16,)}),
    ],
)
def test_a_dynamically_quantized_module_is_refused_with_what_to_do(make, inputs) -> None:
    torch.manual_seed(0)
    quantized = torch.ao.quantization.quantize_dynamic(make(), {nn.Linear, nn.GRUCell})
    with pytest.warns(RuntimeWarning, match="take one scale for a whole batch: give the module that it was made of"):
        cell(quantized, inputs).check_row_wise()


def test_the_input_that_makes_the_difference_is_named() -> None:
    made = cell(lambda x, y, z: x + 1e-4 * y.mean(0) + z, {"x": (SIZE,), "y": (SIZE,), "z": (SIZE,)})
    with pytest.warns(RuntimeWarning, match="a row gives .* alone and .* beside rows 1000 times as large .* in 'y'. A"):
        made.check_row_wise()


def test_tokens_that_mix_are_found() -> None:
    table = nn.Embedding(5, SIZE)
    with pytest.warns(RuntimeWarning, match="beside rows like it in 'token'"):
        cell(lambda token: table(token) - table(token).mean(0), {"token": rows(dtype=torch.int64)}).check_row_wise()


def test_pages_of_other_nodes_that_are_larger_are_found() -> None:
    def largest(x: torch.Tensor, memory: PagedRows) -> torch.Tensor:
        memory.append(x)
        return x / (1 + memory.pages.abs().amax())

    with pytest.warns(RuntimeWarning, match="a row gives .* beside rows like it in 'x' or 'memory'"):
        cell(largest, {"x": (SIZE,), "memory": grows(SIZE, page_size=2)}).check_row_wise()


def test_a_cell_that_says_that_it_mixes_rows_is_registered(engine: Engine, tmp_path: Path) -> None:
    mixes = cell(lambda h: h - h.mean(0), ROW, name="mixes", row_wise=False)
    engine.register(model(lambda graph, h: {"y": mixes(h=h).output}, torch.ones(SIZE)))
    mixes.save(tmp_path)
    assert not load_cell(tmp_path).declaration.row_wise


def test_a_cell_that_says_that_it_mixes_rows_excuses_no_other(engine: Engine) -> None:
    for name, row_wise in (("known", False), ("unknown", True)):
        scale = torch.ones(SIZE) + row_wise
        made = cell(lambda h, scale=scale: scale * (h - h.mean(0)), ROW, name=name, row_wise=row_wise)
        unfolder = model(lambda graph, h, made=made: {"y": made(h=h).output}, torch.ones(SIZE), name=name)
        with nullcontext() if not row_wise else pytest.raises(DefinitionError, match="cell 'unknown'"):
            engine.register(unfolder)


def test_whether_a_cell_is_row_wise_is_said_by_a_bool() -> None:
    with pytest.raises(DefinitionError, match="cell 'x': expected row_wise=True or False, got 'no'"):
        cell(torch.tanh, {"input": (3,)}, name="x", row_wise="no")  # type: ignore[arg-type]


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


class Attends(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)

    def forward(self, query: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        return self.attention(query[:, None], memory, memory, need_weights=False)[0][:, 0]


class Residual(nn.Module):
    """Layers of a Transformer without attention, and what is made of logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)
        )

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        score = x.logsumexp(1) - x.amax(1)
        return {"x": x, "p": x.softmax(1), "log": x.log_softmax(1), "best": x.argmax(1), "score": score}


class Autocast(nn.Module):
    """Computes in bfloat16 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.layers(x).float()


def after_linear(function: Callable[[torch.Tensor], Any], outputs: int = 64) -> Callable[[torch.Tensor], Any]:
    """A function of what a layer makes, whose last places depend on the number of rows."""
    layer = nn.Linear(64, outputs)
    return lambda x: function(layer(x))


def quantize_rows(x: torch.Tensor) -> torch.Tensor:
    scales = x.abs().amax(1, keepdim=True) / 127 + 1e-9
    return torch.round(x / scales) * scales


def sequence(module: nn.Module) -> Callable[[torch.Tensor], Any]:
    return lambda x: module(x)[0]


TABLE, X = torch.arange(50 * 64, dtype=torch.float32).sin().view(50, 64), {"x": (64,)}
HONEST: dict[str, tuple[Callable[[], Callable[..., Any]], dict[str, Any]]] = {
    "layer norm": (lambda: nn.LayerNorm(SIZE), {"input": (SIZE,)}),
    "batch norm": (lambda: nn.BatchNorm1d(SIZE), {"input": (SIZE,)}),
    "group norm": (lambda: nn.GroupNorm(2, 8), {"input": (8, 5)}),
    "softmax": (lambda: nn.Softmax(1), {"input": (SIZE,)}),
    "attention": (Attends, {"query": (16,), "memory": (7, 16)}),
    "an encoder's layer": (lambda: nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), {"src": (5, 16)}),
    "GRU cell": (lambda: nn.GRUCell(SIZE, 64), {"input": (SIZE,), "hx": (64,)}),
    "GRU": (lambda: sequence(nn.GRU(SIZE, 64, 2, batch_first=True)), {"x": (9, SIZE)}),
    "LSTM": (lambda: sequence(nn.LSTM(SIZE, 64, 2, batch_first=True)), {"x": (9, SIZE)}),
    "embedding": (lambda: nn.Embedding(9, SIZE), {"input": rows(dtype=torch.int64)}),
    "embedding of one": (lambda: nn.Embedding(1, SIZE), {"input": rows(dtype=torch.int64)}),
    "dropout": (lambda: nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)), {"input": (64,)}),
    "convolution": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten()), {"input": (3, 8, 8)}),
    "exp": (lambda: after_linear(torch.exp), X),
    "log": (lambda: after_linear(torch.log), X),
    "sine of large numbers": (lambda: after_linear(lambda y: torch.sin(1e4 * y)), X),
    "argmax": (lambda: after_linear(lambda y: y.argmax(1), 1000), X),
    "best five": (lambda: after_linear(lambda y: tuple(y.topk(5))), X),
    "signs": (lambda: after_linear(torch.sign), X),
    "whole numbers": (lambda: after_linear(torch.round), X),
    "a scale for each row": (lambda: after_linear(quantize_rows), X),
    "a norm of each row": (lambda: after_linear(nn.functional.normalize), X),
    "the nearest": (lambda: after_linear(lambda y: torch.cdist(y, TABLE).argmin(1)), X),
    "variance by moments": (lambda: after_linear(lambda y: (y * y).mean(1) - y.mean(1) ** 2), X),
    "a spectrum": (lambda: after_linear(lambda y: torch.view_as_real(torch.fft.rfft(y)).flatten(1)), X),
    "residual": (Residual, X),
    "autocast": (Autocast, {"x": (256,)}),
}


@pytest.mark.parametrize("kind", HONEST)
def test_an_honest_cell_is_not_told(kind: str) -> None:
    torch.manual_seed(0)
    make, inputs = HONEST[kind]
    assert cell(make(), inputs).check_row_wise() == []


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [Residual, lambda: nn.Linear(64, 64), lambda: nn.GRUCell(64, 64)])
def test_an_honest_cell_of_another_precision_is_not_told(make, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    assert cell(make().to(dtype), {"x": rows(64, dtype=dtype)}).check_row_wise() == []


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
    with pytest.warns(RuntimeWarning, match="draws numbers.*on purpose, say it: cellrt.cell.*row_wise=False"):
        made.check_row_wise()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_registration_refuses_it_and_serves_the_others(engine: Engine) -> None:
    mixes = cell(MIXED["the mean of the batch"], ROW, name="mixes")
    good = cell(lambda h: {"y": h + 1}, ROW, name="good")
    refused, taken = (
        model(lambda graph, h, one=one: {"y": one(h=h).y}, torch.ones(SIZE), name=one.name) for one in (mixes, good)
    )
    for _ in range(2):
        with pytest.raises(DefinitionError, match="cell 'mixes', output 'y'"):
            engine.register(refused)
    engine.register(taken)
    assert torch.equal(engine.submit("good", torch.ones(SIZE)).result(timeout=60)["y"], torch.full((SIZE,), 2.0))


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
