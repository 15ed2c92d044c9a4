"""What runs in the engine's process: the engine, and the doorkeeper, who takes in what clients send.

The process is started by an ``EngineProcess`` and ends with it: by its word, or when the socket between them ends.
"""

from __future__ import annotations

import errno
import gc
import json
import logging
import os
import pickle
import select
import signal
import socket
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from cellrt.engine.engine import Engine
from cellrt.errors import CellrtError, EngineClosedError
from cellrt.process import address as addresses
from cellrt.process import memory
from cellrt.process.binding import RowFormat
from cellrt.process.blame import told
from cellrt.process.calls import Calls
from cellrt.process.guest import Guest, answer
from cellrt.process.patience import Patient, WaitingRoom
from cellrt.process.recorded import LENGTH
from cellrt.process.source import ModelSource
from cellrt.process.wire import PROTOCOL, REGION_BYTES, BrokenWireError, Kind, Message, Wire
from cellrt.worker.python_process import end_with, importing

log = logging.getLogger("cellrt")
CLOSE_S = 5.0
LOOK_EVERY_S = 0.5
"""How often one looks whether there are workers, where that matters."""
LEFT_S = 30.0
"""How long the process may take to end after whoever started it."""
LAST_WORDS_S = 0.5
"""How long each client that reads nothing is waited for at the end."""


class Doorkeeper:
    """Takes in what clients send, and sends what no turn does. One thread, the process's main one.

    Args:
        engine: of this process.
        listener: where clients connect.
        lifeline: ends with who started the process.
    """

    def __init__(self, engine: Engine, listener: socket.socket, lifeline: socket.socket) -> None:
        self.engine = engine
        self._listener, self._lifeline = listener, lifeline
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._spare = os.dup(self._bell)
        """A descriptor for whoever comes when there is no other."""
        self._guests: dict[int, Guest] = {}
        """By their sockets' descriptors."""
        self._with_news: deque[Guest] = deque()
        self._with_turns_news: deque[Guest] = deque()
        """Those that the turn which runs tells something."""
        self._stuck: deque[Guest] = deque()
        self._behind: set[Guest] = set()
        """Those that are watched for reading again."""
        self._room = WaitingRoom(engine._manager.places, engine._manager.turns.wake)
        self.calls = Calls(engine, self._announce, lambda: len(self._guests))
        self._formats: list[RowFormat] = []
        self.is_closing = False
        self.ends_without_workers = False
        """Whether the process ends with the engine's last worker, since somebody starts another."""
        for fd in (listener.fileno(), lifeline.fileno(), self._bell):
            self._epoll.register(fd, select.EPOLLIN)
        engine._manager.after_turn = self._after_turn

    def run(self) -> None:
        """Serves until it is told to end, or whoever started the process is gone."""
        while not self.is_closing:
            wait_s = self._room.until_end_s()
            if self.ends_without_workers:
                wait_s = LOOK_EVERY_S if wait_s is None else min(wait_s, LOOK_EVERY_S)
                self.is_closing = not self.engine.has_workers()
            for fd, _ in self._epoll.poll(wait_s):
                if fd == self._listener.fileno():
                    self._welcome()
                elif fd == self._lifeline.fileno():
                    self.is_closing = True
                elif fd == self._bell:
                    os.eventfd_read(self._bell)
                elif fd in self._guests:
                    self._attend(self._guests[fd])
            self._room.look()
            self._send_news()
            self._watch_stuck()

    def end(self) -> None:
        """Ends the engine and tells every client; then they are gone."""
        self._listener.close()
        self.engine.close(CLOSE_S)
        self._room.refuse_all(EngineClosedError("the engine closed while a request waited for a place in its queue"))
        closing = json.dumps(told(EngineClosedError("the engine is closed"))).encode()
        for guest in list(self._guests.values()):
            guest.tell(Message(Kind.CLOSING, (closing,)))
        self._send_news()
        for guest in list(self._guests.values()):
            with suppress(BrokenWireError):
                guest.wire.flush_within(LAST_WORDS_S)
            guest.send_news()
            guest.leave()
        os.close(self._bell)
        self._epoll.close()

    def ring(self) -> None:
        """Has the doorkeeper look around; from any thread, and from a signal's handler."""
        with suppress(BlockingIOError):
            os.eventfd_write(self._bell, 1)

    def formats(self) -> Sequence[RowFormat]:
        """Of all kinds of rows."""
        kinds = self.engine._registry.kinds
        while len(self._formats) < len(kinds):
            self._formats.append(RowFormat(kinds[len(self._formats)]))
        return self._formats

    def note_news(self, guest: Guest) -> None:
        """Has what the guest is to be told sent when the turn ends, or the doorkeeper's round; from any thread."""
        self._with_news.append(guest)

    def note_turns_news(self, guest: Guest) -> None:
        """Has what the guest is to be told sent when the turn is over; by its holder."""
        self._with_turns_news.append(guest)

    def note_stuck(self, guest: Guest) -> None:
        """Has it sent when the guest reads again; from any thread."""
        self._stuck.append(guest)
        self.ring()

    def submit_patiently(self, patient: Patient) -> None:
        """Submits what came, when there are places for it."""
        self._room.submit(patient)

    def call(self, guest: Guest, number: int, name: str, arguments: dict[str, Any], blob: bytes) -> None:
        """Calls one of the functions that clients may call, and tells the guest what came of it."""

        def run() -> None:
            value: Any = None
            data, error = b"", None
            try:
                value, data = self.calls.run(guest, name, arguments, blob)
            except BaseException as raised:
                error = told(raised)
            guest.tell(answer(number, value, data, error))
            self.ring()

        threading.Thread(target=run, name=f"cellrt-{name}", daemon=True).start()

    def _after_turn(self) -> None:
        """At the end of each turn: what ended in it is sent; whoever waits for places may have them now."""
        _send(self._with_turns_news)
        _send(self._with_news)
        if len(self._room):
            self.ring()

    def _send_news(self) -> None:
        """Sends what no turn has left to its end."""
        _send(self._with_news)

    def _announce(self, news_for: Callable[[Guest], object]) -> None:
        for guest in list(self._guests.values()):
            guest.tell(Message(Kind.REBIND, (json.dumps(news_for(guest)).encode(),)))
        self.ring()

    def _welcome(self) -> None:
        """Takes a client in, if it is of this user."""
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # it is gone again
            return
        except OSError as error:
            self._turn_away(error)
            return
        fds: list[int] = []
        try:
            if not addresses.is_ours(sock):
                sock.close()
                return
            fds += [memory.make(REGION_BYTES), memory.make(REGION_BYTES)]
            head = {"version": PROTOCOL, "has_timeline": self.engine.has_timeline}
            socket.send_fds(sock, [json.dumps(head).encode()], fds)
            incoming, outgoing = fds
            fds = []
            guest = Guest(self, Wire(sock, outgoing, incoming))
        except BrokenPipeError:  # it did not wait until the models were registered
            sock.close()
            return
        except OSError:
            sock.close()
            log.exception("a client could not be taken in")
            return
        finally:
            for fd in fds:
                os.close(fd)
        self._guests[sock.fileno()] = guest
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _turn_away(self, error: OSError) -> None:
        """Closes the connection of a client for which there is no descriptor: else it would be there again at once."""
        log.warning("a client could not be taken in: %s", error)
        spare, self._spare = self._spare, -1
        with suppress(OSError):
            if spare >= 0:
                os.close(spare)
            self._listener.accept()[0].close()
        with suppress(OSError):  # another thread may have been quicker
            self._spare = os.dup(self._bell)

    def _attend(self, guest: Guest) -> None:
        """Takes in some messages of a client, and sends on what it had not read."""
        try:
            if guest in self._behind and guest.send_news():
                self._behind.discard(guest)
                self._epoll.modify(guest.wire.fileno(), select.EPOLLIN)
            if guest.listens():
                guest.take()
        except BrokenWireError:
            self._see_off(guest)
        except Exception:
            log.exception("a client does not keep to the protocol, and is seen off")
            self._see_off(guest)

    def _see_off(self, guest: Guest) -> None:
        self._behind.discard(guest)
        del self._guests[guest.wire.fileno()]
        self._epoll.unregister(guest.wire.fileno())
        guest.leave()

    def _watch_stuck(self) -> None:
        while self._stuck:
            guest = self._stuck.popleft()
            if not guest.is_gone:
                self._behind.add(guest)
                listened = select.EPOLLIN if guest.listens() else 0
                self._epoll.modify(guest.wire.fileno(), listened | select.EPOLLOUT)


