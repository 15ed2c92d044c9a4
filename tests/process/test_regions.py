"""Requests that come by shared memory instead of messages: their results, their ends, and what a client may break."""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from cellrt.core.state.region_layout import ENTRIES, ENTRY_BYTES, HANDED, NUM_SLOTS, RING, SLOT_BYTES, WORD_BYTES
from cellrt.engine.future import RequestFuture
from cellrt.errors import CancelledError, CellError, DeviceError, EngineClosedError, OverloadError
from cellrt.graph.known import Alike
from cellrt.graph.reference import run_one_by_one
from cellrt.process import link, region
from cellrt.process.client import Client, connect
from cellrt.process.host import EngineServer
from cellrt.process.numbering import Numbering
from cellrt.process.outcomes import Arrived
from cellrt.process.recorded import Template, template_of
from cellrt.process.region import Region, ended
from cellrt.process.source import ModelSource
from cellrt.worker.cpu.cpu_executor import Executor
from cellrt.worker.cpu.worker import CpuWorker
from tests.engine.helpers import WAIT_S, assert_same, error_of
from tests.process import models
from tests.process.helpers import held, steps
from tests.steps import HOLD, HOLD_LONG, RAISE, WIDTH
from tests.waiting import until

REQUESTS = {
    "chain": (models.chain, steps(3)),
    "loop": (models.loop, torch.ones(WIDTH)),
    "layers": (models.layers, torch.ones(WIDTH)),
    "half": (models.half, torch.ones(3, dtype=torch.bfloat16)),
}
OUT_OF_ORDER, SOON_S, SCRIBBLE_EVERY_S = 7, 0.05, 0.001


@pytest.fixture
def client(server: EngineServer) -> Iterator[Client]:
    """A client of a server in this process that has sent each request twice: those that follow come by the region."""
    for name in REQUESTS:
        server.calls.register(models_source(name), {})
    with connect(server.address) as made:
        for name, (_, request) in REQUESTS.items():
            learn(made, name, request)
        yield made
        if server.engine._manager.turns.stopped is not None:
            return
        assert made.drain(WAIT_S)
        until(lambda: has_all_slots(region_of(made)), "all slots are free")
        until(lambda: server.engine.statistics()["unfinished"] == 0, "nothing is unfinished")
        server.engine.check()


def models_source(name: str) -> ModelSource:
    return ModelSource(f"tests.process.models:{name}")


def region_of(client: Client) -> Region:
    region = client._link._region
    assert region is not None
    return region


def has_all_slots(region: Region) -> bool:
    region._reclaim()
    return len(region._free) == NUM_SLOTS and not region._held and not region._slots


def learn(client: Client, name: str, request: object) -> None:
    """Send a request until the engine has named what runs for it."""

    def is_named() -> bool:
        client.submit(name, request).result(WAIT_S)
        binding = client.binding(name).number
        return any(its.binding == binding for its in region_of(client)._numbers)

    until(is_named, "the engine has named it")


def num_handed_in(client: Client) -> int:
    return int(region_of(client)._head[HANDED])


@pytest.mark.parametrize("name", REQUESTS)
def test_a_request_that_comes_by_the_region_has_its_results(client, name):
    before, (unfolder, request) = num_handed_in(client), REQUESTS[name]
    for _ in range(3):
        assert_same(client.submit(name, request).result(WAIT_S), run_one_by_one(unfolder, request))
    assert num_handed_in(client) == before + 3


def test_rows_are_those_of_each_request_whatever_slots_they_had(client):
    for value in range(3 * NUM_SLOTS):
        future = client.submit("chain", steps(3, float(value % 64)))
        if value % OUT_OF_ORDER:
            assert_same(future.result(WAIT_S), run_one_by_one(models.chain, steps(3, float(value % 64))))


def test_threads_share_a_region(client):
    def live(first: int) -> None:
        for k in range(100):
            request = steps(3, float((first + k) % 64))
            assert_same(client.submit("chain", request).result(WAIT_S), run_one_by_one(models.chain, request))

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(live, range(0, 64, 16)))


