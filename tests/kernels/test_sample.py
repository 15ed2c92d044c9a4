"""Sampling by kernels, against the ready-made cell and the reference; and what is drawn, against its probabilities."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from cellrt import cells
from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder
from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.sample import MOST_TOKENS, Sampling, reference, sample
from tests.effort import quickly
from tests.engine.helpers import close_and_check
from tests.engine.test_cuda_worker import device_engine, serve
from tests.kernels.ahead import Launch, compile_everywhere, needs_compiler, recorded_launches
from tests.kernels.projections import UNTOUCHED, in_order, outputs

END = 3
NUMBER = rows(dtype=torch.int64)
KINDS = [
    Sampling(END),
    Sampling(END, temperature=0.7, top_k=5),
    Sampling(END, top_p=0.8),
    Sampling(END, temperature=2.0, top_k=40, top_p=0.6),
    Sampling(END, top_k=1),
]


def numbers(count: int, device: str, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-(2**63), 2**63 - 1, (count,), generator=generator).to(device)


def draw(logits: Tensor, sampling: Sampling, seeds: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    tokens, stops = outputs(len(logits), str(logits.device))
    given = (in_order(values) for values in (logits, seeds, steps))
    sample(*given, sampling, in_order(tokens), in_order(stops))
    return tokens, stops


def make_cell(sampling: Sampling) -> cells.Sample:
    end_token, temperature, top_k, top_p = sampling
    return cells.Sample(end_token, temperature=temperature, top_k=top_k, top_p=top_p)


SHAPES = [(1, torch.float32), (17, torch.bfloat16), (2048, torch.float32), (4100, torch.float32)]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("tokens", "dtype", "sampling"),
    quickly(
        [
            *((*SHAPES[1], kind) for kind in KINDS),
            (*SHAPES[0], KINDS[0]),
            (*SHAPES[2], KINDS[4]),
            (*SHAPES[3], KINDS[3]),
        ],
        of=((*shape, kind) for shape, kind in product(SHAPES, KINDS)),
    ),
    ids=str,
)
def test_tokens_are_those_of_the_cell(device: str, dtype: torch.dtype, tokens: int, sampling: Sampling) -> None:
    """With the same seed and step; one part of a row, a full one, and several."""
    torch.manual_seed(tokens)
    logits = (3 * torch.randn(2, tokens)).to(dtype)
    seeds, steps = numbers(2, "cpu"), torch.arange(2)
    expected = make_cell(sampling)(logits, seeds, steps)
    chosen, stops = draw(logits.to(device), sampling, seeds.to(device), steps.to(device))
    assert chosen.tolist() == expected.token.tolist()
    assert stops.tolist() == expected.stop.tolist()


@pytest.mark.parametrize("sampling", KINDS, ids=str)
def test_the_reference_is_the_cell(sampling: Sampling) -> None:
    torch.manual_seed(1)
    logits, seeds, steps = 3 * torch.randn(300, 50), numbers(300, "cpu"), torch.arange(300)
    tokens, stops = outputs(300, "cpu")
    given = (in_order(values) for values in (logits, seeds, steps))
    reference.sample(*given, sampling, in_order(tokens), in_order(stops))
    expected = make_cell(sampling)(logits, seeds, steps)
    assert tokens.tolist() == expected.token.tolist() and stops.tolist() == expected.stop.tolist()


@pytest.mark.parametrize("sampling", KINDS[:4], ids=str)
def test_tokens_are_drawn_as_often_as_they_are_likely(sampling: Sampling) -> None:
    """By the reference, whose tokens the kernel's are. A chi-squared test over what is kept, at five deviations."""
    logits = torch.linspace(-2, 2, 12)[torch.randperm(12, generator=torch.Generator().manual_seed(4))]
    count = 40_000
    drawn = (numbers(count, "cpu", seed) for seed in (5, 6))
    chosen, _ = draw(logits.expand(count, -1).contiguous(), sampling, *drawn)
    likely = make_cell(sampling).probabilities(logits[None])[0].double()
    likely /= likely.sum()
    found = torch.bincount(chosen, minlength=12)
    assert not found[likely == 0].any()
    expected = count * likely[likely > 0]
    freedom = len(expected) - 1
    surprise = float(((found[likely > 0] - expected) ** 2 / expected).sum())
    assert surprise <= freedom + 5 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("runs", [True, False])