def _send(with_news: deque[Guest]) -> None:
    while with_news:
        with suppress(IndexError):  # another thread has taken the last
            with_news.popleft().send_news()


def main() -> None:
    """The process: ``starting.COMMAND``, with a descriptor."""
    lifeline = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: whoever started the process decides
    is_there = threading.Event()
    end_with(lifeline, lambda: LEFT_S if is_there.is_set() else 0.0)
    try:
        with importing():
            address, options, models, ends_without_workers = pickle.loads(_read_all(lifeline))
        listener = addresses.listen(address)
        doorkeeper = Doorkeeper(Engine(**{"freeze": True, **options}), listener, lifeline)
        doorkeeper.ends_without_workers = ends_without_workers
        for source, how in models:
            doorkeeper.calls.register(ModelSource(source), how)
        gc.enable()
    except BaseException as error:
        _answer(lifeline, told(error) if isinstance(error, CellrtError) else ("DefinitionError", _short(error), ""))
        os._exit(1)  # an engine may be there, with its threads

    def stop(*_: object) -> None:
        doorkeeper.is_closing = True
        doorkeeper.ring()

    signal.signal(signal.SIGTERM, stop)
    is_there.set()
    _answer(lifeline, None)
    try:
        doorkeeper.run()
    finally:
        doorkeeper.end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # everything has ended in good order: the rest of Python's own end takes a second with torch


def _short(error: BaseException) -> str:
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = " (what is compiled is kept in the folder that NUMBA_CACHE_DIR names, or beside the package)"
    return f"the engine's process did not start: {type(error).__name__}: {error}{where if is_full else ''}"


def _read_all(lifeline: socket.socket) -> bytes:
    """What the starter sent, up to its length."""
    with lifeline.makefile("rb") as file:
        (size,) = LENGTH.unpack(file.read(LENGTH.size))
        return file.read(size)


def _answer(lifeline: socket.socket, error: object) -> None:
    lifeline.sendall(json.dumps({"error": error}).encode() + b"\n")
