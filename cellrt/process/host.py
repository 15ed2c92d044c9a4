"""The engine's process: the engine, and the thread that accepts connections and receives clients' messages.

The process is started by an ``EngineProcess`` and ends with it: when told to, or when the socket between them closes.
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

import numpy as np

from cellrt.core.state import region_layout as layout
from cellrt.core.state.region_layout import WORD_BYTES
from cellrt.engine.crash_log import write_at_a_crash
from cellrt.engine.engine import Engine
from cellrt.engine.regions import Returned
from cellrt.errors import CellrtError, EngineClosedError, InternalError
from cellrt.native.futex import HAS_BELLS
from cellrt.native.row_types import Rows
from cellrt.process import address as addresses
from cellrt.process import shared_memory
from cellrt.process.calls import WAIT_FOR_NOTHING, Calls
from cellrt.process.client_connection import ClientConnection, answer
from cellrt.process.model_binding import RowFormat
from cellrt.process.recorded import LENGTH
from cellrt.process.source import ModelSource
from cellrt.process.submission_queue import QueuedSubmission, SubmissionQueue
from cellrt.process.wire import PROTOCOL, REGION_BYTES, BrokenWireError, Kind, Message, Wire
from cellrt.process.wire_errors import encode_error
from cellrt.worker.cpu.worker import CpuWorker
from cellrt.worker.python_process import end_with, importing
from cellrt.worker.turn_words import num_words

log = logging.getLogger("cellrt")
CLOSE_S = 5.0
LOOK_EVERY_S = 0.5
"""The seconds between two checks whether there are workers, where that matters."""
LEFT_S = 30.0
"""The seconds that the process may take to end after the process that started it."""
LAST_WORDS_S = 0.5
"""The seconds to wait, at the end, for each client that reads nothing."""


class ServedEngine(Engine):
    """An engine whose workers are woken by clients in other processes, too."""

    words_fd = -1

    def _make_words(self, num_workers: int) -> Rows[int]:
        self.words_fd = shared_memory.make(num_words(num_workers) * WORD_BYTES)
        memory = shared_memory.view(os.dup(self.words_fd), writable=True)
        words: Rows[int] = np.frombuffer(memory, np.int64)  # type: ignore[assignment]
        return words

    @property
    def takes_regions(self) -> bool:
        """True if requests may come by regions: all workers sleep on words, and nothing is to be seen of each
        request."""
        workers = self._manager.workers
        is_plain = not self.has_timeline and self._submission.is_by_arrival
        return HAS_BELLS and is_plain and all(isinstance(worker, CpuWorker) for worker in workers)


class EngineServer:
    """The server of an engine's clients: it receives their messages, and sends what no turn does. It runs in the main
    thread.

    Args:
        engine: this process's engine.
        listener: the socket that clients connect to.
        lifeline: a socket that closes with the process that started this one.
    """

    def __init__(self, engine: Engine, listener: socket.socket, lifeline: socket.socket) -> None:
        self.engine = engine
        self._listener, self._lifeline = listener, lifeline
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._spare = os.dup(self._bell)
        """A descriptor to close for a client that comes when there is no other."""
        self._connections: dict[int, ClientConnection] = {}
        """Clients by their sockets' descriptors."""
        self._with_news: deque[ClientConnection] = deque()
        self._with_turns_news: deque[ClientConnection] = deque()
        """Clients that have news from the running turn."""
        self._returned: deque[tuple[ClientConnection, Returned | int]] = deque()
        """Requests that came by regions and are to be submitted as by messages, or cancelled."""
        self._stuck: deque[ClientConnection] = deque()
        self._behind: set[ClientConnection] = set()
        """Clients that are watched until they read again."""
        self._waiting = SubmissionQueue(engine._manager.places, engine._manager.turns.wake)
        self.calls = Calls(engine, self._announce, lambda: len(self._connections))
        self._formats: list[RowFormat] = []
        self.is_closing = False
        self.ends_without_workers = False
        """True if the process ends with the engine's last worker, since another process starts a new one."""
        for fd in (listener.fileno(), lifeline.fileno(), self._bell):
            self._epoll.register(fd, select.EPOLLIN)
        engine._manager.after_turn = self._after_turn
        self._shared_words = engine.words_fd if isinstance(engine, ServedEngine) and engine.takes_regions else -1
        """The descriptor of the words on which the engine's workers sleep, or -1: then requests come by messages."""

    def run(self) -> None:
        """Serve until told to end, or until the process that started this one is gone."""
        while not self.is_closing:
            wait_s = self._waiting.until_end_s()
            if self.ends_without_workers:
                wait_s = LOOK_EVERY_S if wait_s is None else min(wait_s, LOOK_EVERY_S)
                self.is_closing = not self.engine.has_workers()
            for fd, _ in self._epoll.poll(wait_s):
                if fd == self._listener.fileno():
                    self._accept()
                elif fd == self._lifeline.fileno():
                    self.is_closing = True
                elif fd == self._bell:
                    os.eventfd_read(self._bell)
                elif fd in self._connections:
                    self._serve_client(self._connections[fd])
            self.take_returned()
            self._waiting.look()
            self._send_news()
            self._watch_stuck()

    def end(self) -> None:
        """End the engine, tell every client, and close the connections."""
        self._listener.close()
        self.engine.close(CLOSE_S)
        self._waiting.refuse_all(EngineClosedError("the engine closed while a request waited for a place in its queue"))
        closing = json.dumps(encode_error(EngineClosedError("the engine is closed"))).encode()
        for connection in list(self._connections.values()):
            connection.tell(Message(Kind.CLOSING, (closing,)))
        self._send_news()
        for connection in list(self._connections.values()):
            with suppress(BrokenWireError):
                connection.wire.flush_within(LAST_WORDS_S)
            connection.send_news()
            connection.leave()
        os.close(self._bell)
        self._epoll.close()

    def ring(self) -> None:
        """Wake the main thread; from any thread, and from a signal's handler."""
        with suppress(BlockingIOError):
            os.eventfd_write(self._bell, 1)

    def formats(self) -> Sequence[RowFormat]:
        """Return the formats of all kinds of rows."""
        kinds = self.engine._registry.kinds
        while len(self._formats) < len(kinds):
            self._formats.append(RowFormat(kinds[len(self._formats)]))
        return self._formats

    def note_news(self, connection: ClientConnection) -> None:
        """Have a client's news sent at the end of the turn, or of the main thread's round; from any thread."""
        self._with_news.append(connection)

    def note_turns_news(self, connection: ClientConnection) -> None:
        """Have a client's news sent at the end of the turn; by the thread that runs it."""
        self._with_turns_news.append(connection)

    def note_stuck(self, connection: ClientConnection) -> None:
        """Have a client's news sent when it reads again; from any thread."""
        self._stuck.append(connection)
        self.ring()

    def submit_or_wait(self, queued: QueuedSubmission) -> None:
        """Submit requests when there is room for them."""
        self._waiting.submit(queued)

    def note_returned(self, connection: ClientConnection, returned: Returned | int) -> None:
        """Have a request submitted that came by a region, or one that was cancelled by its id; in a turn."""
        self._returned.append((connection, returned))
        self.ring()

    def take_returned(self) -> None:
        """Submit what was returned so far; by the accepting thread."""
        while self._returned:
            connection, returned = self._returned.popleft()
            if isinstance(returned, int):
                connection.cancel_here(returned)
                continue
            try:
                connection.submit_returned(returned)
            except Exception as bug:  # it costs this request alone
                log.exception("a request that came by a region could not be submitted")
                connection.tell((returned.id, InternalError(f"{type(bug).__name__}: {bug}")))

    def call(
        self, connection: ClientConnection, number: int, name: str, arguments: dict[str, Any], blob: bytes
    ) -> None:
        """Call one of the functions that clients may call, and send the client the answer."""

        def run() -> None:
            value: Any = None
            data, error = b"", None
            try:
                value, data = self.calls.run(connection, name, arguments, blob)
            except BaseException as raised:
                error = encode_error(raised)
            connection.tell(answer(number, value, data, error))
            self.ring()

        if name in WAIT_FOR_NOTHING:
            run()
        else:
            threading.Thread(target=run, name=f"cellrt-{name}", daemon=True).start()

    def _after_turn(self) -> None:
        """Send the news of a turn at its end, and wake the main thread for submissions that wait for room."""
        _send(self._with_turns_news)
        _send(self._with_news)
        if len(self._waiting):
            self.ring()

    def _send_news(self) -> None:
        """Send news that was not added in a turn."""
        _send(self._with_news)

    def _announce(self, news_for: Callable[[ClientConnection], object]) -> None:
        for connection in list(self._connections.values()):
            connection.tell(Message(Kind.REBIND, (json.dumps(news_for(connection)).encode(),)))
        self.ring()

    def _accept(self) -> None:
        """Accept a client, if it belongs to this user."""
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:  # it is gone again
            return
        except OSError as error:
            self._refuse_one(error)
            return
        fds: list[int] = []
        try:
            if not addresses.is_ours(sock):
                sock.close()
                return
            fds += [shared_memory.make(REGION_BYTES), shared_memory.make(REGION_BYTES)]
            head: dict[str, Any] = {"version": PROTOCOL, "has_timeline": self.engine.has_timeline}
            words = self._shared_words
            if words >= 0:
                fds += [shared_memory.make(layout.REGION_BYTES), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)]
                head["workers"] = len(self.engine._manager.workers)
                socket.send_fds(sock, [json.dumps(head).encode()], [*fds[:3], words, fds[3]])
            else:
                socket.send_fds(sock, [json.dumps(head).encode()], fds)
            incoming, outgoing, *more = fds
            fds = more
            connection = ClientConnection(self, Wire(sock, outgoing, incoming))
            if more:
                fds = more[1:]
                if connection.open_region(shared_memory.view(more[0], writable=True), more[1]):
                    fds = []
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
        self._connections[sock.fileno()] = connection
        self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _refuse_one(self, error: OSError) -> None:
        """Close the connection of a client for which there is no descriptor: else epoll would
        report it again at once.
        """
        log.warning("a client could not be taken in: %s", error)
        spare, self._spare = self._spare, -1
        with suppress(OSError):
            if spare >= 0:
                os.close(spare)
            self._listener.accept()[0].close()
        with suppress(OSError):  # another thread may have been quicker
            self._spare = os.dup(self._bell)

    def _serve_client(self, connection: ClientConnection) -> None:
        """Receive some messages of a client, and send news that it had not read."""
        try:
            if connection in self._behind and connection.send_news():
                self._behind.discard(connection)
                self._epoll.modify(connection.wire.fileno(), select.EPOLLIN)
            if connection.listens():
                connection.take()
        except BrokenWireError:
            self._disconnect(connection)
        except Exception:
            log.exception("a client does not keep to the protocol, and is seen off")
            self._disconnect(connection)

    def _disconnect(self, connection: ClientConnection) -> None:
        self._behind.discard(connection)
        del self._connections[connection.wire.fileno()]
        self._epoll.unregister(connection.wire.fileno())
        connection.leave()

    def _watch_stuck(self) -> None:
        while self._stuck:
            connection = self._stuck.popleft()
            if not connection.is_gone:
                self._behind.add(connection)
                listened = select.EPOLLIN if connection.listens() else 0
                self._epoll.modify(connection.wire.fileno(), listened | select.EPOLLOUT)