def test_coroutines_are_told_of_what_came_by_the_region(client):
    async def live() -> list[dict[str, torch.Tensor]]:
        return await asyncio.gather(*[client.infer("chain", steps(3, float(k))) for k in range(50)])

    for k, result in enumerate(asyncio.run(live())):
        assert_same(result, run_one_by_one(models.chain, steps(3, float(k))))


def test_a_callback_is_called_once_whenever_it_is_added(client):
    called: list[object] = []
    early, late = client.submit("chain", steps(3, HOLD)), client.submit("chain", steps(3))
    early.add_done_callback(called.append)
    early.result(WAIT_S)
    until(lambda: called == [early], "the first callback was called")
    until(late.done, "the other has ended")
    late.add_done_callback(called.append)
    assert called == [early, late]


def test_several_threads_wait_for_one_request(client):
    future = client.submit("chain", steps(3, HOLD))
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for result in [pool.submit(future.result, WAIT_S) for _ in range(4)]:
            assert_same(result.result(WAIT_S), run_one_by_one(models.chain, steps(3, HOLD)))


def test_who_gave_up_waiting_may_wait_again(client):
    future = client.submit("chain", steps(3, HOLD))
    with pytest.raises(TimeoutError):
        future.result(0.001)
    assert future.result(WAIT_S)


def test_several_futures_are_waited_for_together(client):
    futures = [client.submit("chain", steps(3, float(k))) for k in range(20)]
    done, left = concurrent.futures.wait(futures, WAIT_S)
    assert len(done) == len(futures) and not left


def test_a_cell_that_fails_costs_its_own_request_alone(client):
    futures = [client.submit("chain", steps(3, RAISE if k == 2 else float(k))) for k in range(5)]
    assert isinstance(error_of(futures.pop(2)), CellError)
    for k, future in zip((0, 1, 3, 4), futures):
        assert_same(future.result(WAIT_S), run_one_by_one(models.chain, steps(3, float(k))))


def test_a_request_is_cancelled_wherever_it_is(client):
    first, *others = [client.submit("chain", steps(3, HOLD)) for _ in range(5)]
    for future in others:
        assert future.cancel()
        assert isinstance(error_of(future), CancelledError)
    assert first.result(WAIT_S)


def test_more_requests_than_slots_have_their_results(client):
    blocked = client.submit("chain", held())
    futures = [client.submit("chain", steps(3, float(k % 64))) for k in range(NUM_SLOTS + 50)]
    for k, future in enumerate(futures):
        assert_same(future.result(WAIT_S), run_one_by_one(models.chain, steps(3, float(k % 64))))
    assert blocked.result(WAIT_S)


def test_futures_that_nobody_keeps_give_their_slots_back(client):
    for _ in range(2 * NUM_SLOTS):
        client.submit("chain", steps(3))


def test_what_is_asked_of_a_request_is_told(client):
    future = client.submit("chain", steps(3, HOLD))
    assert client.explain(future)
    assert future.result(WAIT_S)


def test_templates_are_numbered_anew_while_requests_run(client, monkeypatch):
    monkeypatch.setattr(Numbering, "MAX_TEMPLATES", 2)
    for k in range(60):
        request = steps(1 + k % 7, float(k % 64))
        futures = [client.submit("chain", request) for _ in range(3)]
        for future in futures:
            assert_same(future.result(WAIT_S), run_one_by_one(models.chain, request))


def test_a_model_is_loaded_anew_while_requests_run(client):
    futures = [client.submit("chain", steps(3, HOLD)) for _ in range(3)]
    client.load("chain")
    futures += [client.submit("chain", steps(3, float(k))) for k in range(3)]
    for future in futures:
        assert future.result(WAIT_S)


def test_the_queue_counts_what_came_by_the_region(server, client):
    former = client.binding("chain")
    server.calls.register(models_source("chain"), {"replace": True, "max_queue": 2})
    until(lambda: client.binding("chain") is not former, "the client has heard of it")
    learn(client, "chain", steps(3))
    before = num_handed_in(client)
    errors = [future.exception(WAIT_S) for future in [client.submit("chain", steps(3, HOLD_LONG)) for _ in range(8)]]
    assert num_handed_in(client) == before + 8
    assert errors[0] is None and OverloadError in map(type, errors)
    assert all(error is None or isinstance(error, OverloadError) for error in errors)


