"""What one engine knows: its cell types, row kinds, constants and models. Nothing here is shared between engines."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import networkx as nx
import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.processor import Limits, Port, Processor
from cellrt.core.program import draft_program
from cellrt.core.shape import Shape
from cellrt.core.tables import NUM_PERMANENT
from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.engine.places import Places
from cellrt.errors import DefinitionError, RequestError, RequestTooLargeError
from cellrt.graph.graph import Recorded
from cellrt.graph.results import ResultLayout, StateLayout
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.cell_type import CellType

MAX_REMEMBERED_TENSORS = 1024


class Plan(NamedTuple):
    """A request ready to be admitted."""

    shape: Shape
    num_nodes: int
    """Nodes of the graph; a loop counts as its step limit."""
    results: tuple[ResultLayout, ...]
    externals: list[tuple[int, NDArray[Any]]]
    states: tuple[StateLayout, ...] = ()


@dataclass
class Discovery:
    """A binding that accepts anything and notes it: finds the cells and kinds of an example request."""

    max_nodes: int
    cells: list[Cell] = field(default_factory=list)
    specs: list[RowSpec] = field(default_factory=list)
    constants: list[tuple[RowSpec, torch.Tensor]] = field(default_factory=list)

    def cell_type(self, cell: Cell) -> int:
        """Position of the cell among the discovered ones; equal cells share one."""
        if all(cell.identity != known.identity for known in self.cells):
            self.cells.append(cell)
        return next(k for k, known in enumerate(self.cells) if known.identity == cell.identity)

    def kind(self, spec: RowSpec) -> int:
        """Position of the row spec among the discovered ones."""
        spec = RowSpec(spec.shape, spec.dtype)
        if spec not in self.specs:
            self.specs.append(spec)
        return self.specs.index(spec)

    def constant_row(self, spec: RowSpec, value: torch.Tensor) -> int:
        """Notes a constant; any row will do for the example."""
        self.constants.append((spec, value))
        return 1


class Registry:
    """Cell types, kinds and constants of one engine. Written by the thread that registers, one at a time."""

    def __init__(self, processor: Processor, max_nodes: int) -> None:
        self._processor = processor
        self.max_nodes = max_nodes
        self.types: dict[int, CellType] = {}
        self.kinds: list[RowSpec] = []
        self._type_ids: dict[str, int] = {}
        self._num_users: Counter[int] = Counter()
        """Models of each cell type."""
        self._kind_ids: dict[RowSpec, int] = {}
        self._constants: dict[tuple[int, bytes], int] = {}
        self._rows_of_tensors: dict[int, tuple[torch.Tensor, int]] = {}

    def name_of(self, type_id: int) -> str:
        """Name of a type's cell."""
        return self.types[type_id].cell.name

    def has_type(self, cell: Cell) -> bool:
        """Whether an equal cell is known."""
        return cell.identity in self._type_ids

    def find_type(self, cell: Cell) -> int:
        """Type id of an equal cell; -1 if none is known."""
        return self._type_ids.get(cell.identity, -1)

    def kind(self, spec: RowSpec) -> int:
        """Kind of a row spec. Raises RequestError if no cell of the engine has such rows."""
        if spec.ragged:
            spec = RowSpec(spec.shape, spec.dtype)
        if spec not in self._kind_ids:
            raise RequestError(f"no cell of this engine has rows of {spec}")
        return self._kind_ids[spec]

    def constant_row(self, spec: RowSpec, value: torch.Tensor) -> int:
        """Permanent row of a constant, or -1: then it travels with the request."""
        known = self._rows_of_tensors.get(id(value))
        if known is None:
            row = self._constants.get((self.kind(spec), _bytes_of(value)), -1)
            if row < 0:
                return row
            if len(self._rows_of_tensors) >= MAX_REMEMBERED_TENSORS:
                self._rows_of_tensors.clear()
            known = self._rows_of_tensors[id(value)] = (value, row)
        return known[1]

    def add_kind(self, spec: RowSpec, worker_rows: int, host_rows: int) -> int | None:
        """Adds a kind of rows; returns its id, or None if it is known."""
        spec = RowSpec(spec.shape, spec.dtype)
        if spec in self._kind_ids:
            return None
        kind = self._processor.add_kind(worker_rows, host_rows)
        self.kinds.append(spec)
        self._kind_ids[spec] = kind
        return kind

    def add_constant(self, spec: RowSpec, value: torch.Tensor) -> int | None:
        """Gives a constant a permanent row; returns it, or None if it has one or there is none left."""
        kind = self.kind(spec)
        key = (kind, _bytes_of(value))
        row = 1 + sum(1 for known, _ in self._constants if known == kind)
        if key in self._constants or row >= NUM_PERMANENT:
            return None
        self._constants[key] = row
        return row

    def add_type(self, cell: Cell, priority: int) -> CellType | None:
        """Adds a cell type; returns it, or None if an equal cell is known."""
        if cell.identity in self._type_ids:
            return None
        names = list(cell.outputs)
        inputs = [
            Port(self.kind(spec), names.index(cell.carry[name]) if name in cell.carry else -1, spec.ragged)
            for name, spec in cell.inputs.items()
        ]
        outputs = [Port(self.kind(spec)) for spec in cell.outputs.values()]
        type_id = self._processor.add_type(
            inputs,
            outputs,
            max_batch=cell.max_batch,
            min_batch=cell.min_batch,
            priority=priority,
            # Inside a run the number of rows shrinks: not for cells that support certain sizes only.
            max_steps=1 if cell.batch_sizes and not cell.has_steps else 1 << 20,
        )
        made = CellType(type_id, cell, tuple(p.kind for p in inputs), tuple(p.kind for p in outputs))
        self.types[type_id] = made
        self._type_ids[cell.identity] = type_id
        return made

    def use(self, cells: Sequence[Cell]) -> frozenset[int]:
        """Type ids of cells that are known, which stay as long as the model that asks: see ``release``."""
        types = frozenset(self._type_ids[cell.identity] for cell in cells)
        self._num_users.update(types)
        return types

    def release(self, types: frozenset[int]) -> list[int]:
        """Gives up what ``use`` gave; returns the types that are no more."""
        self._num_users.subtract(types)
        unused = [type_id for type_id in types if not self._num_users[type_id]]
        for type_id in unused:
            made = self.types.pop(type_id)
            del self._type_ids[made.cell.identity], self._num_users[type_id]
        return unused


