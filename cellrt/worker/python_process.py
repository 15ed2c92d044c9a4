"""A further Python process: its imports look where this process's do, and it ends when this process does.

It imports users' modules. If such an import started a process, that process would import the module too, and start the
next one, without end: so none can be started meanwhile.
"""

from __future__ import annotations

import os
import select
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from cellrt.errors import DefinitionError

IS_IMPORTING: ContextVar[bool] = ContextVar("IS_IMPORTING", default=False)
"""True while a user's module is imported, within ``importing``."""
NO_GUARD = (
    "a process was to be started while a model's module is imported, which that process would import too, and so on "
    'without end: the module lacks a main guard; put what its program does under `if __name__ == "__main__":`'
)


@contextmanager
def importing() -> Iterator[None]:
    """Refuse every ``PythonProcess`` within the block, which imports or unpickles users' code."""
    token = IS_IMPORTING.set(True)
    try:
        yield
    finally:
        IS_IMPORTING.reset(token)


def python(command: str, words: Iterable[str]) -> list[str]:
    """Return the command line of a Python that runs a command; with ``environment``, its imports look where ours do.

    By itself Python would look into the current folder before the standard library.
    """
    return [sys.executable, "-P", "-c", command, *words]


def environment() -> dict[str, str]:
    """Return the environment of another Python, with this process's import path."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


class PythonProcess:
    """A process that runs a command with a socket as the first argument; it ends when the other end of that closes.

    Args:
        command: the Python code.
        words: the arguments after the socket.
        is_heard: whether its output comes through pipes, which its ``process`` has.

    Attributes:
        lifeline: the other end of the socket.

    Raises DefinitionError within ``importing``.
    """

    def __init__(self, command: str, words: Iterable[object] = (), *, is_heard: bool = False) -> None:
        if IS_IMPORTING.get():
            raise DefinitionError(NO_GUARD)
        self.lifeline, theirs = socket.socketpair()
        _LIFELINES.add(self.lifeline)
        pipe = subprocess.PIPE if is_heard else None
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen(
                python(command, map(str, (fd, *words))),
                pass_fds=[fd],
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                env=environment(),
            )

    def end(self, seconds: float) -> int:
        """End the process, kill it after this many seconds, and wait for it; return its status. May be called twice."""
        self.lifeline.close()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def end_with(lifeline: socket.socket, left_s: Callable[[], float] = lambda: 0.0) -> None:
    """End this process when the other end of its lifeline closes, whatever it does then.

    ``left_s``: called then, returns the seconds that it has to end gracefully by itself.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(lifeline, select.POLLRDHUP)
        poll.poll()
        time.sleep(left_s())
        os._exit(0)  # the parent is gone

    threading.Thread(target=watch, name="cellrt-lifeline", daemon=True).start()


_LIFELINES: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _forget_all() -> None:
    """Close the lifelines in a forked process: the started processes end with the parent."""
    for lifeline in list(_LIFELINES):
        lifeline.close()


os.register_at_fork(after_in_child=_forget_all)
