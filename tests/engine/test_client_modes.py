"""What a client's thread is in (a default device, autocast, inference) is nothing to an engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from cellrt.definition.aot.step_program import export_step
from cellrt.definition.define import cell
from cellrt.engine.engine import Engine
from cellrt.graph.reference import run_one_by_one
from tests.engine.helpers import WAIT_S, assert_same, close_and_check
from tests.engine.paged_models import make_cells, make_request, sums
from tests.steps import HALF, WIDTH, chain


class Halves(TorchFunctionMode):
    """Halves what some functions of torch return."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made / 2 if function in HALVED else made


class HalvesOperators(TorchDispatchMode):
    """Halves what some operators of torch return."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        return made / 2 if function in HALVED else made


HALVED = (torch.gru_cell, torch.add, torch.Tensor.__add__, torch.ops.aten.add.Tensor)
MODES = {
    "default device": lambda: torch.device("meta"),
    "autocast": lambda: torch.autocast("cpu"),
    "inference": torch.inference_mode,
    "functions": Halves,
    "operators": HalvesOperators,
}


@pytest.mark.parametrize("mode", MODES)
def test_models_are_made_registered_and_served_as_ever(mode):
    modes: Callable[[], AbstractContextManager[object]] = MODES[mode]
    x, request = torch.arange(3.0 * WIDTH).view(3, WIDTH), make_request(seed=1, source=4, prompt=5, steps=3, leading=2)
    growing = sums(make_cells(), keep=True)
    expected = run_one_by_one(chain, x), run_one_by_one(growing, request)
    with modes():
        assert_same(run_one_by_one(growing, request), expected[1])
        engine = Engine()
        engine.register(chain)
        engine.register(growing)
        assert_same(engine.submit("chain", x).result(WAIT_S), expected[0])
        assert_same(engine.submit("chain", x.tolist()).result(WAIT_S), expected[0])
        session, other = engine.session("sums"), engine.session("sums")
        assert_same(session.submit(request).result(WAIT_S), expected[1])
        restored = engine.session("sums", state=session.export())
        other.submit(request).result(WAIT_S)
        assert_same(restored.submit(request).result(WAIT_S), other.submit(request).result(WAIT_S))
        assert len(list(engine.stream("chain", x))) == 4
    close_and_check(engine)


@pytest.mark.parametrize("mode", ["default device", "autocast", "inference"])
def test_a_cell_can_be_defined_and_called(mode):
    with MODES[mode]():
        assert HALF.run(torch.zeros(1, 3, dtype=torch.bfloat16, device="cpu"))[0].tolist() == [[1.0] * 3]
        make_cells(page_size=2)
        linear = cell(nn.Linear(2, 2, device="cpu"), {"input": (2,)}, name="linear")
    assert linear.outputs["output"].dtype == torch.float32


@pytest.mark.parametrize("mode", MODES)
def test_the_program_that_is_compiled_is_the_same(mode):
    def program():
        module = nn.GRUCell(2, 2, device="cpu")
        return export_step(cell(module, {"input": (2,), "hx": (2,)}, name="gru")).digest()

    expected = program()
    with MODES[mode]():
        assert program() == expected
