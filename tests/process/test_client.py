"""A client of an engine elsewhere gets what the engine itself would give: results, streams, sessions, errors."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor, as_completed

import pytest
import torch

import cellrt
from cellrt.errors import (
    CancelledError,
    CellError,
    DeadlineError,
    DefinitionError,
    DeviceError,
    EngineClosedError,
    RequestError,
    RequestTooLargeError,
    SessionError,
    UnknownModelError,
)
from cellrt.graph.reference import run_one_by_one
from cellrt.process.client import connect
from cellrt.process.numbering import Numbering
from cellrt.process.source import ModelSource
from tests.engine.helpers import WAIT_S, assert_same, error_of
from tests.process import models
from tests.process.helpers import held, steps
from tests.steps import HOLD_LONG, RAISE, WIDTH
from tests.waiting import until

TOO_MANY = 40_000
"""Steps that are more rows than the host's arena has."""


@pytest.mark.parametrize(
    ("model", "request_"),
    [
        (models.chain, torch.arange(10.0).reshape(5, WIDTH)),
        (models.chain, [[1.0, 2.0], [3.0, 4.0]]),
        (models.loop, torch.ones(WIDTH)),
        (models.layers, torch.ones(WIDTH)),
        (models.shapes, {"parents": [5, 5, 6, 6, -1, 4, 4], "x": torch.arange(8.0).reshape(4, WIDTH)}),
        (models.half, torch.ones(3, dtype=torch.bfloat16)),
    ],
)
def test_results_are_those_of_the_reference(client, model, request_):
    expected = run_one_by_one(model, request_)
    assert_same(client.submit(model.name, request_).result(WAIT_S), expected)
    for future in client.submit_many(model.name, [request_] * 3):
        result = future.result(WAIT_S)
        assert_same(result, expected)
        for value in result.values():
            value.mul_(2)  # it is the client's own memory


def test_many_graphs_of_many_shapes_and_forgotten_templates(client, monkeypatch):
    monkeypatch.setattr(Numbering, "MAX_TEMPLATES", 5)
    futures = {client.submit("chain", steps(length)): length for length in (*range(1, 30), *range(1, 30))}
    for future in as_completed(futures, WAIT_S):
        assert_same(future.result(), run_one_by_one(models.chain, steps(futures[future])))


@pytest.mark.slow
def test_many_at_once(client):
    together = [torch.randn(60, WIDTH) for _ in range(400)]
    whole = client.submit_many("chain", together, wait=True)
    for request, future in zip(together, whole):
        assert_same(future.result(WAIT_S), run_one_by_one(models.chain, request))


def test_a_stream_gives_every_step_then_what_has_none(client):
    expected = run_one_by_one(models.loop, torch.ones(WIDTH))
    *items, last = client.stream("loop", torch.ones(WIDTH))
    assert_same(
        {name: torch.stack([item[name] for item in items]) for name in ("h", "n")},
        {name: expected[name] for name in ("h", "n")},
    )
    assert_same(last, {"total": expected["total"]})


async def test_coroutines(client):
    results = await asyncio.gather(*(client.infer("chain", steps(n), wait=n % 2 == 0) for n in range(1, 9)))
    for n, result in enumerate(results, 1):
        assert_same(result, run_one_by_one(models.chain, steps(n)))
    assert [item async for item in client.stream("loop", torch.ones(WIDTH))][-1]["total"] == 5
    mapped = [result async for result in client.map_async("chain", [steps(2)] * 20, max_in_flight=4)]
    assert len(mapped) == 20
    task = asyncio.create_task(client.infer("chain", held()))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_a_map_has_few_in_flight(client):
    results = list(client.map("chain", (steps(1 + k % 3) for k in range(50)), max_in_flight=7))
    assert [len(result["every"]) for result in results] == [1 + k % 3 for k in range(50)]


