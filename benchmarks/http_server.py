"""The HTTP benchmark's view of a server: how it is started, and the form of its requests and answers.

Peers batch up to 64 requests that arrive within 5 ms, with one worker and one thread of torch.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

MAX_BATCH, MAX_WAIT_S = 64, 0.005
START_S, STOP_S, TIMEOUT_S = 600.0, 30.0, 30.0
LAST_BYTES = 2000
"""The bytes of a log that are shown."""
REPOSITORY = Path(__file__).resolve().parent.parent

Tokens = Sequence[int]
Command = tuple[list[str], Mapping[str, str]]
"""A program with its arguments, and its environment."""


@dataclass(frozen=True)
class Server:
    """One kind of server.

    Attributes:
        path: where requests go.
        prepared: gives the command that serves on a port of loopback; what that needs on disk is there until it ends.
        missing: why it cannot run here, or None if it can.
        body: a request as it is sent, from its tokens.
        answered: what counts in an answer, such as its class.
        counts: batches and rows so far, from the server's own statistics at an address; None: it keeps none.
    """

    path: str
    prepared: Callable[[int], AbstractContextManager[Command]]
    missing: Callable[[], str | None]
    body: Callable[[Tokens], object]
    answered: Callable[[Any], object]
    counts: Callable[[str], tuple[int, int]] | None = None


class DidNotStartError(RuntimeError):
    """A server that did not come to answer; its last words are a note."""


@contextmanager
def serving(server: Server) -> Iterator[str]:
    """Yield a server in processes of its own; its address, without the path.

    Raise DidNotStartError where it does not answer.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    with ExitStack() as stack:
        try:
            command, environment = stack.enter_context(server.prepared(port))
            log = stack.enter_context(tempfile.TemporaryFile())
            process = subprocess.Popen(
                command, env=environment, cwd=REPOSITORY, stdout=log, stderr=log, start_new_session=True
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise DidNotStartError(f"{type(error).__name__}: {error}") from error
        stack.callback(_end, process)
        if not _answers(server, address, process):
            log.seek(0)
            said = log.read()[-LAST_BYTES:].decode(errors="replace").strip() or "it said nothing"
            how = f"no answer within {START_S:.0f} s" if _is_running(process) else "it has ended"
            ended = DidNotStartError(f"{how}: {said.splitlines()[-1]}")
            ended.add_note(said)
            raise ended
        yield address


def _answers(server: Server, address: str, process: subprocess.Popen[bytes]) -> bool:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and _is_running(process):
        try:
            post(server, address, [1, 2, 3])
            return True
        except (OSError, HTTPException):
            time.sleep(0.2)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a server, and then what it left running: some leave their workers behind."""
    os.kill(process.pid, signal.SIGTERM)
    end_s = time.monotonic() + STOP_S
    while time.monotonic() < end_s and _is_running(process):
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    """Leave an ended process to be waited for: until then its id, which is its group's, is nobody else's."""
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def post(server: Server, address: str, tokens: Tokens) -> object:
    """Return what counts in the answer to one request."""
    body = json.dumps(server.body(tokens)).encode()
    sent = urllib.request.Request(address + server.path, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(sent, timeout=TIMEOUT_S) as answer:
        return server.answered(json.load(answer))


def read(url: str) -> Any:
    """Return the JSON at an address."""
    with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
        return json.load(answer)
