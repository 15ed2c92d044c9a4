"""At the limit of descriptors a message without memory fails alone, and everything else goes on."""

from __future__ import annotations

import errno
import os

import pytest

from cellrt.errors import OverloadError
from cellrt.graph.reference import run_one_by_one
from cellrt.process import memory
from cellrt.process.wire import Kind, Message
from tests.engine.helpers import WAIT_S, assert_same
from tests.process import models
from tests.process.helpers import steps
from tests.process.test_wire import SIZE, pair


def no_memory(error: BaseException):
    def make(size: int) -> int:
        raise error

    return make


AT_THE_LIMIT = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize(("raised", "met"), [(AT_THE_LIMIT, OverloadError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_a_submission_that_cannot_be_sent_fails_alone(client, monkeypatch, raised, met):
    assert_same(client.submit("chain", steps(3)).result(WAIT_S), run_one_by_one(models.chain, steps(3)))
    with monkeypatch.context() as patch:
        patch.setattr(memory, "make", no_memory(raised))
        with pytest.raises(met):
            client.submit_many("chain", [steps(400)] * 2000)
    assert client.drain(WAIT_S)
    for count in (3, 400, 5):
        assert_same(client.submit("chain", steps(count)).result(WAIT_S), run_one_by_one(models.chain, steps(count)))


def test_messages_are_sent_all_or_none(monkeypatch):
    writer, reader = pair()
    with monkeypatch.context() as patch:
        patch.setattr(memory, "make", no_memory(AT_THE_LIMIT))
        for _ in range(3):
            with pytest.raises(OverloadError, match=f"expected memory for its {SIZE} bytes, got .* open files"):
                writer.send([Message(Kind.CALL, (b"small",)), Message(Kind.CALL, (bytes(SIZE),))])
        writer.send([Message(Kind.CALL, (bytes(SIZE),))])
    assert [len(body) for _, body in reader.receive()] == [SIZE]
    writer.close()
    reader.close()
