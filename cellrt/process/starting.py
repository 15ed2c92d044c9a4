"""Start and end of an engine's process; the starting process needs neither torch nor an engine of its own."""

from __future__ import annotations

import json
import pickle
import struct
import weakref
from collections.abc import Sequence
from typing import Any

from cellrt.errors import DefinitionError, DeviceError
from cellrt.process.wire_errors import decode_error
from cellrt.worker.python_process import PythonProcess

LENGTH = struct.Struct("<Q")
START_S = 600.0
"""The seconds until the process must have its engine; the first of an installation compiles the scheduler."""
END_S = 10.0
"""The seconds that it may take to end gracefully; then it is killed."""
COMMAND = "import gc; gc.disable(); from cellrt.process.host import main; main()"
"""The command without garbage collection until all is imported, as collections would take a quarter of the time."""


class Started:
    """An engine's process. It ends when this object is ended or dropped, and with the process that has this object."""

    def __init__(
        self,
        address: str,
        options: dict[str, Any],
        models: Sequence[tuple[str, dict[str, Any]]] = (),
        *,
        ends_without_workers: bool = False,
    ) -> None:
        """Start the process, without waiting for it, which ``wait`` does.

        Args:
            address: where clients connect.
            options: see ``Engine``.
            models: sources of models that are registered before any client is accepted, with options of ``register``.
            ends_without_workers: whether it ends by itself when the engine's last worker has died.

        Raise DefinitionError if an option cannot be pickled.
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
        """End the process gracefully, or kill it after this many seconds; may be called twice."""
        self._python.end(seconds)
        self.end.detach()

    def wait(self) -> None:
        """Wait until its engine is ready, with its models. Raise DefinitionError, DeviceError; then it has ended."""
        try:
            self._lifeline.settimeout(START_S)
            with self._lifeline.makefile("rb") as file:
                answer = file.readline()
            self._lifeline.settimeout(None)
            if not answer:
                raise DeviceError(f"the engine's process ended at its start, with status {self.process.wait(END_S)}")
            if (told := json.loads(answer)["error"]) is not None:
                raise decode_error(told)
        except BaseException as error:
            self.end()
            if isinstance(error, OSError):
                raise DeviceError(f"the engine's process did not start: {error}") from error
            raise
