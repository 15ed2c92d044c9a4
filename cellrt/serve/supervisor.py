"""The supervising process of a server: it starts the engine's process and the front ends, replaces and ends them.

It serves nothing itself, and imports no torch. All front ends share one listening socket, so that an idle one takes
the next connection. The socket stays open here, so that connections wait for a successor if there is no front end.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import msgspec
from prometheus_client.multiprocess import mark_process_dead

from cellrt.errors import CellrtError, DefinitionError
from cellrt.process.address import new_address
from cellrt.process.starting import Started
from cellrt.serve.server_settings import Settings
from cellrt.serve.start_engine import start_engine
from cellrt.worker.python_process import environment, python

log = logging.getLogger("cellrt")
COMMAND = "import gc; gc.disable(); from cellrt.serve.front_end import main; main()"
"""The command of a front end, without garbage collection until all is imported, as in ``process.starting``."""
BACKLOG = 2048
"""The most connections that may wait for a front end."""
LOOK_EVERY_S = 0.05
KILL_AFTER_S = 5.0
"""The seconds beyond the limit after which a front end that has not ended is killed."""
MIN_LIFE_S = 1.0
"""The seconds that a front end must have run to be replaced at once.

After a shorter life the supervisor waits so long, and it ends the server after ``MAX_EARLY_DEATHS`` of them.
"""
START_S = 60.0
"""If a front end exits with an error within this many seconds, it counts as one that could not start."""
MAX_EARLY_DEATHS = 5
ENDED_WELL = (0, -signal.SIGTERM)
"""Exit statuses of a front end that was told to end: it handled the signal, or had no handler yet."""


class Supervisor:
    """The supervisor of a server's processes. ``say``: shows messages to people."""

    def __init__(self, settings: Settings, say: Callable[[str], None]) -> None:
        self._say = say
        with ExitStack() as opened:
            self._socket = _listen(settings, opened)
            grpc_port = _reserve(settings.host, settings.grpc_port, opened)
            self._opened = opened.pop_all()
        self.settings = replace(settings, address=settings.address or new_address(), grpc_port=grpc_port)
        self._folder = tempfile.mkdtemp(prefix="cellrt-metrics-")
        self._front_ends: list[subprocess.Popen[bytes]] = []
        self._started_s: list[float] = []
        self._engine: Started | None = None
        self._is_awaited = False
        """True while the engine's process is starting, and ``end`` terminates it at once."""
        self._ends_told = 0
        self._early_deaths = 0
        self._woken = threading.Event()

    @property
    def port(self) -> int:
        """The port of HTTP."""
        return int(self._socket.getsockname()[1])

    def run(self) -> int:
        """Serve until told to end; return the exit status. Raise DefinitionError if the server cannot start."""
        try:
            self._engine = start_engine(self.settings)
            for number in range(self.settings.front_ends):
                self._front_ends.append(self._start_front_end(number))
                self._started_s.append(time.monotonic())
            self._await_engine(self._engine)
            if not self._ends_told:
                self._say_where()
            while not self._woken.wait(LOOK_EVERY_S):
                self._look()
            return self._drain()
        finally:
            self._clean_up()

    def end(self) -> None:
        """End all processes gracefully; the second call kills them.

        Safe from any thread, and from a signal's handler.
        """
        self._ends_told += 1
        if self._ends_told > 1:
            for process in self._front_ends:
                process.kill()
            if self._engine is not None:
                self._engine.process.kill()
            shutil.rmtree(self._folder, ignore_errors=True)
            os._exit(1)
        if self._is_awaited and self._engine is not None:
            self._engine.process.terminate()  # its models may take minutes, and it has no requests yet
        self._woken.set()

    def _say_where(self) -> None:
        self._say(f"serving at http://{self.settings.at(self.port)}")
        if self.settings.grpc_port is not None:
            self._say(f"serving gRPC at {self.settings.at(self.settings.grpc_port)}")

    def _await_engine(self, engine: Started) -> None:
        """Wait until the engine is ready, or the server is told to end. Raise DefinitionError, DeviceError."""
        self._is_awaited = True
        try:
            if self._ends_told:
                engine.process.terminate()
            engine.wait()
        except CellrtError:
            if not self._ends_told:
                raise
        finally:
            self._is_awaited = False

    def _start_front_end(self, number: int) -> subprocess.Popen[bytes]:
        descriptor = self._socket.fileno()
        is_shared = int(self.settings.front_ends > 1)
        variables = environment()
        if is_shared:
            variables["PROMETHEUS_MULTIPROC_DIR"] = self._folder
        process = subprocess.Popen(
            python(COMMAND, (str(descriptor), str(number), str(is_shared))),
            pass_fds=[descriptor],
            stdin=subprocess.PIPE,
            env=variables,
            start_new_session=True,  # a terminal's interrupt comes here alone
        )
        if process.stdin is None:
            raise DefinitionError("a front end has no standard input")
        process.stdin.write(msgspec.json.encode(self.settings) + b"\n")
        process.stdin.flush()
        return process

    def _look(self) -> None:
        """Replace processes that have died."""
        if self._engine is not None and self._engine.process.poll() is not None:
            self._say("the engine's process is gone; another is started")
            self._engine.end()
            try:
                self._engine = start_engine(self.settings)
                self._await_engine(self._engine)
            except CellrtError as error:
                self._note_early_death(f"the engine's process does not start: {error}")
        for number, process in enumerate(self._front_ends):
            if process.poll() is not None:
                self._say(f"front end {number} ended with status {process.returncode}; another is started")
                if process.stdin is not None:
                    process.stdin.close()
                mark_process_dead(process.pid, self._folder)  # type: ignore[no-untyped-call]
                lived_s = time.monotonic() - self._started_s[number]
                if lived_s < MIN_LIFE_S or (process.returncode > 0 and lived_s < START_S):
                    self._note_early_death(f"front end {number} does not start")
                self._front_ends[number] = self._start_front_end(number)
                self._started_s[number] = time.monotonic()

    def _note_early_death(self, what: str) -> None:
        self._early_deaths += 1
        if self._early_deaths > MAX_EARLY_DEATHS:
            raise DefinitionError(what)
        self._woken.wait(MIN_LIFE_S)

    def _drain(self) -> int:
        """End the front ends after their requests, then the engine. Return 0 if all ended gracefully.

        New connections are refused, as no successor will take them.
        """
        self._socket.close()
        self._say(f"ending: at most {self.settings.drain_s:g} s for what was begun")
        for process in self._front_ends:
            process.terminate()
        end_s = time.monotonic() + self.settings.drain_s + KILL_AFTER_S
        is_clean = True
        for process in self._front_ends:
            try:
                is_clean = process.wait(max(0.0, end_s - time.monotonic())) in ENDED_WELL and is_clean
            except subprocess.TimeoutExpired:
                process.kill()
                is_clean = False
        return 0 if is_clean else 1

    def _clean_up(self) -> None:
        for process in self._front_ends:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        if self._engine is not None:
            self._engine.end()
        self._opened.close()
        shutil.rmtree(self._folder, ignore_errors=True)