def test_what_is_wrong_is_said_where_it_can_be_known(client):
    with pytest.raises(UnknownModelError, match="'nobody' is not registered; registered are"):
        client.submit("nobody", 1)
    with pytest.raises(UnknownModelError, match="its name is 'chain'"):
        client.submit(models.chain, steps(1))
    with pytest.raises(RequestError, match="'chain'"):
        client.submit("chain", "no tensor")
    with pytest.raises(RequestError, match="priority"):
        client.submit("chain", steps(1), priority=4)
    with pytest.raises(RequestError, match="deadline"):
        client.submit("chain", steps(1), deadline=0)
    with pytest.raises(RequestTooLargeError, match="nodes"):
        client.submit("chain", steps(70_000))
    assert isinstance(error_of(client.submit("chain", steps(TOO_MANY))), RequestTooLargeError)
    with pytest.raises(RequestTooLargeError):
        client.submit("chain", steps(TOO_MANY), wait=True)
    assert list(client.submit_many("chain", [])) == []


def test_a_cell_that_raises_names_its_reason(client):
    future = client.submit("chain", steps(2, RAISE))
    with pytest.raises(CellError, match="a row this cell cannot take") as raised:
        future.result(WAIT_S)
    assert "ValueError: a row this cell cannot take" in raised.value.__notes__[0]


def test_cancelling_and_deadlines(client):
    first = client.submit("chain", held())
    late = client.submit("chain", held(), deadline=0.05)
    given_up = client.submit("chain", held())
    assert given_up.cancel()
    assert given_up.cancelled()
    assert isinstance(error_of(given_up), CancelledError)
    assert isinstance(error_of(late), DeadlineError)
    assert client.cancel(first)
    assert client.drain(WAIT_S)


def test_a_cancellation_that_finds_the_socket_full_is_sent_when_there_is_room(served, client):
    client._link._wire.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 0)  # as little as there can be
    futures = client.submit_many("chain", [torch.full((400, WIDTH), HOLD_LONG)] * 20)  # longer than anybody waits
    until(lambda: served.statistics()["unfinished"] == len(futures), "they are there")
    os.kill(served.pid, signal.SIGSTOP)
    try:
        for future in futures:
            future.cancel()
        assert client._link._wire.is_behind
    finally:
        os.kill(served.pid, signal.SIGCONT)
    until(lambda: served.statistics()["unfinished"] == 0, "all are cancelled, though their client sends nothing else")


def test_sessions_go_on_where_they_were(served, client):
    model, x = "kept", steps(3)
    alone = client.session(model)
    shared = client.session(model, "shared")
    for session in (alone, shared):
        assert_same(session.submit(x).result(WAIT_S), run_one_by_one(models.kept, x))
    with connect(served.address) as other:
        assert other.session(model, "shared").submit(x).result(WAIT_S)["last"][0] == pytest.approx(1.96875)
    state = shared.export()
    assert shared.submit(x, wait=True).result(WAIT_S)["last"][0] == pytest.approx(1.99609375)
    shared.restore(state)
    assert shared.submit(x).result(WAIT_S)["last"][0] == pytest.approx(1.99609375)
    shared.reset()
    assert_same(shared.submit(x).result(WAIT_S), run_one_by_one(models.kept, x))
    with client.session(model, state=state) as moved:
        assert moved.submit(x).result(WAIT_S)["last"][0] == pytest.approx(1.99609375)
    assert isinstance(error_of(moved.submit(x)), SessionError)
    with pytest.raises(SessionError, match="not a session's state"):
        client.session(model, state=b"nonsense")
    with pytest.raises(RequestError, match="keeps no state"):
        client.session("chain")
    with pytest.raises(RequestError, match="expected a str as id"):
        client.session(model, 7)
    shared.close()


