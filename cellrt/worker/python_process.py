"""Another Python that this process starts: its imports look where ours do, and it ends when we do.

It imports what users wrote. Were a process started by that import, the process would import it too, and start the next
one, without end: none is started meanwhile.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from cellrt.errors import DefinitionError

IS_IMPORTING: ContextVar[bool] = ContextVar("IS_IMPORTING", default=False)
"""Whether what users wrote is imported here: see ``importing``."""
NO_GUARD = (
    "a process was to be started while a model's module is imported, which that process would import too, and so on "
    'without end: the module lacks a main guard; put what its program does under `if __name__ == "__main__":`'
)


@contextmanager
def importing() -> Iterator[None]:
    """Has every ``PythonProcess`` refused that is made within, by what is imported or unpickled there."""
    token = IS_IMPORTING.set(True)
    try:
        yield
    finally:
        IS_IMPORTING.reset(token)


def python(command: str, words: Iterable[str]) -> list[str]:
    """How another Python is started that runs a command; with ``environment``, its imports look where ours do.

    Left to itself it would look into the current folder before the standard library.
    """
    return [sys.executable, "-P", "-c", command, *words]


def environment() -> dict[str, str]:
    """See ``python``."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


class PythonProcess:
    """A process that runs a command, whose first word is a socket; it ends when the other end of that does.

    Args:
        command: what it runs.
        words: behind the socket.
        fds: descriptors that it has, too.
        is_heard: whether what it says comes through pipes: its ``process`` has them.

    Attributes:
        lifeline: the other end of the socket.

    Raises DefinitionError within ``importing``.
    """

    def __init__(
        self, command: str, words: Iterable[object] = (), fds: Sequence[int] = (), *, is_heard: bool = False
    ) -> None:
        if IS_IMPORTING.get():
            raise DefinitionError(NO_GUARD)
        self.lifeline, theirs = socket.socketpair()
        _LIFELINES.add(self.lifeline)
        pipe = subprocess.PIPE if is_heard else None
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen(
                python(command, map(str, (fd, *words))),
                pass_fds=[fd, *fds],
                stdin=subprocess.DEVNULL,
                stdout=pipe,
                stderr=pipe,
                env=environment(),
            )

    def end(self, seconds: float) -> int:
        """Has it end, kills it after so long, and waits for it; returns its status. May be called twice."""
        self.lifeline.close()
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


def end_with(lifeline: socket.socket, left_s: Callable[[], float] = lambda: 0.0) -> None:
    """Has this process end when the other end of its lifeline is gone, whatever else it does.

    ``left_s``, asked then: how many seconds it has to end by itself, in good order.
    """

    def watch() -> None:
        poll = select.poll()
        poll.register(lifeline, select.POLLRDHUP)
        poll.poll()
        time.sleep(left_s())
        os._exit(0)  # nobody asks any more

    threading.Thread(target=watch, name="cellrt-lifeline", daemon=True).start()


_LIFELINES: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _forget_all() -> None:
    """In a forked process: what was started ends with the parent, whoever else lives on."""
    for lifeline in list(_LIFELINES):
        lifeline.close()


os.register_at_fork(after_in_child=_forget_all)
