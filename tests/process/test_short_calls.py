"""Packets and descriptors come as they were sent, and a thread that is busy in Python keeps nobody waiting."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellrt.process import short_calls

NUM_BYTES, NUM_FDS = 512, 7


@pytest.fixture
def pair():
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    yield one, other
    one.close()
    other.close()


@given(st.lists(st.tuples(st.binary(min_size=1, max_size=NUM_BYTES), st.integers(0, NUM_FDS)), max_size=5))
def test_packets_and_descriptors_come_as_they_were_sent(packets):
    one, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    receiver, (file, _) = short_calls.Receiver(NUM_BYTES, NUM_FDS), os.pipe()
    os.close(_)
    for packet, num_fds in packets:
        if num_fds:
            socket.send_fds(one, [packet], [file] * num_fds)
        else:
            short_calls.send(one.fileno(), packet)
    for packet, num_fds in packets:
        found = receiver.receive(other.fileno())
        assert found is not None
        received, fds = found
        assert received == packet and len(fds) == num_fds
        for fd in fds:
            assert os.path.sameopenfile(fd, file) and not os.get_inheritable(fd)
            os.close(fd)
    os.close(file)
    assert receiver.receive(other.fileno()) is None
    one.close()
    assert receiver.receive(other.fileno()) == (b"", [])
    with pytest.raises(BrokenPipeError):
        short_calls.send(other.fileno(), b"x")
    other.close()


def test_who_sends_to_a_reader_that_does_not_read_is_told(pair):
    one, _ = pair
    with pytest.raises(BlockingIOError):
        for _ in range(100_000):
            short_calls.send(one.fileno(), bytes(NUM_BYTES))


def test_a_closed_socket_is_an_error(pair):
    with pytest.raises(OSError, match="Bad file descriptor"):
        short_calls.send(-1, b"x")
    with pytest.raises(OSError, match="Bad file descriptor"):
        short_calls.Receiver(NUM_BYTES, NUM_FDS).receive(-1)


def test_a_thread_that_is_busy_in_python_does_not_get_its_turn_in_between(pair):
    one, other = pair
    receiver, is_over, before = short_calls.Receiver(NUM_BYTES, NUM_FDS), False, sys.getswitchinterval()

    def spin() -> None:
        while not is_over:
            pass

    thread = threading.Thread(target=spin)
    sys.setswitchinterval(0.2)
    try:
        thread.start()
        begin_s = time.monotonic()
        for _ in range(30):  # each would wait for a switch, of 12 s in all
            short_calls.send(one.fileno(), b"x")
            receiver.receive(other.fileno())
        took_s = time.monotonic() - begin_s
    finally:
        sys.setswitchinterval(before)
        is_over = True
        thread.join()
    assert took_s < 4
