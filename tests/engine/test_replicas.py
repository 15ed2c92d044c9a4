"""Workers of one engine run a cell's module side by side: each has its own, with the same weights."""

from __future__ import annotations

import threading

import torch
from torch import Tensor, nn

from cellrt.definition.define import cell
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import close_and_check, small_engine


class Keeps(nn.Module):
    """What a call makes lies in an attribute, a list and a dict until the same call reads it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)
        self.made: dict[str, Tensor] = {}
        self.seen: list[Tensor] = [torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor:
        self.hidden = self.made["hidden"] = self.seen[0] = torch.tanh(self.layer(x))
        for _ in range(20):
            x = torch.tanh(self.layer(x))
        return x + self.hidden + self.made["hidden"] + self.seen[0]


def test_what_a_call_keeps_in_its_module_is_not_seen_by_another_worker() -> None:
    module = Keeps().eval()
    made = cell(module, {"x": (64,)}, max_batch=4)
    model = Unfolder("keeps", lambda graph, x: {"y": made(x=x).output}, torch.zeros(64))
    requests = list(torch.randn(200, 64))
    with torch.no_grad():
        expected = module(torch.stack(requests))
    engine = small_engine(2)
    engine.register(model, warm_up=False)
    results = [result["y"] for result in engine.submit_many("keeps", requests).results()]
    torch.testing.assert_close(torch.stack(results), expected)
    close_and_check(engine)


def test_a_replica_has_the_weights_and_the_cell_s_identity() -> None:
    made = cell(Keeps(), {"x": (64,)})
    replica = made.replica()
    assert replica.module is not made.module and replica.identity == made.identity
    assert all(one is other for one, other in zip(replica.module.parameters(), made.module.parameters(), strict=True))


class Scratch(nn.Module):
    """What is made at the first call is written to at each: in a dict, in a list, on an object without a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.made, self.listed = nn.Linear(64, 64), {}, [torch.empty(8, 64)]

    def forward(self, x: Tensor) -> Tensor:
        rows = len(x)
        scratch = self.made.setdefault("rows", torch.empty(8, 64))[:rows]
        scratch.copy_(x)
        self.listed[0][:rows] = x
        for _ in range(20):
            x = torch.tanh(self.layer(x))
        return x + scratch + self.listed[0][:rows]


class Locked(nn.Module):
    """It cannot be copied any more once it has run."""

    def forward(self, x: Tensor) -> Tensor:
        self.lock = threading.Lock()
        return x + 1


def test_scratch_that_a_module_writes_to_is_each_worker_s_own() -> None:
    assert_served(Scratch(), 200)


def test_a_module_that_cannot_be_copied_is_shared_with_a_warning(caplog) -> None:
    assert_served(Locked(), 4)
    assert "cell 'Locked': its module cannot be copied for each worker" in caplog.text


def assert_served(module: nn.Module, count: int) -> None:
    made, requests = cell(module, {"x": (64,)}, max_batch=4), list(torch.randn(count, 64))
    with torch.no_grad():
        expected = torch.stack([module(request[None])[0] for request in requests])
    engine = small_engine(2)
    engine.register(Unfolder("m", lambda graph, x: {"y": made(x=x).output}, torch.zeros(64)))
    results = [result["y"] for result in engine.submit_many("m", requests).results()]
    torch.testing.assert_close(torch.stack(results), expected)
    close_and_check(engine)