class Model:
    """An unfolder bound to an engine, with the compiled shapes of the requests it has seen.

    Attributes:
        name: the unfolder's.
        types: the cell types that its requests may use.
        places: its part of the queue.
        states: what a session of the model keeps.
        num_live: requests accepted and not over; written in turns.
        num_sessions: open sessions.
    """

    def __init__(
        self,
        unfolder: Unfolder,
        registry: Registry,
        processor: Processor,
        types: frozenset[int],
        max_queue: int | None = None,
        max_cached_bytes: int = 1 << 24,
    ) -> None:
        self.unfolder, self.name, self.types = unfolder, unfolder.name, types
        self.places = Places(f"model {unfolder.name!r}", max_queue)
        self.states: tuple[StateLayout, ...] = ()
        self.num_live = self.num_sessions = 0
        self._registry, self._processor = registry, processor
        self.max_nodes = registry.max_nodes
        self._known_cells: dict[int, tuple[Cell, int]] = {}
        self._shapes: OrderedDict[bytes, tuple[Shape, int]] = OrderedDict()
        self._cached_bytes, self._max_cached_bytes = 0, max_cached_bytes

    @property
    def is_idle(self) -> bool:
        """Whether no request and no session of it is left; a turn may ask."""
        return not (self.num_live or self.num_sessions or self.places.num_unfinished)

    def cell_type(self, cell: Cell) -> int:
        """Type id of a cell. Raises RequestError if the model does not have it."""
        known = self._known_cells.get(id(cell))
        if known is not None:
            return known[1]
        type_id = self._registry.find_type(cell)
        if type_id not in self.types:
            raise RequestError(
                f"cell {cell.name!r} is not one of the model's: the example request did not use it; "
                "name it in unfold(cells=[...])"
            )
        self._known_cells[id(cell)] = (cell, type_id)
        return type_id

    def kind(self, spec: RowSpec) -> int:
        """See ``Registry.kind``."""
        return self._registry.kind(spec)

    def constant_row(self, spec: RowSpec, value: torch.Tensor) -> int:
        """See ``Registry.constant_row``."""
        return self._registry.constant_row(spec, value)

    def plan(self, request: Any) -> Plan:
        """Unfolds a request and checks it, in the caller's thread.

        Raises RequestError, RequestTooLargeError.
        """
        recorded = self.unfolder.record(self, request)
        return Plan(*self._shape(recorded), recorded.results, recorded.externals, recorded.states)

    def _shape(self, recorded: Recorded) -> tuple[Shape, int]:
        """The compiled graph, and its number of nodes with a loop counted as its step limit."""
        known = self._shapes.get(recorded.program)
        if known is None:
            try:
                shape = self._processor.compile(np.frombuffer(recorded.program, np.int32))
            except RequestTooLargeError as error:
                raise RequestTooLargeError(f"model {self.unfolder.name!r}: {error}") from None
            problem = self._processor.why_too_large(shape, self._registry.kinds)
            if problem:
                raise RequestTooLargeError(f"model {self.unfolder.name!r}: the request needs {problem}")
            known = shape, shape.num_steps
            self._keep(recorded.program, known)
        return known

    def _keep(self, program: bytes, known: tuple[Shape, int]) -> None:
        """Caches a shape; the oldest leave when the cache is over its size. Losing a race only costs a recompile."""
        self._shapes[program] = known
        self._cached_bytes += len(program)
        while self._cached_bytes > self._max_cached_bytes and len(self._shapes) > 1:
            oldest, _ = self._shapes.popitem(last=False)
            self._cached_bytes -= len(oldest)


