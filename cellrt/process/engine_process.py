"""An engine in a process of its own, and its first client."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import socket
import subprocess
import sys
import weakref
from typing import Any

from cellrt.engine.engine import Engine
from cellrt.errors import DefinitionError, DeviceError
from cellrt.process import address as addresses
from cellrt.process.blame import heard
from cellrt.process.client import Client
from cellrt.process.recorded import LENGTH

START_S = 300.0
"""How long the process may take until its engine is there; the first on a machine compiles the scheduler."""
END_S = 35.0
"""How long it may take to end in good order; then it is killed."""
COMMAND = "from cellrt.process.host import main; main()"


class EngineProcess(Client):
    """Starts a process with an engine in it, and is its first client; others ``connect`` to its ``address``.

    The engine ends with this object: when it is closed or dropped, and when its process ends, in whatever way.

    Args:
        workers: as of ``Engine``.
        address: where clients connect: "@name", or the path of a socket; default a name that nobody has.
        options: as of ``Engine``.

    Raises DefinitionError if the engine cannot be made of these, or the address is taken.
    """

    def __init__(self, workers: int | list[str] | None = None, *, address: str | None = None, **options: Any) -> None:
        known = inspect.signature(Engine).parameters
        for name in options:
            if name not in known:
                raise DefinitionError(f"EngineProcess: unknown option {name!r}; an engine has {sorted(known)}")
        where = addresses.new_address() if address is None else addresses.check_address(address)
        self._process, self._lifeline = _start(where, {"workers": workers, **options})
        self._ended = weakref.finalize(self, _end, self._process, self._lifeline)
        try:
            super().__init__(where)
        except BaseException:
            self._ended()
            raise

    @property
    def pid(self) -> int:
        """Of the engine's process."""
        return self._process.pid

    def close(self) -> None:
        """Ends the engine, for all clients; what is not done ends with EngineClosedError. May be called twice."""
        self._link.refuse_in_callback()
        self._ended()
        super().close()


def _start(address: str, options: dict[str, Any]) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """A process whose engine is there, and the socket that it ends with."""
    try:
        given = pickle.dumps((address, options))
    except Exception as error:
        raise DefinitionError(f"EngineProcess: an option cannot be handed to another process: {error}") from error
    ours, theirs = socket.socketpair()
    _LIFELINES.add(ours)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with theirs:
        command = [sys.executable, "-c", COMMAND, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
    try:
        ours.settimeout(START_S)
        ours.sendall(LENGTH.pack(len(given)) + given)
        with ours.makefile("rb") as file:
            answer = file.readline()
        ours.settimeout(None)
        if not answer:
            raise DeviceError(f"the engine's process ended at its start, with status {process.wait(END_S)}")
        if (told := json.loads(answer)["error"]) is not None:
            raise heard(told)
    except BaseException as error:
        _end(process, ours)
        if isinstance(error, OSError):
            raise DeviceError(f"the engine's process did not start: {error}") from error
        raise
    return process, ours


_LIFELINES: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _forget_all() -> None:
    """In a forked process: the engine ends with the parent, whoever else lives on."""
    for lifeline in list(_LIFELINES):
        lifeline.close()


os.register_at_fork(after_in_child=_forget_all)


def _end(process: subprocess.Popen[bytes], lifeline: socket.socket) -> None:
    """Has the process end, and waits for it."""
    lifeline.close()
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