def _reserve(host: str, port: int | None, opened: ExitStack) -> int | None:
    """Return a port that front ends share for gRPC; ``opened`` reserves it for them. Raise DefinitionError."""
    if port is None:
        return None
    try:
        family = socket.getaddrinfo(host, port)[0][0]
        _claim(family, (host, port), opened)
        sock = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind((host, port))
    except OSError as error:
        raise DefinitionError(f"cannot listen at {host}:{port}: {error}") from None
    return int(sock.getsockname()[1])


def _claim(family: socket.AddressFamily, address: tuple[Any, ...], opened: ExitStack) -> None:
    """Raise OSError if another program listens there, which may share its port with any other, as we do with our
    processes.

    ``opened`` keeps other servers of ours away, which would find nothing listening if they began at the same moment.
    """
    if address[1] and sys.platform == "linux":
        # A name without a file: where ports are apart, as in containers, so are these.
        mark = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        mark.bind(f"\0cellrt serves {address[0]} {address[1]}")
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)


def _listen(settings: Settings, opened: ExitStack) -> socket.socket:
    """Return the socket that listens for all front ends.

    Raise DefinitionError if the port is taken or not permitted.
    """
    try:
        family, *_, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        sock = opened.enter_context(socket.socket(family, socket.SOCK_STREAM))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        raise DefinitionError(f"cannot listen at {settings.host}:{settings.port}: {error}") from None
    return sock
