"""Runs what must be shown on a GPU, part by part: ``python -m benchmarks.gpu_run first [--out DIR]``.

The sets ``first`` (at most 9 minutes), ``second`` and ``third`` have parts of their own (``gpu_parts.py``). Each part
runs in processes of its own, which are ended after its time; what came of it is written as it ends: a line of JSON to
``DIR/<set>.jsonl``, with the commit, and what it printed to ``DIR/<set>.log``. Run again, a set goes on behind the
parts that this commit has passed. ``DIR`` is ``benchmarks/results/<device>/`` unless it is given.

Python and its standard library suffice to run it; the parts need torch, Triton, Numba, pytest and hypothesis. With
``--dry`` no GPU is needed: the parts that have a dry form run it, the others say that they need one. The exit status is
0 if all parts passed, 1 if one did not, 3 if only time was lacking: run it again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from benchmarks.checkout import commit
from benchmarks.gpu_parts import FIRST_S, SETS, VERSIONS, Command, Part

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PROBE_S = 120.0
GRACE_S = 5.0
"""From an interrupt, at which a benchmark writes what it has, to the end."""
LEAST_S = 10.0
"""With less time left no part is begun."""
TAIL_BYTES = 3000
PASSED, FAILED, LATE, LEFT, NEEDS = "passed", "failed", "out of time", "left for another run", "needs"


class Run:
    """One set of parts, with what is known of it in a folder.

    Args:
        name: of the set.
        out: folder of the results.
        commit: of the repository; parts that another commit passed are run again.
        most_s: seconds that all parts may take together.
        is_dry: whether there is no GPU.
    """

    def __init__(self, name: str, out: Path, commit: str, most_s: float, is_dry: bool) -> None:
        self._name, self._out, self._commit, self._is_dry = name, out, commit, is_dry
        self._end_s = time.monotonic() + most_s
        out.mkdir(parents=True, exist_ok=True)
        self._results, self._log = out / f"{name}.jsonl", out / f"{name}.log"

    def run(self, parts: Sequence[Part]) -> int:
        """Run what is not done yet; return the exit status."""
        passed, statuses = self._passed(), []
        for part in parts:
            if part.name in passed:
                print(f"{part.name}: {PASSED} before", flush=True)
                continue
            statuses.append(self._run(part))
        return 1 if {FAILED, LATE} & set(statuses) else 3 if LEFT in statuses else 0

    def _run(self, part: Part) -> str:
        """Run a part, and write and return what came of it."""
        left_s = self._end_s - time.monotonic() - GRACE_S
        commands = part.dry if self._is_dry else part.commands
        status, codes, seconds, start = LEFT, [], 0.0, self._log.stat().st_size if self._log.exists() else 0
        if not commands:
            status = f"{NEEDS} a GPU"
        elif part.program and shutil.which(part.program) is None:
            status = f"{NEEDS} {part.program}"
        elif left_s >= LEAST_S:
            limit_s = min(part.limit_s, left_s)
            print(f"{part.name}: at most {limit_s:.0f} s ...", flush=True)
            filled = [tuple(fill(word, self._out) for word in command) for command in commands]
            begun_s = time.monotonic()
            codes = run_together(filled, limit_s, self._log, dict(part.environment))
            seconds = time.monotonic() - begun_s
            status = LATE if None in codes else FAILED if any(codes) else PASSED
        self._write(part.name, status, codes, seconds, start)
        print(f"{part.name}: {status}, {seconds:.0f} s", flush=True)
        return status

    def _write(self, name: str, status: str, codes: Sequence[int | None], seconds: float, start: int) -> None:
        row = {
            "part": name,
            "status": status,
            "seconds": round(seconds, 1),
            "codes": list(codes),
            "commit": self._commit,
            "dry": self._is_dry,
            "tail": _tail(self._log, start),
        }
        with self._results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _passed(self) -> set[str]:
        """Return the parts that this commit has passed."""
        if not self._results.exists():
            return set()
        rows = [json.loads(line) for line in self._results.read_text(encoding="utf-8").splitlines()]
        mine = {"commit": self._commit, "dry": self._is_dry, "status": PASSED}
        return {row["part"] for row in rows if mine.items() <= row.items()}


def fill(word: str, out: Path) -> str:
    """Return a word of a command on this machine."""
    return word.replace("{python}", sys.executable).replace("{out}", str(out))


def run_together(
    commands: Sequence[Command], limit_s: float, log: Path, environment: Mapping[str, str]
) -> list[int | None]:
    """Run commands side by side, in the repository; what they print is added to ``log``.

    Return their exit statuses, None for those that did not end in time. When it returns none of their processes is
    left: each command has a process group of its own.
    """
    end_s = time.monotonic() + limit_s
    codes: list[int | None] = []
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", **environment}
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background: what is started would ignore it, too
        signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("ab") as file, ExitStack() as stack:
        started = [stack.enter_context(_group(command, file, variables)) for command in commands]
        for process in started:
            try:
                codes.append(process.wait(max(0.0, end_s - time.monotonic())))
            except subprocess.TimeoutExpired:
                codes.append(None)
    return codes


@contextmanager
def _group(command: Command, file: IO[bytes], variables: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a command in a process group, which is ended with the context: interrupted first, so that it may write."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGINT)
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _tail(log: Path, start: int) -> str:
    """Return the end of what was added to a log."""
    if not log.exists():
        return ""
    with log.open("rb") as file:
        file.seek(max(start, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        return file.read().decode(errors="replace")


def find_gpu() -> str | None:
    """Return the name of the first GPU, asked for in another process; None: there is none."""
    command = [fill(word, ROOT) for word in VERSIONS]
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PROBE_S)
        name = json.loads(done.stdout.splitlines()[-1])["gpu"]
    except (OSError, subprocess.SubprocessError, ValueError, LookupError):
        return None
    return None if name is None else str(name)


def folder_of(device: str) -> Path:
    """Return the folder of a device's results."""
    return RESULTS / re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-")


def commit_here() -> str:
    """Return the commit, where git or CELLRT_COMMIT tells it."""
    return commit(ROOT)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sets that are named; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("sets", nargs="+", choices=[*SETS, "all"])
    parser.add_argument("--out", type=Path, help="folder of the results; default: benchmarks/results/<device>")
    parser.add_argument("--most-s", type=float, help=f"seconds for each set; default: {FIRST_S:.0f} for the first")
    parser.add_argument("--dry", action="store_true", help="without a GPU, to see that it works")
    options = parser.parse_args(arguments)
    begun_s = time.monotonic()
    device = "dry" if options.dry else find_gpu()
    if device is None:
        print("there is no GPU; --dry runs without one", file=sys.stderr)
        return 2
    if options.dry and options.out is None:
        parser.error("--dry needs --out: its results mean nothing, and are not kept beside others")
    out, commit = (options.out or folder_of(device)).absolute(), commit_here()
    statuses = []
    for name in SETS if "all" in options.sets else options.sets:
        most_s = options.most_s or (FIRST_S + begun_s - time.monotonic() if name == "first" else float("inf"))
        statuses.append(Run(name, out, commit, most_s, options.dry).run(SETS[name]))
    return 1 if 1 in statuses else max(statuses)


if __name__ == "__main__":
    sys.exit(main())
