"""Compiled libraries on disk: found again by the structure of their program, or compiled in a process of its own."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from cellrt.definition.aot.program import export_step
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.computation import Computation

BUILD = Path(__file__).with_name("build.py")
PROGRAM, EXPORTED, REFUSED, SAID = "program.pt2", "exported.json", "refused", "said"
NEW = os.O_WRONLY | os.O_CREAT | os.O_TRUNC
MOST_TRACING_S = 120.0
"""A fork gets no more: it stops for ever where it needs a lock that another thread had."""
POLL_S = 0.01
CACHE_VARIABLE = "CELLRT_CACHE"
"""The environment variable that names the folder of what cellrt keeps; default: ``cellrt`` in the user's cache."""


def cache_folder() -> Path:
    """Where compiled code is kept."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cellrt"


class Compiled(NamedTuple):
    """What became of a cell: its library, and what of its program a form must know (see ``StepProgram``)."""

    library: Path
    least_rows: int
    has_equal_values: bool


class LibraryStore:
    """The libraries in one folder. Safe from several threads; several processes may share the folder.

    Tracing a module changes torch for all threads of a process, so it is done in a fork of this one, which knows the
    module and goes on as the compiler, from a fresh start.

    Args:
        folder: default: ``cache_folder()``.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or cache_folder()) / "compiled"
        self.num_compiled = 0
        """How often something was compiled."""
        self._running: set[int] = set()
        self._is_closed = False

    def compile(self, cell: Computation) -> Compiled:
        """The library of a cell; compiles it if there is none, and waits for that. Raises NotCompiledError."""
        compiler = find_compiler()
        self.folder.mkdir(parents=True, exist_ok=True)
        depends_on = "\n".join((torch.__version__, _version_of(compiler), _instructions(), BUILD.read_text()))
        with tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True) as name:
            folder = Path(name)
            with warnings.catch_warnings():
                warnings.simplefilter(
                    "ignore", DeprecationWarning
                )  # of forks beside threads: it traces, and starts anew
                process = os.fork()
            if process == 0:
                _trace_and_compile(cell, folder, depends_on)
            self._wait(process, folder / EXPORTED)
            return self._result(folder)

    def close(self) -> None:
        """Ends the compilers that run; what waits for them gets NotCompiledError."""
        self._is_closed = True
        for process in list(self._running):
            _kill(process)

    def _wait(self, process: int, exported: Path) -> None:
        """Waits for a compiler's end, but not long for one that cannot even trace."""
        self._running.add(process)
        latest_s = time.monotonic() + MOST_TRACING_S
        try:
            while os.waitpid(process, os.WNOHANG) == (0, 0):
                if self._is_closed or (time.monotonic() > latest_s and not exported.exists()):
                    _kill(process)
                time.sleep(POLL_S)
        except BaseException:  # an interrupt, in the thread that registers
            _kill(process)
            os.waitpid(process, 0)
            raise
        finally:
            self._running.discard(process)

    def _result(self, folder: Path) -> Compiled:
        """What a compiler left behind."""
        refused = folder / REFUSED
        if not refused.exists() and (folder / EXPORTED).exists():
            found = json.loads((folder / EXPORTED).read_text())
            library = Path(found["library"])
            self.num_compiled += found["is_new"]
            if library.exists():
                return Compiled(library, found["least_rows"], found["has_equal_values"])
            refused = library.with_suffix(".refused")
        if refused.exists():
            name, _, detail = refused.read_text().partition("\n")
            raise NotCompiledError(Reason[name], detail)
        said = folder / SAID
        raise NotCompiledError(
            Reason.NOT_COMPILED, said.read_text(errors="replace").strip().rpartition("\n")[2] if said.exists() else ""
        )


def _trace_and_compile(cell: Computation, folder: Path, depends_on: str) -> NoReturn:
    """What a fork does: traces a cell, then becomes the compiler unless there is a library. Never returns."""
    status = 1
    try:
        os.setsid()
        for number, path, flags in (
            (0, os.devnull, os.O_RDONLY),
            (1, os.devnull, os.O_WRONLY),
            (2, folder / SAID, NEW),
        ):
            os.dup2(os.open(path, flags, 0o600), number)
        torch.set_num_threads(1)
        step = export_step(cell)
        digest = hashlib.sha256(f"{step.digest()}\n{depends_on}".encode()).hexdigest()[:32]
        library = folder.parent / f"{digest}.so"
        is_new = not library.exists() and not library.with_suffix(".refused").exists()
        if is_new:
            torch.export.save(step.program, folder / PROGRAM)
        found = {"library": str(library), "is_new": is_new, **step.facts()}
        (folder / EXPORTED).write_text(json.dumps(found))
        if is_new:
            # One folder for all: AOTInductor keeps there what it found out of the compiler.
            own = {"TORCHINDUCTOR_CACHE_DIR": str(folder.parent / "inductor"), "OMP_NUM_THREADS": "1"}
            own["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
            counts = map(str, (len(step.weights), step.num_outputs))
            command = [sys.executable, "-P", str(BUILD), str(folder / PROGRAM), str(library), *counts]
            os.execve(sys.executable, command, {**os.environ, **own})
        status = 0
    except NotCompiledError as refused:
        (folder / REFUSED).write_text(f"{refused.reason.name}\n{refused.detail}")
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(status)


def _kill(process: int) -> None:
    """Kills a compiler with all that it started."""
    for kill, signal_number in ((os.killpg, signal.SIGTERM), (os.kill, signal.SIGKILL)):
        with suppress(ProcessLookupError, PermissionError):
            kill(process, signal_number)


def find_compiler() -> str:
    """The C++ compiler that AOTInductor would use. Raises NotCompiledError if there is none."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    found = shutil.which(name)
    if found is None or sys.platform == "win32":
        raise NotCompiledError(Reason.NO_COMPILER, name)
    return found


@functools.cache
def _version_of(compiler: str) -> str:
    return subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=30).stdout


@functools.cache
def _instructions() -> str:
    """What instructions the processor has."""
    flags = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {flags}"
