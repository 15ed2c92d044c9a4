"""What Numba compiles is told; what it loads from its cache is not."""

from __future__ import annotations

import importlib.util
import logging
import sys
from pathlib import Path
from types import ModuleType

import numba
import pytest

from cellrt.engine.compilation import CORE, compilation_told, num_functions
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
"""


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.WARNING, "cellrt")
    return caplog


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
    assert num_functions(PACKAGE) == 2
    with compilation_told("it", PACKAGE, quiet_s=0, every_s=0.01):
        module.twice(1)
        module.twice(1.0)  # another signature of the same function
        until(
            lambda: any("compiles it" in said and "(1 of 2 done, about" in said for said in log.messages), "it is told"
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


def test_an_error_inside_ends_the_telling(log: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ZeroDivisionError), compilation_told("it"):
        raise ZeroDivisionError
    numba.njit(lambda x: x)(1)
    assert not log.messages


def test_all_functions_of_the_core_are_known_before_one_is_compiled() -> None:
    warm_up()
    assert num_functions(CORE) > 300