def _send(with_news: deque[ClientConnection]) -> None:
    while with_news:
        with suppress(IndexError):  # another thread has taken the last
            with_news.popleft().send_news()


def main() -> None:
    """Run the engine's process, which ``starting.COMMAND`` starts with a descriptor."""
    lifeline = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of the terminal: the parent process handles it
    write_at_a_crash()
    is_there = threading.Event()
    end_with(lifeline, lambda: LEFT_S if is_there.is_set() else 0.0)
    try:
        with importing():
            address, options, models, ends_without_workers = pickle.loads(_read_all(lifeline))
        listener = addresses.listen(address)
        server = EngineServer(ServedEngine(**{"freeze": True, **options}), listener, lifeline)
        server.ends_without_workers = ends_without_workers
        for source, how in models:
            server.calls.register(ModelSource(source), how)
        gc.enable()
    except BaseException as error:
        _answer(
            lifeline, encode_error(error) if isinstance(error, CellrtError) else ("DefinitionError", _short(error), "")
        )
        os._exit(1)  # an engine may be there, with its threads

    def stop(*_: object) -> None:
        server.is_closing = True
        server.ring()

    signal.signal(signal.SIGTERM, stop)
    is_there.set()
    _answer(lifeline, None)
    try:
        server.run()
    finally:
        server.end()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # everything has ended in good order: the rest of Python's own end takes a second with torch


def _short(error: BaseException) -> str:
    is_full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
    where = " (what is compiled is kept in the folder that NUMBA_CACHE_DIR names, or beside the package)"
    return f"the engine's process did not start: {type(error).__name__}: {error}{where if is_full else ''}"


def _read_all(lifeline: socket.socket) -> bytes:
    """Return the bytes that the starting process sent, up to their length."""
    with lifeline.makefile("rb") as file:
        (size,) = LENGTH.unpack(file.read(LENGTH.size))
        return file.read(size)


def _answer(lifeline: socket.socket, error: object) -> None:
    lifeline.sendall(json.dumps({"error": error}).encode() + b"\n")
