"""Servers over HTTP: the same LSTM behind cellrt serve, LitServe, mosec and Ray Serve, and the engine in process.

Requests have 5 to 100 steps (tokens; hidden 256). Each server runs alone, on the same cores as the client that sends:
``wrk`` where it is installed, and else this package's own client, which then is what is measured at many clients.
``rate``: requests/s and latency with 1 to 256 connections. ``tiny``: requests of one step through one and two front
ends.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

import cellrt
from benchmarks.http_model import VOCABULARY, classify
from benchmarks.http_peers import MODULES, PATHS, installed
from benchmarks.options import Options
from benchmarks.record import Recorder

PARTS = ("rate", "tiny")
MODEL = "benchmarks.http_model:classify"
OURS, IN_PROCESS = "cellrt serve", "cellrt, in process"
NUM_REQUESTS = 512
CLIENTS = (1, 16, 64, 256)
START_S = 180.0
PATH = "/v1/models/classify/infer"
LUA = """
bodies = {}
for line in io.lines("%s") do bodies[#bodies + 1] = line end
local at = 0
request = function()
  at = at %% #bodies + 1
  return wrk.format("POST", nil, {["Content-Type"] = "application/json"}, bodies[at])
end
"""
UNITS_MS = {"us": 1e-3, "ms": 1.0, "s": 1e3}


def requests_of(longest: int) -> list[list[int]]:
    """Tokens of requests with 5 to ``longest`` steps, or one if ``longest`` is 1."""
    random = np.random.default_rng(0)
    lengths = random.integers(min(5, longest), longest + 1, NUM_REQUESTS)
    return [random.integers(0, VOCABULARY, length).tolist() for length in lengths]


@contextmanager
def serving(name: str, front_ends: int = 1) -> Iterator[str]:
    """A server in processes of its own; its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ours = ["cellrt.cli", "serve", MODEL, "--port", str(port), "--device", "cpu:1", "--front-ends", str(front_ends)]
    command = [*ours, "--timeline", "0"] if name == OURS else [f"benchmarks.{MODULES[name]}", str(port)]
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=log, stderr=log, start_new_session=True, env={**os.environ}
        )
        url = f"http://127.0.0.1:{port}{PATH if name == OURS else PATHS[name]}"
        try:
            _wait_until_ready(url, process)
            yield url
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    end_s = time.monotonic() + START_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            _post(url, [1, 2, 3])
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"{url} does not answer")


def _post(url: str, tokens: Sequence[int]) -> int:
    """The class of one request."""
    body = json.dumps({"request": list(tokens)}).encode()
    sent = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(sent, timeout=30) as answer:
        found = json.load(answer)
    return int(found["results"]["class"] if "results" in found else found["class"])


def measured(url: str, requests: Sequence[Sequence[int]], clients: int, seconds: float) -> dict[str, float]:
    """Requests/s, and p50 and p99 in ms, of so many connections that send one request after the other."""
    with tempfile.TemporaryDirectory() as folder:
        bodies, script = Path(folder) / "bodies.jsonl", Path(folder) / "send.lua"
        bodies.write_text("".join(json.dumps({"request": list(tokens)}) + "\n" for tokens in requests))
        script.write_text(LUA % bodies)
        threads = ["-t1", f"-c{clients}", f"-d{seconds:g}s", "--latency", "--timeout", "30s"]
        done = subprocess.run(["wrk", *threads, "-s", str(script), url], capture_output=True, text=True, check=True)
    if "Non-2xx" in done.stdout:
        raise RuntimeError(f"{url}: {done.stdout}")
    found = {"rate": float(re.findall(r"Requests/sec:\s+([\d.]+)", done.stdout)[0])}
    for percentile in (50, 99):
        value, unit = re.findall(rf"{percentile}%\s+([\d.]+)(us|ms|s)", done.stdout)[0]
        found[f"p{percentile}"] = float(value) * UNITS_MS[unit]
    return found


def in_process(requests: Sequence[Sequence[int]], clients: int, seconds: float) -> float:
    """Requests/s of the engine itself, with so many in flight."""
    with cellrt.Engine(1) as engine:
        engine.register(classify())
        end_s, count = time.perf_counter() + seconds, 0

        def endless() -> Iterator[Sequence[int]]:
            while time.perf_counter() < end_s:
                yield from requests

        begin_s = time.perf_counter()
        for _ in engine.map("classify", endless(), max_in_flight=clients, ordered=False):
            count += 1
            if time.perf_counter() > end_s:
                break
        return count / (time.perf_counter() - begin_s)


def run(recorder: Recorder, options: Options) -> None:
    """Measures and records."""
    if shutil.which("wrk") is None:
        raise SystemExit("this benchmark sends with wrk; on Debian and Ubuntu: apt install wrk")
    seconds = 3.0 if options.quick else 15.0
    if options.has("rate"):
        _run_rate(recorder, (1, 64) if options.quick else CLIENTS, seconds, 1 if options.quick else 3)
    if options.has("tiny"):
        requests = requests_of(1)
        for front_ends in (1, 2):
            with serving(OURS, front_ends) as url:
                found = measured(url, requests, 64, seconds)
            for metric, value in found.items():
                unit = "requests/s" if metric == "rate" else "ms"
                recorder.add("tiny requests", f"{front_ends} front ends: {metric}", value, unit)


def _run_rate(recorder: Recorder, clients: Sequence[int], seconds: float, rounds: int) -> None:
    """Every server in each round, so that what else the machine does meets all of them."""
    requests = requests_of(100)
    expected: int | None = None
    for number in range(rounds):
        for count in clients:
            rate = in_process(requests, count, seconds)
            recorder.add(f"{count} clients", f"{IN_PROCESS}: rate", rate, "requests/s", round=number)
        for name in (OURS, *installed()):
            with serving(name) as url:
                found = _post(url, requests[0])
                expected = found if expected is None else expected
                if found != expected:
                    raise RuntimeError(f"{name} answers {found}, another {expected}")
                measured(url, requests, 16, 1.0)  # warm
                for count in clients:
                    before = _tasks_and_rows(url) if name == OURS else None
                    for metric, value in measured(url, requests, count, seconds).items():
                        unit = "requests/s" if metric == "rate" else "ms"
                        recorder.add(f"{count} clients", f"{name}: {metric}", value, unit, round=number)
                    if before is not None:
                        tasks, rows = _tasks_and_rows(url)
                        mean = (rows - before[1]) / max(1, tasks - before[0])
                        recorder.add(f"{count} clients", f"{name}: mean rows of a task", mean, "rows", round=number)


def _tasks_and_rows(url: str) -> tuple[int, int]:
    """Of the LSTM so far, from the server's own statistics."""
    with urllib.request.urlopen(url.removesuffix(PATH) + "/debug/statistics", timeout=30) as answer:
        cells = json.load(answer)["cells"]
    lstm = max(cells.values(), key=lambda cell: cell["nodes"])
    return int(lstm["tasks"]), int(lstm["rows"])
