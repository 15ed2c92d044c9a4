"""Another Python that this process starts: its imports look where ours do, and it ends when we do."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterable, Sequence


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

    Attributes:
        lifeline: the other end of the socket.
    """

    def __init__(self, command: str, words: Iterable[object] = (), fds: Sequence[int] = ()) -> None:
        self.lifeline, theirs = socket.socketpair()
        _LIFELINES.add(self.lifeline)
        with theirs:
            fd = theirs.fileno()
            self.process = subprocess.Popen(
                python(command, map(str, (fd, *words))),
                pass_fds=[fd, *fds],
                stdin=subprocess.DEVNULL,
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


_LIFELINES: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _forget_all() -> None:
    """In a forked process: what was started ends with the parent, whoever else lives on."""
    for lifeline in list(_LIFELINES):
        lifeline.close()


os.register_at_fork(after_in_child=_forget_all)
