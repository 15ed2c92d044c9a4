"""An engine says in words what a request waits for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cellrt.engine.future import RequestFuture
from cellrt.errors import RequestError
from tests.engine.helpers import WAIT_S, close_and_check, small_engine
from tests.engine.models import WIDTH, Gate, chain_model, make_cells
from tests.limits import SMALL

STEP, _, _ = make_cells(max_batch=1)
CHAIN = chain_model("chain", STEP)


def test_a_request_says_what_it_waits_for_until_it_has_ended():
    gate = Gate(WAIT_S)
    engine = small_engine(1, limits=replace(SMALL, max_requests=2))
    engine.register(gate.unfolder, warm_up=False)
    engine.register(CHAIN, warm_up=False)
    held = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    ready, waiting = engine.submit_many("chain", [torch.ones(3, WIDTH), torch.ones(4, WIDTH)])
    assert "in task 0 at worker 1" in engine.explain(held)
    assert "chain of" in engine.explain(ready) and "0 of 3 steps done" in engine.explain(ready)
    assert "waits for room in the tables and arenas" in engine.explain(waiting)
    gate.open.set()
    for future in (held, ready, waiting):
        future.result(WAIT_S)
    assert engine.explain(ready) == "the request has ended"
    with pytest.raises(RequestError, match="expected a future of this engine"):
        engine.explain(RequestFuture(held))  # type: ignore[arg-type]
    close_and_check(engine)
