"""Compiled libraries on disk: found by the structure of their program, or compiled in a process of its own."""

from __future__ import annotations

import functools
import inspect
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch

from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.aot.tracing import (
    BEGUN,
    BUILD,
    ENDED,
    EXPORTED,
    MOST_TRACING_S,
    OPERATORS,
    POLL_S,
    PROGRAM,
    REFUSED,
    SAID,
    STATUS,
    trace_all,
)
from cellrt.definition.computation import Computation

CLOSED = "its engine was closed meanwhile"
MOST_IMPORTING_S = 10.0
"""The longest wait for another thread's import, which may be that of a module that serves until the end."""
ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning|Refused)\b(: |$)")
"""The beginning of the line of a traceback that names the exception."""
ERROR_LINES, MOST_CHARACTERS = 3, 500
CACHE_VARIABLE = "CELLRT_CACHE"
"""The environment variable with the folder of cellrt's caches; default: ``cellrt`` in the user's cache."""


def cache_folder() -> Path:
    """Return the folder of compiled code."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cellrt"
    except RuntimeError:  # there is no home, as in a container: a folder that cannot be made
        return Path(os.devnull) / "cellrt"


class Compiled(NamedTuple):
    """A compiled cell: its library, and the facts of its program that a form needs (see ``StepProgram``)."""

    library: Path
    least_rows: int
    has_equal_values: bool
    tied: list[int]
    packed: dict[int, bool]


class LibraryStore:
    """The libraries in one folder. Safe from several threads; several processes may share the folder.

    Args:
        folder: default: ``cache_folder()``.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or cache_folder()) / "compiled"
        self.num_compiled = 0
        """The number of libraries that were compiled."""
        self._running: set[int] = set()
        self._owner = os.getpid()
        self._is_closed = False

    def compile(
        self, cells: Sequence[Computation], note_compiling: Callable[[], object]
    ) -> Iterator[Compiled | NotCompiledError]:
        """Yield the library of each cell, or the reason why there is none, as soon as it is known; compile missing
        ones, and call ``note_compiling`` meanwhile.
        """
        try:
            compiler = find_compiler()
        except NotCompiledError as error:
            yield from [error] * len(cells)
            return
        sources = [file.read_text() for file in (BUILD, *OPERATORS)]
        depends_on = "\n".join((torch.__version__, _version_of(compiler), _instructions(), *sources))
        try:
            work = self._new_folder()
        except OSError as error:
            told = f"{error}; {CACHE_VARIABLE} names another one"
            yield from [NotCompiledError(Reason.NO_FOLDER, told)] * len(cells)
            return
        with work as name:
            folders = [Path(name, str(number)) for number in range(len(cells))]
            for folder in folders:
                folder.mkdir()
            wait_for_imports()
            if self._is_closed:
                yield from [NotCompiledError(Reason.NOT_COMPILED, CLOSED)] * len(cells)
                return
            owner = os.getpid()
            process = _fork()
            if process == 0:
                trace_all(cells, folders, self.folder, depends_on, owner)
            self._running.add(process)
            try:
                for folder in folders:
                    self._wait(process, folder, note_compiling)
                    yield self._result(folder)
            finally:  # whatever came between, such as an interrupt
                _kill(process)
                self._running.discard(process)
                with suppress(ChildProcessError):
                    os.waitpid(process, 0)

    def close(self) -> None:
        """End the compilers that run; calls that wait for them get NotCompiledError.

        In a forked process the compilers are the parent's, and go on.
        """
        self._is_closed = True
        for process in list(self._running) if os.getpid() == self._owner else ():
            _kill(process)

    def _new_folder(self) -> tempfile.TemporaryDirectory[str]:
        """Return a folder to work in: in the store's, or elsewhere if that is read-only, as in an image."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True)
        except OSError:
            if not self.folder.is_dir():
                raise
            return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

    def _wait(self, process: int, folder: Path, note_compiling: Callable[[], object]) -> None:
        """Wait until a fork is through with a cell, or ended; not long for one that does not begin with it."""
        latest_s = time.monotonic() + MOST_TRACING_S
        while not (folder / ENDED).exists() and _is_running(process):
            if self._is_closed or (time.monotonic() > latest_s and not (folder / BEGUN).exists()):
                _kill(process)
            if (folder / PROGRAM).exists():
                note_compiling()
            time.sleep(POLL_S)

    def _result(self, folder: Path) -> Compiled | NotCompiledError:
        """Return the result of compiling a cell."""
        refused = folder / REFUSED
        if not refused.exists() and (folder / EXPORTED).exists():
            found = json.loads((folder / EXPORTED).read_text())
            library = Path(found["library"])
            self.num_compiled += found["is_new"]
            if library.exists():
                packed = dict(found["packed"])
                return Compiled(library, found["least_rows"], found["has_equal_values"], found["tied"], packed)
            refused = library.with_suffix(".refused")
        if refused.exists():
            name, _, detail = refused.read_text().partition("\n")
            return NotCompiledError(Reason.__members__.get(name, Reason.NOT_COMPILED), detail)
        return NotCompiledError(Reason.NOT_COMPILED, self._failure(folder))

    def _failure(self, folder: Path) -> str:
        """Return why a compiler left no library: its error, or how it ended."""
        said, status = folder / SAID, folder / STATUS
        if said.exists() and (raised := first_lines_of_error(said.read_text(errors="replace"))):
            return raised
        if self._is_closed:
            return CLOSED
        return status.read_text() if status.exists() else "the process that had it compiled was ended"


def first_lines_of_error(said: str) -> str:
    """Return the first lines of the last exception in a Python process's output, or the output's last line."""
    lines = [line.rstrip() for line in said.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if ERROR.match(line)]
    if not starts:
        return "\n".join(lines[-1:])
    return "; ".join(line.strip() for line in lines[starts[-1] : starts[-1] + ERROR_LINES])[:MOST_CHARACTERS]


def _fork() -> int:
    """Call ``os.fork`` without its warning about threads: this fork traces, in forks that start anew."""
    with warnings.catch_warnings():  # Python 3.12 warns
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def wait_for_imports() -> None:
    """Wait, not for long, while other threads import: a fork that needs such a module would wait for it for ever."""
    own, frame = set[int](), inspect.currentframe()
    while frame is not None:
        own.add(id(frame.f_globals))
        frame = frame.f_back
    latest_s = time.monotonic() + MOST_IMPORTING_S
    while time.monotonic() < latest_s and any(map(_is_imported_elsewhere, list(sys.modules.values()), repeat(own))):
        time.sleep(POLL_S)


def _is_imported_elsewhere(module: object, own: Container[int]) -> bool:
    """Return whether a module is being imported, by a module whose globals are not among these."""
    if not isinstance(module, ModuleType):
        return False
    names = object.__getattribute__(module, "__dict__")  # which loads no lazy module
    return getattr(names.get("__spec__"), "_initializing", False) and id(names) not in own


def _is_running(process: int) -> bool:
    """Return whether a child has not ended; it is not reaped."""
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def _kill(process: int) -> None:
    """Kill a compiler with all processes that it started."""
    for kill, signal_number in ((os.killpg, signal.SIGTERM), (os.kill, signal.SIGKILL)):
        with suppress(ProcessLookupError, PermissionError):
            kill(process, signal_number)


def find_compiler() -> str:
    """Return the C++ compiler that AOTInductor would use. Raise NotCompiledError if there is none."""
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
    """Return the processor's instruction sets."""
    flags = ""
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()} {flags}"
