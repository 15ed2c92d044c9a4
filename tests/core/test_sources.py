"""A stamp is of the code that a module's compiled functions can reach, and of nothing else."""

from __future__ import annotations

import importlib
import os
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numba
import pytest
from numba.core.dispatcher import Dispatcher

from cellrt.native.sources import Sources

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")

FILES = {
    "__init__.py": "",
    "root.py": '"""Says what it is."""\nfrom PACKAGE.near import double\n\ndef run(x):\n    return double(x)\n',
    "near.py": "from . import far\nfrom .inner.deep import ONE\n\ndef double(x):\n    return far.twice(x) * ONE\n",
    "far.py": "import math\n\ndef twice(x):\n    from PACKAGE.late import TWO\n    return TWO * x\n",
    "late.py": "TWO = 2\n",
    "inner/__init__.py": "",
    "inner/deep.py": "import PACKAGE.near\nONE = 1\n",
    "beside.py": "from PACKAGE import root\n",
    "typed.py": "",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of its own name in each test, as where modules lie is looked for once in a process."""
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / f"package_{tmp_path.name}"
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("PACKAGE", folder.name))
    return folder


def stamp(package: Path, kept: Path | None = None) -> str:
    """As a new process finds it."""
    return Sources(kept).stamp(f"{package.name}.root", str(package / "root.py"))


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("root.py", "double(x)", "double(x) + 1"),
        ("near.py", "* ONE", "+ ONE"),
        ("far.py", "TWO * x", "x * TWO"),
        ("late.py", "2", "3"),
        ("inner/deep.py", "ONE = 1", "ONE = 1.0"),
    ],
    ids=["its own", "imported", "by one that is imported", "inside a function", "in a circle"],
)
def test_an_edit_of_what_a_module_imports_changes_its_stamp(package: Path, file: str, old: str, new: str):
    before = stamp(package)
    edit(package / file, old, new)
    assert stamp(package) != before


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("beside.py", "import root", "import near"),
        ("root.py", "Says what it is.", "Says something else,\nin two lines."),
        ("root.py", "\n\ndef", "\n\n\n# whatever\ndef"),
        ("root.py", "    return double(x)", '    """Runs."""\n    return double(\n        x)'),
        ("inner/deep.py", "ONE = 1", 'ONE = 1\n"""Of something."""'),
    ],
    ids=["not imported", "docstring", "comment", "line break", "a text by itself"],
)
def test_an_edit_of_nothing_that_is_compiled_changes_no_stamp(package: Path, file: str, old: str, new: str):
    before = stamp(package)
    edit(package / file, old, new)
    assert stamp(package) == before


def test_what_is_imported_for_type_checkers_alone_is_no_part_of_a_stamp(package: Path):
    lines = f"\nfrom typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import {package.name}.typed\n\ndef"
    edit(package / "root.py", "\n\ndef", lines)
    before = stamp(package)
    (package / "typed.py").write_text("a = 1\n")
    assert stamp(package) == before


def test_a_stamp_is_of_content_and_not_of_when_or_where_it_was_written(package: Path, tmp_path: Path):
    before = stamp(package)
    for path in package.rglob("*.py"):
        os.utime(path, (1, 1))
    assert stamp(package) == before


def test_a_package_that_is_imported_itself_stands_for_all_its_files(package: Path):
    edit(package / "root.py", "\n\ndef", f"\nimport {package.name}\n\ndef")
    before = stamp(package)
    edit(package / "beside.py", "import root", "import near")
    assert stamp(package) != before


def test_what_a_package_loads_when_it_is_asked_is_found_by_what_it_tells_type_checkers(package: Path):
    (package / "__init__.py").write_text(
        f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {package.name}.typed import lazy\n"
    )
    edit(package / "root.py", "\n\ndef", f"\nfrom {package.name} import lazy\n\ndef")
    before = stamp(package)
    (package / "typed.py").write_text("lazy = 1\n")
    assert stamp(package) != before


def test_a_package_may_tell_type_checkers_of_a_name_of_its_own(package: Path):
    (package / "__init__.py").write_text(
        f"from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from {package.name} import lazy\n"
    )
    edit(package / "root.py", "\n\ndef", f"\nfrom {package.name} import lazy\n\ndef")
    assert stamp(package)


def test_what_was_read_is_remembered_by_content(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    kept = tmp_path / "kept.json"
    before = stamp(package, kept)
    with monkeypatch.context() as without:
        without.setattr("cellrt.native.sources.read_source", lambda *_: pytest.fail("a file was parsed again"))
        without.setattr(Sources, "_write", lambda *_: pytest.fail("what is known was written again"))
        assert stamp(package, kept) == before
    edit(package / "late.py", "2", "3")
    assert stamp(package, kept) != before
    kept.write_text("{half of")
    assert stamp(package, kept) != before


def test_a_change_while_the_process_runs_is_seen(package: Path):
    sources, root = Sources(None), (f"{package.name}.root", str(package / "root.py"))
    before = sources.stamp(*root)
    edit(package / "late.py", "TWO = 2", "TWO = 2 + 0")
    assert sources.stamp(*root) != before


def test_a_file_that_cannot_be_parsed_counts_by_its_bytes(package: Path):
    edit(package / "late.py", "2", "2 +")
    before = stamp(package)
    edit(package / "late.py", "2 +", "3 +")
    assert stamp(package) != before


COMPILED = (
    *("core.scheduling.schedule", "core.entries", "core.state.copying", "core.running.records"),
    *("core.scheduling.span_choice", "core.pages.pages"),
    *(
        "products.packed",
        "worker.cpu.run_task",
        "worker.device.launch",
        "worker.device.shape",
        "definition.aot.run_step",
    ),
    *("cells._host", "cells._llama_step", "cells._paged_attention", "cells._row_kernels", "unfolders._marshalled"),
)


def module_of(name: str) -> ModuleType:
    if not name.startswith("core."):
        pytest.importorskip("torch")
    return importlib.import_module(f"cellrt.{name}")


def reached(function: Any, found: set[str]) -> set[str]:
    """The modules of all Python functions that a compiled function reaches by its globals and closures."""
    function = getattr(function, "py_func", getattr(function, "_defn", getattr(function, "_function", function)))
    if not isinstance(function, FunctionType) or not function.__module__.startswith("cellrt."):
        return found
    key = f"{function.__module__}:{function.__qualname__}"
    if key in found:
        return found
    found.add(key)
    held = [cell.cell_contents for cell in function.__closure__ or ()]
    for each in (*held, *(function.__globals__.get(name) for name in function.__code__.co_names)):
        reached(each, found)
    return found


@pytest.mark.parametrize("name", COMPILED)
def test_all_that_compiled_functions_reach_is_part_of_their_modules_stamp(name: str):
    module = module_of(name)
    stamped = Sources(None).modules(module.__name__, str(module.__file__))
    found: set[str] = set()
    for value in vars(module).values():
        if isinstance(value, Dispatcher) or hasattr(value, "_function"):
            reached(value, found)
    assert found and {each.partition(":")[0] for each in found} <= stamped


@pytest.mark.parametrize("name", COMPILED)
def test_an_edit_of_what_only_python_runs_compiles_nothing(name: str):
    module = module_of(name)
    stamped = Sources(None).modules(module.__name__, str(module.__file__))
    leaves = ("scheduling.policies", "simulate", "processor", "checks.validate")
    assert stamped.isdisjoint(
        {"cellrt.engine.engine", "cellrt.worker.cpu.cpu_executor", *(f"cellrt.core.{leaf}" for leaf in leaves)}
    )