def default_priorities(recorded: Recorded, discovery: Discovery) -> list[int]:
    """Priority of each discovered cell from the example's type graph: cell types later in the graph come first.

    (BatchMaker section 2.4.3: decoder before encoder, internal before leaf.) Types on a cycle share a depth.
    """
    types, ports = _example_tables(discovery)
    draft = draft_program(np.frombuffer(recorded.program, np.int32), types, ports)
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(range(len(discovery.cells)))
    for node, after in enumerate(draft.node_types.tolist()):
        at = int(draft.ref_starts[node])
        for spec in discovery.cells[after].inputs.values():
            count = int(draft.refs[at]) if spec.ragged else 1
            at += int(spec.ragged)
            for value in draft.refs[at : at + count].tolist():
                producer = int(draft.producers[value])
                if producer >= 0:
                    graph.add_edge(int(draft.node_types[producer]), after)
            at += count
    groups = nx.condensation(graph)
    depth: dict[int, int] = {}
    for group in nx.topological_sort(groups):
        depth[group] = max((depth[before] + 1 for before in groups.predecessors(group)), default=0)
    return [depth[groups.graph["mapping"][k]] for k in range(len(discovery.cells))]


def _example_tables(discovery: Discovery) -> tuple[np.ndarray, np.ndarray]:
    """Types and ports tables for the discovered cells alone."""
    scratch = Processor(
        1, Limits(max_requests=1, max_nodes=1, max_values=1, max_links=1, max_subgraphs=1, story_events=0)
    )
    for _ in discovery.specs:
        scratch.add_kind(0, 0)
    for cell in discovery.cells:
        names = list(cell.outputs)
        inputs = [
            Port(
                discovery.kind(RowSpec(s.shape, s.dtype)),
                names.index(cell.carry[n]) if n in cell.carry else -1,
                s.ragged,
            )
            for n, s in cell.inputs.items()
        ]
        outputs = [Port(discovery.kind(spec)) for spec in cell.outputs.values()]
        scratch.add_type(inputs, outputs, max_batch=1)
    return scratch.tables.types, scratch.tables.ports


def _bytes_of(value: torch.Tensor) -> bytes:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def check_example(unfolder: Unfolder, discovery: Discovery) -> Recorded:
    """Unfolds the example request with a binding that notes all cells and specs.

    Raises DefinitionError if the example does not unfold.
    """
    try:
        recorded = unfolder.record(discovery, unfolder.example)
    except RequestError as error:
        raise DefinitionError(f"the example request does not unfold: {error}") from error
    for cell in unfolder.cells:
        discovery.cell_type(cell)
    for cell in discovery.cells:
        for spec in (*cell.inputs.values(), *cell.outputs.values()):
            discovery.kind(RowSpec(spec.shape, spec.dtype))
    return recorded
