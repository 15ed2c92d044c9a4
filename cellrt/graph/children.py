"""Matches the input names of a tree or dag node with the outputs of its children or sources."""

from __future__ import annotations

from functools import lru_cache

from cellrt.core.templates.program import CARRY, LIST
from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec

Word = tuple[int, int, int]
"""(mode, a, b) of an input, as ``core/templates/node_sets.py`` reads it."""


@lru_cache(maxsize=256)
def child_word(cell: Cell, name: str, child: Cell) -> Word | str:
    """Return which output of which child an input of an inner cell reads, or a text that says what is wrong.

    The input's name decides.
    """
    spec = cell.inputs[name]
    stem, _, suffix = name.rpartition("_")
    row = RowSpec(spec.shape, spec.dtype)
    index = {"left": 0, "right": 1}.get(suffix, int(suffix) if suffix.isdigit() else -1)
    output = name if spec.ragged else stem
    if (not spec.ragged and index < 0) or output not in cell.outputs or output not in child.outputs:
        return f"missing, and not the name of a child's output; expected {spec}"
    for maker in (cell, child):
        if maker.outputs[output] != row or maker.output_index[output] != cell.output_index[output]:
            return f"expected {row}, got {maker.outputs[output]} of {maker.name!r}"
    number = cell.output_index[output]
    return (LIST, number, 0) if spec.ragged else (CARRY, index, number)
