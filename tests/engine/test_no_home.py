"""Somebody without a home, as in a container, has an engine that keeps nothing, and is told what to set."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import cellrt
from cellrt.definition.aot.form import compile_cell
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.aot.store import CACHE_VARIABLE, LibraryStore
from tests.engine.helpers import WAIT_S, close_and_check, small_engine


@pytest.fixture
def without_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As for a user that the system does not know."""

    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", home)
    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("without_home")
def test_an_engine_serves_without_a_home() -> None:
    double = cellrt.cell(lambda x: 2 * x, {"x": (2,)}, name="double")
    engine = small_engine()
    engine.register(
        cellrt.Unfolder("doubled", lambda graph, x: {"y": double(x=x).output}, torch.zeros(2)), warm_up=False
    )
    assert engine.submit("doubled", torch.ones(2)).result(WAIT_S)["y"].tolist() == [2, 2]
    close_and_check(engine)


@pytest.mark.usefixtures("without_home")
def test_what_could_be_compiled_says_which_variable_names_a_folder() -> None:
    double = cellrt.cell(lambda x: 2 * x, {"x": (2,)}, name="double")
    with pytest.raises(NotCompiledError, match=f"{os.devnull}.*{CACHE_VARIABLE} names another one") as refused:
        compile_cell(double, LibraryStore())
    assert refused.value.reason is Reason.NO_FOLDER
