"""The queue's places: limits of the engine and of a model, waiting for a place, and memory of who has left."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch

from cellrt.core.state.tables import NEVER
from cellrt.engine.places import InLine, Places, QueueLimit, Room, Size
from cellrt.errors import DeadlineError, EngineClosedError, OverloadError, RequestTooLargeError
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import SMALL, WAIT_S, close_and_check, small_engine
from tests.engine.models import WIDTH, Gate, chain_model, make_cells
from tests.waiting import until

PLAIN, *_ = make_cells()
CHAIN, OTHER = chain_model("chain", PLAIN), chain_model("other", PLAIN)
KEPT = Unfolder("kept", lambda graph, x: {"h": graph.chain(PLAIN, keep=True, x=x).h}, torch.zeros(2, WIDTH))
STEPS = torch.ones(2, WIDTH)


def gated(**options):
    """(engine, gate, future of the request in the gate)."""
    gate = Gate(WAIT_S)
    engine = small_engine(1, queue_depth=1, **options)
    engine.register(gate.unfolder, warm_up=False)
    engine.register(CHAIN, warm_up=False)
    held = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    return engine, gate, held


def test_a_batch_larger_than_the_queue_is_refused_as_such():
    engine = small_engine(max_queue=4)
    engine.register(CHAIN, warm_up=False)
    with pytest.raises(RequestTooLargeError, match="5 requests at once; the engine takes 4"):
        engine.submit_many("chain", [STEPS] * 5)
    with pytest.raises(RequestTooLargeError):
        engine.submit_many("chain", [STEPS] * 5, wait=True)
    close_and_check(engine)


def test_a_model_fills_its_own_part_of_the_queue_only():
    engine, gate, held = gated()
    engine.register(OTHER, warm_up=False, max_queue=2)
    futures = list(engine.submit_many("other", [STEPS] * 2))
    with pytest.raises(OverloadError, match="2 requests are unfinished, model 'other' takes 2"):
        engine.submit("other", STEPS)
    futures.append(engine.submit("chain", STEPS))
    gate.open.set()
    assert all(future.result(WAIT_S) for future in (*futures, held))
    assert engine.submit("other", STEPS).result(WAIT_S)
    close_and_check(engine)


def test_submit_waits_for_a_place_if_asked_to():
    engine, gate, held = gated(max_queue=2)
    engine.submit("chain", STEPS)
    made: list[object] = []
    has_begun = threading.Event()

    def client() -> None:
        has_begun.set()
        made.append(engine.submit("chain", STEPS, wait=True))

    thread = threading.Thread(target=client)
    thread.start()
    assert has_begun.wait(WAIT_S)
    with pytest.raises(DeadlineError, match="waited for a place"):
        engine.submit("chain", STEPS, wait=True, deadline=0.01)
    gate.open.set()
    thread.join(WAIT_S)
    assert made[0].result(WAIT_S) and held.result(WAIT_S)
    close_and_check(engine)


def test_a_session_s_stream_waits_for_a_place_if_asked_to():
    engine, gate, held = gated(max_queue=1)
    engine.register(KEPT, warm_up=False)
    session = engine.session("kept")
    with pytest.raises(OverloadError):
        session.stream(STEPS)
    opening = threading.Timer(0.05, gate.open.set)
    opening.start()
    with session.stream(STEPS, wait=True) as steps:
        assert len(list(steps)) == len(STEPS)
    assert held.result(WAIT_S)
    close_and_check(engine)


def test_what_a_request_waits_for_a_place_is_of_its_deadline():
    engine, gate, held = gated(max_queue=1)
    threading.Timer(0.2, gate.open.set).start()
    begin_ns = time.perf_counter_ns()
    assert engine.submit("chain", STEPS, wait=True, deadline=WAIT_S).result(WAIT_S) and held.result(WAIT_S)
    deadlines_ns = engine._processor.tables.requests["deadline_ns"]
    (allowed_ns,) = deadlines_ns[(deadlines_ns > 0) & (deadlines_ns < NEVER)] - begin_ns
    assert 0 < allowed_ns < (WAIT_S + 0.15) * 1e9
    close_and_check(engine)


def test_who_waits_for_a_place_is_told_when_the_engine_closes():
    engine, gate, _ = gated(max_queue=1)
    errors: list[BaseException] = []

    def client() -> None:
        try:
            engine.submit("chain", STEPS, wait=True)
        except EngineClosedError as error:
            errors.append(error)

    threads = [threading.Thread(target=client) for _ in range(3)]
    for thread in threads:
        thread.start()
    gate.open.set()
    engine.close(WAIT_S)
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    close_and_check(engine)


@pytest.mark.parametrize("count", [2_000])
def test_requests_that_ended_before_their_deadline_take_no_memory(count):
    engine, gate, held = gated(max_queue=count + 1)
    gate.open.set()
    held.result(WAIT_S)
    pinned = Gate(WAIT_S)
    engine.register(Unfolder("pin", pinned.unfolder.function, pinned.unfolder.example), warm_up=False)
    late = weakref.WeakSet()
    for _ in range(count // 50):
        futures = engine.submit_many("chain", [STEPS] * 50, deadline=WAIT_S)
        late.update(futures)
        for future in futures:
            future.result(WAIT_S)
    del futures, future
    engine.drain(WAIT_S)
    until(lambda: gc.collect() >= 0 and len(late) <= 128, "few are kept")
    close_and_check(engine)


def test_cancelled_requests_behind_a_blocked_one_take_no_memory():
    limits = type(SMALL)(**{**vars(SMALL), "max_requests": 1})
    engine, gate, held = gated(limits=limits)
    left = weakref.WeakSet()
    for _ in range(40):
        futures = engine.submit_many("chain", [STEPS] * 50, priority=0)
        left.update(futures)
        for future in futures:
            future.cancel()
        del futures, future
    assert engine.statistics()["unfinished"] >= 1
    engine.check()
    gc.collect()
    assert len(left) <= 128
    gate.open.set()
    held.result(WAIT_S)
    close_and_check(engine)


def test_cancelled_requests_of_a_busy_session_take_no_memory():
    engine, gate, held = gated()
    engine.register(KEPT, warm_up=False)
    session = engine.session("kept")
    first = session.submit(STEPS)
    left = weakref.WeakSet()
    for _ in range(40):
        futures = [session.submit(STEPS) for _ in range(50)]
        left.update(futures)
        for future in futures:
            future.cancel()
        del futures, future
    engine.check()
    gc.collect()
    assert len(left) <= 128
    gate.open.set()
    assert first.result(WAIT_S) and held.result(WAIT_S)
    close_and_check(engine)


@pytest.mark.parametrize("key", [None, len])
def test_a_closed_engine_gives_its_memory_back_without_a_collection(key):
    engine = small_engine()
    engine.register(replace(CHAIN, key=key), warm_up=False)
    for _ in range(5):
        engine.submit("chain", STEPS).result(WAIT_S)
    gone = [weakref.ref(one) for one in (engine, engine._processor, engine._manager, engine._arenas[0])]
    gc.collect()
    gc.disable()
    try:
        engine.close(WAIT_S)
        del engine
        assert [one() for one in gone] == [None] * 4
    finally:
        gc.enable()


def test_what_never_fits_in_its_models_queue_is_told_so_while_the_engine_is_full():
    engine, gate, held = gated(max_queue=3)
    engine.register(OTHER, warm_up=False, max_queue=2)
    full = engine.submit_many("chain", [STEPS] * 2)
    for wait in (False, True):
        with pytest.raises(RequestTooLargeError, match="3 requests at once; model 'other' takes 2"):
            engine.submit_many("other", [STEPS] * 3, wait=wait)
    gate.open.set()
    assert len(full.results(WAIT_S)) == 2 and held.result(WAIT_S)
    close_and_check(engine)


def queues(*limits: int) -> list[Places]:
    return [Places(f"queue {number}", QueueLimit(limit)) for number, limit in enumerate(limits)]


@pytest.mark.parametrize(("taken", "taken_of_model", "holds_all_up"), [(2, 0, True), (0, 1, False)])
def test_who_comes_later_does_not_overtake_who_waits_for_the_same_places(taken, taken_of_model, holds_all_up):
    gate = threading.RLock()
    engine, model, other = queues(3, 2, 3)
    room, ended = Room(gate), threading.Event()
    engine.take(Size(taken, 0))
    model.take(Size(taken_of_model, 0))
    bulk, single, elsewhere = (
        [(engine, Size(count, 0)), (its, Size(count, 0))] for its, count in ((model, 2), (model, 1), (other, 1))
    )

    def wait() -> None:
        with gate:
            room.wait(bulk, None, lambda: False)
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    until(lambda: room.must_wait(single), "the bulk is in line")
    assert room.must_wait(elsewhere) == holds_all_up
    (model if taken_of_model else engine).give_back(Size(1, 0))
    room.note_place()
    thread.join(WAIT_S)
    assert ended.is_set() and not room.must_wait(single)


def test_who_was_interrupted_on_the_way_into_the_line_or_out_of_it_holds_nobody_up():
    engine, model = queues(1, 1)
    room = Room(threading.RLock())
    wanted = [(engine, Size(1, 0)), (model, Size(1, 0))]
    waiting = InLine([(engine, Size(2, 0)), (model, Size(2, 0))])
    room.line.append(weakref.ref(waiting))
    assert room.must_wait(wanted)
    del waiting
    assert not room.must_wait(wanted)
