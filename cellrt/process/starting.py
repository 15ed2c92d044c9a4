"""Starting an engine's process, and ending it; whoever does that needs neither torch nor an engine of its own."""

from __future__ import annotations

import json
import os
import pickle
import socket
import struct
import subprocess
import weakref
from collections.abc import Sequence
from typing import Any

from cellrt.errors import DefinitionError, DeviceError
from cellrt.process.blame import heard
from cellrt.process.imports import environment, python

LENGTH = struct.Struct("<Q")
START_S = 600.0
"""How long the process may take until its engine is there; the first of an installation compiles the scheduler."""
END_S = 10.0
"""How long it may take to end in good order; then it is killed."""
COMMAND = "import gc; gc.disable(); from cellrt.process.host import main; main()"
"""The collector looks through what is imported again and again, a quarter of the time that it takes: ``main`` has it
look when all is there."""


class Started:
    """An engine's process; it ends when this is ended or dropped, and with the process that has this."""

    def __init__(
        self,
        address: str,
        options: dict[str, Any],
        models: Sequence[tuple[str, dict[str, Any]]] = (),
        *,
        ends_without_workers: bool = False,
    ) -> None:
        """Starts it, and does not wait for it: see ``wait``.

        Args:
            address: where clients connect.
            options: as of ``Engine``.
            models: sources of models that are registered before anybody is let in, with options of ``register``.
            ends_without_workers: whether it ends by itself when the engine's last worker has died.

        Raises DefinitionError if an option cannot be handed over.
        """
        try:
            given = pickle.dumps((address, options, list(models), ends_without_workers))
        except Exception as error:
            raise DefinitionError(f"EngineProcess: an option cannot be handed to another process: {error}") from error
        self._lifeline, theirs = socket.socketpair()
        _LIFELINES.add(self._lifeline)
        with theirs:
            command = python(COMMAND, [str(theirs.fileno())])
            self.process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment()
            )
        self.end = weakref.finalize(self, _end, self.process, self._lifeline)
        try:
            self._lifeline.sendall(LENGTH.pack(len(given)) + given)
        except OSError as error:
            self.end()
            raise DeviceError(f"the engine's process did not start: {error}") from error

    def end_within(self, seconds: float) -> None:
        """Has it end in good order, or kills it after so long; may be called twice."""
        _end(self.process, self._lifeline, seconds)
        self.end.detach()

    def wait(self) -> None:
        """Waits until its engine is there, with its models. Raises DefinitionError, DeviceError; then it has ended."""
        try:
            self._lifeline.settimeout(START_S)
            with self._lifeline.makefile("rb") as file:
                answer = file.readline()
            self._lifeline.settimeout(None)
            if not answer:
                raise DeviceError(f"the engine's process ended at its start, with status {self.process.wait(END_S)}")
            if (told := json.loads(answer)["error"]) is not None:
                raise heard(told)
        except BaseException as error:
            self.end()
            if isinstance(error, OSError):
                raise DeviceError(f"the engine's process did not start: {error}") from error
            raise


_LIFELINES: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _forget_all() -> None:
    """In a forked process: the engine ends with the parent, whoever else lives on."""
    for lifeline in list(_LIFELINES):
        lifeline.close()


os.register_at_fork(after_in_child=_forget_all)


def _end(process: subprocess.Popen[bytes], lifeline: socket.socket, seconds: float = END_S) -> None:
    """Has the process end, and waits for it."""
    lifeline.close()
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
