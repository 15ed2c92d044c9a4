"""The compiled form of a cell gives what its module gives, in runs, trees and loops, and leaves the rest to it."""

from __future__ import annotations

import copy
import pickle
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch

from cellrt import cells
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, ragged, rows
from cellrt.errors import CellError, DefinitionError, RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder, unfold
from cellrt.worker.cpu.cpu_executor import Executor
from tests.engine.helpers import assert_same, close_and_check, small_engine

SIZE, HIDDEN, TOKENS, END = 5, 11, 7, 2
TOKEN, NUMBERS = rows(dtype=torch.int64), rows(SIZE)
H, LSTM = {"h": rows(HIDDEN)}, {"h": rows(HIDDEN), "c": rows(HIDDEN)}
CHILDREN = {"h": ragged(HIDDEN), "c": ragged(HIDDEN)}
VOCABULARY = TOKENS, SIZE, HIDDEN

CHAINS = {
    "EmbeddingGRUCell": (lambda: cells.EmbeddingGRUCell(*VOCABULARY), {"token": TOKEN, **H}),
    "EmbeddingLSTMCell": (lambda: cells.EmbeddingLSTMCell(*VOCABULARY), {"token": TOKEN, **LSTM}),
    "EmbeddingGRUCell, not folded": (lambda: cells.EmbeddingGRUCell(*VOCABULARY, fold=False), {"token": TOKEN, **H}),
    "EmbeddingLSTMCell, not folded": (
        lambda: cells.EmbeddingLSTMCell(*VOCABULARY, fold=False),
        {"token": TOKEN, **LSTM},
    ),
    "EmbeddingTreeLSTMLeaf, not folded": (
        lambda: cells.EmbeddingTreeLSTMLeaf(*VOCABULARY, fold=False),
        {"token": TOKEN},
    ),
    "EmbeddingTreeLSTMLeaf": (lambda: cells.EmbeddingTreeLSTMLeaf(*VOCABULARY), {"token": TOKEN}),
    "GRUCell": (lambda: cells.GRUCell(SIZE, HIDDEN), {"x": NUMBERS, **H}),
    "GRUInput": (lambda: cells.GRUInput(SIZE, HIDDEN), {"x": NUMBERS}),
    "GRURecurrent": (lambda: cells.GRURecurrent(HIDDEN), {"gates": rows(3 * HIDDEN), **H}),
    "LSTMCell": (lambda: cells.LSTMCell(SIZE, HIDDEN), {"x": NUMBERS, **LSTM}),
    "LSTMCell without bias": (lambda: cells.LSTMCell(SIZE, HIDDEN, bias=False), {"c": LSTM["c"], **H, "x": NUMBERS}),
    "LSTMInput": (lambda: cells.LSTMInput(SIZE, HIDDEN), {"x": NUMBERS}),
    "LSTMRecurrent": (lambda: cells.LSTMRecurrent(HIDDEN), {"gates": rows(4 * HIDDEN), **LSTM}),
    "Projection": (lambda: cells.Projection(SIZE, TOKENS), {"h": NUMBERS}),
    "ProjectionArgmax": (lambda: cells.ProjectionArgmax(SIZE, TOKENS, END), {"h": NUMBERS}),
    "TreeLSTMLeaf": (lambda: cells.TreeLSTMLeaf(SIZE, HIDDEN), {"x": NUMBERS}),
}
LOOPS = {
    "EmbeddingGRUDecoder": (lambda: cells.EmbeddingGRUDecoder(*VOCABULARY, END), {"token": TOKEN, **H}),
    "EmbeddingLSTMDecoder": (lambda: cells.EmbeddingLSTMDecoder(*VOCABULARY, END), {**LSTM, "token": TOKEN}),
}


@pytest.fixture(autouse=True)
def only_compiled_forms(monkeypatch) -> None:
    """Fails every task that is not run by a compiled form."""

    def refuse(self, cell_type, buffer):
        raise AssertionError(f"cell {cell_type.cell.name!r} was run without its compiled form")

    monkeypatch.setattr(Executor, "_run_module", refuse)


def check(model: Unfolder, requests: list, workers: int = 1) -> None:
    """Serves requests together, and compares with running them one by one through modules."""
    engine = small_engine(workers)
    engine.register(model, warm_up=False)
    for future, request in zip(engine.submit_many(model.name, requests), requests):
        assert_same(future.result(60), run_one_by_one(model, request))
    close_and_check(engine)


def values_for(made: Cell, count: int) -> dict[str, torch.Tensor]:
    """Random rows for the inputs that are not state."""
    return {
        name: torch.randint(TOKENS, (count,)) if spec == TOKEN else torch.randn(count, *spec.shape)
        for name, spec in made.inputs.items()
        if name not in made.carry
    }


