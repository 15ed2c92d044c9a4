"""What ``jit.py`` takes from inside Numba is there, and does what it did when it was written."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import numba
import numpy as np
import pytest
from packaging.requirements import Requirement

PYPROJECT = Path(__file__).resolve().parents[2] / "pyproject.toml"

needs_compiler = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")


def test_numba_is_of_a_minor_version_that_was_tested():
    """The bound in pyproject.toml is the one list of them."""
    dependencies = tomllib.loads(PYPROJECT.read_text())["project"]["dependencies"]
    bound = next(Requirement(each) for each in dependencies if Requirement(each).name == "numba").specifier
    assert any(each.operator == "<" for each in bound), "numba has no upper bound in pyproject.toml"
    assert bound.contains(numba.__version__), (
        f"numba {numba.__version__} is installed; cellrt/native/jit.py reaches into Numba (how arrays are built of "
        f"addresses, how arguments choose a compiled form, when its cache on disk is stale) and was tested with numba "
        f"{bound}. Run tests/core with this version; if they pass, widen the bound in pyproject.toml, which is the "
        "list of the versions that were tested"
    )


SOURCE = """
from cellrt.native.jit import compiled, entry
from callee_NAME import added


@compiled
def double(number):
    return 2 * number


@entry
def total(numbers, few):
    return double(numbers[0]) + double(few[0]) + double(1) + added
"""


def load(folder: Path, callee: str) -> ModuleType:
    """A module with compiled functions as a new process finds it, and beside it a file that it imports from."""
    name = folder.name
    path = folder / f"called_{name}.py"
    path.write_text(SOURCE.replace("NAME", name))
    (folder / f"callee_{name}.py").write_text(callee)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, f"callee_{name}", raising=False)
        spec.loader.exec_module(module)
    assert module.total(np.array([1]), np.array([2], np.int8)) == 8 + module.added
    return module


@needs_compiler
def test_what_compiled_code_calls_is_compiled_once_for_all_kinds_of_integers(tmp_path: Path):
    assert len(load(tmp_path, "added = 0").double.nopython_signatures) == 1


@needs_compiler
def test_a_part_of_compiled_code_refuses_to_be_called_from_python(tmp_path: Path):
    """It has no machine code: a call would end the process."""
    double = load(tmp_path, "added = 0").double
    for number in (1, 1.5):  # of which one has been compiled, for compiled code
        with pytest.raises(TypeError, match="double is a part of compiled functions, which alone can call it"):
            double(number)


@needs_compiler
def test_the_cache_on_disk_is_stale_once_a_file_that_is_imported_has_changed(tmp_path: Path):
    hits = [sum(load(tmp_path, f"added = {k}").total.stats.cache_hits.values()) for k in (1, 1, 2)]
    assert hits == [0, 1, 0]


@needs_compiler
def test_a_cache_that_names_a_module_which_is_gone_is_not_read(tmp_path: Path):
    load(tmp_path, "added = 1")
    for kept in tmp_path.rglob("*.code"):
        first_line, _, _ = kept.read_bytes().partition(b"\n")
        kept.write_bytes(first_line + b"\nca_module_that_is_gone\nName\n.")
    assert sum(load(tmp_path, "added = 1").total.stats.cache_hits.values()) == 0
