"""One end of a connection: packets of a Unix socket say where in shared memory the messages lie.

The socket orders what the memory alone would not: a body is written before its packet is sent, read after it has come,
and its place is free again once a later packet of the reader says so. So no process polls a flag in shared memory, and
a process that ends is noticed at once by its socket. A packet there and back costs 10 us, an eventfd or a futex 7
(``python -m benchmarks clients --only wake``).

Packets are numbered: a packet whose sender was interrupted, and does not know whether it was sent, is sent again, and
handled once.

A body for which there is no place, because it is large or the other end is slow, gets memory of its own, whose
descriptor travels with the packet. So no sender waits for a place either.
"""

from __future__ import annotations

import array
import json
import os
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from enum import IntEnum
from typing import Any, NamedTuple

from cellrt.errors import DeviceError, OverloadError
from cellrt.process import shared_memory, short_calls
from cellrt.process.shared_memory import Part

PROTOCOL = 10
"""The version of the protocol. Both ends are of one version of cellrt."""
REGION_BYTES = 4 << 20
"""The memory for the bodies of one direction; only pages that are written to take any."""
PACKET_MESSAGES = 64
PACKET_BYTES = 1 << 14
PACKETS_TOGETHER = 16
"""The most packets that are received before other work has a turn."""


class Kind(IntEnum):
    """The kinds of messages.

    Bodies: ``recorded.py``, ``submissions.py``, ``outcomes.py``, ``wire_errors.py``; JSON; numbers.
    """

    CALL = 1
    """A client calls a function of ``calls.py`` by name."""
    ANSWER = 2
    """The engine answers a call with its value or error."""
    TEMPLATE = 3
    """A client sends the common parts of requests of equal programs; templates are numbered as they come."""
    FORGET = 4
    """A client forgets all templates so far, and numbers further ones from 0."""
    SUBMIT = 5
    CANCEL = 6
    RELEASE = 7
    """A client releases a binding."""
    OUTCOMES = 8
    """The engine sends steps and results of requests."""
    ERRORS = 9
    """The engine sends errors of requests."""
    ACCEPTED = 10
    """The engine accepted requests that waited for room in its queue."""
    REBIND = 11
    """The engine registered or removed a model: its versions in use, and the new one for
    clients that unfolded for it.
    """
    CLOSING = 12
    """The engine closes gracefully."""
    CUT_BACK = 13
    """A client cuts a session back to this many of its rows; 0: its state begins anew."""
    PLAN = 14
    """The engine names what runs for requests of a template, so that they may come by the region."""


class Message(NamedTuple):
    """A message: its body is the parts one after the other."""

    kind: Kind
    parts: Sequence[Part] = ()


class BrokenWireError(Exception):
    """The other end is gone, or does not keep to the protocol."""


HEAD = struct.Struct("<QQ")
"""The head of a packet: its number, and how many places of the other end were freed so far."""
PLACE = struct.Struct("<IiQQ")
"""A message in a packet: kind, the descriptor with its memory (-1: this direction's memory), begin and size there."""


