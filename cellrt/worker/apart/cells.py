"""Cells for workers' processes: the engine pickles each once into shared memory.

Pickle is for a process that the engine itself starts. A cell's code must be importable there, so a cell whose
module or function is local to a function, or to the program's main module, has to run in threads.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from types import FunctionType
from typing import Any, NamedTuple

from cellrt.definition.aot.form import compile_cell
from cellrt.definition.aot.store import LibraryStore
from cellrt.definition.cell import Cell
from cellrt.definition.compiled_form import CompiledForm
from cellrt.errors import DefinitionError
from cellrt.worker.apart.pool import Segment, SharedPool, mapped
from cellrt.worker.apart.shared_arenas import MappedArenas, PlacedArena, SharedArenas
from cellrt.worker.cell_type import CellType


class PlacedType(NamedTuple):
    """The description of a cell type for a worker's process."""

    id: int
    cell: Segment
    input_kinds: tuple[int, ...]
    output_kinds: tuple[int, ...]
    has_form: bool
    arenas: list[list[PlacedArena]]
    """The arenas, by location and kind."""


class SharedCells:
    """The cells of one engine, in its pool.

    Args:
        pool: the engine's pool.
    """

    def __init__(self, pool: SharedPool) -> None:
        self.pool = pool
        self._cells: dict[str, Segment] = {}
        self._types: dict[int, tuple[CellType, Segment]] = {}

    def add(self, cell: Cell) -> None:
        """Pickle a cell, unless it is pickled already; this takes long for one with many weights.

        Raise DefinitionError if another process could not load it.
        """
        if cell.identity not in self._cells:
            self._cells[cell.identity] = self._write(_pickled(cell))

    def forget(self, cell_type: CellType) -> None:
        """Free a type without tasks, and its cell if no other described type has it. Only in a turn."""
        known = self._types.pop(cell_type.id, None)
        if known is not None:
            self.pool.free(known[1])
        identity = cell_type.cell.identity
        if all(other.cell.identity != identity for other, _ in self._types.values()):
            cell = self._cells.pop(identity, None)
            if cell is not None:
                self.pool.free(cell)

    def segment_of(self, cell_type: CellType, arenas: Sequence[SharedArenas]) -> Segment:
        """Return the segment with the description of a type; write it if it is new. Only in a turn."""
        known = self._types.get(cell_type.id)
        if known is not None and known[0] is cell_type:
            return known[1]
        self.add(cell_type.cell)  # its last type may have been given up since it was registered
        placed = PlacedType(
            cell_type.id,
            self._cells[cell_type.cell.identity],
            cell_type.input_kinds,
            cell_type.output_kinds,
            cell_type.form is not None,
            [at.placed for at in arenas],
        )
        segment = self._write(pickle.dumps(placed))
        self._types[cell_type.id] = cell_type, segment
        return segment

    def _write(self, data: bytes) -> Segment:
        segment = self.pool.allocate(len(data))
        self.pool.map(segment)[:] = data
        return segment


def load_type(fd: int, segment: Segment, arenas: Sequence[MappedArenas]) -> CellType:
    """Return a cell type in a worker's process, and map the arenas that are new to it."""
    placed: PlacedType = pickle.loads(mapped(fd, segment))
    for at, known in zip(arenas, placed.arenas, strict=True):
        at.adopt(known)
    cell: Cell = pickle.loads(mapped(fd, placed.cell))
    form = _form_of(cell) if placed.has_form else None
    return CellType(placed.id, cell, placed.input_kinds, placed.output_kinds, form)


def _form_of(cell: Cell) -> CompiledForm:
    """Return the form that the engine's process has, made from the same library."""
    form = cell.compiled_form
    return compile_cell(cell, LibraryStore()) if form is None else form


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        """Refuse classes and functions that another process would look for in its own main module."""
        if isinstance(value, type | FunctionType) and value.__module__ == "__main__":
            raise pickle.PicklingError(f"{value.__qualname__} is of the main module, which it does not have")
        return NotImplemented


def _pickled(cell: Cell) -> bytes:
    buffer = io.BytesIO()
    try:
        _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(cell)
    except Exception as error:
        raise DefinitionError(
            f"cell {cell.name!r} cannot be handed to a worker's process, as 'cpu:process' asks for: {error}"
        ) from error
    return buffer.getvalue()
