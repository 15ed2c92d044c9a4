"""A form that comes while a request is under way is for those that come later.

No compiler runs: the form that comes is that of another cell, with other weights, so results tell which one ran.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

import cellrt
from cellrt import Cell, cells
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.compiled_form import CompiledForm
from cellrt.engine import cell_compiler
from cellrt.graph.reference import run_one_by_one
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, small_engine
from tests.engine.models import WIDTH, Door, Gate
from tests.waiting import until

STUB = "a stub"


class Own(cells.GRUCell):
    """Without a form of its own, as a subclass."""


def step_of(kind: type[cells.GRUCell], seed: int) -> Cell:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return cellrt.cell(kind(WIDTH, WIDTH), {"x": WIDTH, "h": WIDTH}, name="step")


def model_of(step: Cell, gate: Gate) -> cellrt.Unfolder:
    """A step before the gate, and one behind it."""
    door = cellrt.cell(Door(gate), {"x": WIDTH}, name="gate", max_batch=1)

    @cellrt.unfold("held", example=torch.zeros(WIDTH))
    def model(graph, x):
        before = step(x=x, h=torch.zeros(WIDTH))
        return {"before": before.h, "after": step(x=door(x=x).output, h=before.h).h}

    return model


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate(WAIT_S)
    yield made
    made.open.set()


@pytest.fixture
def late_form(gate: Gate, monkeypatch: pytest.MonkeyPatch) -> Cell:
    """The cell whose form comes once a request is at the gate."""
    other = step_of(cells.GRUCell, seed=1)
    form = other.compiled_form
    assert form is not None

    def compile_cells(given: Sequence[Cell], store: object, _: object) -> Iterator[CompiledForm | NotCompiledError]:
        assert gate.entered.wait(WAIT_S)
        for made in given:
            yield form._replace(origin=STUB) if made.name == "step" else NotCompiledError(Reason.MEMORY)

    monkeypatch.setattr(cell_compiler, "compile_cells", compile_cells)
    return other


def form_of(engine: cellrt.Engine) -> str:
    return str(engine.statistics()["cells"]["step"]["form"])


def assert_gives(result: dict[str, Tensor], step: Cell, x: Tensor) -> None:
    opened = Gate(WAIT_S)
    opened.open.set()
    assert_same(result, run_one_by_one(model_of(step, opened), x))


def test_a_request_ends_in_the_form_it_began_with_and_a_later_one_has_the_new_one(gate: Gate, late_form: Cell) -> None:
    own, x, later = step_of(Own, seed=0), torch.ones(WIDTH), torch.full((WIDTH,), 0.5)
    engine = small_engine(2, compile="background", debug=True)
    engine.register(model_of(own, gate), warm_up=False)
    assert form_of(engine) == f"eager: {cell_compiler.WAITS}"
    held, before = engine.submit("held", x), engine._models["held"]
    until(lambda: engine._models["held"] is not before, "the model with the form has its place")
    assert form_of(engine) == STUB
    assert_gives(engine.submit("held", later).result(WAIT_S), late_form, later)
    assert not held.done(), "it is under way all that time"
    assert engine.statistics()["cells"]["step"]["nodes"] == 3, "one before the gate, and both of the later request"
    engine.unregister("held")  # now the older request alone has the cell
    until(lambda: form_of(engine) != STUB, "nobody has the new form any more")
    assert form_of(engine) == f"eager: {cell_compiler.BEGAN_BEFORE}"
    assert engine.statistics()["cells"]["step"]["nodes"] == 3, "what ran in the new form is not forgotten"
    gate.open.set()
    assert_gives(held.result(WAIT_S), own, x)
    close_and_check(engine)
