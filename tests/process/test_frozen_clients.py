"""What a client's process freezes: once it has imported a model, until the last client is closed; or nothing."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

import cellrt
from cellrt.engine.frozen import FrozenHeap
from cellrt.process import client as client_module
from tests.engine.helpers import WAIT_S
from tests.process import models

REQUEST = torch.ones(3, 2)


@pytest.fixture(autouse=True)
def nothing_is_frozen(thawed, monkeypatch):
    """Whatever engines and clients of other tests hold."""
    gc.unfreeze()
    monkeypatch.setattr(client_module, "HEAP", FrozenHeap())


def use(client: cellrt.Client) -> None:
    client.submit(models.chain.name, REQUEST).result(WAIT_S)


def test_from_the_first_model_to_the_end_of_the_last_client(served):
    first, second = (cellrt.connect(served.address, freeze=True) for _ in range(2))
    assert not gc.get_freeze_count()
    use(first)
    frozen = gc.get_freeze_count()
    use(second)
    assert gc.get_freeze_count() >= frozen > 0
    first.close()
    assert gc.get_freeze_count()
    second.close()
    second.close()
    assert not gc.get_freeze_count()


def test_a_client_that_is_dropped_holds_nothing(served):
    client = cellrt.connect(served.address, freeze=True)
    use(client)
    dropped = weakref.ref(client)
    del client
    assert dropped() is None
    assert not gc.get_freeze_count()


def test_a_model_that_is_known_freezes_nothing_anew(served):
    with cellrt.connect(served.address, freeze=True) as client:
        use(client)
        gc.unfreeze()
        use(client)
        assert not gc.get_freeze_count()


def test_unless_asked_for_nothing_is_frozen(served):
    with cellrt.connect(served.address) as client:
        use(client)
        assert not gc.get_freeze_count()