def test_the_cell_runs_by_it_where_there_is_a_device(runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cellrt.cells._fused.has_device", lambda: True)
    made = cell(make_cell(KINDS[3]), {"logits": (30,), "seed": NUMBER, "step": NUMBER}, max_batch=8)

    def unfold(graph: Graph, request: dict[str, Tensor]) -> dict[str, object]:
        chain = graph.chain(made, logits=request["logits"], seed=request["seed"], step=request["step"])
        return {"tokens": chain.token, "stops": chain.stop}

    requests = [
        {"logits": torch.randn(n, 30), "seed": numbers(n, "cpu", n), "step": torch.arange(n)} for n in (2, 5, 3, 1, 4)
    ]
    model = Unfolder("sample", unfold, requests[0])
    engine = device_engine("dry", 1, settings=SchedulerSettings(runs=runs, join_budget_s=1.0))
    engine.register(model, warm_up=False)
    placed = engine._manager.workers[0]._device.placements.of(made)
    assert placed.run_rows is not None and placed.reads_spans
    serve(engine, model, requests)
    assert engine._manager.workers[0]._executor.counts()["unfused"] == 0
    close_and_check(engine)


def test_the_cell_takes_rows_of_logits_and_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    module = make_cell(KINDS[0])
    good, made = {"logits": rows(30), "seed": NUMBER, "step": NUMBER}, {"token": NUMBER, "stop": rows(dtype=torch.bool)}
    assert not module.can_run_rows(good, made)  # there is no device here
    monkeypatch.setattr("cellrt.cells._fused.has_device", lambda: True)
    assert module.can_run_rows(good, made)
    for bad in (rows(3, 10), rows(30, dtype=torch.float64), rows(MOST_TOKENS + 1)):
        assert not module.can_run_rows(good | {"logits": bad}, made)
    assert not module.can_run_rows(good | {"seed": rows(1, dtype=torch.int64)}, made)


def test_a_row_alone_and_in_company_draws_the_same(device: str) -> None:
    torch.manual_seed(2)
    logits, seeds, steps = torch.randn(4, 300), numbers(4, device), torch.zeros(4, dtype=torch.int64)
    logits, steps = logits.to(device), steps.to(device)
    together, _ = draw(logits, KINDS[3], seeds, steps)
    alone = [draw(logits[k : k + 1], KINDS[3], seeds[k : k + 1], steps[k : k + 1])[0].item() for k in (0, 3)]
    assert together[[0, 3]].tolist() == alone


@pytest.mark.slow
def test_equally_likely_tokens_are_kept_together(device: str) -> None:
    """Of a hundred, three are equal and the best: all are drawn, with top-k and top-p of less."""
    logits = torch.zeros(6, 100)
    logits[:, 40:43] = 30.0
    for sampling in (Sampling(END, top_k=2), Sampling(END, top_p=0.05)):
        chosen, _ = draw(logits.to(device), sampling, numbers(6, device), numbers(6, device, 1))
        assert set(chosen.tolist()) == set(range(40, 43))


@pytest.mark.parametrize("is_reference", quickly([False], of=[False, True]))
def test_spans_and_negative_rows_are_minded(device: str, is_reference: bool) -> None:
    run = reference.sample if is_reference else sample
    torch.manual_seed(3)
    logits, seeds, steps = torch.randn(5, 40, device=device), numbers(5, device), torch.arange(5, device=device)
    expected, _ = draw(logits, KINDS[3], seeds, steps)
    index = torch.tensor([9, 9, 4, 0, 2, 9, 9, 9], device=device)
    to = torch.tensor([0, 0, 3, -1, 1, 0, 0, 0], device=device)
    span = torch.tensor([2, 3], device=device)
    tokens, stops = outputs(4, device)
    given = (ArenaRows(values, index, 6, span) for values in (logits, seeds, steps))
    run(*given, KINDS[3], *(ArenaRows(values, to, 6, span) for values in (tokens, stops)))
    assert tokens.tolist() == [UNTOUCHED, expected[2].item(), UNTOUCHED, expected[4].item()]
    assert stops.tolist() == [True, expected[2].item() == END, True, expected[4].item() == END]


@pytest.mark.parametrize("is_reference", quickly([False], of=[False, True]))
@pytest.mark.parametrize("tokens", [40, 2100])
@pytest.mark.slow
def test_logits_may_be_in_order_and_the_next_step_is_told(device: str, tokens: int, is_reference: bool) -> None:
    run = reference.sample if is_reference else sample
    torch.manual_seed(5)
    logits, seeds, steps = torch.randn(3, tokens, device=device), numbers(5, device), torch.arange(5, device=device)
    expected, _ = draw(logits, KINDS[3], seeds[[4, 0, 2]], steps[[4, 0, 2]])
    index = torch.tensor([9, 4, 0, 2, 9, 9, 9, 9], device=device)
    to = torch.tensor([0, 3, -1, 1, 0, 0, 0, 0], device=device)
    span = torch.tensor([1, 3], device=device)
    (tokens_made, stops), (nexts, _) = outputs(4, device), outputs(4, device)
    given = (ArenaRows(values, index, 3, span) for values in (seeds, steps))
    run(logits, *given, KINDS[3], *(ArenaRows(values, to, 3, span) for values in (tokens_made, stops, nexts)))
    assert tokens_made.tolist() == [UNTOUCHED, expected[2].item(), UNTOUCHED, expected[0].item()]
    assert nexts.tolist() == [UNTOUCHED, 3, UNTOUCHED, 5]


@pytest.mark.parametrize("worst", quickly([torch.nan], of=[torch.nan, torch.inf, -torch.inf]))
def test_a_row_that_is_not_finite_draws_some_token_and_disturbs_nobody(device: str, worst: float) -> None:
    torch.manual_seed(4)
    logits, seeds, steps = torch.randn(3, 100, device=device), numbers(3, device), torch.arange(3, device=device)
    expected, _ = draw(logits, KINDS[3], seeds, steps)
    logits[1] = worst
    chosen, _ = draw(logits, KINDS[3], seeds, steps)
    assert chosen[[0, 2]].tolist() == expected[[0, 2]].tolist()
    assert 0 <= chosen[1].item() < 100


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": torch.zeros(2, 4, dtype=torch.int64)}, "logits must be rows of 1 to"),
        ({"seed": torch.zeros(2)}, "seed must be contiguous torch.int64"),
        ({"step": torch.zeros(3, dtype=torch.int64)}, "step must name 2 rows, got 3"),
        ({"stop": torch.zeros(2)}, "stop must be contiguous torch.bool"),
        ({"next_step": torch.zeros(2)}, "next_step must be contiguous torch.int64"),
    ],
)
def test_what_does_not_fit_is_refused(changed: dict[str, Tensor], message: str) -> None:
    number = torch.zeros(2, dtype=torch.int64)
    good: dict[str, Any] = {"logits": torch.zeros(2, 4), "seed": number, "step": number, "token": number.clone()}
    good["stop"] = torch.zeros(2, dtype=torch.bool)
    with pytest.raises(ValueError, match=message):
        sample(sampling=KINDS[0], **{name: in_order(value) for name, value in (good | changed).items()})


