"""The GPU form of the ready-made cells gives what their plain form gives, and is used where it can be.

Here ``run_rows`` runs the kernels' references; one test interprets the kernels.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cellrt import cells
from cellrt.cells._fused import choose_rows, chosen_precision
from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.definition.fused import IndexedRows, RunSizes, is_reading_outputs
from cellrt.definition.spec import RaggedRows, RowSpec, ragged, rows
from cellrt.engine.engine import Engine
from cellrt.graph.graph import Graph
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.device.placement import PlacedCell
from tests.engine.helpers import SMALL, WAIT_S, assert_same
from tests.kernels.interpreter import set_up

SIZE, HIDDEN, TOKENS, END, WORDS = 5, 11, 3, 1, 7
STATE = {"h": rows(HIDDEN), "c": rows(HIDDEN)}
LAYERS = {"h": rows(3, HIDDEN), "c": rows(3, HIDDEN)}
X = {"x": rows(SIZE)}
TOKEN = {"token": rows(dtype=torch.int64)}
CHILDREN = {f"{name}_{side}": spec for side in ("left", "right") for name, spec in STATE.items()}
CHOICE = {"token": rows(dtype=torch.int64), "stop": rows(dtype=torch.bool)}
UNTOUCHED = {torch.float32: torch.nan, torch.int64: -7, torch.bool: True}


DRAWN = {"seed": rows(dtype=torch.int64), "step": rows(dtype=torch.int64)}
NEXT = {"step": rows(dtype=torch.int64)}
MEMORY, ATTENDED = {"memory": ragged(HIDDEN)}, {"attended": rows(HIDDEN)}


def drawing(decoder: Any, **options: Any) -> cells.SamplingDecoder:
    return cells.SamplingDecoder(decoder, cells.Sample(END, temperature=0.9, **options))


class Case(NamedTuple):
    """How to make a cell, its inputs and its outputs."""

    make: Callable[[], nn.Module]
    inputs: Mapping[str, RowSpec]
    outputs: Mapping[str, RowSpec]


H = {"h": STATE["h"]}
CASES = {
    "LSTMCell": Case(lambda: cells.LSTMCell(SIZE, HIDDEN), X | STATE, STATE),
    "LSTMCell without bias": Case(lambda: cells.LSTMCell(SIZE, HIDDEN, bias=False), X | STATE, STATE),
    "LSTMRecurrent": Case(lambda: cells.LSTMRecurrent(HIDDEN), {"gates": rows(4 * HIDDEN)} | STATE, STATE),
    "EmbeddingLSTMCell": Case(lambda: cells.EmbeddingLSTMCell(WORDS, SIZE, HIDDEN), TOKEN | STATE, STATE),
    "GRUCell": Case(lambda: cells.GRUCell(SIZE, HIDDEN), X | H, H),
    "GRUCell without bias": Case(lambda: cells.GRUCell(SIZE, HIDDEN, bias=False), X | H, H),
    "GRURecurrent": Case(lambda: cells.GRURecurrent(HIDDEN), {"gates": rows(3 * HIDDEN)} | H, H),
    "BinaryTreeLSTMCell": Case(lambda: cells.BinaryTreeLSTMCell(None, HIDDEN), CHILDREN, STATE),
    "BinaryTreeLSTMCell with x": Case(lambda: cells.BinaryTreeLSTMCell(SIZE, HIDDEN), CHILDREN | X, STATE),
    "EmbeddingGRUCell": Case(lambda: cells.EmbeddingGRUCell(WORDS, SIZE, HIDDEN), TOKEN | H, H),
    "EmbeddingLSTMDecoder": Case(
        lambda: cells.EmbeddingLSTMDecoder(WORDS, SIZE, HIDDEN, END), TOKEN | STATE, CHOICE | STATE
    ),
    "EmbeddingLSTMDecoder of layers": Case(
        lambda: cells.EmbeddingLSTMDecoder(WORDS, SIZE, HIDDEN, END, num_layers=3), TOKEN | LAYERS, CHOICE | LAYERS
    ),
    "EmbeddingGRUDecoder": Case(lambda: cells.EmbeddingGRUDecoder(WORDS, SIZE, HIDDEN, END), TOKEN | H, CHOICE | H),
    "SamplingDecoder": Case(
        lambda: drawing(cells.EmbeddingLSTMDecoder(WORDS, SIZE, HIDDEN, END)),
        TOKEN | DRAWN | STATE,
        CHOICE | NEXT | STATE,
    ),
    "SamplingDecoder of layers": Case(
        lambda: drawing(cells.EmbeddingGRUDecoder(WORDS, SIZE, HIDDEN, END, num_layers=3), top_k=4, top_p=0.8),
        TOKEN | DRAWN | {"h": LAYERS["h"]},
        CHOICE | NEXT | {"h": LAYERS["h"]},
    ),
    "AttentionGRUDecoder": Case(
        lambda: cells.AttentionGRUDecoder(WORDS, SIZE, HIDDEN, END), TOKEN | H | MEMORY, CHOICE | H | ATTENDED
    ),
    "AttentionLSTMDecoder of layers": Case(
        lambda: cells.AttentionLSTMDecoder(
            *(WORDS, SIZE, HIDDEN, END),
            num_layers=3,
            attention=cells.AdditiveAttention(HIDDEN, HIDDEN, 6),
            input_feeding=True,
        ),
        TOKEN | LAYERS | ATTENDED | MEMORY | {"keys": ragged(6)},
        CHOICE | LAYERS | ATTENDED,
    ),
    "AttentionGRUDecoder without keys": Case(
        lambda: cells.AttentionGRUDecoder(
            *(WORDS, SIZE, HIDDEN, END), attention=cells.AdditiveAttention(HIDDEN, HIDDEN, 6, bias=True)
        ),
        TOKEN | H | MEMORY,
        CHOICE | H | ATTENDED,
    ),
    "SamplingDecoder with attention": Case(
        lambda: drawing(
            cells.AttentionGRUDecoder(
                *(WORDS, SIZE, HIDDEN, END), attention=cells.DotAttention(HIDDEN, 4), memory_size=4, input_feeding=True
            )
        ),
        TOKEN | DRAWN | H | ATTENDED | {"memory": ragged(4)},
        CHOICE | NEXT | H | ATTENDED,
    ),
    "ProjectionArgmax": Case(lambda: cells.ProjectionArgmax(HIDDEN, TOKENS, END), H, CHOICE),
    "ProjectionArgmax without bias": Case(lambda: cells.ProjectionArgmax(HIDDEN, TOKENS, bias=False), H, CHOICE),
}
CHAINS = ["LSTMCell", "LSTMCell without bias", "LSTMRecurrent", "EmbeddingLSTMCell"]
"""Those with a form for several steps."""
every_case = pytest.mark.parametrize("name", CASES)


def some_rows(count: int, generator: torch.Generator) -> Tensor:
    """Different rows of an arena of ``count + 3``, the first and the last among them, in any order."""
    inner = 1 + torch.randperm(count + 1, generator=generator)
    chosen = torch.cat([torch.tensor([count + 2, 0]), inner])[:count]
    return chosen[torch.randperm(count, generator=generator)]


def arena(count: int, spec: RowSpec) -> Tensor:
    return torch.full((count + 3, *spec.shape), UNTOUCHED[spec.dtype], dtype=spec.dtype)


def given_rows(spec: RowSpec, count: int, generator: torch.Generator) -> IndexedRows | RaggedRows:
    """Inputs in an arena; what nobody may read there is not a number, or no token. Ragged ones have rows that nobody
    has behind the others."""
    if spec.ragged:
        offsets = torch.tensor([0, *(node % 4 for node in range(count))]).cumsum(0)
        return RaggedRows(torch.randn(int(offsets[-1]) + 2, *spec.shape, generator=generator), offsets)
    values, index = arena(count, spec), some_rows(count, generator)
    if spec.dtype == torch.int64:
        values[index] = torch.randint(WORDS, (count,), generator=generator)
    else:
        values[index] = torch.randn(count, *spec.shape, generator=generator)
    return IndexedRows(values, index)


def as_given(value: IndexedRows | RaggedRows) -> Tensor | RaggedRows:
    """An input as ``forward`` takes it."""
    if isinstance(value, RaggedRows):
        return value._replace(values=value.values[: value.offsets[-1]])
    return value.values[value.rows]


def check(name: str, count: int, unwritten: int = 0) -> None:
    """The rows named are what ``forward`` gives; all others, and those of negative outputs, are as they were."""
    generator = torch.Generator().manual_seed(count)
    torch.manual_seed(count)
    case = CASES[name]
    module = case.make()
    inputs = {key: given_rows(spec, count, generator) for key, spec in case.inputs.items()}
    outputs = {key: IndexedRows(arena(count, spec), some_rows(count, generator)) for key, spec in case.outputs.items()}
    expected = {key: value.values.clone() for key, value in outputs.items()}
    made = module(**{key: as_given(value) for key, value in inputs.items()})
    results = made if isinstance(made, dict) else made._asdict()
    left = torch.randperm(count, generator=generator)
    for key, (_, index) in outputs.items():
        if not is_reading_outputs(module.run_rows):  # those need all rows of a step, or none
            left = torch.randperm(count, generator=generator)
        index[left[:unwritten]] = -1
        expected[key][index[index >= 0]] = results[key][index >= 0].detach()
    module.run_rows(inputs, outputs)
    for key, value in outputs.items():
        torch.testing.assert_close(value.values, expected[key], rtol=1e-5, atol=1e-5, equal_nan=True)


@every_case
@pytest.mark.parametrize(("count", "unwritten"), [(1, 0), (2, 1), (17, 3)])
def test_rows_are_what_forward_gives(name: str, count: int, unwritten: int) -> None:
    check(name, count, unwritten)


def check_chain(name: str, sizes: tuple[int, ...], unwritten: int = 0) -> None:
    """A run gives what its steps give, in the rows named and no others; of positions with the same row the last."""
    generator = torch.Generator().manual_seed(len(sizes))
    torch.manual_seed(sum(sizes))
    case, positions = CASES[name], sum(sizes)
    module: Any = case.make()
    inputs = {
        key: given_rows(spec, sizes[0] if key in STATE else positions, generator) for key, spec in case.inputs.items()
    }
    outputs = {key: IndexedRows(arena(positions, spec), some_rows(positions, generator)) for key, spec in STATE.items()}
    expected = {key: value.values.clone() for key, value in outputs.items()}
    for _, index in outputs.values():
        index[torch.randperm(positions, generator=generator)[:unwritten]] = -1
        index[0] = index[-1]  # the first state is nobody's, as it is where only the next step reads it
    state, start = {key: inputs[key].values[inputs[key].rows] for key in STATE}, 0
    for size in sizes:
        step = {
            key: value.values[value.rows[start : start + size]] for key, value in inputs.items() if key not in STATE
        }
        state = module(**step, **{key: value[:size] for key, value in state.items()})._asdict()
        for key, (_, index) in outputs.items():
            at = index[start : start + size]
            expected[key][at[at >= 0]] = state[key][at >= 0].detach()
        start += size
    assert module.run_chain_rows(RunSizes(sizes, torch.tensor(sizes)), inputs, outputs)
    for key, value in outputs.items():
        torch.testing.assert_close(value.values, expected[key], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize(("sizes", "unwritten"), [((1, 1), 0), ((3, 3, 3), 2), ((5, 4, 4, 1, 1), 4)])
def test_a_run_is_what_its_steps_give(name: str, sizes: tuple[int, ...], unwritten: int) -> None:
    check_chain(name, sizes, unwritten)


@pytest.mark.parametrize("limit", ["weights", "gates"])
def test_a_run_that_does_not_fit_is_refused_untouched(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if limit == "weights":
        monkeypatch.setattr("cellrt.kernels.lstm_chain.plan.STREAMED_BYTES", 0)
        monkeypatch.setattr("cellrt.kernels.lstm_chain.device_limits", lambda device: (132, 1000))
    else:
        monkeypatch.setattr("cellrt.cells._fused.MAX_GATES_BYTES", 4 * 4 * HIDDEN * 2)
    module, generator = cells.LSTMCell(SIZE, HIDDEN), torch.Generator().manual_seed(0)
    inputs = {key: given_rows(spec, 3, generator) for key, spec in CASES["LSTMCell"].inputs.items()}
    outputs = {key: IndexedRows(arena(3, spec), torch.tensor([0, 1, 2])) for key, spec in STATE.items()}
    inputs |= {key: IndexedRows(inputs[key].values, inputs[key].rows[:2]) for key in STATE}
    assert not module.run_chain_rows(RunSizes((2, 1), torch.tensor([2, 1])), inputs, outputs)
    assert all(value.values.isnan().all() for value in outputs.values())


@pytest.mark.parametrize("token", [-1, WORDS, 1 << 40])
def test_a_token_outside_the_embedding_spoils_its_own_row_alone(token: int) -> None:
    module = cells.EmbeddingLSTMCell(WORDS, SIZE, HIDDEN)
    index = torch.arange(3)
    inputs = {key: IndexedRows(torch.zeros(3, HIDDEN), index) for key in STATE}
    outputs = {key: IndexedRows(torch.zeros(3, HIDDEN), index) for key in STATE}
    module.run_rows({"token": IndexedRows(torch.tensor([2, token, 6]), index), **inputs}, outputs)
    for value in outputs.values():
        assert value.values.isnan().any(1).tolist() == [False, True, False]


def check_interpreted(name: str) -> None:
    case = CASES[name]
    assert case.make().can_run_rows(case.inputs, case.outputs)
    check(name, 17, 3)
    if name in CHAINS:
        check_chain(name, (17, 16, 3, 1), 4)


@pytest.mark.slow
def test_kernels_give_what_forward_gives() -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton: pip install triton")
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context, initializer=set_up) as interpreter:
        for done in [interpreter.submit(check_interpreted, name) for name in CASES]:
            done.result(60)


@pytest.mark.parametrize("make", [cells.LSTMCell, cells.GRUCell])
def test_weights_are_packed_again_after_a_change(make: Callable[..., Any]) -> None:
    module, case = make(SIZE, HIDDEN), CASES[make.__name__]
    inputs = {key: IndexedRows(torch.ones(1, *spec.shape), torch.tensor([0])) for key, spec in case.inputs.items()}
    before, after = (
        {key: IndexedRows(torch.zeros(1, HIDDEN), torch.tensor([0])) for key in case.outputs} for _ in range(2)
    )
    module.run_rows(inputs, before)
    with torch.no_grad():
        module.weight_hh.zero_()
    module.run_rows(inputs, after)
    plain = module(**{key: value.values for key, value in inputs.items()})
    torch.testing.assert_close(after["h"].values, plain.h.detach())
    assert not torch.equal(before["h"].values, after["h"].values)


@pytest.fixture
def has_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: kernels run where the weights are."""
    monkeypatch.setattr("cellrt.cells._fused.uses_triton", lambda weight: True)


