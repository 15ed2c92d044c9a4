"""The life of requests and engines: overload, cancel, deadlines, drain, close, statistics and timeline."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref

import pytest
import torch

from cellrt.definition.define import cell
from cellrt.engine.engine import Engine
from cellrt.errors import (
    CancelledError,
    DeadlineError,
    DefinitionError,
    EngineClosedError,
    OverloadError,
    RequestError,
    UnknownModelError,
)
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.engine.author import OPERATIONS, make_unfolder
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, error_of, small_engine
from tests.engine.models import WIDTH, Gate, chain_model, make_cells
from tests.engine.zoo import make_zoo

PLAIN, WITH_STEPS, _ = make_cells()
CHAIN = chain_model("chain", PLAIN)
RUNS = chain_model("runs", WITH_STEPS)


def gated_engine(**options):
    """(engine, gate, future of the request inside the gate): its one worker is busy until the gate opens."""
    gate = Gate(WAIT_S)
    engine = small_engine(1, queue_depth=1, **options)
    engine.register(gate.unfolder, warm_up=False)
    engine.register(CHAIN, warm_up=False)
    held = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    return engine, gate, held


def steps(count: int) -> torch.Tensor:
    return torch.arange(count * WIDTH, dtype=torch.float32).reshape(count, WIDTH) / 10


def test_cancel_while_waiting_while_running_and_after_the_end():
    engine, gate, held = gated_engine()
    waiting = engine.submit("chain", steps(3))
    assert waiting.cancel()
    assert type(error_of(waiting)) is CancelledError
    assert engine.cancel(held)  # its task is running: the request ends at once, its rows come back later
    assert type(error_of(held)) is CancelledError
    gate.open.set()
    done = engine.submit("chain", steps(3))
    done.result(WAIT_S)
    assert not done.cancel() and not engine.cancel(done)
    assert engine.statistics()["errors"] == {"CancelledError": 2}
    close_and_check(engine)


@pytest.mark.parametrize("seed", range(4))
def test_cancel_at_any_moment(seed):
    """Several threads submit and cancel in a random order; whatever is not cancelled is right."""
    unfolder = make_unfolder(make_zoo(8))
    engine = small_engine(2)
    engine.register(unfolder, warm_up=False)
    ended: list[tuple[object, object]] = []

    def client(number: int) -> None:
        draw = random.Random(100 * seed + number)
        futures = []
        for _ in range(25):
            request = [(draw.choice(sorted(OPERATIONS)), draw.randrange(1000)) for _ in range(draw.randint(1, 3))]
            futures.append((request, engine.submit("random", request)))
            if draw.random() < 0.4:
                draw.choice(futures)[1].cancel()
            if draw.random() < 0.2:
                error_of(futures[0][1])
        ended.extend((request, error_of(future) or future.result()) for request, future in futures)

    threads = [threading.Thread(target=client, args=(k,)) for k in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert len(ended) == 75
    for request, outcome in ended:
        if isinstance(outcome, Exception):
            assert type(outcome) is CancelledError
        else:
            assert_same(outcome, run_one_by_one(unfolder, request))
    close_and_check(engine)


def test_a_request_that_waits_past_its_deadline_ends():
    engine, gate, held = gated_engine()
    late = [engine.submit("chain", steps(k + 1), deadline=0.001 * (k + 1)) for k in range(5)]
    in_time = engine.submit("chain", steps(2), deadline=WAIT_S)
    for future in late:
        assert type(error_of(future)) is DeadlineError
    assert not held.done() and not in_time.done()
    gate.open.set()
    held.result(WAIT_S)
    in_time.result(WAIT_S)
    close_and_check(engine)


def test_a_request_that_runs_past_its_deadline_ends_while_its_cell_runs_on():
    gate = Gate(WAIT_S)
    engine = small_engine()
    engine.register(gate.unfolder, warm_up=False)
    running = engine.submit("gate", torch.ones(WIDTH), deadline=0.2)
    assert gate.entered.wait(WAIT_S)
    assert type(error_of(running)) is DeadlineError
    assert not gate.open.is_set()
    gate.open.set()
    close_and_check(engine)


def test_a_deadline_or_priority_that_makes_no_sense_is_refused():
    engine = small_engine()
    engine.register(CHAIN, warm_up=False)
    for deadline in (0.0, -1.0, float("nan"), float("inf"), 1e300, 10**400, "soon", True):
        with pytest.raises(RequestError, match="deadline"):
            engine.submit("chain", steps(2), deadline=deadline)
    for priority in (-1, 4):
        with pytest.raises(RequestError, match="priority"):
            engine.submit("chain", steps(2), priority=priority)
    with pytest.raises(UnknownModelError, match="chain"):
        engine.submit("chian", steps(2))
    for model in (chain_model("chain", PLAIN), ["chain"], None):
        for use in (engine.submit, engine.stream, engine.session):
            with pytest.raises(UnknownModelError, match="expected the name of a registered model, got"):
                use(model, steps(2))
    with pytest.raises(UnknownModelError, match=r"got Unfolder\('chain'\); its name is 'chain'$"):
        engine.submit(chain_model("chain", PLAIN), steps(2))
    assert engine.statistics()["unfinished"] == 0
    close_and_check(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, "workers: expected a positive number of CPU workers, or a list of devices .*, got 0"),
        ({"workers": "cpu"}, "workers: .* got 'cpu'"),
        ({"workers": 1.5}, "workers: .* got 1.5"),
        ({"workers": []}, r"workers: .* got \[\]"),
        ({"max_queue": 0}, "max_queue: expected a positive integer, got 0"),
        ({"threads_per_worker": 0}, "threads_per_worker: expected a positive integer"),
        ({"max_nodes": True}, "max_nodes: expected a positive integer, got True"),
        ({"queue_depth": 0}, "queue_depth: expected a positive integer"),
        ({"policy": "fifo"}, "policy: expected a Policy, one of batchmaker, .* got 'fifo'"),
        ({"settings": {"runs": False}}, "settings: expected a SchedulerSettings"),
        ({"device_options": {}}, "device_options: expected a DeviceOptions"),
    ],
)
def test_a_wrong_option_is_named(options, message):
    with pytest.raises(DefinitionError, match=message):
        Engine(**options)


def count_threads(x: torch.Tensor) -> torch.Tensor:
    """An operation, then the number of threads that it may use, a row."""
    return (x @ torch.eye(WIDTH)).sum(1) * 0 + torch.get_num_threads()


def test_workers_keep_their_number_of_torch_threads_whatever_others_set():
    before = torch.get_num_threads()
    engine = small_engine(threads_per_worker=1)
    try:
        torch.set_num_threads(3)
        made = cell(count_threads, {"x": (WIDTH,)})
        engine.register(Unfolder("count", lambda graph, x: {"n": made(x=x).output}, torch.ones(WIDTH)), warm_up=False)
        assert engine.submit("count", torch.ones(WIDTH)).result(WAIT_S)["n"].item() == 1
    finally:
        torch.set_num_threads(before)
    close_and_check(engine)


def test_a_full_queue_refuses_and_takes_again():
    engine, gate, held = gated_engine(max_queue=3)
    with pytest.raises(OverloadError, match="1 requests are unfinished, the engine takes 3; 3 more came"):
        engine.submit_many("chain", [steps(2)] * 3)
    accepted = engine.submit_many("chain", [steps(2), steps(3)])
    with pytest.raises(OverloadError, match="3"):
        engine.submit("chain", steps(1))
    gate.open.set()
    for future in (held, *accepted):
        future.result(WAIT_S)
    engine.submit("chain", steps(1)).result(WAIT_S)
    close_and_check(engine)


def test_submit_many_takes_all_or_none():
    engine = small_engine()
    engine.register(CHAIN, warm_up=False)
    with pytest.raises(RequestError, match="add"):
        engine.submit_many("chain", [steps(2), torch.zeros(2, WIDTH + 1), steps(3)])
    assert list(engine.submit_many("chain", [])) == []
    assert engine.statistics()["unfinished"] == 0
    futures = engine.submit_many("chain", (steps(k) for k in range(1, 5)))
    for k, future in enumerate(futures, 1):
        assert_same(future.result(WAIT_S), run_one_by_one(CHAIN, steps(k)))
    close_and_check(engine)


def test_drain_waits_or_says_that_it_did_not():
    engine, gate, held = gated_engine()
    assert not engine.drain(timeout=0.01)
    gate.open.set()
    assert engine.drain(WAIT_S)
    assert held.done()
    assert engine.drain(0.0)
    close_and_check(engine)


def test_a_time_limit_that_makes_no_sense_is_refused():
    engine = small_engine()
    for wait in (engine.drain, engine.close):
        for timeout in (float("nan"), -1.0, 1e300, 10**400, "soon"):
            with pytest.raises(RequestError, match="timeout: expected seconds"):
                wait(timeout)
    close_and_check(engine)


def test_close_waits_no_longer_than_it_was_told():
    engine, gate, held = gated_engine()
    more = engine.submit("chain", steps(2))
    began_s = time.monotonic()
    engine.close(0.2)
    assert time.monotonic() - began_s < WAIT_S / 2
    for future in (held, more):
        assert type(error_of(future)) is EngineClosedError
    threads = [worker._thread for worker in engine._manager.workers]
    gate.open.set()
    engine.close(WAIT_S)
    assert not any(thread.is_alive() for thread in threads)


def test_close_with_work_in_flight_ends_it():
    engine, gate, held = gated_engine()
    waiting = engine.submit_many("chain", [steps(k) for k in range(1, 9)])
    closing = threading.Thread(target=engine.close, args=(WAIT_S,))
    closing.start()
    for future in (held, *waiting):
        assert type(error_of(future)) is EngineClosedError
    gate.open.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    close_and_check(engine)  # closes it a second time


def test_close_takes_in_what_a_worker_completed_while_another_had_the_turn():
    engine, gate, held = gated_engine()
    closing = threading.Thread(target=engine.close, args=(WAIT_S,))
    closing.start()
    assert type(error_of(held)) is EngineClosedError  # its row comes back with its task
    turns = engine._manager.turns

    def find_taken(is_held: bool) -> bool:
        if is_held:
            turns._release()
        return False

    engine._manager.workers[0]._take_turns = find_taken
    gate.open.set()
    closing.join(WAIT_S)
    close_and_check(engine)


def test_a_closed_engine_refuses():
    engine = small_engine()
    engine.register(CHAIN, warm_up=False)
    engine.close()
    engine.close()
    with pytest.raises(EngineClosedError):
        engine.submit("chain", steps(2))
    with pytest.raises(EngineClosedError):
        engine.register(RUNS, warm_up=False)
    assert engine.drain(WAIT_S)
    assert not engine._manager.turns._thread.is_alive()


def test_the_context_manager_finishes_what_was_submitted():
    with small_engine(2) as engine:
        engine.register(CHAIN, warm_up=False)
        futures = engine.submit_many("chain", [steps(k) for k in range(1, 20)])
    assert all(future.done() and future.exception() is None for future in futures)
    close_and_check(engine)


def test_the_context_manager_does_not_wait_after_an_error():
    with pytest.raises(ZeroDivisionError):  # noqa: SIM117
        with small_engine() as engine:
            gate = Gate(WAIT_S)
            engine.register(gate.unfolder, warm_up=False)
            held = engine.submit("gate", torch.ones(WIDTH))
            held.add_done_callback(lambda _: gate.open.set())
            raise ZeroDivisionError
    assert type(error_of(held)) is EngineClosedError
    close_and_check(engine)


def test_two_engines_of_the_same_cells_know_nothing_of_each_other():
    unfolder = make_unfolder(make_zoo(4))
    first = small_engine(1, arena_bytes=2048, max_queue=64)
    second = small_engine(2, arena_bytes=1 << 18, max_queue=1)
    for engine in (first, second):
        engine.register(unfolder, warm_up=False)
    requests = [[(operation, seed)] for seed in range(4) for operation in OPERATIONS]
    futures = first.submit_many("random", requests)
    for request in requests:
        assert_same(second.submit("random", request).result(WAIT_S), run_one_by_one(unfolder, request))
    for request, future in zip(requests, futures):
        assert_same(future.result(WAIT_S), run_one_by_one(unfolder, request))
    close_and_check(first)
    assert_same(second.submit("random", requests[0]).result(WAIT_S), run_one_by_one(unfolder, requests[0]))
    close_and_check(second)


def test_a_future_that_nobody_keeps_still_ends():
    engine, gate, held = gated_engine()
    for k in range(1, 9):
        engine.submit("chain", steps(k))
    gc.collect()
    gate.open.set()
    held.result(WAIT_S)
    assert engine.drain(WAIT_S)
    assert engine.statistics()["done"] == 9
    close_and_check(engine)


def test_a_callback_that_raises_or_submits_harms_nobody(caplog):
    engine = small_engine()
    engine.register(CHAIN, warm_up=False)
    further = []

    def callback(_: object) -> None:
        further.append(engine.submit("chain", steps(3)))
        raise ValueError("a client's own mistake")

    engine.submit("chain", steps(2)).add_done_callback(callback)
    assert engine.drain(WAIT_S)
    assert_same(further[0].result(WAIT_S), run_one_by_one(CHAIN, steps(3)))
    engine.check()
    close_and_check(engine)


def test_statistics_count_every_end():
    engine = small_engine()
    engine.register(CHAIN, warm_up=False)
    assert engine.statistics()["latency_s"] == {}
    for k in range(1, 6):
        engine.submit("chain", steps(k)).result(WAIT_S)
    error_of(engine.submit("chain", torch.full((1, WIDTH), 101.0)))
    counts = engine.statistics()
    assert (counts["unfinished"], counts["done"], counts["errors"]) == (0, 5, {"CellError": 1})
    assert counts["cells"]["add"]["nodes"] == 15  # those that ran, without the one that failed
    assert counts["cells"]["add"]["mean_batch"] == 1.0
    assert 0 < counts["latency_s"]["p50"] <= counts["latency_s"]["p99"] < WAIT_S
    close_and_check(engine)


def test_the_timeline_has_every_task_and_request():
    engine = small_engine(2, trace=True)
    engine.register(CHAIN, warm_up=False)
    for future in engine.submit_many("chain", [steps(k) for k in range(1, 9)]):
        future.result(WAIT_S)
    timeline = engine.timeline()
    assert len(timeline.requests) == 8
    assert all(span.arrival_s <= span.finish_s for span in timeline.requests)
    assert {request for task in timeline.tasks for request in task.requests} == set(range(1, 9))
    assert all(task.start_s <= task.end_s and task.worker in (1, 2) and task.cell == "add" for task in timeline.tasks)
    assert sum(task.rows for task in timeline.tasks) >= 8
    close_and_check(engine)
    with pytest.raises(DefinitionError, match="trace=True"):
        small_engine().timeline()


def test_the_threads_of_an_engine_that_is_dropped_end():
    engine = small_engine(2)
    engine.register(CHAIN, warm_up=False)
    engine.submit("chain", steps(3)).result(WAIT_S)
    threads = [engine._manager.turns._thread, *(worker._thread for worker in engine._manager.workers)]
    dropped = weakref.ref(engine)
    del engine
    gc.collect()
    assert dropped() is None
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
