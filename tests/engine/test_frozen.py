"""What is frozen for engines: when, for how long, and whose it stays."""

from __future__ import annotations

import gc
import weakref

import pytest

from cellrt.engine import engine as engine_module
from cellrt.engine.frozen import FrozenHeap
from tests.engine.helpers import close_and_check, small_engine
from tests.engine.models import chain_model, make_cells

PLAIN, *_ = make_cells()
CHAIN = chain_model("chain", PLAIN)


@pytest.fixture(autouse=True)
def nothing_is_frozen(thawed, monkeypatch):
    """Whatever engines of other tests hold."""
    monkeypatch.setattr(engine_module, "HEAP", FrozenHeap())


def serving(**options):
    made = small_engine(**options)
    made.register(CHAIN, warm_up=False)
    return made


def test_from_the_first_model_to_the_end_of_the_last_engine():
    first = small_engine(freeze=True)
    assert not gc.get_freeze_count()
    first.register(CHAIN, warm_up=False)
    assert gc.get_freeze_count()
    second = serving(freeze=True)
    close_and_check(first)
    assert gc.get_freeze_count()
    second.close()
    second.close()
    assert not gc.get_freeze_count()


def test_an_engine_that_is_dropped_holds_nothing():
    engine = serving(freeze=True)
    assert gc.get_freeze_count()
    del engine
    for _ in range(100):
        gc.collect()
        if not gc.get_freeze_count():
            return
    pytest.fail("still frozen")


def test_a_model_that_was_replaced_does_not_stay_with_its_weights():
    """As a module does that a server has loaded: in a cycle."""
    engine, gone = small_engine(freeze=True), []
    for _ in range(4):
        again = chain_model("again", PLAIN)
        object.__setattr__(again, "itself", again)
        gone.append(weakref.ref(again))
        engine.register(again, warm_up=False, replace=True)
        del again
    assert [its() is None for its in gone][:2] == [True, True]
    close_and_check(engine)


def test_what_the_program_froze_itself_stays_frozen():
    gc.freeze()
    engine = serving(freeze=True)
    close_and_check(engine)
    assert gc.get_freeze_count()


def test_the_switch():
    engine = serving(freeze=False)
    assert not gc.get_freeze_count()
    close_and_check(engine)
