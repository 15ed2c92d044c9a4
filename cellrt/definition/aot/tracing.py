"""The fork that traces cells, one after the other, and compiles those that are new.

Tracing a module changes torch for all threads of a process, so it is done in a fork of it, which has the modules. Each
cell is traced in a fork of that one again, so that no change by one cell affects another; it goes on as the compiler,
from a fresh start. The imports that torch needs to trace take a second, once for all cells.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import torch

from cellrt.definition.aot.refusal import NotCompiledError
from cellrt.definition.aot.step_program import export_step
from cellrt.definition.computation import Computation

BUILD, PRODUCT, RUN = map(Path(__file__).with_name, ("build.py", "product_operator.py", "run_function.py"))
OPERATORS = (PRODUCT, Path(__file__).parents[1] / "attention_operator.py", RUN)
PROGRAM, EXPORTED, REFUSED, SAID, STATUS = "program.pt2", "exported.json", "refused", "said", "status"
BEGUN, ENDED = "begun", "ended"
"""Files with a cell's progress; the files before them have its results. There is a program if it must be compiled."""
INDUCTOR_VARIABLE = "TORCHINDUCTOR_CACHE_DIR"
"""The environment variable of the folder for torch's compiler: facts about the C++ compiler, and compiled headers."""
MOST_TRACING_S = 120.0
"""The most time of a fork: it stops for ever where it needs a lock that another thread had."""
POLL_S = 0.01
PR_SET_PDEATHSIG = 1


def trace_all(
    cells: Sequence[Computation], folders: Sequence[Path], libraries: Path, depends_on: str, owner: int
) -> NoReturn:
    """Trace all cells in the fork, and leave each cell's result in its folder. Never return.

    Args:
        cells: the cells.
        folders: one for each cell.
        libraries: the folder of compiled libraries.
        depends_on: the dependencies of a library beside its program.
        owner: the process that wants them. If it ends, however it ends, so does this one with all that it started.
    """
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, lambda *_: _end_all(folders[0].parent))
        _get_signal_at_end(signal.SIGTERM)
        _end_with(owner, folders[0].parent)
        for number, flags in ((0, os.O_RDONLY), (1, os.O_WRONLY), (2, os.O_WRONLY)):
            os.dup2(os.open(os.devnull, flags), number)
        torch.set_num_threads(1)
        if len(cells) > 1:
            with suppress(Exception):  # for what it imports
                torch.export.export(torch.nn.Identity(), (torch.zeros(2),))
        for cell, folder in zip(cells, folders):
            _end_with(owner, folder.parent)
            (folder / BEGUN).touch()
            process = os.fork()
            if process == 0:
                _trace_and_compile(cell, folder, libraries, depends_on)
            _wait(process, folder, owner)
            (folder / ENDED).touch()
    finally:
        os._exit(0)


def _wait(process: int, folder: Path, owner: int) -> None:
    """Wait for a compiler's end, but not long for one that cannot even trace; write how a failed one ended."""
    latest_s, text = time.monotonic() + MOST_TRACING_S, ""
    while (ended := os.waitpid(process, os.WNOHANG)) == (0, 0):
        _end_with(owner, folder.parent)
        if time.monotonic() > latest_s and not (folder / EXPORTED).exists():
            text = f"it was not traced within {MOST_TRACING_S:.0f} seconds"
            os.kill(process, signal.SIGKILL)
        time.sleep(POLL_S)
    status = os.waitstatus_to_exitcode(ended[1])
    if not text and status < 0:
        text = f"its compiler was ended by signal {-status}{' (for want of memory?)' * (status == -signal.SIGKILL)}"
    (folder / STATUS).write_text(text or f"its compiler ended with status {status}")


def _end_with(owner: int, folder: Path) -> None:
    """End this process and all that it started, if the process that wanted them has ended."""
    if os.getppid() != owner:
        _end_all(folder)


def _end_all(folder: Path) -> None:
    """End this process and all that it started, and remove their files."""
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def _trace_and_compile(cell: Computation, folder: Path, libraries: Path, depends_on: str) -> NoReturn:
    """Trace a cell, then become the compiler unless there is a library."""
    status = 1
    try:
        _get_signal_at_end(signal.SIGKILL)
        os.dup2(os.open(folder / SAID, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)
        step = export_step(cell)
        digest = hashlib.sha256(f"{step.digest()}\n{depends_on}".encode()).hexdigest()[:32]
        library = libraries / f"{digest}.so"
        if library.exists() and not _is_whole(library):  # one that is missing another process may be about to write
            library.unlink(missing_ok=True)
        is_new = not library.exists() and not library.with_suffix(".refused").exists()
        if is_new:
            torch.export.save(step.program, folder / PROGRAM)
        found = {"library": str(library), "is_new": is_new, **step.facts()}
        (folder / EXPORTED).write_text(json.dumps(found))
        if is_new:
            counts = map(str, (len(step.weights), step.num_outputs))
            command = [
                sys.executable,
                "-P",
                str(BUILD),
                os.pathsep.join(map(str, OPERATORS)),
                str(folder / PROGRAM),
                str(library),
                *counts,
            ]
            os.execve(sys.executable, command, environment_for(libraries))
        status = 0
    except NotCompiledError as refused:
        (folder / REFUSED).write_text(f"{refused.reason.name}\n{refused.detail}")
    except BaseException as error:
        os.write(2, f"{type(error).__name__}: {error}".encode())
    finally:
        os._exit(status)


def environment_for(libraries: Path) -> dict[str, str]:
    """Return the environment of a compiler whose libraries go to a folder.

    Facts about the C++ compiler go to one folder for all, which the environment may name.
    """
    own = {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }
    return {INDUCTOR_VARIABLE: str(libraries / "inductor"), **os.environ, **own}


def _get_signal_at_end(signal_number: int) -> None:
    """Have the kernel signal this process, or the program that it becomes, when its parent ends, where it can."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal_number)


def _is_whole(library: Path) -> bool:
    """Return whether a library is as its compiler wrote it. Loading a truncated one may end the process."""
    with suppress(OSError):
        return hashlib.sha256(library.read_bytes()).hexdigest() == library.with_suffix(".sha256").read_text()
    return False