@pytest.mark.one_in(3)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", CHAINS)
def test_chains(name: str, workers: int) -> None:
    torch.manual_seed(1)
    make, inputs = CHAINS[name]
    made = cell(make(), inputs, name="made", max_batch=64)

    @unfold("chains", example=values_for(made, 2))
    def model(graph, request):
        chain = graph.chain(made, **request)
        return {output: getattr(chain, output) for output in made.outputs}

    check(model, [values_for(made, length) for length in (1, 9, 4, 30, 1, 2, 2, *range(1, 60))], workers)


@pytest.mark.parametrize("name", LOOPS)
def test_loops(name: str) -> None:
    torch.manual_seed(3)
    make, inputs = LOOPS[name]
    made = cell(make(), inputs, name="made", max_batch=64)

    @unfold("loops", example={"start": 1, "h": torch.zeros(HIDDEN), "steps": 3})
    def model(graph, request):
        loop = graph.loop(made, token=request["start"], h=request["h"], until="stop", max_steps=request["steps"])
        return {"tokens": loop.token, "h": loop.last.h, "every_h": loop.h}

    requests = [{"start": k % TOKENS, "h": 3 * torch.randn(HIDDEN), "steps": 1 + k % 17} for k in range(150)]
    lengths = {len(run_one_by_one(model, request)["tokens"]) for request in requests}
    assert len(lengths) > 5
    check(model, requests)


def random_parents(generator: random.Random, count: int) -> list[int]:
    """A tree of ``count`` nodes with any number of children each."""
    return [-1, *(generator.randrange(node) for node in range(1, count))]


CHILD_SUMS = {
    "x": lambda: cells.ChildSumTreeLSTMCell(SIZE, HIDDEN),
    "token": lambda: cells.EmbeddingChildSumTreeLSTMCell(*VOCABULARY),
    "token, not folded": lambda: cells.EmbeddingChildSumTreeLSTMCell(*VOCABULARY, fold=False),
}


@pytest.mark.parametrize("name", CHILD_SUMS)
def test_child_sum_trees(name: str) -> None:
    given = {"x": NUMBERS} if name == "x" else {"token": TOKEN}
    made = cell(CHILD_SUMS[name](), {**given, **CHILDREN}, max_batch=64)

    @unfold("trees", example=([-1, 0], values_for(made, 2)))
    def model(graph, request):
        parents, given = request
        is_leaf = np.isin(np.arange(len(parents)), parents, invert=True)
        (name, values), *_ = given.items()
        return graph.tree(
            parents, leaf=made, inner=made, leaf_inputs={name: values[is_leaf]}, inner_inputs={name: values[~is_leaf]}
        )

    generator = random.Random(5)
    requests = []
    for k in range(60):
        given = values_for(made, 1 + k)
        requests.append((random_parents(generator, 1 + k), {name: given[name] for name in given if name not in "hc"}))
    check(model, requests, workers=2)


