"""What an unfolder holds of a graph has no value yet: whatever would look at one is refused, and says what to do."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cellrt.definition.define import cell
from cellrt.engine.engine import Engine
from cellrt.errors import DefinitionError, RequestError
from cellrt.graph.graph import Graph
from cellrt.graph.reference import run_one_by_one
from tests.api.models import SIZE, child_sum, counter, leaf, model, pair, recurrent, serve

STEP, COUNT, LEAF, PAIR, SUM = recurrent(), counter(), leaf(), pair(), child_sum()
ROWS = torch.ones(3, SIZE)

HANDLES: dict[str, Callable[[Graph], Any]] = {
    "Node": lambda graph: STEP(x=ROWS[0]),
    "Output": lambda graph: STEP(x=ROWS[0]).h,
    "constant": lambda graph: graph.constant(3),
    "Chain": lambda graph: graph.chain(STEP, x=ROWS),
    "Steps": lambda graph: graph.chain(STEP, x=ROWS).h,
    "Loop": lambda graph: graph.loop(COUNT, max_steps=3, limit=1, step=1),
    "LoopSteps": lambda graph: graph.loop(COUNT, max_steps=3, limit=1, step=1).number,
    "Tree": lambda graph: graph.tree([2, 2, -1], leaf=LEAF, inner=PAIR, leaf_inputs={"x": ROWS[0]}),
    "TreeNodes": lambda graph: graph.tree([2, 2, -1], leaf=LEAF, inner=PAIR, leaf_inputs={"x": ROWS[0]}).nodes,
    "Dag": lambda graph: graph.dag(SUM, [0, 0, 1], [0], {"x": ROWS[0]}),
    "State": lambda graph: graph.zeros(STEP),
}

OPERATIONS: dict[str, Callable[[Any], object]] = {
    "if": lambda handle: 1 if handle else 0,
    "not": operator.not_,
    "and": lambda handle: handle and 1,
    "==": lambda handle: handle == 4,
    "== from the right": lambda handle: 4 == handle,  # noqa: SIM300
    "== of itself": lambda handle: handle == handle,
    "== of a tensor": lambda handle: torch.ones(1) == handle,
    "== None": lambda handle: handle == None,  # noqa: E711
    "!=": lambda handle: handle != 4,
    "<": lambda handle: handle < 4,
    ">=": lambda handle: handle >= 4,
    "in a list": lambda handle: handle in [4],
    "int": int,
    "float": float,
    "index": lambda handle: [1, 2][handle],
    "range": range,
    "round": round,
    "floor": math.floor,
    "+": lambda handle: handle + 1,
    "+ from the right": lambda handle: 1 + handle,
    "+=": lambda handle: operator.iadd(handle, 1),
    "sum": lambda handle: sum([handle]),
    "-": operator.neg,
    "*": lambda handle: 2.0 * handle,
    "@": lambda handle: handle @ handle,
    "/": lambda handle: handle / 2,
    "//": lambda handle: 5 // handle,
    "%": lambda handle: handle % 2,
    "**": lambda handle: handle**2,
    "divmod": lambda handle: divmod(handle, 2),
    "abs": abs,
    "~": operator.invert,
    "&": lambda handle: handle & 1,
    "|": lambda handle: 1 | handle,
    "<<": lambda handle: handle << 1,
    "in": lambda handle: 4 in handle,
    "torch": torch.tanh,
    "torch, beside a tensor": lambda handle: torch.ones(2).add(handle),
    "numpy": np.tanh,
    "numpy, by name": lambda handle: np.add(np.ones(2), np.ones(2), out=handle),
    "numpy, of a shape": np.transpose,
    "an array": np.asarray,
}
SEQUENCE_OPERATIONS: dict[str, Callable[[Any], object]] = {
    "len": len,
    "iterate": list,
    "unpack": lambda handle: (lambda h, c: h)(*handle),
    "reversed": reversed,
    "subscript": lambda handle: handle[0],
}
REFUSED = (
    r"(cannot be|is neither true nor false|is no (number|array)|has no length)"
    r".*values are not known.*graph\.loop\(until="
)


def is_refused(operate: Callable[[Any], object], handle: Any) -> bool:
    """Whether it is refused with a message that names the handle and says what to do."""
    try:
        operate(handle)
    except RequestError as error:
        return re.match(rf"{re.escape(repr(handle))} {REFUSED}", str(error)) is not None
    except TypeError:
        pass
    return False


@pytest.mark.parametrize("handle", HANDLES)
def test_what_would_need_a_value_is_refused(handle: str) -> None:
    operations = OPERATIONS if handle == "Steps" else OPERATIONS | SEQUENCE_OPERATIONS
    allowed: list[str] = []

    def function(graph: Graph, request: object) -> object:
        made = HANDLES[handle](graph)
        allowed.extend(name for name, operate in operations.items() if not is_refused(operate, made))
        return STEP(x=ROWS[0])

    run_one_by_one(model(function), None)
    assert allowed == []


def test_a_chains_steps_are_a_sequence_of_known_length() -> None:
    def function(graph: Graph, request: object) -> object:
        steps = graph.chain(STEP, x=ROWS).h
        assert len(steps) == 3 and len(list(steps)) == 3 and len(steps[1:]) == 2
        (_, _, last), (first, *_) = steps, reversed(steps)
        assert first is not last and first.value == last.value == steps[-1].value
        return {"h": steps}

    assert run_one_by_one(model(function), None)["h"].shape == (3, SIZE)


@pytest.mark.parametrize("handle", HANDLES)
def test_a_handle_is_itself_in_a_set_or_a_dict(handle: str) -> None:
    def function(graph: Graph, request: object) -> object:
        one, other = HANDLES[handle](graph), HANDLES[handle](graph)
        assert len({one, other, one}) == 2 and {one: 1, other: 2}[other] == 2
        assert one in {one} and one not in {other} and one in [one, other]
        return STEP(x=ROWS[0])

    run_one_by_one(model(function), None)


def test_a_loop_written_in_python_is_refused_where_it_decides(engine: Engine) -> None:
    """It would end after the first step, or never."""
    step = cell(lambda n: {"n": n + 1, "stop": n >= 3}, {"n": counter().inputs["number"]}, name="step")

    def function(graph: Graph, decide: Callable[[Any], bool] | None) -> object:
        node = step(n=0)
        while decide is not None and not decide(node):
            node = step(n=node.n)
        return {"n": node.n}

    for decide in (lambda node: node.stop, lambda node: node.n == 4):
        with pytest.raises(DefinitionError, match=rf"model 'm': Output\((bool|int64)\[\]\) {REFUSED}"):
            engine.register(model(function, decide))
    serve(engine, model(function))
    with pytest.raises(RequestError, match=rf"model 'm': Output\(bool\[\]\) {REFUSED}"):
        engine.submit("m", lambda node: node.stop)


@pytest.mark.parametrize("handle", ["Output", "constant", "Steps"])
def test_what_a_tensor_would_have_is_refused_with_what_to_do_instead(handle):
    def unfold(graph: Graph, request: object) -> dict[str, object]:
        return {"h": HANDLES[handle](graph).sum()}

    with Engine() as engine, pytest.raises(DefinitionError, match="has no 'sum', as a tensor might have: values are"):
        engine.register(model(unfold))
