"""Starting an engine's process, and ending it; whoever does that needs neither torch nor an engine of its own."""

from __future__ import annotations

import json
import pickle
import struct
import weakref
from collections.abc import Sequence
from typing import Any

from cellrt.errors import DefinitionError, DeviceError
from cellrt.process.blame import heard
from cellrt.worker.python_process import PythonProcess

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
        self._python = PythonProcess(COMMAND)
        self.process, self._lifeline = self._python.process, self._python.lifeline
        self.end = weakref.finalize(self, self._python.end, END_S)
        try:
            self._lifeline.sendall(LENGTH.pack(len(given)) + given)
        except OSError as error:
            self.end()
            raise DeviceError(f"the engine's process did not start: {error}") from error

    def end_within(self, seconds: float) -> None:
        """Has it end in good order, or kills it after so long; may be called twice."""
        self._python.end(seconds)
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