class Wire:
    """An end of a connection: its socket and the memory of both directions.

    One thread receives; senders hold a lock.
    """

    def __init__(self, sock: socket.socket, outgoing: int, incoming: int) -> None:
        """Take over the socket and the descriptors of the memory that it writes to and reads from."""
        self.sock = sock
        self._outgoing = shared_memory.view(outgoing, writable=True)
        self._incoming = shared_memory.view(incoming, writable=False)
        self._ring = shared_memory.Ring(len(self._outgoing))
        self._num_freed_by_other = 0
        self._last_made = self._last_taken = 0
        """Numbers of packets; some may be left out."""
        self._num_read = self._num_read_bytes = self._num_told_bytes = 0
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._receiver = short_calls.Receiver(PACKET_BYTES, PACKET_MESSAGES)
        sock.setblocking(False)

    def fileno(self) -> int:
        """Return the socket's descriptor."""
        return self.sock.fileno()

    @property
    def is_behind(self) -> bool:
        """True if packets wait because the other end does not read."""
        return bool(self._unsent)

    @property
    def owes_word(self) -> bool:
        """True if the other end should be told which places are free, before it runs out of them."""
        return self._num_read_bytes - self._num_told_bytes > len(self._incoming) // 4

    def send(self, messages: Sequence[Message]) -> None:
        """Send messages in order, as far as the other end reads; ``flush`` sends the rest.

        Raise BrokenWireError; OverloadError if there is no memory for one of them, and then send none.
        """
        self._ring.free_up_to(self._num_freed_by_other)
        num_read, num_read_bytes = self._num_read, self._num_read_bytes
        num_held = self._ring.num_held
        packets: list[bytes] = []
        fds: list[list[int]] = []
        try:
            for first in range(0, max(1, len(messages)), PACKET_MESSAGES):
                fds.append([])
                some = messages[first : first + PACKET_MESSAGES]
                places = [PLACE.pack(kind, *self._place(parts, fds[-1])) for kind, parts in some]
                self._last_made += 1
                packets.append(b"".join([HEAD.pack(self._last_made, num_read), *places]))
        except BaseException:
            self._ring.take_back(self._ring.num_held - num_held)
            for each in fds:
                _close_all(each)
            raise
        self._unsent.extend(zip(packets, fds))
        self._num_told_bytes = num_read_bytes
        self.flush()

    def _place(self, parts: Sequence[Part], fds: list[int]) -> tuple[int, int, int]:
        """Write a body; return the index of the descriptor with its memory, and begin and size there."""
        size = sum(map(len, parts))
        begin = self._ring.take(size)
        if begin >= 0:
            shared_memory.write(self._outgoing, begin, parts)
            return -1, begin, size
        try:
            fds.append(shared_memory.make(max(size, 1)))
            shared_memory.write(shared_memory.view(os.dup(fds[-1]), writable=True), 0, parts)
        except OSError as error:
            raise OverloadError(f"a message: expected memory for its {size} bytes, got {error}") from None
        return len(fds) - 1, 0, size

    def flush(self) -> bool:
        """Send waiting packets; return False if the other end does not read. Raise BrokenWireError."""
        while self._unsent:
            packet, fds = self._unsent[0]
            try:
                if fds:
                    rights = socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds)
                    self.sock.sendmsg([packet], [rights], socket.MSG_NOSIGNAL)
                else:
                    short_calls.send(self.sock.fileno(), packet)
            except BlockingIOError:
                return False
            except OSError as error:
                raise BrokenWireError(str(error)) from None
            self._unsent.popleft()  # after an interrupt before this line it is sent again
            _close_all(fds)
        return True

    def flush_within(self, seconds: float, lock: AbstractContextManager[object] | None = None) -> None:
        """Send waiting packets, and wait for the other end to read. Raise BrokenWireError after this many seconds.

        ``lock``: that of the senders; not held while this waits.
        """
        end_s = time.monotonic() + seconds
        while True:
            with lock or nullcontext():
                if self.flush():
                    return
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                raise BrokenWireError(f"nothing was read for {seconds} s")
            self.wait(select.POLLOUT, left_s)

    def wait(self, what: int, seconds: float) -> None:
        """Wait until the socket is ready for ``what`` (of ``select.poll``), or has ended."""
        poll = select.poll()
        with suppress(ValueError):  # it was closed meanwhile
            poll.register(self.sock, what)
            poll.poll(1000 * seconds)

    def receive(self) -> Iterator[tuple[int, memoryview]]:
        """Yield the messages of a few packets: kind and body, which is valid until the next is asked for.

        Raise BrokenWireError, also at the end of the connection.
        """
        for _ in range(PACKETS_TOGETHER):
            try:
                received = self._receiver.receive(self.sock.fileno())
            except ConnectionResetError:
                return  # told once, when the other end left something unread; then comes what it had sent before
            except OSError as error:
                raise BrokenWireError(str(error)) from None
            if received is None:
                return
            yield from self._messages(*received)

    def _messages(self, packet: bytes, fds: list[int]) -> Iterator[tuple[int, memoryview]]:
        try:
            if len(packet) < HEAD.size or (len(packet) - HEAD.size) % PLACE.size:
                raise BrokenWireError("the other end is gone" if not packet else "a packet of another protocol")
            number, num_freed = HEAD.unpack_from(packet)
            if number <= self._last_taken:
                return
            self._last_taken, self._num_freed_by_other = number, num_freed
            for kind, which, begin, size in PLACE.iter_unpack(packet[HEAD.size :]):
                yield kind, self._body(which, begin, size, fds)
                if which < 0:
                    self._num_read += 1
                    self._num_read_bytes += size
        finally:
            _close_all([fd for fd in fds if fd >= 0])

    def _body(self, which: int, begin: int, size: int, fds: list[int]) -> memoryview:
        if which < 0:
            source = self._incoming
        else:
            try:
                fd, fds[which] = fds[which], -1
                source = shared_memory.view(fd, writable=False)
            except (IndexError, OSError, ValueError) as error:
                raise BrokenWireError(f"a message without memory: {error}") from None
        if begin + size > len(source):
            raise BrokenWireError("a message outside of the memory")
        return source[begin : begin + size]

    def end(self) -> None:
        """Shut the connection down for both ends; from any thread."""
        with suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and release its resources; no thread may send or receive after this."""
        self.end()
        self.leave()

    def leave(self) -> None:
        """Close this process's part of the connection; another that has the socket too, by a fork, keeps it."""
        self.sock.close()
        while self._unsent:
            _close_all(self._unsent.popleft()[1])
        self._outgoing = self._incoming = memoryview(b"")


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def _head_of(packet: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        head = json.loads(packet)
        return head if isinstance(head, dict) else {}
    return {}


MEMORIES = 2
"""Descriptors of memory that come with a connection's head; behind them may be those of a region (``region.py``): its
memory, the engine's words and the bell.
"""


def welcomed(sock: socket.socket, timeout: float) -> tuple[Wire, dict[str, Any], list[int]]:
    """Return a client's end of a connection, the head that the engine's process sent with its memory, and the
    descriptors of a region, which the caller closes.

    Raise DeviceError.
    """
    fds: list[int] = []
    try:
        sock.settimeout(timeout)
        packet, fds, _, _ = socket.recv_fds(sock, PACKET_BYTES, MEMORIES + 3)
        head = _head_of(packet)
        if head.get("version") != PROTOCOL or len(fds) < MEMORIES:
            raise DeviceError(f"what listens there is no engine's process of this version: {packet[:80]!r}")
        outgoing, incoming, *more = fds
        fds = more
        wire = Wire(sock, outgoing, incoming)
        fds = []
        return wire, head, more
    except OSError as error:
        sock.close()
        raise DeviceError(f"the engine's process did not answer: {error}") from None
    except BaseException:
        sock.close()
        raise
    finally:
        for fd in fds:
            os.close(fd)
