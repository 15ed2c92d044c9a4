"""Compiled libraries on disk: found again by the structure of their program, or compiled in a process of its own."""

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
from collections.abc import Container, Iterator, Sequence
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
    REFUSED,
    SAID,
    STATUS,
    trace_all,
)
from cellrt.definition.computation import Computation

CLOSED = "its engine was closed meanwhile"
MOST_IMPORTING_S = 10.0
"""No longer is another thread's import waited for: it may be that of a module that serves until the end."""
ERROR = re.compile(r"[A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning|Refused)\b(: |$)")
"""How the line of a traceback begins that names what was raised."""
ERROR_LINES, MOST_CHARACTERS = 3, 500
CACHE_VARIABLE = "CELLRT_CACHE"
"""The environment variable that names the folder of what cellrt keeps; default: ``cellrt`` in the user's cache."""


def cache_folder() -> Path:
    """Where compiled code is kept."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cellrt"
    except RuntimeError:  # somebody without a home, as in a container: it is a folder that cannot be made
        return Path(os.devnull) / "cellrt"


class Compiled(NamedTuple):
    """What became of a cell: its library, and what of its program a form must know (see ``StepProgram``)."""

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
        """How often something was compiled."""
        self._running: set[int] = set()
        self._owner = os.getpid()
        self._is_closed = False

    def compile(self, cells: Sequence[Computation]) -> Iterator[Compiled | NotCompiledError]:
        """The library of each cell, or why there is none, each as soon as that is known; compiles what is not there."""
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
                    self._wait(process, folder)
                    yield self._result(folder)
            finally:  # whatever came between, such as an interrupt
                _kill(process)
                self._running.discard(process)
                with suppress(ChildProcessError):
                    os.waitpid(process, 0)

    def close(self) -> None:
        """Ends the compilers that run; what waits for them gets NotCompiledError. In a forked process they are not its
        own."""
        self._is_closed = True
        for process in list(self._running) if os.getpid() == self._owner else ():
            _kill(process)

    def _new_folder(self) -> tempfile.TemporaryDirectory[str]:
        """A folder to work in: in the store's, or elsewhere if that may only be read, as in an image."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryDirectory(dir=self.folder, ignore_cleanup_errors=True)
        except OSError:
            if not self.folder.is_dir():
                raise
            return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)

    def _wait(self, process: int, folder: Path) -> None:
        """Waits until a fork is through with a cell, or ended; not long for one that does not begin with it."""
        latest_s = time.monotonic() + MOST_TRACING_S
        while not (folder / ENDED).exists() and _is_running(process):
            if self._is_closed or (time.monotonic() > latest_s and not (folder / BEGUN).exists()):
                _kill(process)
            time.sleep(POLL_S)

    def _result(self, folder: Path) -> Compiled | NotCompiledError:
        """What became of a cell."""
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
        """What became of a compiler that left no library: what it raised, or how it ended."""
        said, status = folder / SAID, folder / STATUS
        if said.exists() and (raised := first_lines_of_error(said.read_text(errors="replace"))):
            return raised
        if self._is_closed:
            return CLOSED
        return status.read_text() if status.exists() else "the process that had it compiled was ended"


def first_lines_of_error(said: str) -> str:
    """The first lines of the last exception that a Python process told of, or the last line of whatever it said."""
    lines = [line.rstrip() for line in said.splitlines() if line.strip()]
    starts = [number for number, line in enumerate(lines) if ERROR.match(line)]
    if not starts:
        return "\n".join(lines[-1:])
    return "; ".join(line.strip() for line in lines[starts[-1] : starts[-1] + ERROR_LINES])[:MOST_CHARACTERS]


def _fork() -> int:
    """``os.fork``; without the warning of forks beside threads: this one traces, in forks that start anew."""
    with warnings.catch_warnings():  # Python 3.12 warns
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def wait_for_imports() -> None:
    """Waits, not for long, while other threads import: a fork that needs such a module would wait for it for ever."""
    own, frame = set[int](), inspect.currentframe()
    while frame is not None:
        own.add(id(frame.f_globals))
        frame = frame.f_back
    latest_s = time.monotonic() + MOST_IMPORTING_S
    while time.monotonic() < latest_s and any(map(_is_imported_elsewhere, list(sys.modules.values()), repeat(own))):
        time.sleep(POLL_S)


def _is_imported_elsewhere(module: object, own: Container[int]) -> bool:
    """Whether a module is being imported, and not by one whose globals are among these."""
    if not isinstance(module, ModuleType):
        return False
    names = object.__getattribute__(module, "__dict__")  # which loads no lazy module
    return getattr(names.get("__spec__"), "_initializing", False) and id(names) not in own


def _is_running(process: int) -> bool:
    """Whether a child has not ended; it stays to be waited for."""
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


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
