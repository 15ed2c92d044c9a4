"""The time until ``cellrt serve`` is ready on a CPU, with compiled code in the caches, and the parts of it.

A server is started some times, and imports of torch between, for the part of torch. Seconds of the clock say what an
operator waits; seconds of processors, which other work on the machine changes less, who works meanwhile: the process
that keeps the server, then the engine's and the front end's beside each other.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks.options import Options
from benchmarks.record import Recorder

PARTS = ("server", "parts")
MODEL = "benchmarks.http_model:classify"
WAIT_S = 300.0
TICKS = os.sysconf("SC_CLK_TCK")
WHO = {"process.host": "engine", "serve.front_end": "front end"}
STEPS = (
    ("torch", "import torch"),
    ("engine's imports", "import cellrt.process.host"),
    ("front end's imports", "import cellrt.serve.front_end"),
    ("model", "from cellrt.process.source import ModelSource; model = ModelSource(sys.argv[1]).load()"),
    ("engine", "from cellrt.engine.engine import Engine; engine = Engine(1)"),
    ("registration", "engine.register(model)"),
)
"""The steps of the processes, done here one after the other in one process."""


def run(recorder: Recorder, options: Options) -> None:
    """Start servers, and measure the parts."""
    count = 2 if options.quick else 7
    with _server():  # fills the caches
        pass
    if options.has("server"):
        measure_server(recorder, count)
    if options.has("parts"):
        measure_parts(recorder, count)


def measure_server(recorder: Recorder, count: int) -> None:
    """Medians of servers, and of imports of torch between them."""
    clocks, torch_s, processors = [], [], []
    for _ in range(count):
        begin_s = time.perf_counter()
        subprocess.run([sys.executable, "-c", "import torch"], check=True)
        torch_s.append(time.perf_counter() - begin_s)
        with _server() as (clock_s, processor_s):
            clocks.append(clock_s)
            processors.append(processor_s)
    ready_s, import_s = statistics.median(clocks), statistics.median(torch_s)
    recorder.add("server", "ready after", ready_s, "s", least_s=min(clocks))
    recorder.add("server", "a process that imports torch", import_s, "s", least_s=min(torch_s))
    recorder.add("server", "ready after, without torch", ready_s - import_s, "s", least_s=min(clocks) - min(torch_s))
    for who in processors[0]:
        recorder.add("server", f"processor time of {who}", statistics.median(each[who] for each in processors), "s")


def measure_parts(recorder: Recorder, count: int) -> None:
    """Medians of processor time of each step."""
    code = ["import gc, sys, time", "gc.disable()", "last = time.process_time()", "print(last)"]
    for _, step in STEPS:
        code += [step, "now = time.process_time()", "print(now - last)", "last = now"]
    command = [sys.executable, "-c", "\n".join([*code, "sys.stdout.flush()", "import os; os._exit(0)"]), MODEL]
    runs = []
    for _ in range(count):
        printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        runs.append([float(line) for line in printed.split()])
    for (name, *_), values in zip((("Python",), *STEPS), zip(*runs, strict=True), strict=True):
        recorder.add("parts", name, statistics.median(values), "s of a processor")


@contextmanager
def _server() -> Iterator[tuple[float, dict[str, float]]]:
    """Yield a server that is ready: after how many seconds, and how many each of its processes had of a processor."""
    command = [sys.executable, "-m", "cellrt", "serve", "--port", "0", "--device", "cpu:1", MODEL]
    begin_s = time.perf_counter()
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        url = _url(process)
        while not _is_ready(url):
            if time.perf_counter() > begin_s + WAIT_S:
                raise TimeoutError("the server is not ready")
            time.sleep(0.005)
        yield time.perf_counter() - begin_s, _processor_s(process.pid)
    finally:
        process.terminate()
        process.wait(WAIT_S)
        if process.stderr is not None:
            process.stderr.close()


def _url(process: subprocess.Popen[str]) -> str:
    said = []
    for line in process.stderr or ():
        said.append(line)
        if found := re.search(r"serving at (http://\S+)", line):
            return found[1]
    raise RuntimeError("the server did not start: " + "".join(said))


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v2/health/ready", timeout=WAIT_S) as answer:
            return bool(answer.status == 200)
    except urllib.error.HTTPError:
        return False


def _processor_s(keeper: int) -> dict[str, float]:
    """Return the processor seconds of each process of a server."""
    found = {"keeper": _ticks(keeper) / TICKS}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            command = (path / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        who = next((name for word, name in WHO.items() if word in command), None)
        if parent == keeper and who is not None:
            found[who] = _ticks(int(path.name)) / TICKS
    return found


def _ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])
