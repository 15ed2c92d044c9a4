"""What users are told who gave something of another dtype, shape or kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from cellrt.definition.define import cell
from cellrt.definition.spec import RowSpec
from cellrt.errors import CellrtError, RequestError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import small_engine

LINEAR = cell(nn.Linear(3, 2), {"input": (3,)}, name="linear")
MODEL = Unfolder("model", lambda graph, x: {"y": LINEAR(input=x).output}, torch.zeros(3))
CHAIN = Unfolder("chain", lambda graph, x: {"y": graph.chain(LINEAR, input=x).output}, torch.zeros(2, 3))


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        (torch.zeros(3, dtype=torch.float64), r"got float64\[3\]; use .float\(\)"),
        (torch.zeros(3, dtype=torch.float16), r"got float16\[3\]; use .float\(\)"),
        (np.zeros(3), r"got float64\[3\]; use .astype\(numpy.float32\)"),
        ([torch.zeros((), dtype=torch.float64)] * 3, r"got float64\[3\]; use .float\(\)"),
        (torch.zeros(3, dtype=torch.int64), r"got int64\[3\]$"),
    ],
)
def test_floats_of_another_width_are_refused_with_what_makes_them_fit(given, hint):
    with pytest.raises(RequestError, match=rf"input 'input': expected float32\[3\], {hint}"):
        run_one_by_one(MODEL, given)


def test_inputs_of_a_cell_that_is_run_by_itself_are_refused_alike():
    with pytest.raises(RequestError, match=r"got float64\[1, 3\]; use .float\(\)"):
        LINEAR.run(torch.zeros(1, 3, dtype=torch.float64))


def test_a_half_is_asked_for_by_its_dtype():
    half = cell(lambda x: {"y": x + 1}, {"x": RowSpec((2,), torch.float16)}, name="half")
    with pytest.raises(RequestError, match=r"use .to\(torch.float16\)"):
        half.run(torch.zeros(1, 2))


def test_an_output_without_rows_is_told_with_the_shape_that_was_expected():
    squeezed = cell(lambda x: {"y": x.sum(1, keepdim=True).squeeze()}, {"x": (3,)}, name="squeezed")
    told = r"output 'y': expected float32\[1\] \(1 row of float32\[\]\), got float32\[\]; .*squeeze\(-1\)"
    with pytest.raises(CellrtError, match=told):
        run_one_by_one(Unfolder("model", lambda graph, x: {"y": squeezed(x=x).y}, torch.zeros(3)), torch.zeros(3))


def test_zeros_of_a_cell_without_a_state_are_refused():
    for write in (lambda graph: graph.zeros(LINEAR), lambda graph: graph.state(LINEAR)):
        with pytest.raises(RequestError, match="cell 'linear' carries no state: no input of .* see cellrt.cell"):
            run_one_by_one(Unfolder("model", lambda graph, x, write=write: write(graph), torch.zeros(3)), None)


def test_which_of_several_requests_is_wrong_is_counted_from_one_and_by_index():
    with small_engine() as engine:
        engine.register(CHAIN, warm_up=False)
        with pytest.raises(RequestError, match=r"^request 4 of 5 \(index 3\): "):
            engine.submit_many("chain", [torch.zeros(2, 3)] * 3 + [torch.zeros(2, 4)] + [torch.zeros(2, 3)])
