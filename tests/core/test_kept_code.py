"""No two bodies share a symbol in any processes, and what was kept is used only while all it is made of is the same."""

from __future__ import annotations

import cProfile
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.bytecode import FunctionIdentity

from cellrt.native import jit, kept_code

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")

FACTORY = f"""
import math
import numpy as np
from cellrt.native.jit import nogil


def product(factor):
    @nogil
    def multiply(x):
        return {" + ".join(f"math.sin(x + {k}) * factor" for k in range(40))}
    return multiply


four, three = product(4), product(3)


@nogil
def by_four(x):
    return four(x)


@nogil
def by_three(x):
    return three(x)


@nogil
def by_both(x):
    return 100 * four(x) + three(x)
"""


def processes(folder: Path, *commands: str) -> list[str]:
    """What each of several processes prints, one after the other, that share a cache which was empty."""
    (folder / "factory.py").write_text(FACTORY)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    printed = []
    for command in commands:
        program = f"import factory; print(factory.{command}(1.0))"
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=environment
        )
        assert done.returncode == 0, done.stderr
        printed.append(done.stdout)
    return printed


def test_closures_of_one_name_that_two_processes_kept_are_told_apart_by_a_third(tmp_path: Path):
    four, three, both = processes(tmp_path, "by_four", "by_three", "by_both")
    assert float(both) == pytest.approx(100 * float(four) + float(three), rel=1e-9)


def load(folder: Path, source: str, name: str = "kept_module") -> ModuleType:
    """A module as a new process finds it; no other test has one of the same content."""
    path = folder / f"{name}.py"
    path.write_text(f"{source}\n\nOF_TEST = {str(folder)!r}\n")
    # Python takes a source of the same size and second for the same source.
    Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ONE = "from cellrt.native.jit import nogil\n\n\n@nogil\ndef run(x):\n    return x + 1\n"


def hits(function: Any) -> int:
    return sum(function.stats.cache_hits.values())


def kept_files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.code"))


def test_what_was_kept_is_found_by_whoever_comes_next_with_another_docstring_at_another_line(tmp_path: Path):
    told = ONE.replace("    return", '    """Add one."""\n    return')
    assert load(tmp_path, told).run(1) == 2
    moved = load(tmp_path, told.replace("\n\n\n@", "\n\n\n# Adds.\n@").replace("Add one.", "Return one more."))
    assert moved.run(1) == 2 and hits(moved.run) == 1


def test_a_profiler_changes_nothing_in_what_was_kept(tmp_path: Path):
    run = load(tmp_path, ONE).run
    before = kept_code.content_of(run.py_func)
    profile = cProfile.Profile()
    assert profile.runcall(run, 1) == 2
    assert kept_code.content_of(run.py_func) == before


def test_a_changed_function_is_compiled_again(tmp_path: Path):
    assert load(tmp_path, ONE).run(1) == 2
    changed = load(tmp_path, ONE.replace("x + 1", "x + 2"))
    assert changed.run(1) == 3 and hits(changed.run) == 0
    assert len(kept_files(tmp_path)) == 1, "the old one's file is used again"


@pytest.mark.parametrize("left", [0, 10, 100, 2000], ids=str)
def test_a_file_that_is_cut_off_is_compiled_again(tmp_path: Path, left: int):
    assert load(tmp_path, ONE).run(1) == 2
    (path,) = kept_files(tmp_path)
    path.write_bytes(path.read_bytes()[:left])
    again = load(tmp_path, ONE)
    assert again.run(1) == 2 and hits(again.run) == 0
    assert load(tmp_path, ONE).run(1) == 2


def test_what_another_version_kept_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert load(tmp_path, ONE).run(1) == 2
    monkeypatch.setattr(kept_code, "FORMAT", kept_code.FORMAT + 1)
    other = load(tmp_path, ONE)
    assert other.run(1) == 2 and hits(other.run) == 0


def test_what_numbas_own_cache_kept_is_not_read(tmp_path: Path):
    plain = load(
        tmp_path,
        ONE.replace("cellrt.native.jit import nogil", "numba import njit").replace("nogil", "njit(cache=True)"),
    )
    assert plain.run(1) == 2 and list(tmp_path.rglob("*.nbc"))
    ours = load(tmp_path, ONE)
    assert ours.run(1) == 2 and hits(ours.run) == 0 and len(kept_files(tmp_path)) == 1


def test_code_of_another_key_under_a_files_name_is_not_read(tmp_path: Path):
    module = load(tmp_path, ONE)
    assert module.run(1) == 2 and module.run(1.5) == 2.5
    first, second = kept_files(tmp_path)
    data = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(data)
    again = load(tmp_path, ONE)
    assert (again.run(1), again.run(1.5)) == (2, 2.5) and hits(again.run) == 0


def test_one_function_with_other_options_is_kept_apart(tmp_path: Path):
    source = ONE + "\n\nfrom cellrt.native.jit import short_entry\n\nkeeps_lock = short_entry(run.py_func)\n"
    for number in range(2):
        module = load(tmp_path, source)
        assert (module.run(1), module.keeps_lock(1)) == (2, 2)
        assert hits(module.run) == hits(module.keeps_lock) == number
    assert len(kept_files(tmp_path)) == 2


