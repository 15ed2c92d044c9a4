"""The switch that turns hand-written CPU kernels off."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cellrt
from cellrt.cells import LSTMCell, ProjectionArgmax
from cellrt.definition.compiled_form import HAND_WRITTEN_VARIABLE, uses_hand_written
from cellrt.errors import DefinitionError

ROOT = Path(__file__).resolve().parents[2]
STATE = cellrt.rows(33)


def forms() -> list[bool]:
    """Whether two of the ready-made cells have a compiled form."""
    made = [
        cellrt.cell(LSTMCell(33, 33), {"x": STATE, "h": STATE, "c": STATE}),
        cellrt.cell(ProjectionArgmax(33, 50), {"h": STATE}),
    ]
    return [cell.compiled_form is not None for cell in made]


def has_bits_of_torch() -> bool:
    """Whether a cell gives for inference just what it gives in plain torch, which the kernels do not."""
    cell, given = LSTMCell(33, 33), [torch.randn(50, 33) for _ in range(3)]
    plain = cell(*given)
    with torch.inference_mode():
        return all(torch.equal(one, two) for one, two in zip(cell(*given), plain, strict=True))


def test_kernels_are_used_unless_they_are_turned_off():
    assert forms() == [True, True]
    assert not has_bits_of_torch()


def test_off_leaves_plain_torch():
    program = "from tests.cells.test_hand_written import *\nprint(forms(), has_bits_of_torch())"
    done = subprocess.run(
        [sys.executable, "-c", program], env=os.environ | {HAND_WRITTEN_VARIABLE: "off"}, cwd=ROOT,
        capture_output=True, text=True, timeout=110,
    )  # fmt: skip
    assert done.stdout.strip() == "[False, False] True", done.stderr


def test_another_setting_is_refused():
    with pytest.raises(DefinitionError, match="CELLRT_HAND_WRITTEN must be 'on' or 'off', got '0'"):
        uses_hand_written("0")
