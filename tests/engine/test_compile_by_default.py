"""Cells are compiled while they are served unless somebody says otherwise, and who compiles ends with who asked."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.aot.store import LibraryStore, first_lines_of_error
from cellrt.definition.aot.tracing import SAID, STATUS
from cellrt.engine.cell_compiler import MODE_VARIABLE, mode_of
from cellrt.engine.engine import Engine
from cellrt.errors import DefinitionError
from tests.engine.helpers import small_engine
from tests.waiting import until

MARK = "CELLRT_TEST_MARK"
PROGRAM = """
import logging, sys, time
import torch
import cellrt
logging.getLogger("cellrt").setLevel(logging.ERROR)  # of a slow machine's first engine

class Endless(torch.nn.Module):
    def forward(self, x):
        if torch.compiler.is_exporting():
            time.sleep(600)
        return x + 1

cell = cellrt.cell(Endless(), {"x": (4,)})
model = cellrt.unfold("model", example=torch.ones(4))(lambda graph, x: {"y": cell(x=x).output})
engine = cellrt.Engine(1, arena_bytes=1 << 16, freeze=False)
engine.register(model)
print(float(engine.submit("model", torch.ones(4)).result()["y"].sum()), flush=True)
"""
ENDS = "print(engine.statistics()['cells']['Endless']['form'], flush=True)\ntime.sleep(float(sys.argv[1]))\n"


def test_the_default_is_to_compile_while_serving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MODE_VARIABLE)
    assert mode_of(None) == "background"


def test_the_environment_says_what_an_engine_does_that_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MODE_VARIABLE, "wait")
    assert (mode_of(None), mode_of("off")) == ("wait", "off")
    monkeypatch.setenv(MODE_VARIABLE, "never")
    with pytest.raises(
        DefinitionError, match="CELLRT_COMPILE: expected one of 'off', 'background', 'wait', got 'never'"
    ):
        Engine(1)


def test_the_suite_compiles_nothing_that_it_does_not_ask_for() -> None:
    with small_engine() as engine:
        assert engine._compiler._mode == "off"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], tuple[subprocess.Popen[str], Callable[[], list[int]]]]]:
    """Starts the program with some seconds to live; gives it, and what finds the processes that it started."""
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "CELLRT_CACHE": str(tmp_path), MODE_VARIABLE: ""}

    def processes() -> list[int]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
        return found

    def begin(seconds: str) -> tuple[subprocess.Popen[str], Callable[[], list[int]]]:
        command = [sys.executable, "-c", PROGRAM + ENDS, seconds]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(command, env=environment, **pipes), processes  # type: ignore[call-overload]

    yield begin
    for process in processes():
        os.kill(process, signal.SIGKILL)


@pytest.mark.slow
def test_a_program_that_ends_while_cells_are_compiled_ends_at_once_and_says_nothing(start) -> None:
    program, processes = start("0")
    said, complained = program.communicate(timeout=100)
    assert (program.returncode, complained) == (0, "")
    assert said == "8.0\neager: it is being compiled\n"
    until(lambda: not processes(), "all that it started has ended", 30)


@pytest.mark.slow
def test_what_compiles_ends_with_a_program_that_is_killed(start) -> None:
    program, processes = start("600")
    assert [program.stdout.readline() for _ in range(2)] == ["8.0\n", "eager: it is being compiled\n"]
    until(lambda: len(processes()) == 3, "a fork has one that traces")
    program.kill()
    until(lambda: not processes(), "all have ended", 30)
    program.communicate()


TRACEBACK = """Traceback (most recent call last):
  File "build.py", line 90, in <module>
torch._inductor.exc.InductorError: CppCompileError: C++ compile error

Command:
g++ x.cpp -o x.so

Output:
x.cpp:3:10: fatal error: no such file
compilation terminated.
"""


def test_the_first_lines_of_what_was_raised_are_the_reason() -> None:
    told = first_lines_of_error(f"warning: this and that\n{TRACEBACK}")
    assert told.startswith("torch._inductor.exc.InductorError: CppCompileError: C++ compile error; Command:; g++ x.cpp")
    assert first_lines_of_error("one\n\ntwo\n\n") == "two"
    assert first_lines_of_error("") == ""


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({SAID: TRACEBACK}, "InductorError: CppCompileError"),
        ({SAID: "", STATUS: "its compiler was ended by signal 9"}, "its compiler was ended by signal 9"),
        ({}, "the process that had it compiled was ended"),
    ],
)
def test_a_cell_that_is_not_compiled_has_always_a_reason(tmp_path: Path, files: dict[str, str], reason: str) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    made = LibraryStore(tmp_path)._result(tmp_path)
    assert isinstance(made, NotCompiledError) and made.reason is Reason.NOT_COMPILED
    assert reason in made.detail
