"""The needs of a model's example, and which of them the registry of an engine lacks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from cellrt.core.state.tables import NUM_PERMANENT
from cellrt.core.templates.program_operations import rename_types
from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.engine.registry import Registry
from cellrt.errors import DefinitionError, RequestError
from cellrt.graph.results import Recorded
from cellrt.graph.slots import check_key
from cellrt.graph.unfolder import Unfolder


class Discovery:
    """The needs of a model's example, and which of them a registry lacks.

    Kinds and constants get the ids that they will have once the new ones are added, cells their numbers in ``cells``.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.max_nodes = registry.max_nodes
        self.cells: list[Cell] = []
        """The cells, each once."""
        self._numbers: dict[str, int] = {}
        self._kind_ids, self._constants = dict(registry.kind_ids), dict(registry.constants)
        self._num_constants = Counter(kind for kind, _ in self._constants)

    def unfold(self, unfolder: Unfolder) -> Recorded:
        """Unfold a model's example and record its cells. Raise DefinitionError if it does not unfold."""
        try:
            recorded = unfolder.record(self, unfolder.example)
        except RequestError as error:
            raise DefinitionError(f"the example request does not unfold: {error}") from error
        check_key(unfolder, self, recorded)
        for cell in unfolder.cells:
            self.cell_type(cell)
        return recorded

    def with_types(self, recorded: Recorded, types: Mapping[str, int]) -> Recorded:
        """Return a recording that was made with this as binding as if it were made with a model of these types."""
        ids = [types[cell.identity] for cell in self.cells]
        program = np.frombuffer(recorded.program, np.int32)
        renamed = rename_types(program, [len(cell.inputs) for cell in self.cells], ids)
        return recorded._replace(program=renamed.tobytes())

    def cell_type(self, cell: Cell) -> int:
        """Return the number of a cell; equal cells share one."""
        if cell.identity not in self._numbers:
            self._numbers[cell.identity] = len(self.cells)
            self.cells.append(cell)
            for spec in (*cell.inputs.values(), *cell.outputs.values()):
                if not spec.span:
                    self.kind(spec)
        return self._numbers[cell.identity]

    def kind(self, spec: RowSpec) -> int:
        """Return the kind of a row spec."""
        return self._kind_ids.setdefault(spec.stored, len(self._kind_ids))

    def constant_row(self, kind: int, content: bytes) -> int:
        """Return the permanent row of a constant, or -1 if there is none left."""
        key = kind, content
        if key not in self._constants:
            if self._num_constants[kind] == NUM_PERMANENT - 1:
                return -1
            self._num_constants[kind] += 1
            self._constants[key] = self._num_constants[kind]
        return self._constants[key]

    @property
    def new_kinds(self) -> list[RowSpec]:
        """The row specs that the registry lacks, in order of their kinds."""
        return [spec for spec in self._kind_ids if spec not in self._registry.kind_ids]

    @property
    def new_constants(self) -> list[tuple[int, bytes, int]]:
        """The constants that the registry lacks: (kind, bits, row) of each."""
        return [(*key, row) for key, row in self._constants.items() if key not in self._registry.constants]