def test_the_end_of_an_engine_ends_what_came_by_the_region(server, client):
    futures = [client.submit("chain", held()) for _ in range(3)]
    server.engine.close(WAIT_S)
    for future in futures:
        assert isinstance(error_of(future), EngineClosedError)


@pytest.mark.parametrize("forever", [False, True])
def test_a_worker_that_dies_costs_what_ran_on_it_and_the_last_all_that_comes(server, client, monkeypatch, forever):
    execute, is_over = Executor.execute, threading.Event()

    def die(self, type_id, buffer):
        if is_over.is_set():
            return execute(self, type_id, buffer)
        is_over.set()
        raise SystemExit("the worker's own fault")

    monkeypatch.setattr(Executor, "execute", die)
    monkeypatch.setattr(CpuWorker, "is_replaceable", not forever)
    assert isinstance(error_of(client.submit("chain", steps(3))), DeviceError | EngineClosedError)
    until(lambda: server.engine.has_workers() is not forever, "what becomes of the worker is known")
    for _ in range(2):
        future = client.submit("chain", steps(3))
        assert isinstance(future.exception(WAIT_S), EngineClosedError if forever else type(None))


def test_the_reader_takes_no_results_of_the_request_that_had_a_slot_before(client, monkeypatch):
    hand_in = Region.hand_in

    def hand_in_late(self):
        self.ring()
        time.sleep(SOON_S)
        hand_in(self)

    assert_same(client.submit("chain", steps(3, 1.0)).result(WAIT_S), run_one_by_one(models.chain, steps(3, 1.0)))
    monkeypatch.setattr(Region, "hand_in", hand_in_late)
    future = client.submit("chain", steps(3, 7.0))
    assert_same(future.result(WAIT_S), run_one_by_one(models.chain, steps(3, 7.0)))


def test_a_request_that_was_cancelled_keeps_its_slot_until_the_engine_has_left_it(client, monkeypatch):
    """Else the slot is handed in twice, and the engine sees the client off."""
    cancelled: list[RequestFuture] = []

    def find(*what: Any) -> int:
        monkeypatch.undo()
        count = ended(*what)
        cancelled.append(client.submit("chain", steps(3, HOLD_LONG)))  # in a slot that was found
        with monkeypatch.context() as untold:
            untold.setattr(client, "ask_to_cancel", lambda _: None)
            cancelled[0].cancel()
        return count

    running = client.submit("chain", steps(3, HOLD_LONG))
    client.submit("half", REQUESTS["half"][1]).result(WAIT_S)
    monkeypatch.setattr(region, "ended", find)
    region_of(client).take_all(Arrived())
    assert cancelled[0].id in region_of(client)._slots
    client.ask_to_cancel(cancelled[0])
    assert running.result(WAIT_S)


@pytest.mark.parametrize("is_handed_in", [False, True])
def test_a_request_is_forgotten_whose_submission_was_interrupted_twice(client, monkeypatch, is_handed_in):
    hand_in = Region.hand_in

    def interrupt(*what: Any) -> None:
        if is_handed_in and isinstance(what[0], Region):
            hand_in(*what)
        raise KeyboardInterrupt

    with monkeypatch.context() as interrupted:
        interrupted.setattr(Region, "hand_in", interrupt)
        interrupted.setattr(client._link, "_give_up", interrupt)
        with pytest.raises(KeyboardInterrupt):
            client.submit("chain", steps(3))
    assert client.drain(WAIT_S)

    def is_free() -> bool:  # seen by the thread that hears of answers for callbacks, not for who waits for its own
        future = client.submit("chain", steps(3))
        future.add_done_callback(lambda _: None)
        assert future.result(WAIT_S)
        return not region_of(client)._held

    until(is_free, "its slot is free")


def test_a_thread_waits_for_a_request_that_fails_and_has_a_callback(client):
    told: list[object] = []
    bad = torch.cat([steps(1, HOLD_LONG), steps(1), steps(1, RAISE)])
    future = client.submit("chain", bad)
    future.add_done_callback(told.append)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        assert isinstance(pool.submit(future.exception).result(WAIT_S), CellError)
    assert told == [future]


