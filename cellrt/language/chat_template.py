"""Chat templates of checkpoints: they turn the turns of a conversation into the text of a prompt."""

from __future__ import annotations

import importlib.util
import json
import socket
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from cellrt.errors import DefinitionError, RequestError
from cellrt.language.text import NEEDED
from cellrt.worker.python_process import PythonProcess

LENGTH = struct.Struct("<I")
COMMAND = "from cellrt.language.rendering import main; main()"
RENDER_S, START_S, END_S = 5.0, 60.0, 1.0
"""The limits, in seconds, of rendering a text, of the first one with the start of the process, and of its end."""


class ChatTemplate:
    """A template in jinja2's language, rendered in a process of its own, which starts with the first text and ends with
    this object.

    A template is code that comes with weights: one that loops for ever, or takes too much memory, ends with an error,
    and one that reaches out of its sandbox is refused. Safe from any thread; one text at a time.

    Args:
        source: the template.
        tokens: the texts of special tokens by name: ``bos_token``, ``eos_token``.

    Raises DefinitionError where jinja2 is not installed.
    """

    def __init__(self, source: str, tokens: Mapping[str, str] | None = None) -> None:
        if importlib.util.find_spec("jinja2") is None:
            raise DefinitionError(NEEDED.format("there is no jinja2"))
        self._source, self._tokens = source, dict(tokens or {})
        self._lock = threading.Lock()
        self._process: PythonProcess | None = None

    def render(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """Return the text of a conversation, up to where the assistant's answer begins.

        ``variables``: others that the template takes, such as ``enable_thinking``.

        Raise RequestError, with the template's own words if it has some.
        """
        given = {"add_generation_prompt": True, **self._tokens, **variables, "messages": messages}
        with self._lock:
            answer = self._ask(given)
        if "text" not in answer:
            raise RequestError(f"chat template: {answer['error']}")
        return str(answer["text"])

    def close(self) -> None:
        """End the process, if there is one; the next text starts another."""
        with self._lock:
            self._drop()

    def _ask(self, variables: dict[str, Any]) -> dict[str, Any]:
        """Return the ``text``, or the ``error``."""
        try:
            lifeline = self._started()
            send(lifeline, variables)
            answer: dict[str, Any] = receive(lifeline)
            return answer
        except TimeoutError:
            self._drop()
            return {"error": f"it takes more than {RENDER_S:g} s"}
        except (EOFError, OSError):
            self._drop()
            return {"error": "its process ended"}
        except (TypeError, ValueError, RecursionError) as error:
            return {"error": f"expected what JSON can hold: {error}"}

    def _started(self) -> socket.socket:
        """Return the socket to the process, which is started if it is not running."""
        if self._process is not None and self._process.process.poll() is None:
            return self._process.lifeline
        self._drop()
        self._process = process = PythonProcess(COMMAND)
        self._end = weakref.finalize(self, process.end, END_S)
        process.lifeline.settimeout(START_S)
        receive(process.lifeline)
        process.lifeline.settimeout(RENDER_S)
        send(process.lifeline, self._source)
        return process.lifeline

    def _drop(self) -> None:
        if self._process is not None:
            self._process.process.kill()
            self._end()
            self._process = None


def send(sock: socket.socket, value: object) -> None:
    """Send a message: its length, then JSON."""
    content = json.dumps(value).encode()
    sock.sendall(LENGTH.pack(len(content)) + content)


def receive(sock: socket.socket) -> Any:
    """Return a message. Raise EOFError if the other end is closed, TimeoutError where the socket has a limit."""
    (size,) = LENGTH.unpack(_read(sock, LENGTH.size))
    return json.loads(_read(sock, size))


def _read(sock: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = sock.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
