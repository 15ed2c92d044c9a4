"""A cell without its module: what a process needs that builds graphs with a cell and runs none.

An outline is what is declared of a cell and its identity, as JSON. The cell that is made of it has the identity of the
one with the weights, so an engine that has that one takes graphs with this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from cellrt.definition.cell import Cell
from cellrt.definition.declaration import BatchSizes, Declaration
from cellrt.definition.identity import Identity
from cellrt.definition.spec import DTYPE_NAMES, RowSpec
from cellrt.errors import DefinitionError

ATTRIBUTES = "longest_span", "vocabulary"
"""The integers that builders of graphs, and ready-made unfolders, read from a cell's module."""


class Elsewhere:
    """Stands where a cell has its module, whose weights are in another process. ``attributes``: of that module."""

    def __init__(self, attributes: Mapping[str, Any]) -> None:
        vars(self).update(attributes)

    def __call__(self, *_: object, **__: object) -> NoReturn:
        """Raise DefinitionError."""
        raise DefinitionError("the weights of this cell are in another process, which alone can run it")


def outline_of(cell: Cell) -> dict[str, Any]:
    """Return a cell's declaration and identity as values for JSON."""
    declaration = cell.declaration
    asked = {name: getattr(cell.module, name, None) for name in ATTRIBUTES}
    return {
        "name": declaration.name,
        "inputs": {name: _spec_to_json(spec) for name, spec in declaration.inputs.items()},
        "outputs": {name: _spec_to_json(spec) for name, spec in declaration.outputs.items()},
        "carry": dict(declaration.carry),
        "finite": list(declaration.finite),
        "sizes": list(declaration.sizes),
        "priority": declaration.priority,
        "row_wise": declaration.row_wise,
        "identity": cell.identity,
        "module": {name: value for name, value in asked.items() if type(value) is int},
    }


def cell_of(outline: Mapping[str, Any]) -> Cell:
    """Return the cell of an outline, which can be used in graphs and not be run."""
    largest, smallest, supported, largest_rows = outline["sizes"]
    declaration = Declaration(
        outline["name"],
        {name: _spec_of(spec) for name, spec in outline["inputs"].items()},
        {name: _spec_of(spec) for name, spec in outline["outputs"].items()},
        outline["carry"],
        tuple(outline["finite"]),
        BatchSizes(largest, smallest, tuple(supported), largest_rows),
        outline["priority"],
        outline["row_wise"],
    )
    return Cell(Elsewhere(outline["module"]), False, declaration, Identity(outline["identity"], ""))


def _spec_to_json(spec: RowSpec) -> dict[str, Any]:
    return {**spec._asdict(), "shape": list(spec.shape), "dtype": str(spec.dtype).removeprefix("torch.")}


def _spec_of(value: Mapping[str, Any]) -> RowSpec:
    return RowSpec(**{**value, "shape": tuple(value["shape"]), "dtype": DTYPE_NAMES[value["dtype"]]})
