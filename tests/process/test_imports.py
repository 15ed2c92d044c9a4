"""Imports look where ``python`` looks: beside a model's file, or in the current folder, in all processes alike."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from cellrt.errors import DefinitionError
from cellrt.process.model_names import source_of
from cellrt.process.source import ModelSource
from tests.engine.helpers import WAIT_S
from tests.process.helpers import start

HELPER = "def grown(x):\n    return {'y': x + %d}\n"
MODEL = """import cellrt, torch
import imports_helper
CELL = cellrt.cell(imports_helper.grown, {'x': (2,)}, name='grown')
@cellrt.unfold('helped', example=torch.zeros(2))
def helped(graph, x):
    import imports_of_later
    return {'y': CELL(x=x).y}
"""


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Imports look where they looked before, after each test, and what they found is forgotten."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in ("imports_helper", "imports_of_later", "imports_model"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def folder(path: Path, number: int = 1) -> Path:
    path.mkdir(exist_ok=True)
    (path / "imports_helper.py").write_text(HELPER % number)
    (path / "imports_of_later.py").write_text("")
    (path / "imports_model.py").write_text(MODEL)
    return path


def test_a_file_imports_what_lies_beside_it_in_the_engines_process_and_here(tmp_path: Path) -> None:
    with start() as engine:
        engine.register(f"{folder(tmp_path) / 'imports_model.py'}:helped", warm_up=False)
        assert engine.submit("helped", torch.ones(2)).result(WAIT_S)["y"].tolist() == [2, 2]


@pytest.mark.slow
def test_a_client_that_cannot_import_a_model_says_that_it_imports_it_for_itself_and_from_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.syspath_prepend(str(folder(tmp_path)))
        engine = start()
    told = (
        "model 'imports_model:helped': ModuleNotFoundError: No module named 'imports_model'.* PYTHONPATH .*; "
        "a client imports the model for itself, .* working folder"
    )
    with engine:
        engine.register("imports_model:helped", warm_up=False)
        with pytest.raises(DefinitionError, match=told):
            engine.submit("helped", torch.ones(2))


def test_a_module_is_found_in_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder(tmp_path))
    assert ModelSource(source_of("imports_model:helped")).load().name == "helped"
    assert sys.path[0] == str(tmp_path)


def test_of_two_helpers_of_one_name_the_first_is_meant(tmp_path: Path) -> None:
    texts = [f"{folder(tmp_path / name, number) / 'imports_model.py'}:helped" for number, name in enumerate("ab", 1)]
    for text in map(source_of, texts):
        ModelSource(text).load()
    assert sys.modules["imports_helper"].__file__ == str(tmp_path / "a" / "imports_helper.py")


@pytest.mark.slow
def test_the_engines_process_looks_into_the_current_folder_only_if_we_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "glob.py").write_text("raise RuntimeError('this is not the standard library')")
    monkeypatch.chdir(tmp_path)
    with start() as engine:
        assert engine.statistics()["unfinished"] == 0


def test_a_module_that_is_not_there_is_said_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DefinitionError, match=f"no module 'no_such_module' in {tmp_path}, nor installed; PYTHONPATH"):
        source_of("no_such_module:model")
    (tmp_path / "imports_package").mkdir()
    (tmp_path / "imports_package" / "__init__.py").write_text("import no_such_module")
    (tmp_path / "imports_alone.py").write_text("import no_such_module")
    for text in ("imports_package.models:model", "imports_alone.py"):
        with pytest.raises(DefinitionError, match="No module named 'no_such_module': install it, or have PYTHONPATH"):
            source_of(text)
