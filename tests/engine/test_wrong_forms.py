"""A hand-written compiled form that computes something else than its module is not used, and the log says so."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch
from torch import nn

import cellrt
from cellrt.definition.compiled_form import (
    DONE,
    POSITIONS,
    REFUSED,
    CompiledForm,
    TaskFunction,
    array_at,
    port_address,
    read_word,
)
from cellrt.definition.span_form import AT, FIRST_TENSOR, SIZES, TENSOR, SpanForm
from tests.engine.helpers import WAIT_S, close_and_check, small_engine

WIDTH = 4


@TaskFunction
def scale(constants, task):
    """``x`` -> ``y``, times the one constant; refuses if that is 0."""
    size = WIDTH * read_word(task, POSITIONS)
    given, made = array_at(port_address(task, 0), size, np.float32), array_at(port_address(task, 1), size, np.float32)
    for k in range(size):
        made[k] = read_word(constants, 0) * given[k]
    return DONE if read_word(constants, 0) else REFUSED


@TaskFunction
def largest(constants, task):
    """``x`` -> ``y``, where the largest is, plus the one constant."""
    rows = read_word(task, POSITIONS)
    given = array_at(port_address(task, 0), (rows, WIDTH), np.float32)
    made = array_at(port_address(task, 1), rows, np.int64)
    for row in range(rows):
        made[row] = np.argmax(given[row]) + read_word(constants, 0)
    return DONE


@TaskFunction
def add_places(constants, task):
    """``x``, ``text`` -> ``y``: each number and its row's place, times the one constant."""
    tensors = array_at(task + 8 * FIRST_TENSOR, (6, TENSOR), np.int64)
    rows = tensors[0, SIZES]
    given, made = array_at(tensors[0, AT], rows, np.float32), array_at(tensors[5, AT], rows, np.float32)
    place = array_at(tensors[1, AT], rows, np.int32)
    for row in range(rows):
        made[row] = given[row] + read_word(constants, 0) * place[row]
    return DONE


class Formed(nn.Module):
    """Something whose form has one constant."""

    def __init__(self, constant: int) -> None:
        super().__init__()
        self.constants = np.array([constant])


class Doubled(Formed):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": 2 * x}

    def compiled_form(self) -> CompiledForm:
        return CompiledForm(
            scale, {"x": cellrt.rows(WIDTH)}, {"y": cellrt.rows(WIDTH)}, self.constants, keeps=self.constants
        )


class Raises(Doubled):
    compiled_form = Doubled.compiled_form

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        if x.device.type == "cpu" and not bool((x == 0).all()):
            raise ValueError("random rows are none of mine")
        return {"y": 2 * x}


class Largest(Formed):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x.argmax(1)}

    def compiled_form(self) -> CompiledForm:
        return CompiledForm(
            largest, {"x": cellrt.rows(WIDTH)}, {"y": cellrt.token}, self.constants, keeps=self.constants
        )


class Placed(Formed):
    def forward(self, x: torch.Tensor, text: cellrt.Spans) -> dict[str, torch.Tensor]:
        return {"y": x + text.positions}

    def compiled_form(self) -> SpanForm:
        inputs = {"x": cellrt.rows(), "text": cellrt.span()}
        return SpanForm.of(add_places, inputs, {"y": cellrt.rows()}, self.constants, keeps=self.constants)


def cell_of(kind: type[Formed], constant: int) -> cellrt.Cell:
    inputs = {"x": cellrt.rows(), "text": cellrt.span()} if kind is Placed else {"x": cellrt.rows(WIDTH)}
    return cellrt.cell(kind(constant), inputs, name="formed")


@pytest.mark.parametrize(
    ("kind", "right", "wrong"), [(Doubled, 2, 3), (Largest, 0, 1), (Placed, 1, 2)], ids=["rows", "tokens", "spans"]
)
def test_a_form_is_used_if_it_gives_what_its_module_gives(kind: type[Formed], right: int, wrong: int, caplog) -> None:
    with caplog.at_level(logging.WARNING, "cellrt"):
        assert cell_of(kind, right).compiled_form is not None and "'formed' runs" not in caplog.text
        cell = cell_of(kind, wrong)
        assert cell.compiled_form is None and "compiled form gave other results than the module: y" in cell.why_no_form
    assert caplog.text.count("'formed' runs without it") == 1


def test_rows_that_a_form_refuses_or_its_module_raises_on_say_nothing_against_it() -> None:
    assert cell_of(Doubled, 0).compiled_form is not None
    assert cell_of(Raises, 3).compiled_form is not None


def test_a_request_is_served_by_the_module_of_a_form_that_is_wrong() -> None:
    cell = cell_of(Doubled, 3)
    engine = small_engine()
    engine.register(cellrt.Unfolder("doubled", lambda graph, x: {"y": cell(x=x).y}, torch.zeros(WIDTH)), warm_up=False)
    x = torch.randn(WIDTH)
    assert torch.equal(engine.submit("doubled", x).result(WAIT_S)["y"], 2 * x)
    assert "formed eager: its module's compiled form gave other results than the module: y" in repr(engine)
    close_and_check(engine)


def test_trying_a_form_draws_nothing_from_torchs_random_state() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert cell_of(Doubled, 2).compiled_form is not None
    assert torch.equal(before, torch.get_rng_state())