@pytest.mark.parametrize("has_inputs", [False, True])
def test_trees_with_three_children(has_inputs: bool) -> None:
    leaf = cell(cells.TreeLSTMLeaf(SIZE, HIDDEN), {"x": NUMBERS}, name="leaf", max_batch=64)
    states = {f"{state}_{child}": rows(HIDDEN) for child in range(3) for state in "ch"}
    inner = cell(
        cells.NaryTreeLSTMCell(3, SIZE if has_inputs else None, HIDDEN),
        {"x": NUMBERS, **states} if has_inputs else states,
        name="inner",
        max_batch=64,
    )

    @unfold("trees", example=1)
    def model(graph, depth):
        size = (3 ** (depth + 1) - 1) // 2
        parents = [-1, *((node - 1) // 3 for node in range(1, size))]
        generator = torch.Generator().manual_seed(depth)
        leaves, inners = 3**depth, size - 3**depth
        return graph.tree(
            parents,
            leaf=leaf,
            inner=inner,
            leaf_inputs={"x": torch.randn(leaves, SIZE, generator=generator)},
            inner_inputs={"x": torch.randn(inners, SIZE, generator=generator)} if has_inputs else {},
        )

    check(model, [0, 1, 2, 3, 1, 4, 2])


def chain_of(made: Cell) -> Unfolder:
    @unfold("chain", example={"x": torch.zeros(1, SIZE)})
    def model(graph, request):
        return {"h": graph.chain(made, x=request["x"]).last.h}

    return model


def test_state_that_is_not_finite_is_left_to_the_module(monkeypatch) -> None:
    monkeypatch.undo()
    made = cell(cells.GRUCell(SIZE, HIDDEN), {"x": NUMBERS, **H}, finite="h")
    engine = small_engine()
    engine.register(chain_of(made))
    good, bad = torch.randn(3, SIZE), torch.full((2, SIZE), torch.nan)
    answers = engine.submit_many("chain", [{"x": x} for x in (good, bad, good)])
    assert_same(answers[0].result(60), answers[2].result(60))
    with pytest.raises(CellError, match="not finite"):
        answers[1].result(60)
    close_and_check(engine)


def test_a_token_that_does_not_exist_is_left_to_the_module(monkeypatch) -> None:
    monkeypatch.undo()
    made = cell(cells.EmbeddingGRUDecoder(*VOCABULARY, END), {"token": TOKEN, **H})

    @unfold("loop", example=1)
    def model(graph, start):
        return {"tokens": graph.loop(made, token=start, until="stop", max_steps=4).token}

    engine = small_engine()
    engine.register(model)
    good, bad, other = engine.submit_many("loop", [1, TOKENS, 3])
    assert_same(good.result(60), run_one_by_one(model, 1))
    assert_same(other.result(60), run_one_by_one(model, 3))
    with pytest.raises(RequestError, match=f"expected tokens from 0 to {TOKENS - 1}, got {TOKENS}"):
        bad.result(60)
    close_and_check(engine)


class Doubled(cells.GRUCell):
    """Computes something else than the class whose compiled form it inherits."""

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> cells.gru.GRUState:
        return super().forward(2 * x, h)


def test_a_subclass_that_computes_something_else_has_no_compiled_form() -> None:
    assert cell(cells.GRUCell(SIZE, HIDDEN), {"x": NUMBERS, **H}).compiled_form is not None
    assert cell(Doubled(SIZE, HIDDEN), {"x": NUMBERS, **H}).compiled_form is None


def test_half_precision_has_no_compiled_form() -> None:
    made = cell(
        cells.GRUCell(SIZE, HIDDEN).to(torch.bfloat16),
        {"x": rows(SIZE, dtype=torch.bfloat16), "h": rows(HIDDEN, dtype=torch.bfloat16)},
    )
    assert made.compiled_form is None


def test_a_compiled_form_runs_on_tensors(monkeypatch) -> None:
    made = cell(cells.GRUCell(SIZE, HIDDEN), {"h": rows(HIDDEN), "x": NUMBERS})
    x, h = torch.randn(7, SIZE), torch.randn(7, HIDDEN)
    torch.testing.assert_close(made.compiled_form.run(7, {"x": x, "h": h})["h"], made.run(h, x)[0])


X, STATE = torch.zeros(3, SIZE), torch.zeros(3, HIDDEN)


@pytest.mark.parametrize(
    ("count", "changed", "said"),
    [
        (
            3,
            {"x": torch.zeros(SIZE, 3).t()},
            r"input 'x': expected contiguous rows on the CPU, got strides \(1, 3\) on cpu",
        ),
        (3, {"x": X.double()}, r"input 'x': expected 3 rows of float32\[5\], got float64\[3, 5\]"),
        (3, {"x": torch.zeros(3, SIZE + 2)}, r"input 'x': expected 3 rows of float32\[5\], got float32\[3, 7\]"),
        (3, {"h": STATE[:2]}, r"input 'h': expected 3 rows of float32\[11\], got float32\[2, 11\]"),
        (4, {}, r"input 'x': expected 4 rows of float32\[5\], got float32\[3, 5\]"),
        (3, {"h": torch.zeros(3, HIDDEN, device="meta")}, r"input 'h': .*on the CPU, got strides \(11, 1\) on meta"),
        (3, {"h": None}, r"input 'h': expected 3 rows of float32\[11\], got NoneType"),
        (3, {"y": X}, r"expected inputs \['x', 'h'\], got \['x', 'h', 'y'\]"),
        (3, {"x": RaggedRows(X, torch.arange(4))}, r"input 'x': expected float32\[5\], got RaggedRows"),
        (0, {}, "num_rows: expected at least 1, got 0"),
    ],
)
def test_a_compiled_form_reads_no_other_memory_than_the_rows_it_expects(count, changed, said) -> None:
    form = cell(cells.GRUCell(SIZE, HIDDEN), {"x": NUMBERS, **H}).compiled_form
    for call in (form.run, form.bind):
        with pytest.raises(DefinitionError, match=said):
            call(count, {"x": X, "h": STATE, **changed})


@pytest.mark.parametrize(
    ("rows_", "offsets", "said"),
    [
        (STATE, [0, 1, 4], r"input 'h': expected 4 rows of float32\[11\], got float32\[3, 11\]"),
        (STATE, [1, 2, 3], r"input 'h': expected offsets from 0 that never fall, got \[1, 2, 3\]"),
        (STATE, [0, 5, 3], r"input 'h': expected offsets from 0 that never fall, got \[0, 5, 3\]"),
        (STATE, [0, 3], r"input 'h': expected 3 offsets of int64\[\], got int64\[2\]"),
        (
            STATE,
            torch.tensor([0, 1, 3], dtype=torch.int32),
            r"input 'h': expected 3 offsets of int64\[\], got int32\[3\]",
        ),
        (STATE.half(), [0, 1, 3], r"input 'h': expected 3 rows of float32\[11\], got float16\[3, 11\]"),
        (STATE, None, r"input 'h': expected ragged float32\[11\], got Tensor"),
    ],
)
def test_a_compiled_form_reads_no_other_memory_than_ragged_rows_have(rows_, offsets, said) -> None:
    form = cell(cells.ChildSumTreeLSTMCell(SIZE, HIDDEN), {"x": NUMBERS, **CHILDREN}).compiled_form
    good = RaggedRows(STATE, torch.tensor([0, 1, 3]))
    assert form.run(2, {"x": X[:2], "h": good, "c": good}) is not None
    bad = rows_ if offsets is None else RaggedRows(rows_, torch.as_tensor(offsets))
    with pytest.raises(DefinitionError, match=said):
        form.run(2, {"x": X[:2], "h": bad, "c": good})


class OtherLogits(cells.Projection):
    """Changes a method that ``forward`` uses."""

    def logits(self, h: torch.Tensor) -> torch.Tensor:
        return 2 * super().logits(h)


def test_a_subclass_that_changes_any_method_has_no_compiled_form() -> None:
    assert cell(OtherLogits(SIZE, TOKENS), {"h": NUMBERS}).compiled_form is None


def test_an_embedding_with_other_strides(monkeypatch) -> None:
    table = torch.nn.Embedding(TOKENS, SIZE, _weight=torch.randn(SIZE, TOKENS).t())
    lstm = torch.nn.LSTMCell(SIZE, HIDDEN)
    made = cell(cells.EmbeddingLSTMCell.from_torch(table, lstm, fold=False), {"token": TOKEN, **LSTM})

    @unfold("chains", example=values_for(made, 2))
    def model(graph, request):
        return {"h": graph.chain(made, **request).h}

    check(model, [values_for(made, 9)])


def test_a_copied_cell_finds_a_compiled_form_of_its_own() -> None:
    made = cell(cells.GRUCell(SIZE, HIDDEN), {"x": NUMBERS, **H})
    assert made.compiled_form is not None
    copied = copy.deepcopy(made)
    assert copied.compiled_form.constants.ctypes.data != made.compiled_form.constants.ctypes.data
    assert pickle.loads(pickle.dumps(made)).identity == made.identity


class Wrong(cells.GRUCell):
    def compiled_form(self):
        raise ValueError("no form today")


def test_a_compiled_form_that_cannot_be_made_is_a_mistake_of_the_definition() -> None:
    made = cell(Wrong(SIZE, HIDDEN), {"x": NUMBERS, **H})
    engine = small_engine()
    with pytest.raises(DefinitionError, match="no form today"):
        engine.register(chain_of(made), warm_up=False)
    close_and_check(engine)


def test_the_documented_example_runs_compiled() -> None:
    page = Path(__file__).parents[2] / "docs" / "compiled-forms.md"
    names: dict[str, object] = {"__name__": "page"}
    for block in re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
        exec(compile(block, page.name, "exec"), names)
    assert "futures" in names


def test_an_engine_says_in_which_form_each_cell_runs_and_why() -> None:
    step = cell(cells.GRUCell(SIZE, HIDDEN), {"x": NUMBERS, **H}, name="step")
    add, double = (
        cell(lambda x, k=k: x * k + 1, {"x": NUMBERS}, name=name) for k, name in enumerate(("add", "double"))
    )

    @unfold("all", example=torch.zeros(SIZE))
    def model(graph, x):
        return {"h": step(x=double(x=add(x=x).output).output, h=torch.zeros(HIDDEN)).h}

    engine = small_engine()
    engine.register(model, warm_up=False)
    forms = "1 of 3 cells compiled; add, double eager: compile is off; step written by hand"
    assert repr(engine) == f"Engine(1 workers, models ['all'], {forms})"
    close_and_check(engine)
