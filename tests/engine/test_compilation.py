"""What Numba compiles is told; what it loads from its cache is not."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numba
import pytest

from cellrt.core import entries
from cellrt.engine import compilation
from cellrt.engine.announce import Announcement
from cellrt.engine.compilation import CORE, compilation_told, cost_of, functions_of, reached_from
from cellrt.worker.cpu.warm_up import warm_up
from tests.waiting import until

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")
PACKAGE = "told"
MODULE = """
from numba import njit


@njit(cache=True)
def twice(x):
    return x + x


@njit(cache=True)
def unused(x):
    return x


@njit(cache=True, no_cpython_wrapper=True)
def part(x):
    return twice(x) + 1


@njit(cache=True)
def whole(x):
    return part(x) + twice(x)
"""


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "cellrt")
    return caplog


@pytest.fixture
def announcement() -> Iterator[Announcement]:
    """One that says nothing after its test."""
    made = Announcement("it")
    yield made
    made.end()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "functions.py"
    made.write_text(MODULE)
    return made


def imported(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return the module in a file, made anew, so that its functions know only what is on disk."""
    spec = importlib.util.spec_from_file_location(f"{PACKAGE}.functions", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def test_what_is_compiled_is_told_with_how_many_functions_are_done(
    path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    module = imported(path, monkeypatch)
    assert len(functions_of(PACKAGE)) == 4
    with compilation_told("it", PACKAGE, quiet_s=0, every_s=0.01):
        module.twice(1)
        module.twice(1.0)  # another signature of the same function
        until(
            lambda: any("compiles it" in said and "(1 of 4 done, about" in said for said in log.messages), "it is told"
        )


def test_what_is_loaded_from_disk_is_not_told(
    path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    imported(path, monkeypatch).twice(1)
    again = imported(path, monkeypatch)
    with compilation_told("it", PACKAGE, quiet_s=0, every_s=0.01):
        assert again.twice(1) == 2
    assert not again.twice.stats.cache_misses
    assert not log.messages


def test_what_is_called_is_expected_with_what_calls_it_unless_it_is_on_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch, announcement: Announcement
) -> None:
    """Whatever package it is of."""
    watch = compilation._Watch(announcement, "")
    module = imported(path, monkeypatch)

    def counts() -> tuple[int, int]:
        return announcement._num_done, announcement._num_steps

    watch.on_start(Event({"dispatcher": module.whole}))
    assert counts() == (0, 3)
    watch.on_start(Event({"dispatcher": module.part}))
    watch.on_end(Event({"dispatcher": module.part}))
    assert counts() == (1, 2), "what it calls came from disk"
    watch.on_end(Event({"dispatcher": module.whole}))
    assert counts() == (2, 2)
    assert announcement._cost_done == pytest.approx(announcement._cost)
    watch.on_start(Event({"dispatcher": module.unused}))
    assert counts() == (2, 3)


def test_machine_code_costs_by_all_that_is_in_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = imported(path, monkeypatch)
    assert reached_from(module.whole) == {module.whole, module.part, module.twice}
    alone, whole = (len(each.py_func.__code__.co_code) for each in (module.part, module.whole))
    assert cost_of(module.part) == alone
    assert cost_of(module.whole) > whole + compilation.MACHINE_CODE * (alone + whole)


def test_an_error_inside_ends_the_telling(log: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), compilation_told("it"):
        raise ZeroDivisionError
    numba.njit(lambda x: x)(1)
    assert not log.messages


def test_all_functions_of_the_core_are_known_before_one_is_compiled() -> None:
    warm_up()
    assert len(functions_of(CORE)) > 300


class Event(NamedTuple):
    """Numba's, of a function that is being compiled."""

    data: dict[str, Any]


def of_the_core() -> Event:
    return Event({"dispatcher": entries.schedule_tasks})


@pytest.fixture
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "has_second_core", lambda: True)


@pytest.mark.usefixtures("two_cores")
def test_a_second_process_ends_well_and_tells_nothing_of_what_is_loaded_from_disk() -> None:
    warm_up()
    told: list[str] = []
    with compilation._SecondProcess(told.append) as second:
        second.on_start(of_the_core())
        second.wait()
        assert second._process is not None and second._process.returncode == 0
    assert not [name for name in told if name.startswith(CORE)]


@pytest.mark.usefixtures("two_cores")
def test_a_second_process_that_cannot_start_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation, "MODULE", "cellrt.engine.no_such_module")
    with compilation._SecondProcess(print) as second:
        second.on_start(of_the_core())
        second.wait()
        assert second._process is not None and second._process.returncode == 1
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    with compilation._SecondProcess(print) as second:
        second.on_start(of_the_core())
        second.wait()
        assert second._process is None


@pytest.mark.usefixtures("two_cores")
def test_a_second_process_ends_with_what_it_was_started_for() -> None:
    with pytest.raises(KeyboardInterrupt), compilation._SecondProcess(print) as second:
        second.on_start(of_the_core())
        raise KeyboardInterrupt
    assert second._process is not None and second._process.returncode is not None


def test_a_second_process_ends_when_nobody_holds_its_pipe() -> None:
    program = "import time\nfrom cellrt.engine import compilation\n"
    program += "compilation.warm_up_second_half = lambda: time.sleep(60)\ncompilation.main(['second-half'])"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(30) == 1


def test_no_second_process_starts_on_one_core_nor_of_a_program_that_is_no_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert not compilation.has_second_core()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert compilation.has_second_core()
    monkeypatch.setattr(sys, "executable", "/usr/bin/editor")
    assert not compilation.has_second_core()


def test_what_two_processes_compile_is_counted_once(announcement: Announcement) -> None:
    watch = compilation._Watch(announcement, CORE)
    watch.on_start(of_the_core())
    watch.on_end(of_the_core())
    watch.count(f"{CORE}.entries.schedule_tasks")
    watch.count("numba.np.arrayobj.impl")
    assert announcement._num_done == 1
