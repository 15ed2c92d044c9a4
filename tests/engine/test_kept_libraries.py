"""Compiled libraries on disk: damaged, in a folder that may only be read, or with no folder to keep them in; and what
comes between while they are made.
"""

from __future__ import annotations

import importlib
import sys
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from threading import Thread

import pytest
import torch
from torch import nn

import cellrt
from cellrt import Cell
from cellrt.definition.aot.form import compile_cell, compile_cells
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.aot.store import CACHE_VARIABLE, MOST_IMPORTING_S, LibraryStore, wait_for_imports
from cellrt.definition.aot.tracing import INDUCTOR_VARIABLE, environment_for
from cellrt.definition.compiled_form import CompiledForm
from tests.engine.helpers import WAIT_S, close_and_check, small_engine
from tests.waiting import until


def linear() -> Cell:
    return cellrt.cell(nn.Linear(4, 4), {"input": (4,)}, name="linear")


def assert_runs(cell: Cell, store: LibraryStore) -> None:
    form, x = compile_cell(cell, store), torch.randn(3, 4)
    outputs = form.run(3, {"input": x})
    assert outputs is not None
    torch.testing.assert_close(outputs["output"], cell.run(x)[0])


def test_what_torchs_compiler_keeps_goes_where_its_own_variable_says(tmp_path, monkeypatch) -> None:
    monkeypatch.delenv(INDUCTOR_VARIABLE, raising=False)
    assert environment_for(tmp_path)[INDUCTOR_VARIABLE] == str(tmp_path / "inductor")
    monkeypatch.setenv(INDUCTOR_VARIABLE, "elsewhere")
    assert environment_for(tmp_path)[INDUCTOR_VARIABLE] == "elsewhere"


@pytest.mark.slow
def test_warnings_of_torch_are_no_errors_of_its_compiler(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    assert environment_for(tmp_path)["PYTHONWARNINGS"] == "ignore"


def test_what_is_compiled_is_told_and_what_is_found_is_not(tmp_path) -> None:
    told: list[int] = []
    for time in (1, 2):
        (form,) = compile_cells([linear()], LibraryStore(tmp_path), partial(told.append, time))
        assert isinstance(form, CompiledForm)
    assert set(told) == {1}


@pytest.mark.slow
def test_what_is_damaged_is_compiled_anew_and_what_may_only_be_read_is_used(tmp_path, monkeypatch) -> None:
    store, made = LibraryStore(tmp_path), linear()
    assert_runs(made, store)
    (library,) = store.folder.glob("*.so")
    whole = library.read_bytes()
    library.unlink()  # a loaded one is not written to
    library.write_bytes(whole[: len(whole) // 2])
    assert_runs(made, store)
    assert store.num_compiled == 2

    class ReadOnly(tempfile.TemporaryDirectory[str]):
        def __init__(self, dir: Path | None = None, **options: bool) -> None:
            if dir is not None:
                raise PermissionError(dir)
            super().__init__(**options)

    monkeypatch.setattr(tempfile, "TemporaryDirectory", ReadOnly)
    assert_runs(made, store)
    assert store.num_compiled == 2

    library.unlink()
    library.with_suffix(".refused").write_text("no reason that anybody knows")
    with pytest.raises(NotCompiledError, match=str(Reason.NOT_COMPILED)):
        compile_cell(made, store)


@pytest.mark.parametrize("mode", ["wait", "background"])
def test_without_a_folder_the_module_serves(tmp_path, monkeypatch, mode) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file"))
    made, x = linear(), torch.randn(4)
    engine = small_engine(compile=mode)
    engine.register(cellrt.unfold("model", example=x)(lambda graph, x: {"y": made(input=x).output}))
    torch.testing.assert_close(engine.submit("model", x).result(WAIT_S)["y"], made.run(x[None])[0][0])
    if mode == "wait":
        assert str(Reason.NO_FOLDER) in engine.statistics()["cells"]["linear"]["form"]
    close_and_check(engine)


def test_who_was_interrupted_while_waiting_may_ask_again(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    made, x, asked = linear(), torch.zeros(4), list[int]()

    def interrupt_once(store: LibraryStore, cells: Sequence[Cell], _: object) -> Iterator[NotCompiledError]:
        asked.append(len(cells))
        if len(asked) == 1:
            raise KeyboardInterrupt
        yield NotCompiledError(Reason.NO_COMPILER)

    monkeypatch.setattr(LibraryStore, "compile", interrupt_once)
    engine = small_engine(compile="wait")
    model = cellrt.unfold("model", example=x)(lambda graph, x: {"y": made(input=x).output})
    with pytest.raises(KeyboardInterrupt):
        engine.register(model)
    engine.register(model)
    assert asked == [1, 1]
    assert engine.statistics()["cells"]["linear"]["form"] == f"eager: {Reason.NO_COMPILER}"
    close_and_check(engine)


@pytest.mark.parametrize("mode", ["wait", "background"])
def test_that_there_is_no_compiler_is_told_once(tmp_path, monkeypatch, caplog, mode) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    x, one, other = torch.zeros(4), linear(), linear()
    engine = small_engine(compile=mode)
    engine.register(cellrt.unfold("model", example=x)(lambda graph, x: {"y": other(input=one(input=x).output).output}))
    lacking = f"eager: {Reason.NO_COMPILER}: no-such-compiler"
    until(lambda: {each["form"] for each in engine.statistics()["cells"].values()} == {lacking}, "both are eager")
    assert len(engine.statistics()["cells"]) == 2
    assert [each.levelname for each in caplog.records if "no-such-compiler" in each.message] == ["WARNING"]
    close_and_check(engine)


def test_no_fork_is_made_while_another_thread_imports(tmp_path, monkeypatch) -> None:
    (tmp_path / "imported_slowly.py").write_text("import time\ntime.sleep(0.5)\nis_done = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    importing = Thread(target=importlib.import_module, args=["imported_slowly"])
    importing.start()
    until(lambda: "imported_slowly" in sys.modules, "the import has begun")
    wait_for_imports()
    assert sys.modules["imported_slowly"].is_done
    importing.join()


def test_nobody_waits_for_an_import_of_his_own(tmp_path, monkeypatch) -> None:
    (tmp_path / "imports_and_waits.py").write_text(
        "import time\nfrom cellrt.definition.aot.store import wait_for_imports\n"
        "began_s = time.monotonic()\nwait_for_imports()\nwaited_s = time.monotonic() - began_s\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert importlib.import_module("imports_and_waits").waited_s < MOST_IMPORTING_S / 2