HELD = """
from cellrt.native.jit import nogil


def make(held):
    @nogil
    def run(x):
        return {}
    return run
"""


@pytest.mark.parametrize(
    ("held", "computed"),
    [
        (1, "x + held"),
        (np.float64(1), "x + held"),
        ((1, 2), "x + held[0]"),
        (np.ones(2), "x + held[0]"),
        (np.float32, "x + held(1)"),
    ],
    ids=["number", "NumPy's number", "tuple", "array", "type"],
)
def test_what_a_closure_holds_is_part_of_what_it_is_kept_by(tmp_path: Path, held: Any, computed: str):
    for number in range(2):
        run = load(tmp_path, HELD.format(computed)).make(held)
        assert run(1) == 2 and hits(run) == number


def test_a_caller_of_what_has_a_number_in_its_symbol_is_not_kept(tmp_path: Path):
    plain = numba.njit(lambda x: x + 1)
    assert plain(1) == 2
    for _ in range(2):
        run = load(tmp_path, HELD.format("held(x)")).make(plain)
        assert run(1) == 2 and hits(run) == 0
    assert not kept_files(tmp_path)


def test_functions_of_numba_that_are_compiled_on_the_way_are_named_by_content_too(tmp_path: Path):
    run = load(tmp_path, HELD.format("held((x, x))").replace("from", "import numpy as np\nfrom", 1)).make(
        np.concatenate
    )
    assert run(np.arange(3)).size == 6
    symbols = list(kept_code.symbols_of(run.overloads[run.signatures[0]].library._final_module))
    assert any("numba" in name for name in symbols) and all(map(kept_code.is_ours, symbols))


def test_other_constants_under_the_same_source_have_a_symbol_of_their_own(tmp_path: Path):
    """As a test leaves a module whose constants it changed."""
    source = ONE.replace("x + 1", "x + ADDED").replace("\n\n\n@", "\n\nADDED = 1\n\n\n@")
    module = load(tmp_path, source)
    assert module.run(1) == 2
    for path in kept_files(tmp_path):
        path.unlink()
    module.ADDED = 5
    again = jit.nogil(module.run.py_func)
    assert (again(1), module.run(1)) == (6, 2) and not kept_files(tmp_path)


def test_numba_is_left_as_it_was():
    before = FunctionIdentity.__dict__["from_function"]
    assert jit.nogil(lambda x: x + 1)(1) == 2
    assert FunctionIdentity.__dict__["from_function"] is before
    assert isinstance(FunctionIdentity.from_function(load).unique_id, int)


def test_what_is_typed_at_a_prompt_is_compiled_and_not_kept():
    names: dict[str, Any] = {}
    exec("from cellrt.native.jit import nogil\n@nogil\ndef run(x):\n    return x + 1", names)
    assert names["run"](1) == 2


def no_place(folder: Path) -> dict[str, str]:
    """An environment in which nothing can be kept of the modules in and below a folder, not even by root."""
    for each in [folder, *filter(Path.is_dir, folder.rglob("*"))]:
        (each / "__pycache__").write_text("no folder")
    left = {key: value for key, value in os.environ.items() if key not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    return {**left, "HOME": "/dev/null", "PYTHONDONTWRITEBYTECODE": "1"}


def test_without_a_place_it_goes_on_in_memory_with_one_warning_that_says_what_to_set(tmp_path: Path):
    (tmp_path / "alone.py").write_text(ONE + "\n\n@nogil\ndef twice(x):\n    return run(run(x))\n")
    environment = {**no_place(tmp_path), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    program = "import alone; print(alone.twice(1), alone.twice(1.5))"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (0, "3 3.5\n"), done.stderr
    assert done.stderr.count("RuntimeWarning") == 1 and "set NUMBA_CACHE_DIR to a folder" in done.stderr
    assert not (tmp_path / "~").exists()


def test_the_core_is_imported_where_nothing_can_be_written(tmp_path: Path):
    home = Path(kept_code.__file__).parents[1]
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("core", "native"):
        shutil.copytree(home / name, tmp_path / "cellrt" / name, ignore=ignored)
    for name in ("__init__.py", "errors.py"):
        shutil.copy(home / name, tmp_path / "cellrt" / name)
    environment = {**no_place(tmp_path / "cellrt"), "PYTHONPATH": str(tmp_path)}
    program = "from cellrt.core import entries; print(entries.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith(str(tmp_path))


def test_what_lies_where_nothing_can_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert load(tmp_path, ONE).run(1) == 2
    monkeypatch.setattr(kept_code, "_can_be_written", lambda folder: folder != tmp_path / "__pycache__")
    kept_code._folders_for.cache_clear()
    found = load(tmp_path, ONE)
    assert found.run(1) == 2 and hits(found.run) == 1
    monkeypatch.undo()
    kept_code._folders_for.cache_clear()


def test_a_disk_that_is_full_costs_the_keeping_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(kept_code, "_warned", [])
    monkeypatch.setattr(kept_code.os, "replace", full)
    module = load(tmp_path, ONE)
    with pytest.warns(RuntimeWarning, match="No space left on device.*set NUMBA_CACHE_DIR"):
        assert module.run(1) == 2
    assert module.run(1.5) == 2.5
    assert [path.name for path in (tmp_path / "__pycache__").glob("kept_module.run*")] == []