@every_case
def test_there_is_no_fused_form_on_a_cpu(name: str) -> None:
    case = CASES[name]
    assert not case.make().can_run_rows(case.inputs, case.outputs)


@every_case
@pytest.mark.usefixtures("has_kernels")
def test_the_fused_form_takes_only_rows_like_the_weights(name: str) -> None:
    make, inputs, outputs = CASES[name]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        module, other = make().to(dtype), make().double()
        given, made = (
            {key: spec._replace(dtype=dtype) if spec.dtype.is_floating_point else spec for key, spec in specs.items()}
            for specs in (inputs, outputs)
        )
        assert module.can_run_rows(given, made)
        assert not other.can_run_rows(given, made)
        assert not module.can_run_rows(
            {key: spec._replace(shape=(2, *spec.shape)) for key, spec in given.items()}, made
        )
        assert not module.can_run_rows({key: spec._replace(dtype=torch.float64) for key, spec in given.items()}, made)


@pytest.mark.usefixtures("has_kernels")
def test_weights_that_are_computed_are_not_fused() -> None:
    case = CASES["GRUCell"]
    module = nn.utils.parametrizations.weight_norm(case.make(), "weight_hh")
    assert not module.can_run_rows(case.inputs, case.outputs)


class Doubled(cells.GRURecurrent):
    def forward(self, gates: Tensor, h: Tensor) -> Any:
        return super().forward(2 * gates, h)