def test_who_drains_hears_of_what_is_handed_in_meanwhile(client):
    first = client.submit("chain", steps(3, HOLD_LONG))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        drained = pool.submit(client.drain)
        until(lambda: region_of(client).num_drains, "it drains")
        second = client.submit("chain", steps(3, HOLD))
        assert drained.result(WAIT_S)
    assert first.result(WAIT_S) and second.result(WAIT_S)


def test_plans_are_forgotten_while_another_thread_submits(client, monkeypatch):
    is_forgotten = threading.Event()

    def forget(binding: int, alike: Alike) -> Template:
        if threading.current_thread() is not threading.main_thread():
            client._link._numbering.MAX_TEMPLATES = 0  # the next template that is new is one too many
            is_forgotten.set()
            client.submit("chain", steps(5, 2.0)).result(WAIT_S)
        return template_of(binding, alike)

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(link, "template_of", lambda *what: (monkeypatch.undo(), forget(*what))[1])
        future = pool.submit(client.submit, "chain", steps(3, 5.0)).result(WAIT_S)
    assert is_forgotten.is_set()
    assert_same(future.result(WAIT_S), run_one_by_one(models.chain, steps(3, 5.0)))


def test_the_release_of_one_binding_leaves_another_of_the_same_model(client):
    value = client._link.call("bind", model="chain", known=[]).value  # as for a thread that knows of no other
    other = client._bindings.binding_of(value)
    assert other.number != client.binding("chain").number
    client._link.give_up(other)
    before = num_handed_in(client)
    assert_same(client.submit("chain", steps(3, 5.0)).result(WAIT_S), run_one_by_one(models.chain, steps(3, 5.0)))
    assert num_handed_in(client) == before + 1


def test_a_forked_process_takes_nothing_of_its_parents(client):
    told = threading.Event()
    future = client.submit("chain", steps(3, HOLD_LONG))
    future.add_done_callback(lambda _: told.set())
    pid = os.fork()
    if pid == 0:
        try:
            future.cancel()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    assert told.wait(WAIT_S) and future.result(WAIT_S)


BROKEN = {
    "a slot that is none": lambda head, slot: head.__setitem__(RING + head[HANDED] % NUM_SLOTS, NUM_SLOTS),
    "a plan that is none": lambda head, slot: head.__setitem__(ENTRIES + slot * ENTRY_BYTES // WORD_BYTES, 999),
    "more than there are slots": lambda head, slot: head.__setitem__(HANDED, head[HANDED] + 2 * NUM_SLOTS),
    "fewer than before": lambda head, slot: head.__setitem__(HANDED, head[HANDED] - 2),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_client_that_writes_nonsense_is_seen_off_and_nobody_else_notices(server, client, how):
    with connect(server.address) as other:
        learn(other, "chain", steps(3))
        region, future = region_of(other), other.submit("chain", held())
        slot = next(iter(set(range(NUM_SLOTS)) - set(region._slots.values())))
        region._head[RING + region._head[HANDED] % NUM_SLOTS] = slot
        BROKEN[how](region._head, slot)
        region._head[HANDED] += 1
        assert_same(client.submit("chain", steps(3)).result(WAIT_S), run_one_by_one(models.chain, steps(3)))
        assert isinstance(future.exception(WAIT_S), DeviceError | None)
        until(lambda: other.is_lost, "it is seen off")


def test_a_client_may_write_anything_to_its_slots_while_they_are_used(server, client):
    with connect(server.address) as other:
        learn(other, "chain", steps(3))
        region, is_over = region_of(other), threading.Event()

        def scribble() -> None:
            while not is_over.is_set():
                for word in range(ENTRIES - NUM_SLOTS, len(region._head)):
                    region._head[word] = -word * 0x1234567
                region._memory[-SLOT_BYTES:] = bytes([255]) * SLOT_BYTES
                time.sleep(SCRIBBLE_EVERY_S)

        thread = threading.Thread(target=scribble)
        thread.start()
        for k in range(50):
            request = steps(3, float(k % 64))
            assert_same(client.submit("chain", request).result(WAIT_S), run_one_by_one(models.chain, request))
            if not other.is_lost:
                region._head[HANDED] += 1
        is_over.set()
        thread.join(WAIT_S)
        server.engine.check()