def test_the_next_requests_of_many_sessions_go_together(served, client):
    """Of several lengths, twice; one of a session that another client closed does not cost the others."""
    sessions = [client.session("kept") for _ in range(4)]
    states = [[] for _ in sessions]
    requests = [steps(1 + number % 2) for number in range(4)]
    for wait in (False, True):
        results = client.submit_many("kept", requests, sessions=sessions, wait=wait).results(WAIT_S)
        for result, x, state in zip(results, requests, states, strict=True):
            assert_same(result, run_one_by_one(models.kept, x, state))
    with connect(served.address) as other, pytest.raises(RequestError, match="one of another client"):
        other.submit_many("kept", requests, sessions=sessions)
    with pytest.raises(RequestError, match="got str"):
        client.submit_many("kept", requests[:1], sessions=["a"])
    sessions[0].close()
    assert all(
        isinstance(error_of(each), SessionError) for each in client.submit_many("kept", requests, sessions=sessions)
    )
    with pytest.raises(RequestError, match="twice"):
        client.submit_many("kept", requests[:2], sessions=[sessions[1]] * 2).results(WAIT_S)
    client.check()


def test_a_callback_may_submit_but_not_wait(client):
    raised: list[BaseException] = []
    done = threading.Event()

    def callback(future):
        for wait in (
            lambda: client.submit("chain", held()).result(),
            lambda: client.drain(),
            client.close,
            client.statistics,
        ):
            try:
                wait()
            except RequestError as error:
                raised.append(error)
        client.submit("chain", steps(1)).add_done_callback(lambda _: done.set())

    client.submit("chain", held()).add_done_callback(callback)  # not done yet: else it runs here
    assert done.wait(WAIT_S)
    assert len(raised) == 4
    assert client.drain(WAIT_S)


def test_a_client_that_leaves_or_is_dropped_ends_its_own_requests_alone(served, client):
    other = connect(served.address)
    mine, theirs = client.submit("chain", held()), other.submit("chain", held())
    other.close()
    other.close()
    assert isinstance(error_of(theirs), EngineClosedError)
    with pytest.raises(EngineClosedError):
        other.submit("chain", steps(1))
    mine.result(WAIT_S)
    future = connect(served.address).submit("chain", steps(1))  # it stays while one of its requests is unfinished
    assert_same(future.result(WAIT_S), run_one_by_one(models.chain, steps(1)))


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_does_not_use_its_parents_connection_nor_wait_for_it(client):
    under_way = client.submit("chain", held())
    calls = lambda: client.submit("chain", steps(1)), under_way.result, client.statistics
    if (pid := os.fork()) == 0:
        signal.alarm(int(WAIT_S))  # a process that hangs ends by it
        refused = 0
        try:
            for call in calls:
                with pytest.raises(EngineClosedError, match="connect anew"):
                    call()
                refused += 1
        finally:
            os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == len(calls)
    client.submit("chain", steps(1)).result(WAIT_S)


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_closes_nothing_of_its_parents(client):
    session = client.session("kept", "forked")
    before = session.submit(steps(2)).result(WAIT_S)
    if (pid := os.fork()) == 0:
        signal.alarm(int(WAIT_S))  # a process that hangs ends by it
        status = 1
        try:
            with client, session:
                pass
            client.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    after = session.submit(steps(2)).result(WAIT_S)
    assert not torch.equal(before["last"], after["last"]), "it goes on where it was"


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
def test_a_client_has_no_workers_in_a_forked_process(client):
    if (pid := os.fork()) == 0:
        signal.alarm(int(WAIT_S))  # a process that hangs ends by it
        status = 2
        try:
            status = int(client.has_workers())
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert client.has_workers()


def test_nobody_listens_there(tmp_path):
    for address in ("@nobody-listens-there", str(tmp_path / "nobody")):
        with pytest.raises(DeviceError, match="no engine's process takes clients"):
            connect(address)
    with pytest.raises(DefinitionError, match="address"):
        connect("")


def test_the_public_names_are_these():
    assert cellrt.connect is connect


