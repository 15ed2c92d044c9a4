"""Ways to wake another process: how long a word takes there and back."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import socket
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack

FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
FUTEX_WAIT, FUTEX_WAKE = 0, 1
BYTES = bytes(32)
Ends = tuple[Callable[[], object], Callable[[], object]]
"""A function that asks, and one that answers in another process."""


def round_trips(count: int, pause_s: float) -> dict[str, float]:
    """Return the median microseconds of a round trip by each way, with a pause before each."""
    found = {}
    for name, make in (("packet of a Unix socket", _packets), ("eventfd", _eventfds), ("futex", _futexes)):
        with ExitStack() as stack:
            found[name] = _measure(*make(stack), max(20, count if not pause_s else count // 10), pause_s)
    return found


def _measure(ask: Callable[[], object], answer: Callable[[], object], count: int, pause_s: float) -> float:
    """``answer`` runs in another process."""
    if (pid := os.fork()) == 0:
        try:
            for _ in range(count):
                answer()
        finally:
            os._exit(0)
    times = []
    for _ in range(count):
        if pause_s:
            time.sleep(pause_s)
        start = time.perf_counter()
        ask()
        times.append(1e6 * (time.perf_counter() - start))
    os.waitpid(pid, 0)
    return statistics.median(times)


def _packets(stack: ExitStack) -> Ends:
    here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ends = [(stack.enter_context(end), stack.enter_context(select.epoll())) for end in (here, there)]
    for end, poll in ends:
        poll.register(end, select.EPOLLIN)

    def receive(end: socket.socket, poll: select.epoll) -> None:
        poll.poll()
        end.recv(4096)

    def ask() -> None:
        here.send(BYTES)
        receive(*ends[0])

    def answer() -> None:
        receive(*ends[1])
        there.send(BYTES)

    return ask, answer


def _eventfds(stack: ExitStack) -> Ends:
    there, back = os.eventfd(0), os.eventfd(0)
    polls = [stack.enter_context(select.epoll()) for _ in range(2)]
    for poll, fd in zip(polls, (back, there)):
        stack.callback(os.close, fd)
        poll.register(fd, select.EPOLLIN)

    def ask() -> None:
        os.eventfd_write(there, 1)
        polls[0].poll()
        os.eventfd_read(back)

    def answer() -> None:
        polls[1].poll()
        os.eventfd_read(there)
        os.eventfd_write(back, 1)

    return ask, answer


def _futexes(stack: ExitStack) -> Ends:
    libc, number = ctypes.CDLL(None), FUTEX_NUMBERS[platform.machine()]
    shared = mmap.mmap(-1, mmap.PAGESIZE)
    there, back = (ctypes.c_uint32.from_buffer(shared, offset) for offset in (0, 64))

    def wait(word: ctypes.c_uint32, known: int) -> None:
        while word.value == known:
            libc.syscall(number, ctypes.byref(word), FUTEX_WAIT, known, None, None, 0)

    def add(word: ctypes.c_uint32) -> None:
        word.value += 1
        libc.syscall(number, ctypes.byref(word), FUTEX_WAKE, 1, None, None, 0)

    def ask() -> None:
        known = back.value
        add(there)
        wait(back, known)

    def answer() -> None:
        wait(there, back.value)
        add(back)

    return ask, answer
