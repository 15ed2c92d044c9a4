"""Cells that write to their inputs in place, or return them, give the same answers as cells that do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell, load_cell
from cellrt.definition.spec import RaggedRows, ragged, rows
from cellrt.errors import CellError, DefinitionError
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.executor import DeviceOptions
from tests.api.models import SIZE, model
from tests.effort import examples
from tests.engine.helpers import small_engine

H = {"h": (SIZE,)}
X = {"x": (SIZE,)}
KINDS: dict[str, dict[str, Any]] = {
    "cpu": {"workers": 1},
    "single steps": {"workers": 1, "settings": SchedulerSettings(runs=False)},
    "dry": {"workers": ["dry"]},
    "dry and compiled": {"workers": ["dry"], "device_options": DeviceOptions(compiled=True, compile_backend="eager")},
}
every_kind = pytest.mark.parametrize("kind", KINDS)


class Preactivated(nn.Module):
    """``h' = W relu(h) + x``, with the activation in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.activation, self.linear = nn.ReLU(inplace=in_place), nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": self.linear(self.activation(h)) + x}


class PreactivatedSteps(Preactivated):
    """The same with a steps-first form that writes to its inputs."""

    def steps(self, batch_sizes: list[int], x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        made, first = [], 0
        for size in batch_sizes:
            h = self.linear(h[:size].relu_()).add_(x[first : first + size])
            made.append(h.clone())
            first += size
        x.zero_()
        return {"h": torch.cat(made)}


def chain_by_hand(x: torch.Tensor) -> torch.Tensor:
    """What a chain of ``Preactivated`` gives, in plain torch."""
    module, h, made = Preactivated(in_place=False), torch.zeros(SIZE), []
    with torch.no_grad():
        for row in x:
            h = module(row[None], h[None])["h"][0]
            made.append(h)
    return torch.stack(made)


def serve(kind: str, unfolder: Unfolder, requests: list[Any]) -> list[Any]:
    """Results, or errors, of requests that are served together."""
    with small_engine(**KINDS[kind], arena_bytes=1 << 18) as engine:
        engine.register(unfolder)
        futures = engine.submit_many(unfolder.name, requests)
        return [future.exception(60) or future.result(60) for future in futures]


@pytest.mark.one_in(2)
@every_kind
@pytest.mark.parametrize("make", [Preactivated, PreactivatedSteps])
def test_an_activation_in_place_works_in_chains(make: Callable[[bool], nn.Module], kind: str) -> None:
    made = cell(make(True), {**X, **H})
    unfolder = model(lambda graph, x: {"h": graph.chain(made, x=x).h}, torch.zeros(2, SIZE))
    requests = [torch.randn(1 + k % 6, SIZE) for k in range(12)]
    for request, result in zip(requests, serve(kind, unfolder, requests)):
        torch.testing.assert_close(result["h"], chain_by_hand(request), rtol=1e-5, atol=1e-5)


@every_kind
def test_the_fixed_input_of_a_loop_may_be_written_to(kind: str) -> None:
    def step(x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": h.add_(x.mul_(2))}

    made = cell(step, {**X, **H})
    unfolder = model(lambda graph, x: {"h": graph.loop(made, max_steps=4, x=x).h}, torch.zeros(SIZE))
    requests = [torch.full((SIZE,), float(k)) for k in range(5)]
    for request, result in zip(requests, serve(kind, unfolder, requests)):
        assert torch.equal(result["h"], torch.stack([2 * step * request for step in (1, 2, 3, 4)]))


@pytest.mark.one_in(2)
@every_kind
@pytest.mark.parametrize("inputs", [{"x": ()}, {"x": (), "others": ragged()}], ids=["plain", "ragged"])
@pytest.mark.filterwarnings("ignore:cell 'halve' is not compiled")
def test_a_write_before_an_error_costs_nobody_else(inputs: dict[str, Any], kind: str) -> None:
    def halve(x: torch.Tensor, others: object = None) -> torch.Tensor:
        is_bad = x > 100
        x /= 2
        if x.device.type == "cpu" and bool(is_bad.any()):
            raise ValueError("too large")
        return x + 0

    made = cell(halve, inputs)
    others = {name: [] for name in inputs if name != "x"}
    unfolder = model(lambda graph, x: {"y": made(x=x, **others).output}, 0.0)
    results = serve(kind, unfolder, [float(k) if k != 13 else 150.0 for k in range(32)])
    assert isinstance(results[13], CellError) and "too large" in str(results[13])
    assert [float(result["y"]) for k, result in enumerate(results) if k != 13] == [k / 2 for k in range(32) if k != 13]


def written(function: Callable[..., Any], inputs: dict[str, Any]) -> set[str]:
    return cell(function, inputs).written


def under_a_condition(x: torch.Tensor) -> torch.Tensor:
    if bool((x > 0.5).any()):
        x.clamp_(max=0.5)
    return x + 1


def through_numpy(x: torch.Tensor) -> torch.Tensor:
    x.numpy()[...] += 1
    return 2 * x


def of_children(x: torch.Tensor, h: RaggedRows) -> torch.Tensor:
    h.values.tanh_()
    return x + 0


class OtherData(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.data.fill_(3)
        return x + 0


@pytest.mark.parametrize(
    ("function", "inputs", "expected"),
    [
        (lambda x, h: x + h, {**X, **H}, set()),
        (lambda x, h: x.add_(h), {**X, **H}, {"x"}),
        (lambda x, h: x + h[:, :2].zero_().sum(1, True), {**X, **H}, {"h"}),
        (lambda *given: given[0] + given[1].relu_(), {**X, **H}, {"h"}),
        (lambda x: x.t_().sum(0), X, {"x"}),
        (under_a_condition, X, {"x"}),
        (through_numpy, X, {"x"}),
        (of_children, {**X, "h": ragged(SIZE)}, {"h"}),
        (lambda h: h.offsets.diff() + h.offsets.zero_()[1:], {"h": ragged(SIZE)}, {"h"}),
        (lambda x: x.masked_fill_(x == 1, 5), {"x": rows(dtype=torch.int64)}, {"x"}),
        (lambda x: x.logical_not_(), {"x": rows(2, dtype=torch.bool)}, {"x"}),
        (OtherData(), X, {"x"}),
        (PreactivatedSteps(False), {**X, **H}, {"x", "h"}),
    ],
)
def test_the_trial_finds_what_is_written_to(function: Any, inputs: dict[str, Any], expected: set[str]) -> None:
    assert written(function, inputs) == expected


@pytest.mark.parametrize("sizes", [None, [4, 8]])
def test_a_run_leaves_its_inputs_alone(sizes: list[int] | None) -> None:
    made = cell(lambda x: x.mul_(2), X, batch_sizes=sizes)
    x = torch.ones(3, SIZE)
    assert torch.equal(made.run_padded([x])[0], 2 * x) and torch.equal(x, torch.ones(3, SIZE))


SWITCH: list[bool] = []


@pytest.mark.parametrize("sizes", [None, [4, 8]])
def test_registration_finds_what_the_definition_did_not(sizes: list[int] | None) -> None:
    def shy(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1) if SWITCH else x + 1

    made = cell(shy, X, batch_sizes=sizes)
    assert made.written == set()
    SWITCH.append(True)
    try:
        assert made.check_row_wise() == []
    finally:
        SWITCH.clear()
    assert made.written == {"x"}


class Keeping(nn.Module):
    """Writes to a weight of its own where the input is not zero."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SIZE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool(x.any()):
            self.weight += 1
        return x * self.weight


def test_a_state_of_its_own_that_shows_on_random_rows_alone_is_refused() -> None:
    with pytest.raises(DefinitionError, match=r"writes to its own \['weight'\]"):
        cell(Keeping(), X)


def test_the_trial_leaves_no_trace_in_the_cell() -> None:
    class Caching(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen = x
            return x + 1

    made = cell(Caching(), X)
    assert not hasattr(made.module, "seen")


def test_a_saved_cell_that_writes_to_its_inputs(tmp_path: Path) -> None:
    made = cell(lambda x, h: {"h": h.relu_().add_(x), "x": x.mul_(2)}, {**X, **H})
    made.save(tmp_path)
    x, h = torch.randn(3, SIZE), torch.randn(3, SIZE)
    results = load_cell(tmp_path).run(x, h)
    for result, expected in zip(results, made.run(x, h)):
        torch.testing.assert_close(result, expected)


PASSING: dict[str, Callable[..., Any]] = {
    "an input itself": lambda x, h: {"h": h, "y": x},
    "the other input": lambda x, h: {"h": x, "y": h},
    "one tensor twice": lambda x, h: {"h": x, "y": x},
    "views": lambda x, h: {"h": h.flip(1).view_as(h), "y": x[:, ::2]},
    "an input written to": lambda x, h: {"h": h.add_(1), "y": x.relu_()},
    "expanded": lambda x, h: {"h": h[:, :1].expand(-1, SIZE), "y": x[:, None, :1].expand(-1, 3, SIZE)},
}


@pytest.mark.one_in(3)
@every_kind
@pytest.mark.parametrize("passing", PASSING)
def test_an_input_may_be_returned(passing: str, kind: str) -> None:
    function = PASSING[passing]
    made = cell(function, {**X, **H})

    def write(graph: Any, x: torch.Tensor) -> dict[str, Any]:
        chain = graph.chain(made, x=x, h=x[0])
        loop = graph.loop(made, max_steps=3, x=x[0], h=chain.last.h)
        return {"chain": chain.h, "y": chain.y, "loop": loop.h, "last": loop.last.y}

    requests = [torch.randn(1 + k % 5, SIZE) for k in range(10)]
    for x, result in zip(requests, serve(kind, model(write, requests[2]), requests)):
        h, made_h, made_y = x[0], [], []
        for row in x:
            outputs = function(row[None].clone(), h[None].clone())
            h = outputs["h"][0].clone()
            made_h.append(h)
            made_y.append(outputs["y"][0].clone())
        assert torch.equal(result["chain"], torch.stack(made_h)) and torch.equal(result["y"], torch.stack(made_y))
        made_h.clear()
        for _ in range(3):
            outputs = function(x[:1].clone(), h[None].clone())
            h = outputs["h"][0].clone()
            made_h.append(h)
        assert torch.equal(result["loop"], torch.stack(made_h)) and torch.equal(result["last"], outputs["y"][0])


OPERATIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "add": lambda a, b: a.add_(b),
    "relu": lambda a, b: a.relu_(),
    "part": lambda a, b: a[:, 1:].mul_(0.5),
    "swap": lambda a, b: a.copy_(b.flip(1)),
    "plain": lambda a, b: a + b,
}


@settings(max_examples=examples(15), deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(sorted(OPERATIONS)), st.booleans()), min_size=1, max_size=5),
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
    st.sampled_from(["cpu", "single steps", "dry"]),
)
def test_any_writes_are_as_if_each_step_had_its_own_inputs(
    operations: list[tuple[str, bool]], lengths: list[int], kind: str
) -> None:
    def compute(x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        for name, swaps in operations:
            a, b = (h, x) if swaps else (x, h)
            made = OPERATIONS[name](a, b)
        return {"h": (x + h).tanh_(), "y": made, "z": x}

    made: Cell = cell(compute, {**X, **H})
    unfolder = model(
        lambda graph, x: {"h": graph.chain(made, x=x).h, "z": graph.chain(made, x=x).z}, torch.ones(2, SIZE)
    )
    requests = [torch.randn(length, SIZE, generator=torch.Generator().manual_seed(length)) for length in lengths]
    for x, result in zip(requests, serve(kind, unfolder, requests)):
        h = torch.zeros(SIZE)
        for k, row in enumerate(x):
            outputs = compute(row[None].clone(), h[None].clone())
            h = outputs["h"][0].clone()
            torch.testing.assert_close(result["h"][k], h)
            torch.testing.assert_close(result["z"][k], outputs["z"][0])