def test_what_grows_is_kept_and_moved_across_processes(client):
    state: list[torch.Tensor] = []
    with client.session("grown") as session:
        for count in (4, 1, 7):
            assert_same(session.submit(steps(count)).result(WAIT_S), run_one_by_one(models.grown, steps(count), state))
        exported = session.export()
    with client.session("grown", state=exported) as moved:
        assert_same(moved.submit(steps(2)).result(WAIT_S), run_one_by_one(models.grown, steps(2), state))


def test_a_bulk_of_two_versions_is_unfolded_before_any_of_it_is_sent(served):
    """One session's request is wrong: that of the other, of the model's version before, has not run."""
    with connect(served.address) as client:
        before = client.session("kept", "before")
        client.register("tests.process.models:kept", warm_up=False, replace=True)
        after = client.session("kept", "after")
        assert client.session("kept", "before").submit(steps(1)).result(WAIT_S)["last"][0] == 1.0  # the same session
        for wrong, sessions in ((0, [after, before]), (1, [before, after])):
            requests: list[object] = [steps(1), steps(1)]
            requests[wrong] = "nonsense"
            with pytest.raises(RequestError, match=rf"request {wrong + 1} of 2 \(index {wrong}\)"):
                client.submit_many("kept", requests, sessions=sessions)
        both = client.submit_many("kept", [steps(1)] * 2, sessions=[before, after]).results(WAIT_S)
        assert [result["last"][0].item() for result in both] == [1.5, 1.0]
        for session in (before, after):
            session.close()


@pytest.mark.parametrize("waits", [False, True])
def test_a_bulk_of_two_versions_is_handed_in_all_or_none(served, waits):
    """One session has ended, as the engine's process alone knows: the request of the other does not run."""
    with connect(served.address) as client:
        before = client.session("kept")
        client.register("tests.process.models:kept", warm_up=False, replace=True)
        after = client.session("kept")
        assert before._binding is not after._binding
        before.submit(steps(1)).result(WAIT_S)
        after.close()
        state = before.export()
        for sessions in ([before, after], [after, before]):
            if waits:
                with pytest.raises(SessionError, match=after.id):
                    client.submit_many("kept", [steps(1)] * 2, sessions=sessions, wait=True)
            else:
                futures = client.submit_many("kept", [steps(1)] * 2, sessions=sessions)
                assert [type(error_of(future)) for future in futures] == [SessionError] * 2
        assert before.export() == state


def test_reset_takes_its_place_among_the_requests_and_waits_for_nothing(client):
    session = client.session("kept")
    futures = []
    for _ in range(20):
        futures += [session.submit(steps(1)), session.submit(steps(1))]
        session.reset()
    assert [future.result(WAIT_S)["last"][0].item() for future in futures] == [1.0, 1.5] * 20
    told = []
    future = session.submit(steps(1))
    future.add_done_callback(lambda _: told.append(session.reset()))
    future.result(WAIT_S)
    until(lambda: told == [None], "the callback has run")
    assert session.submit(steps(1)).result(WAIT_S)["last"][0].item() == 1.0
    session.close()
    session.reset()  # as it says, the next request tells
    assert "kept" in str(error_of(session.submit(steps(1))))


def test_sessions_are_known_by_one_number_until_they_end(client):
    shared = [client.session("kept", "one") for _ in range(3)]
    assert len({session._number for session in shared}) == 1
    shared[0].close()
    anew = client.session("kept", "one")
    assert anew._number != shared[0]._number
    assert anew.submit(steps(1)).result(WAIT_S)["last"][0].item() == 1.0
    anew.close()


def test_a_file_that_two_threads_load_at_once_is_whole_for_both(tmp_path):
    path = tmp_path / "slow.py"
    path.write_text("import time\ntime.sleep(0.2)\nfrom tests.process.models import kept as model\n")
    with ThreadPoolExecutor(4) as threads:
        loaded = list(threads.map(lambda _: ModelSource(f"{path}:model").load(), range(4)))
    assert {id(model) for model in loaded} == {id(loaded[0])}
