"""At the limit of descriptors a message without memory fails alone, and everything else goes on."""

from __future__ import annotations

import errno
import os
import resource
import select
from types import SimpleNamespace

import pytest

from cellrt.errors import DeviceError, OverloadError, RequestTooLargeError
from cellrt.graph.reference import run_one_by_one
from cellrt.process import shared_memory
from cellrt.process.client import connect
from cellrt.process.submission_queue import QueuedSubmission, SubmissionQueue
from cellrt.process.wire import Kind, Message
from tests.engine.helpers import WAIT_S, assert_same
from tests.process import models
from tests.process.helpers import steps
from tests.process.test_wire import SIZE, pair
from tests.waiting import until


def no_memory(error: BaseException):
    def make(*_: int) -> int:
        raise error

    return make


AT_THE_LIMIT = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize(("raised", "met"), [(AT_THE_LIMIT, OverloadError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_a_submission_that_cannot_be_sent_fails_alone(client, monkeypatch, raised, met):
    assert_same(client.submit("chain", steps(3)).result(WAIT_S), run_one_by_one(models.chain, steps(3)))
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "make", no_memory(raised))
        with pytest.raises(met):
            client.submit_many("chain", [steps(400)] * 2000)
    assert client.drain(WAIT_S)
    for count in (3, 400, 5):
        assert_same(client.submit("chain", steps(count)).result(WAIT_S), run_one_by_one(models.chain, steps(count)))


def test_messages_are_sent_all_or_none(monkeypatch):
    writer, reader = pair()
    with monkeypatch.context() as patch:
        patch.setattr(shared_memory, "make", no_memory(AT_THE_LIMIT))
        for _ in range(3):
            with pytest.raises(OverloadError, match=f"expected memory for its {SIZE} bytes, got .* open files"):
                writer.send([Message(Kind.CALL, (b"small",)), Message(Kind.CALL, (bytes(SIZE),))])
        writer.send([Message(Kind.CALL, (bytes(SIZE),))])
    assert [len(body) for _, body in reader.receive()] == [SIZE]
    writer.close()
    reader.close()


def test_a_client_for_whom_the_engine_has_no_descriptor_is_turned_away_and_others_are_served(served, client):
    before = resource.prlimit(served.pid, resource.RLIMIT_NOFILE)
    until(lambda: client.statistics()["clients"] == 2, "those of other tests have left")
    open_files = len(os.listdir(f"/proc/{served.pid}/fd"))
    resource.prlimit(served.pid, resource.RLIMIT_NOFILE, (open_files, before[1]))
    try:
        for _ in range(3):
            with pytest.raises(DeviceError):
                connect(served.address, timeout=WAIT_S)
        assert client.submit("chain", steps(3)).result(WAIT_S)
    finally:
        resource.prlimit(served.pid, resource.RLIMIT_NOFILE, before)
    with connect(served.address) as other:
        assert other.submit("chain", steps(3)).result(WAIT_S)


def test_a_client_without_a_descriptor_to_wait_with_is_not_made(served, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(select, "epoll", no_memory(AT_THE_LIMIT))
        with pytest.raises(DeviceError, match="open files"):
            connect(served.address)
    until(lambda: served.statistics()["clients"] == 1, "the engine's process has seen it off")


def test_a_submission_that_waited_and_cannot_be_handed_in_fails_alone():
    refused = []

    class ClientConnection:
        def hand_in(self, queued):
            raise ValueError("what nobody expected") if room.is_there else OverloadError("no place")

        def refuse(self, submission, error):
            refused.append(error)

    class Room:
        is_there = False

        def has_room(self, size):
            return True

    room = Room()

    class Model:
        places = room

        def plan_of(self, recorded):
            raise AssertionError("it has no requests")

        def __init__(self):
            self.unfolding = set()

    waiting = SubmissionQueue(room, lambda: None)
    model = Model()
    waiting.submit(QueuedSubmission(ClientConnection(), SimpleNamespace(num_requests=1, end_s=None), {model: ()}, ()))
    assert model.unfolding and len(waiting) == 1
    room.is_there = True
    waiting.look()
    assert [str(error) for error in refused] == ["ValueError: what nobody expected"] and len(waiting) == 0
    assert not model.unfolding


def test_a_submission_that_fits_in_no_tables_is_refused_alone_while_the_engine_is_full():
    refused = []

    class ClientConnection:
        def hand_in(self, queued):
            raise OverloadError("no place")

        def refuse(self, submission, error):
            refused.append(error)

    class Free:
        def has_room(self, size):
            return True

    class Model:
        places, unfolding = Free(), set()

        def plan_of(self, recorded):
            raise RequestTooLargeError("it needs more rows than there are")

    waiting = SubmissionQueue(Free(), lambda: None)
    alike = SimpleNamespace(recorded=None, indices=(0,))
    waiting.submit(
        QueuedSubmission(ClientConnection(), SimpleNamespace(num_requests=1, end_s=None), {Model(): (alike,)}, ())
    )
    assert [type(error) for error in refused] == [RequestTooLargeError] and len(waiting) == 0
