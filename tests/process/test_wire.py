"""What crosses a connection comes once, in order and whole, whatever its size and however slow its reader."""

from __future__ import annotations

import gc
import os
import select
import socket
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellrt.process import shared_memory, short_calls
from cellrt.process.shared_memory import Ring
from cellrt.process.wire import HEAD, PACKET_MESSAGES, BrokenWireError, Kind, Message, Wire
from tests.process.helpers import holdings

SIZE = 1 << 10


def pair(size: int = SIZE) -> tuple[Wire, Wire]:
    """Two ends of a connection, with that much memory for each direction."""
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    there, back = shared_memory.make(size), shared_memory.make(size)
    return Wire(one, os.dup(there), os.dup(back)), Wire(other, back, there)


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 3))))
def test_places_never_overlap_and_all_memory_is_there_again(asked):
    ring, held = Ring(SIZE), deque[tuple[int, int]]()
    num_freed = 0
    for size, num_read in asked:
        for _ in range(min(num_read, len(held))):
            held.popleft()
            num_freed += 1
        ring.free_up_to(num_freed)
        begin = ring.take(size)
        if begin < 0:
            assert held
            continue
        end = begin + shared_memory.padded(max(size, 1))
        assert 0 <= begin < end <= SIZE
        assert all(end <= other or begin >= behind for other, behind in held)
        held.append((begin, end))
    ring.free_up_to(num_freed + len(held))
    assert ring.take(SIZE) == 0


@given(st.lists(st.one_of(st.lists(st.binary(max_size=2 * SIZE), max_size=4), st.just(None)), max_size=30))
def test_messages_come_once_in_order_and_whole(sent):
    """None: the reader reads what is there."""
    gc.collect()  # what another test has left behind
    before = holdings()
    assert_all_come(sent)
    assert all(now <= then for now, then in zip(holdings(), before, strict=True))  # fewer, if another test's went


def assert_all_come(sent: list[list[bytes] | None]) -> None:
    writer, reader = pair()
    expected: list[bytes] = []
    received: list[bytes] = []

    def read() -> None:
        while select.select([reader], [], [], 0)[0]:
            received.extend(bytes(body) for _, body in reader.receive())
            if reader.owes_word:
                reader.send(())
                assert list(writer.receive()) == []

    for parts in sent:
        if parts is None:
            read()
            continue
        writer.send([Message(Kind.CALL, (part, b"|", part)) for part in parts])
        expected += [part + b"|" + part for part in parts]
    while writer.is_behind:
        read()
        writer.flush()
    read()
    assert received == expected
    for end in (writer, reader):
        end.close()


def test_a_reader_that_reads_nothing_is_waited_for_only_so_long():
    writer, reader = pair()
    while not writer.is_behind:
        writer.send([Message(Kind.CALL, (bytes(2 * SIZE),))] * PACKET_MESSAGES)
    with pytest.raises(BrokenWireError, match="nothing was read for 0.01 s"):
        writer.flush_within(0.01)
    reader.close()
    with pytest.raises(BrokenWireError):
        writer.flush_within(1.0)
    writer.close()


def test_a_packet_whose_sender_was_interrupted_goes_out_again_and_is_taken_once(monkeypatch):
    writer, reader = pair()

    def send_and_be_interrupted(fd: int, packet: bytes) -> None:
        send(fd, packet)
        raise KeyboardInterrupt

    send = short_calls.send
    with monkeypatch.context() as patch:
        patch.setattr(short_calls, "send", send_and_be_interrupted)
        for body in (b"one", b"two"):
            with pytest.raises(KeyboardInterrupt):
                writer.send([Message(Kind.CALL, (body,))])
    writer.send([Message(Kind.CALL, (b"three",))])
    assert [bytes(body) for _, body in reader.receive()] == [b"one", b"two", b"three"]
    for end in (writer, reader):
        end.close()


def test_what_does_not_keep_to_the_protocol_ends_the_connection():
    head = HEAD.pack(1, 0) + b"\1\0\0\0"
    for packet in (b"x", b"\0" * 17, head + b"\xff" * 20, head + b"\0" * 20):
        writer, reader = pair()
        writer.sock.send(packet)
        with pytest.raises(BrokenWireError):
            list(reader.receive())
        writer.close()
        reader.close()


def test_memory_whose_size_may_change_is_not_looked_at():
    fd = os.memfd_create("other")
    os.ftruncate(fd, 10)
    with pytest.raises(ValueError, match="sealed"):
        shared_memory.view(fd, writable=False)
