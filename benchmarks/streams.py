"""The cost of a piece of a stream behind the server and in process: processor time of all its processes.

Streams of a small GRU, each a session that sends its next piece when the last is answered: over websockets, as raw
rows and as JSON, and in process, as tasks of one event loop. Of the server the processes that serve are counted, not
the client's; of the engine in process all is, as its clients are in it. The ways are measured in turn, and the middle
of the rounds counts: what else the machine does lengthens both, as caches and cores are shared.

Fifty streams and two hundred: what a packet to the engine and back costs, its pieces share.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
from websockets.asyncio.client import ClientConnection, connect

import cellrt
from benchmarks.http_server import Command, Server, read, serving
from benchmarks.options import Options
from benchmarks.record import Recorder
from cellrt.cells import GRUCell

PARTS = ("streams",)
MODEL = "benchmarks.streams:stream"
STREAMS = (50, 200)
STEPS, WIDTH, HIDDEN = 10, 40, 64
PIECE = np.linspace(-1, 1, STEPS * WIDTH, dtype=np.float32).reshape(STEPS, WIDTH)


def stream() -> cellrt.Unfolder:
    """Return a GRU over pieces of sound, whose state stays in a session."""
    torch.manual_seed(0)
    gru = cellrt.cell(GRUCell(WIDTH, HIDDEN), inputs={"x": (WIDTH,), "h": (HIDDEN,)})

    def unfold(graph: cellrt.Graph, x: torch.Tensor) -> dict[str, object]:
        return {"h": graph.chain(gru, keep=True, x=x).last.h}

    return cellrt.Unfolder("stream", unfold, torch.from_numpy(PIECE))


Piece = Callable[[], Awaitable[object]]


async def pieces(streams: Sequence[Piece], count: int) -> None:
    """Let each stream send so many pieces, one after the other."""

    async def go_on(ask: Piece) -> None:
        for _ in range(count):
            await ask()

    await asyncio.gather(*map(go_on, streams))


def in_process(num_streams: int, count: int) -> float:
    """Return seconds of processor time a piece."""

    async def run(engine: cellrt.Engine) -> float:
        piece = torch.from_numpy(PIECE)
        sessions = [engine.session("stream") for _ in range(num_streams)]
        streams = [partial(session.infer, piece) for session in sessions]
        await pieces(streams, 10)
        begin_s = time.process_time()
        await pieces(streams, count)
        return (time.process_time() - begin_s) / (count * num_streams)

    with cellrt.Engine(1) as engine:
        engine.register(stream())
        return asyncio.run(run(engine))


def behind_server(address: str, parent: int, message: str | bytes, num_streams: int, count: int) -> tuple[float, float]:
    """Return seconds of processor time a piece of the server's processes, and rows a task."""

    async def run() -> tuple[float, float]:
        url = f"{address.replace('http', 'ws', 1)}/v1/models/stream/session"
        sockets = [await connect(url, proxy=None, compression=None) for _ in range(num_streams)]

        async def ask(sock: ClientConnection) -> None:
            await sock.send(message)
            answer = await sock.recv()
            if b"error" in (answer if isinstance(answer, bytes) else answer.encode()):
                raise RuntimeError(answer)

        streams = [partial(ask, sock) for sock in sockets]
        await pieces(streams, 10)
        before, (tasks, rows) = processor_s(parent), tasks_and_rows(address)
        await pieces(streams, count)
        spent, (tasks_after, rows_after) = processor_s(parent) - before, tasks_and_rows(address)
        for sock in sockets:
            await sock.close()
        return spent / (count * num_streams), (rows_after - rows) / max(1, tasks_after - tasks)

    return asyncio.run(run())


def tasks_and_rows(address: str) -> tuple[int, int]:
    """Return the tasks and rows of the cell so far; rows are nodes, of which a task has several steps."""
    (cell,) = read(f"{address}/debug/statistics")["cells"].values()
    return int(cell["tasks"]), int(cell["rows"])


def processor_s(parent: int) -> float:
    """Return the processor time so far of the threads that a process and its children have."""
    total_ns = 0
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = (path / "stat").read_text().rpartition(")")[2].split()
            if int(path.name) == parent or int(fields[1]) == parent:
                total_ns += sum(int(each.read_text().split()[0]) for each in path.glob("task/*/schedstat"))
    return total_ns / 1e9


@contextmanager
def _prepared(port: int) -> Iterator[Command]:
    words = ["--port", str(port), "--device", "cpu:1", "--timeline", "0", "--compile", "off"]
    yield [sys.executable, "-m", "cellrt", "serve", MODEL, *words], os.environ


def _parent_of(address: str) -> int:
    """Return the process that keeps the server at an address."""
    port = address.rpartition(":")[2]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if b"serve" in words and port.encode() in words:
            return int(path.parent.name)
    raise RuntimeError(f"no server at {address}")


def run(recorder: Recorder, options: Options) -> None:
    """Measure all ways in turn."""
    num_pieces, rounds = (2_000, 3) if options.quick else (6_000, 5)
    body = {"request": PIECE.tolist(), "session": "first", "start": True, "end": True}
    server = Server("/v1/models/stream/infer", _prepared, lambda: None, lambda _: body, lambda _: 0)
    messages: dict[str, str | bytes] = {"raw rows": PIECE.tobytes(), "JSON": json.dumps({"request": PIECE.tolist()})}
    with serving(server) as address:
        parent = _parent_of(address)
        for _, num_streams in product(range(rounds), STREAMS):
            count, part = num_pieces // num_streams, f"{num_streams} streams"
            own_s = in_process(num_streams, count)
            recorder.add(part, "in process", 1e6 * own_s, "us of processor a piece")
            for name, message in messages.items():
                spent_s, rows = behind_server(address, parent, message, num_streams, count)
                recorder.add(part, f"websockets, {name}", 1e6 * spent_s, "us of processor a piece")
                recorder.add(part, f"websockets, {name}: of in process", spent_s / own_s, "x")
                recorder.add(part, f"websockets, {name}: rows a task", rows, "rows")
