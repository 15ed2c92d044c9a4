"""What the tests of the doors share: a server in processes of its own, and a client that knows nothing of cellrt."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import httpx

from tests.waiting import until

ROOT = Path(__file__).resolve().parent.parent.parent
WAIT_S = 60.0
START_S = 110.0
"""The first on a machine compiles the scheduler."""
KEY = {"x-api-key": "secret"}
"""Headers with the key of a server behind one."""
UNCOMPILED = {"CELLRT_SERVE_COMPILE": "off"}
"""Compilers would take the processors from other tests."""


class Server:
    """``cellrt serve`` as a process; ``lines``: what it said.

    ``is_whole``: whether all its models can be served, so that it comes to be ready.
    """

    def __init__(
        self, arguments: Sequence[str], environment: dict[str, str] | None = None, *, is_whole: bool = True
    ) -> None:
        command = [sys.executable, "-m", "cellrt", "serve", *arguments]
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **UNCOMPILED, **(environment or {})},
        )
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            self._wait(is_whole)
        except BaseException:  # or it would stay, with its engine
            self.process.send_signal(signal.SIGTERM)
            raise

    def _wait(self, is_whole: bool) -> None:
        """Waits until it serves."""
        is_told = "the server says where it listens"
        until(lambda: self._address() or self.process.poll() is not None, is_told, START_S)
        assert self.process.poll() is None, "\n".join(self.lines)
        self.url = self._address()
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S, trust_env=False)
        until(lambda: self.is_ready() or not is_whole, "the server is ready")

    @property
    def address(self) -> str:
        """Host and port."""
        return self.url.removeprefix("http://")

    @property
    def grpc_address(self) -> str:
        """Host and port of gRPC."""
        until(lambda: any("gRPC at " in line for line in self.lines), "the server says where it takes gRPC")
        return next(line.rpartition(" ")[2] for line in self.lines if "gRPC at " in line)

    def gauge(self, name: str) -> float:
        """A metric without labels."""
        return float(re.findall(rf"^{name} (\S+)", self.http.get("/metrics").text, re.MULTILINE)[0])

    @contextmanager
    def streaming(self, model: str, request: object) -> Iterator[None]:
        """Has a thread read one stream of a model after the other, until the end or until one breaks."""
        is_over = threading.Event()

        def read() -> None:
            with suppress(httpx.HTTPError):
                while not is_over.is_set():
                    self.post(f"/v1/models/{model}/infer", {"request": request, "stream": True})

        reader = threading.Thread(target=read, daemon=True)
        reader.start()
        try:
            yield
        finally:
            is_over.set()
            reader.join(WAIT_S)

    def is_ready(self) -> bool:
        return self.http.get("/v2/health/ready").status_code == 200

    def post(self, path: str, json: Any = None, **options: Any) -> httpx.Response:
        return self.http.post(path, json=json, **options)

    def statistics(self) -> dict[str, Any]:
        return self.http.get("/debug/statistics").json()

    def unfinished(self) -> int:
        return int(self.statistics()["unfinished"])

    def close(self, signum: int = signal.SIGTERM) -> int:
        """Has it end; returns its status."""
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signum)
        try:
            status = self.process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        finally:
            self._reader.join(WAIT_S)
            if self.process.stderr is not None:
                self.process.stderr.close()
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.close() == 0, "\n".join(self.lines)

    def _read(self) -> None:
        if self.process.stderr is not None:
            for line in self.process.stderr:
                self.lines.append(line.rstrip())

    def _address(self) -> str:
        found = re.search(r"serving at (http://\S+)", "\n".join(self.lines))
        return found[1] if found else ""


def start(*models: str, options: Sequence[str] = (), environment: dict[str, str] | None = None) -> Server:
    """A server of models of ``tests.serve.models``, at a port that is free."""
    paths = [f"tests.serve.models:{model}" for model in models]
    return Server(["--port", "0", "--device", "cpu:1", *options, *paths], environment)


def begun_websocket(server: Server, model: str, message: str, stack: ExitStack, headers: dict[str, str]) -> Any:
    """A websocket whose first message is answered; one of two front ends may not have the engine's successor yet, and
    closes it as one that may be tried again."""
    from websockets.exceptions import ConnectionClosedError
    from websockets.sync.client import connect

    begun: list[Any] = []

    def try_to_begin() -> bool:
        address = f"ws://{server.address}/v1/models/{model}/session"
        sock = stack.enter_context(connect(address, proxy=None, additional_headers=headers))
        try:
            assert asked(sock, message)["number"] == 0
        except ConnectionClosedError as closed:
            assert closed.rcvd is not None and closed.rcvd.code == 1012
            return False
        begun.append(sock)
        return True

    until(try_to_begin, f"a websocket of {model} is answered")
    return begun[0]


def asked(sock: Any, message: str) -> dict[str, Any]:
    sock.send(message)
    return json.loads(sock.recv(10))


def children(server: Server, word: str) -> list[int]:
    """Processes of a server whose command has a word in it."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == server.process.pid and word in (path / "cmdline").read_text():
                found.append(int(path.name))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found