class SeenTwice(Doubled):
    def run_rows(self, inputs: Mapping[str, IndexedRows], outputs: Mapping[str, IndexedRows]) -> None:
        raise NotImplementedError


def placed(module: nn.Module) -> PlacedCell:
    """In bfloat16, whose plain form needs no compiled code."""
    specs = {key: spec._replace(dtype=torch.bfloat16) for key, spec in CASES["GRURecurrent"].inputs.items()}
    return PlacedCell(cell(module.to(torch.bfloat16), specs), torch.device("cpu"))


def test_a_worker_asks_the_cell(has_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert placed(cells.GRURecurrent(HIDDEN)).run_rows is not None
    monkeypatch.undo()
    assert placed(cells.GRURecurrent(HIDDEN)).run_rows is None


@pytest.mark.usefixtures("has_kernels")
def test_a_cell_whose_forward_was_changed_is_not_fused() -> None:
    assert placed(Doubled(HIDDEN)).run_rows is None
    assert placed(SeenTwice(HIDDEN)).run_rows is not None
    hooked = cells.GRURecurrent(HIDDEN)
    hooked.register_forward_hook(double_output)
    assert placed(hooked).run_rows is None


def double_output(module: nn.Module, args: Any, output: Any) -> Any:
    return type(output)(2 * output.h)


@pytest.mark.usefixtures("has_kernels")
@pytest.mark.parametrize("runs", [False, True])
def test_an_engine_gives_what_running_one_by_one_gives(runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(
        "cellrt.cells.output.choose_rows", lambda *given: (calls.append(len(given)), choose_rows(*given))
    )
    gru, choose, tree = (
        cell(CASES[name].make(), CASES[name].inputs) for name in ("GRUCell", "ProjectionArgmax", "BinaryTreeLSTMCell")
    )

    def unfold(graph: Graph, request: Tensor) -> dict[str, object]:
        chain = graph.chain(gru, x=request)
        left, right = gru(x=request[0], h=chain.last.h).h, chain.last.h
        node = tree(h_left=left, c_left=right, h_right=right, c_right=left)
        chosen = choose(h=node.h)
        return {"every": chain.h, "c": node.c, "token": chosen.token, "stop": chosen.stop}

    model = Unfolder("decode", unfold, torch.zeros(2, SIZE))
    settings = SchedulerSettings(runs=runs, join_budget_s=1.0)
    with Engine(["dry"], limits=SMALL, settings=settings, arena_bytes=1 << 16) as engine:
        engine.register(model, warm_up=False)
        requests = [torch.randn(1 + k % 5, SIZE) for k in range(20)]
        for request, future in zip(requests, engine.submit_many("decode", requests)):
            assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    assert calls


@pytest.fixture
def keeps_precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.usefixtures("keeps_precision")
def test_precision_is_torchs() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True
    assert chosen_precision() == "tf32"
    torch.backends.cuda.matmul.allow_tf32 = False
    assert chosen_precision() == "ieee"
