"""A client that reads nothing for a while gets everything then, and costs the engine's process nothing meanwhile."""

from __future__ import annotations

import errno
import threading
from concurrent.futures import Future

import pytest

from cellrt.errors import DeviceError, OverloadError
from cellrt.graph.reference import run_one_by_one
from cellrt.process import address as addresses
from cellrt.process import client_connection, shared_memory
from cellrt.process import host as host_module
from cellrt.process.client import connect
from cellrt.process.wire import HEAD
from tests.engine.helpers import WAIT_S, assert_same
from tests.process import models
from tests.process.helpers import held, steps
from tests.waiting import until


@pytest.mark.parametrize("most_unsent", [10, 1 << 16])
def test_a_slow_client_gets_everything_in_the_end(server, monkeypatch, most_unsent):
    monkeypatch.setattr(client_connection, "MAX_UNSENT", most_unsent)
    client, quick = connect(server.address), connect(server.address)
    client.register("tests.process.models:chain", warm_up=False)
    may_go_on = threading.Event()
    client.submit("chain", held()).add_done_callback(lambda _: may_go_on.wait(WAIT_S))
    expected = run_one_by_one(models.chain, steps(4))
    futures = []
    while not server._behind:
        futures.append(client.submit("chain", steps(4)))
        assert_same(quick.submit("chain", steps(4)).result(WAIT_S), expected)
    futures += [client.submit("chain", steps(4)) for _ in range(20)]
    may_go_on.set()
    for future in futures:
        assert_same(future.result(WAIT_S), expected)
    until(lambda: not server._behind, "it is watched for reading no more")
    assert_same(client.submit("chain", steps(4)).result(WAIT_S), expected)
    for each in (client, quick):
        each.close()
    until(lambda: not server._connections, "they have left")
    assert server.engine.statistics()["unfinished"] == 0


def test_a_slow_client_that_leaves_is_forgotten(server):
    client, other = connect(server.address), connect(server.address)
    client.register("tests.process.models:chain", warm_up=False)
    may_go_on = threading.Event()
    client.submit("chain", held()).add_done_callback(lambda _: may_go_on.wait(WAIT_S))
    while not server._behind:
        client.submit("chain", steps(4))
        other.submit("chain", steps(4)).result(WAIT_S)
    client._link._wire.end()
    until(lambda: len(server._connections) == 1, "it has left")
    assert not server._behind
    may_go_on.set()
    client.close()
    other.close()


def test_a_client_that_talks_nonsense_is_seen_off_alone(server, caplog):
    client = connect(server.address)
    for nonsense in (b"", b"x" * 33, HEAD.pack(1, 0) + b"\x63" + b"\0" * 23):
        sock = addresses.connect(server.address, WAIT_S)
        sock.recv(1000)
        sock.send(nonsense or b"?")
        assert sock.recv(1000) == b""
        sock.close()
    assert client.statistics()["clients"] == 1
    client.close()


def test_a_call_that_nobody_knows_is_an_error_of_ours(server):
    client = connect(server.address)
    with pytest.raises(Exception, match="KeyError: 'no such'"):
        client._link.call("no such")
    client.close()


def test_what_cannot_be_told_costs_one_client_its_connection_and_nobody_else(server, monkeypatch):
    client, other = connect(server.address), connect(server.address)
    client.register("tests.process.models:chain", warm_up=False)

    def outcome_parts(outcomes):
        if any(rows == 7 for outcome in outcomes for _, rows, _ in outcome.parts):
            raise KeyError("a bug")
        return original(outcomes)

    original = client_connection.outcome_parts
    monkeypatch.setattr(client_connection, "outcome_parts", outcome_parts)
    assert isinstance(client.submit("chain", steps(7)).exception(WAIT_S), DeviceError)
    assert_same(other.submit("chain", steps(4)).result(WAIT_S), run_one_by_one(models.chain, steps(4)))
    until(lambda: len(server._connections) == 1, "it has left")
    client.close()
    other.close()


def test_what_has_no_memory_for_its_end_fails_alone(server, monkeypatch):
    monkeypatch.setattr(host_module, "REGION_BYTES", 1 << 12)
    client = connect(server.address)
    client.register("tests.process.models:chain", warm_up=False)

    def make_here_only(size):
        if threading.current_thread() is not threading.main_thread():
            raise OSError(errno.EMFILE, "too many open files")
        return original(size)

    original = shared_memory.make
    monkeypatch.setattr(shared_memory, "make", make_here_only)
    large, small = client.submit_many("chain", [steps(600), steps(4)])
    assert isinstance(large.exception(WAIT_S), OverloadError)
    assert_same(small.result(WAIT_S), run_one_by_one(models.chain, steps(4)))
    with pytest.raises(OverloadError, match="expected memory"):
        client._link.call("no such" * 1000)
    assert client.statistics()["clients"] == 1
    client.close()


def test_a_callback_submits_while_another_thread_waits_for_the_engine_to_read(server, monkeypatch):
    monkeypatch.setattr(client_connection, "MAX_UNSENT", 10)
    client = connect(server.address)
    client.register("tests.process.models:chain", warm_up=False)
    may_go_on, submitted = threading.Event(), Future()

    def submit_another(_):
        may_go_on.wait(WAIT_S)
        submitted.set_result(client.submit("chain", steps(4), deadline=WAIT_S))

    def send_until_then():
        while not submitted.done():
            client.submit("chain", steps(1), deadline=WAIT_S)  # by a message

    client.submit("chain", held()).add_done_callback(submit_another)
    sender = threading.Thread(target=send_until_then)
    sender.start()
    until(lambda: client._link._wire.is_behind, "the engine's process reads nothing")
    may_go_on.set()
    assert_same(submitted.result(WAIT_S).result(WAIT_S), run_one_by_one(models.chain, steps(4)))
    sender.join(WAIT_S)
    assert client.drain(WAIT_S)
    client.close()
