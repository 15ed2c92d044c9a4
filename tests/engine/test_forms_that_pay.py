"""A form from the compiler that is clearly slower than its module is not used; one written by hand always is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import cellrt
from cellrt import cells
from cellrt.definition.aot import pays
from cellrt.definition.aot.form import compile_cell
from cellrt.definition.aot.pays import EAGER_S, StepTimes, check_that_it_pays
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.aot.store import CACHE_VARIABLE, LibraryStore
from cellrt.definition.compiled_form import (
    DONE,
    POSITIONS,
    CompiledForm,
    TaskFunction,
    array_at,
    port_address,
    read_word,
)
from tests.engine.helpers import WAIT_S, close_and_check, small_engine

WIDTH = 4


@TaskFunction
def double(constants, task):
    """``x`` -> ``output``, as often as the one constant says."""
    size = WIDTH * read_word(task, POSITIONS)
    given, made = array_at(port_address(task, 0), size, np.float32), array_at(port_address(task, 1), size, np.float32)
    for again in range(read_word(constants, 0)):
        for k in range(size):
            made[k] = np.sqrt(np.float32(again)) + given[k]
        for k in range(size):
            made[k] = 2 * given[k]
    return DONE


def doubling(**options: int) -> cellrt.Cell:
    return cellrt.cell(lambda x: 2 * x, {"x": (WIDTH,)}, name="doubling", **options)


def form_of(cell: cellrt.Cell, times: int) -> CompiledForm:
    return CompiledForm(double, cell.inputs, cell.outputs, np.array([times]), keeps=None)


def test_a_form_that_is_slower_is_refused_with_both_figures_and_one_that_is_not_is_taken(tmp_path: Path) -> None:
    cell = doubling()
    check_that_it_pays(cell, form_of(cell, 1), tmp_path / "fast.so")
    said = r"us, and the module \d+, for 64 rows; [\d,]+ us, and the module \d+, for 512 rows$"
    with pytest.raises(NotCompiledError, match=said) as refused:
        check_that_it_pays(cell, form_of(cell, 20_000), tmp_path / "slow.so")
    assert refused.value.reason is Reason.SLOWER


def test_what_was_found_is_kept_beside_the_library_and_asked_once(tmp_path: Path) -> None:
    cell, library = doubling(), tmp_path / "step.so"
    with pytest.raises(NotCompiledError) as first:
        check_that_it_pays(cell, form_of(cell, 20_000), library)
    with pytest.raises(NotCompiledError) as second:
        check_that_it_pays(cell, form_of(cell, 1), library)
    assert str(first.value) == str(second.value)
    (kept,) = tmp_path.iterdir()
    kept.write_text("cut o")
    check_that_it_pays(cell, form_of(cell, 1), library)
    check_that_it_pays(cell, form_of(cell, 20_000), library)
    with pytest.raises(NotCompiledError):
        check_that_it_pays(doubling(max_batch=8), form_of(cell, 20_000), library)


@pytest.mark.parametrize(
    ("times", "pays_off"),
    [
        ({64: (61e-6, 117e-6), 512: (366e-6, 1027e-6)}, False),
        ({64: (61e-6, 117e-6), 512: (366e-6, 400e-6)}, True),
        ({64: (1e-6, 5e-6), 512: (2e-6, 1e-6 + EAGER_S)}, True),
        ({}, True),
    ],
    ids=["slower at both", "at one", "by less than an eager step costs", "not known"],
)
def test_it_is_slower_at_all_numbers_of_rows_by_a_fifth_and_what_an_eager_step_costs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: StepTimes, pays_off: bool
) -> None:
    cell = doubling()
    monkeypatch.setattr(pays, "_measure", lambda cell, form: times)
    if pays_off:
        check_that_it_pays(cell, form_of(cell, 1), tmp_path / "step.so")
        return
    said = "117 us, and the module 61, for 64 rows; 1,027 us, and the module 366, for 512 rows"
    with pytest.raises(NotCompiledError, match=said):
        check_that_it_pays(cell, form_of(cell, 1), tmp_path / "step.so")


def test_what_does_not_take_random_rows_is_not_compared(tmp_path: Path) -> None:
    cell = cellrt.cell(lambda x: 2 * x, {"x": (WIDTH,)})

    def raising(*_: object) -> list[torch.Tensor]:
        raise RuntimeError("no such rows")

    cell.run_step = raising  # type: ignore[method-assign]
    check_that_it_pays(cell, form_of(cell, 20_000), tmp_path / "step.so")


@pytest.mark.slow
def test_an_engine_says_why_a_cell_whose_form_is_slower_stays_eager(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(pays, "_measure", lambda cell, form: {64: (61e-6, 117e-6), 512: (366e-6, 1027e-6)})
    own = cellrt.cell(nn.Linear(WIDTH, WIDTH), {"input": (WIDTH,)}, name="own")
    by_hand = cellrt.cell(cells.Projection(WIDTH, WIDTH), {"h": (WIDTH,)}, name="by hand")
    engine, x = small_engine(compile="wait"), torch.ones(WIDTH)
    engine.register(cellrt.unfold("model", example=x)(lambda graph, x: {"y": by_hand(h=own(input=x).output).logits}))
    forms = {name: each["form"] for name, each in engine.statistics()["cells"].items()}
    told = f"{Reason.SLOWER}: 117 us, and the module 61, for 64 rows; 1,027 us, and the module 366, for 512 rows"
    assert forms == {"own": f"eager: {told}", "by hand": "written by hand"}
    assert told in repr(engine) and told in caplog.text
    expected = by_hand.run(own.run(x[None])[0])[0][0]
    torch.testing.assert_close(engine.submit("model", x).result(WAIT_S)["y"], expected)
    close_and_check(engine)
    assert compile_cell(own, LibraryStore(tmp_path)), "whoever asks for the form itself gets it"
