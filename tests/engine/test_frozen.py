"""What is frozen for engines: when, for how long, and whose it stays."""

from __future__ import annotations

import gc
import itertools
import mmap
import weakref

import pytest

from cellrt.engine import engine as engine_module
from cellrt.engine import frozen as frozen_module
from cellrt.engine.frozen import WORTH_A_PAUSE_BYTES, WORTH_A_PAUSE_MODELS, FrozenHeap, memory_in_use
from tests.engine.helpers import SMALL, close_and_check, small_engine
from tests.engine.models import chain_model, make_cells

PLAIN, *_ = make_cells()
CHAIN = chain_model("chain", PLAIN)


@pytest.fixture(autouse=True)
def nothing_is_frozen(thawed, monkeypatch):
    """Whatever engines of other tests hold."""
    gc.unfreeze()
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


@pytest.mark.parametrize("grows_by", [0, WORTH_A_PAUSE_BYTES // 2, WORTH_A_PAUSE_BYTES])
@pytest.mark.slow
def test_models_that_were_replaced_stay_until_their_weights_are_worth_a_pause(monkeypatch, grows_by):
    """As modules do that a server has loaded: in a cycle."""
    engine, gone, memory = small_engine(freeze=True), [], itertools.count(10**9, grows_by)
    monkeypatch.setattr(frozen_module, "memory_in_use", lambda: next(memory))
    for _ in range(6):
        again = chain_model("again", PLAIN)
        object.__setattr__(again, "itself", again)
        gone.append(weakref.ref(again))
        engine.register(again, warm_up=False, replace=True)
        del again
    stay = [its() is not None for its in gone]
    assert stay[-1] and stay[:2] == [not grows_by] * 2
    close_and_check(engine)


def test_many_models_that_were_replaced_are_worth_a_pause(monkeypatch):
    monkeypatch.setattr(frozen_module, "memory_in_use", lambda: 0)
    heap, thawed = FrozenHeap(), []
    monkeypatch.setattr(gc, "unfreeze", lambda: thawed.append(True))
    for num_gone in range(2 * WORTH_A_PAUSE_MODELS + 1):
        heap.freeze(1, num_gone)
    assert len(thawed) == 2


def test_the_memory_in_use_is_that_of_the_process():
    before = memory_in_use()
    with mmap.mmap(-1, 128 << 20) as held:  # of what a tensor has, the process may have had some before
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        assert memory_in_use() - before > 100 << 20


def test_what_the_program_froze_itself_stays_frozen():
    gc.freeze()
    engine = serving(freeze=True)
    close_and_check(engine)
    assert gc.get_freeze_count()


def test_unless_asked_for_nothing_is_frozen():
    with engine_module.Engine(1, limits=SMALL, arena_bytes=1 << 16) as engine:
        engine.register(CHAIN, warm_up=False)
        assert not gc.get_freeze_count()