def launched(dtype: torch.dtype, tokens: int, sampling: Sampling, in_arena: bool) -> list[Launch]:
    """The launches of a step of loops."""
    from cellrt.kernels.sample import triton

    number, span = torch.zeros(4, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)
    values = torch.empty(4, tokens, dtype=dtype, device="meta")
    stop = ArenaRows(torch.zeros(4, dtype=torch.bool), number, 4, span)
    drawn = ArenaRows(number, number, 4, span)
    logits = ArenaRows(values, number, 4, span) if in_arena else values
    with recorded_launches() as launches:
        triton.sample(logits, drawn, drawn, sampling, drawn, stop, None if in_arena else drawn)
    return launches


@needs_compiler
@pytest.mark.parametrize(("tokens", "count"), [(5, 1), (2048, 1), (2049, 21)])
def test_a_row_that_is_one_part_takes_one_launch(tokens: int, count: int) -> None:
    """With top-k and top-p."""
    assert len(launched(torch.float32, tokens, KINDS[3], False)) == count


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("in_arena", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_passes_compile_without_spills(dtype: torch.dtype, in_arena: bool) -> None:
    launches = launched(dtype, 50_001, Sampling(END, 0.7, 40, 0.9), in_arena)
    different = {launch.key: launch for launch in launches}
    assert len(launches) == 1 + 2 * 9 + 2 and len(different) == 7
    for tokens in (74, 1025, 2048):
        different |= {launch.key: launch for kind in KINDS for launch in launched(dtype, tokens, kind, in_arena)}
    for compiled in compile_everywhere(list(different.values())):
        assert compiled.stack_bytes == 0, compiled.name
