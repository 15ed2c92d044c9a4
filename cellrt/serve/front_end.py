"""A front end: a process that parses, unfolds and answers. All front ends share one listening socket.

    python -c "import gc; gc.disable(); from cellrt.serve.front_end import main; main()" DESCRIPTOR NUMBER IS_SHARED

Its settings come as JSON on its standard input, which ends with the supervising process: then the front end ends too.
After SIGTERM it takes no more connections, ends its requests within the limit, and exits 0; a second SIGTERM exits it
at once.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import msgspec
import uvicorn
from starlette.types import ASGIApp

from cellrt.serve.app import make_app
from cellrt.serve.backend import Backend
from cellrt.serve.connection import HttpProtocol, WebSocketProtocol
from cellrt.serve.inference import InferenceService
from cellrt.serve.listener import Listener
from cellrt.serve.measures import Measures
from cellrt.serve.server_settings import Settings

SWITCH_S = 5e-4
"""The switch interval: the longest time that the loop keeps the interpreter from the thread that receives answers."""
COLLECT_AFTER = 10_000, 10, 10
"""The arguments of ``gc.set_threshold``. Objects of a request are gone before a collection, which saves a twentieth."""
MARGIN_S = 1.0
"""The seconds that gRPC has after the limit to tell clients which calls were cut off."""
PING_EVERY_S = 20.0
"""The seconds between two pings to a websocket's client."""
LOOK_EVERY = 5
"""Ticks of uvicorn, of 0.1 s each, after which slow clients are looked for."""


class FrontEnd(uvicorn.Server):
    """The server of one front end. It handles signals itself, and accepts connections by a ``Listener``."""

    def __init__(self, config: uvicorn.Config, service: InferenceService) -> None:
        super().__init__(config)
        self._service = service
        self._listeners: list[Listener] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start the server and accept connections."""
        await super().startup([])
        self._listeners = [Listener(sock, self._make_protocol) for sock in sockets or ()]

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections and shut the server down."""
        for listener in self._listeners:
            await listener.close()
        await super().shutdown(sockets)

    def _make_protocol(self) -> asyncio.Protocol:
        return HttpProtocol(self.config, self.server_state, self.lifespan.state)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture no signals: ``_serve`` handles them."""
        yield

    async def on_tick(self, counter: int) -> bool:
        """Close the connections of slow clients now and then. Return whether the server is to end."""
        if counter % LOOK_EVERY == 0:
            self._end_slow()
        return await super().on_tick(counter)

    def _end_slow(self) -> None:
        now, limits = asyncio.get_running_loop().time(), self._service.backend.settings.limits
        for connection in list(self.server_state.connections):
            if isinstance(connection, HttpProtocol):
                connection.end_if_slow(now - limits.read_timeout_s)
                connection.end_if_unread(now, limits.write_timeout_s)

    def end(self) -> None:
        """End gracefully; the second call exits at once."""
        if self._service.draining.is_set():
            os._exit(1)
        self._service.drain()
        self.should_exit = True


async def run(settings: Settings, sock: socket.socket, number: int, *, is_shared: bool) -> None:
    """Serve until told to end."""
    backend = Backend(settings)
    service = InferenceService(backend, Measures(is_shared=is_shared))
    with tracing(backend) as wrap:
        await _serve(settings, sock, service, make_app(service, wrap))


@contextmanager
def tracing(backend: Backend) -> Iterator[Callable[[ASGIApp], ASGIApp]]:
    """Provide the middleware that writes spans, if the settings ask for it; waiting spans are exported at the end."""
    if backend.settings.spans == "off":
        yield lambda app: app
        return
    from cellrt.serve.telemetry import Traced, make_provider  # it needs more packages

    provider = make_provider()
    try:
        yield partial(Traced, backend=backend, provider=provider, with_tasks=backend.settings.spans == "tasks")
    finally:
        provider.shutdown()


async def _serve(settings: Settings, sock: socket.socket, service: InferenceService, app: ASGIApp) -> None:
    drain_s = max(1, round(settings.drain_s))
    config = uvicorn.Config(
        app,
        http=HttpProtocol,
        ws=WebSocketProtocol,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=drain_s,
        timeout_keep_alive=settings.keep_alive_s,  # type: ignore[arg-type]
        ws_max_size=settings.limits.max_body_bytes,
        ws_ping_interval=min(PING_EVERY_S, settings.ping_timeout_s) or None,
        ws_ping_timeout=settings.ping_timeout_s or None,
        proxy_headers=False,
        server_header=False,
        date_header=False,
    )
    server = FrontEnd(config, service)
    loop = asyncio.get_running_loop()
    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, server.end)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if settings.grpc_port is None:
        await server.serve(sockets=[sock])
        return
    from cellrt.serve.grpc_handlers import open_grpc  # it needs more packages

    # uvicorn waits for the calls as for its own requests, and cancels at the limit what is left; then it ends the app,
    # and with it the way to the engine.
    grpc_server = await open_grpc(service, settings.grpc_port, server.server_state.tasks)

    async def end_grpc() -> None:
        await service.draining.wait()
        await grpc_server.stop(drain_s + MARGIN_S)

    ending = asyncio.create_task(end_grpc())
    await server.serve(sockets=[sock])
    await ending


def _end_with_parent() -> None:
    """End this process when its parent is gone."""
    with suppress(OSError):
        while os.read(0, 1):
            pass
    os._exit(1)


def main() -> None:
    """Run the process of a front end."""
    gc.enable()
    gc.set_threshold(*COLLECT_AFTER)
    descriptor, number, is_shared = (int(argument) for argument in sys.argv[1:4])
    settings = msgspec.json.decode(_read_line(), type=Settings)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    sys.setswitchinterval(SWITCH_S)
    sock = socket.socket(fileno=descriptor)
    _run(settings, sock, number, bool(is_shared))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # everything has ended in good order: the rest of Python's own end takes a second with torch


def _run(settings: Settings, sock: socket.socket, number: int, is_shared: bool) -> None:
    try:
        import uvloop
    except ImportError:  # it is not made for every platform
        asyncio.run(run(settings, sock, number, is_shared=is_shared))
    else:
        uvloop.run(run(settings, sock, number, is_shared=is_shared))


def _read_line() -> bytes:
    """Return the first line of the standard input, without reading a byte more."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(0, 1)
        if not part:
            raise SystemExit("a front end is started by cellrt serve")
        line += part
    return bytes(line)
