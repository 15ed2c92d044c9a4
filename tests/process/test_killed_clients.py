"""Clients that are killed at any moment: what was theirs is given back, and nobody else notices."""

from __future__ import annotations

import multiprocessing
import threading
import time
from concurrent.futures import Future
from itertools import count

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.errors import CellrtError
from cellrt.graph.reference import run_one_by_one
from cellrt.process.client import Client, connect
from tests.effort import examples
from tests.engine.helpers import WAIT_S, assert_same
from tests.process import models
from tests.process.helpers import assert_as_before, held, holdings, steps
from tests.steps import RAISE

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["tests.process.test_killed_clients"])
DEEDS = ("submit", "many", "wait", "held", "stream", "session", "shared", "cancel", "wrong")


def act(client: Client, deeds: list[str], futures: list[Future]) -> None:
    """Does one thing after the other, as a client does, and waits for nothing but places."""
    for deed in deeds:
        if deed == "submit":
            futures.append(client.submit("chain", steps(5)))
        elif deed == "many":
            futures += client.submit_many("chain", [steps(1 + k % 4) for k in range(20)])
        elif deed == "wait":
            futures += client.submit_many("chain", [steps(2)] * 8, wait=True, deadline=WAIT_S)
        elif deed == "held":
            futures.append(client.submit("chain", held(), deadline=WAIT_S))
        elif deed == "stream":
            futures.append(client.stream("chain", steps(9)).future)
        elif deed in ("session", "shared"):
            session = client.session("kept", None if deed == "session" else "between")
            futures += [session.submit(steps(2)) for _ in range(3)]
        elif deed == "cancel" and futures:
            futures.pop().cancel()
        elif deed == "wrong":
            futures.append(client.submit("chain", steps(2, RAISE)))


def live_and_die(address: str, deeds: list[str], pipe) -> None:
    """A client's whole process: it never leaves by itself."""
    client, futures = connect(address), []
    pipe.send("there")
    for _ in count():
        act(client, deeds, futures)
        futures = [future for future in futures if not future.done()][-200:]


class Bystander:
    """Another client, which notices if anything becomes of its own requests."""

    def __init__(self, address: str) -> None:
        self._client, self._problems, self._stop = connect(address), [], threading.Event()
        self._thread = threading.Thread(target=self._go_on)
        self._thread.start()

    def _go_on(self) -> None:
        try:
            while not self._stop.is_set():
                request = steps(3)
                results = [
                    future.result(WAIT_S) for future in self._client.submit_many("chain", [request] * 5, wait=True)
                ]
                for result in results:
                    assert_same(result, EXPECTED)
        except BaseException as problem:
            self._problems.append(problem)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        self._client.close()
        assert not self._problems


EXPECTED = run_one_by_one(models.chain, steps(3))


@pytest.fixture(scope="module")
def watched(served):
    """The engine, how it was before, and what its process held; a session that lives on is there already."""
    served.session("kept", "between").submit(steps(1)).result(WAIT_S)
    return served, served.statistics(), holdings(served.pid)


deeds = st.lists(st.sampled_from(DEEDS), min_size=1, max_size=6)


@settings(max_examples=examples(15), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(clients=st.lists(st.tuples(deeds, st.booleans()), min_size=1, max_size=4))
def test_connections_that_break_leave_nothing(watched, clients):
    """Clients of this process, whose connections end as if they were killed: each of their futures ends once."""
    engine, before, held_before = watched
    bystander = Bystander(engine.address)
    ended: list[Future] = []
    futures: list[Future] = []
    for plan, is_patient in clients:
        client, theirs = connect(engine.address), []
        act(client, plan, theirs)
        for future in theirs:
            future.add_done_callback(ended.append)
        if is_patient:
            client.drain(0.02)
        client._link._wire.end()
        futures += theirs
        del client
    for future in futures:
        error = future.exception(WAIT_S) if not future.cancelled() else None
        assert error is None or isinstance(error, CellrtError)
    bystander.end()
    assert_as_before(engine, before, held_before, engine.pid)
    assert sorted(map(id, ended)) == sorted(map(id, futures))


def kill_some(watched, plans: list[list[str]], after_s: float) -> None:
    engine, before, held_before = watched
    bystander = Bystander(engine.address)
    processes = []
    for plan in plans:
        here, there = PROCESSES.Pipe()
        process = PROCESSES.Process(target=live_and_die, args=(engine.address, plan, there), daemon=True)
        process.start()
        processes.append((process, here))
    for _, here in processes:
        assert here.poll(WAIT_S), "the client has not come"
        here.recv()
    time.sleep(after_s)
    for process, _ in processes:
        assert process.is_alive(), "the client ended by itself"
        process.kill()
    for process, _ in processes:
        process.join(WAIT_S)
    bystander.end()
    assert_as_before(engine, before, held_before, engine.pid)


@pytest.mark.slow
def test_processes_that_are_killed_leave_nothing(watched):
    kill_some(watched, [["submit", "many", "stream", "session"], ["wait", "held", "cancel", "wrong", "shared"]], 0.05)


@pytest.mark.slow
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans=st.lists(deeds, min_size=1, max_size=3), after_s=st.floats(0, 0.1))
def test_processes_that_are_killed_at_any_moment_leave_nothing(watched, plans, after_s):
    kill_some(watched, plans, after_s)
