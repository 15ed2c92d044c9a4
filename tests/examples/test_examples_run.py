"""Each example runs, in its quick form where it has one."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sys
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"


def has_main(path: Path) -> bool:
    body = ast.parse(path.read_text(), str(path)).body
    return any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in body)


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    name = f"example_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "path", [path for path in sorted(EXAMPLES.glob("*.py")) if has_main(path)], ids=lambda p: p.stem
)
def test_example_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = loaded(path, monkeypatch)
    is_quick = "quick" in inspect.signature(module.main).parameters
    try:
        assert module.main(**({"quick": True} if is_quick else {})) in (None, 0)
    except SystemExit as error:  # what it needs is not there
        assert "python examples/" in str(error.code)
