"""Compiled libraries on disk: found again by the structure of their program, or compiled in a process of its own."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

import torch

from cellrt.definition.aot.program import StepProgram
from cellrt.definition.aot.refusal import NotCompiledError, Reason

BUILD = Path(__file__).with_name("build.py")
CACHE_VARIABLE = "CELLRT_CACHE"
"""The environment variable that names the folder of what cellrt keeps; default: ``cellrt`` in the user's cache."""


def cache_folder() -> Path:
    """Where compiled code is kept."""
    if named := os.environ.get(CACHE_VARIABLE):
        return Path(named)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "cellrt"


class LibraryStore:
    """The libraries in one folder. Safe from several threads; several processes may share the folder.

    Args:
        folder: default: ``cache_folder()``.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = (folder or cache_folder()) / "compiled"
        self.num_compiled = 0
        """How often a compiler was started."""
        self._running: set[subprocess.Popen[str]] = set()
        self._is_closed = False

    def library_of(self, step: StepProgram) -> Path:
        """The library of a program; compiles it if there is none, and waits for that. Raises NotCompiledError."""
        compiler = find_compiler()
        library = self.folder / f"{_digest(step, compiler)}.so"
        if not library.exists():
            if not (refused := library.with_suffix(".refused")).exists():
                self._compile(step, library)
            if refused.exists():
                name, _, detail = refused.read_text().partition("\n")
                raise NotCompiledError(Reason[name], detail)
        return library

    def close(self) -> None:
        """Ends the compilers that run; what waits for them gets NotCompiledError."""
        self._is_closed = True
        for process in list(self._running):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)

    def _compile(self, step: StepProgram, library: Path) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder) as folder:
            program = Path(folder) / "program.pt2"
            torch.export.save(step.program, program)
            counts = map(str, (len(step.weights), step.num_outputs))
            said = self._run([sys.executable, "-P", str(BUILD), str(program), str(library), *counts])
        if not library.exists() and not library.with_suffix(".refused").exists():
            raise NotCompiledError(Reason.NOT_COMPILED, said.strip().rpartition("\n")[2])

    def _run(self, command: list[str]) -> str:
        """Runs a compiler to its end; returns what it said."""
        paths = os.pathsep.join(path for path in sys.path if path)
        # One folder for all: AOTInductor keeps precompiled headers there, which take longer than a small program.
        own = {"PYTHONPATH": paths, "TORCHINDUCTOR_CACHE_DIR": str(self.folder / "inductor"), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            command,
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.num_compiled += 1
        self._running.add(process)
        try:
            if self._is_closed:
                self.close()
            return process.communicate()[1]
        finally:
            self._running.discard(process)


def find_compiler() -> str:
    """The C++ compiler that AOTInductor would use. Raises NotCompiledError if there is none."""
    name = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    found = shutil.which(name)
    if found is None or sys.platform == "win32":
        raise NotCompiledError(Reason.NO_COMPILER, name)
    return found


def _digest(step: StepProgram, compiler: str) -> str:
    """Of all that a library depends on: the program, torch, the compiler, the machine, how we compile."""
    parts = (step.digest(), torch.__version__, _version_of(compiler), _instructions(), BUILD.read_text())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


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
