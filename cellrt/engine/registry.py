"""The registry of one engine: its cell types, row kinds, constants and models. Engines share none of these."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from cellrt.core.processor import Processor, SizedTemplate, Template
from cellrt.core.state.ports import Port
from cellrt.definition.cell import Cell
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.spec import RowSpec
from cellrt.engine.answer_layout import Answers
from cellrt.engine.needs import why_never
from cellrt.engine.places import NO_LIMIT, Places, QueueLimit
from cellrt.engine.template_cache import MAX_CACHED_BYTES, TemplateCache
from cellrt.engine.together import Reader
from cellrt.errors import RequestError, RequestTooLargeError
from cellrt.graph.known import Alike, Known, KnownGraphs
from cellrt.graph.results import Recorded, ResultLayout, StateLayout
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.cell_type import CellType

NO_LIMITS: Mapping[str, int] = MappingProxyType({})
_NUMBERS = count(1)


class Plan:
    """The plan of a graph's requests, which share it.

    Attributes:
        program: the recorded program (``core/templates/program.py``).
        template, results, states: those of the graph.
        answers: the results that compiled code copies to clients.
        lengths_address: the address of the template's lengths.
        readers: the readers of the results. Graphs whose results have the same layout share them.
        answered_with: plans that have the same object may be answered together: the graphs differ in lengths alone.
        stepped: the name, kind and positions of each result that has a row for every step.
        admission_group: the template, whose requests may be admitted together whatever their lengths; None for a
            graph without lengths, whose requests may be admitted with any others of this kind.
        num_nodes: nodes of the graph; a loop counts as its step limit.
        comes_again: True if a second request has the same graph.
        prepared: the object that hands in its requests without Python (``fast_path.py``). None: it is not made yet;
            False: there can be none.
    """

    __slots__ = (
        "admission_group",
        "answered_with",
        "answers",
        "comes_again",
        "lengths_address",
        "num_nodes",
        "prepared",
        "program",
        "readers",
        "results",
        "states",
        "stepped",
        "template",
    )

    def __init__(self, template: SizedTemplate, recorded: Recorded, its: _Answers, answered_with: object) -> None:
        self.template, self.num_nodes, self.answered_with = template, template.num_steps, answered_with
        self.program, _, self.results, self.states = recorded
        _, self.readers, self.answers, self.stepped = its
        self.lengths_address, self.admission_group = 0, None
        self.comes_again = False
        self.prepared: Any = None
        if template.lengths.size:
            self.lengths_address, self.admission_group = int(template.lengths.ctypes.data), template.template

    @property
    def num_bytes(self) -> int:
        """Memory of the template's rows."""
        return self.template.num_bytes


class _Answers(NamedTuple):
    """The results of a graph, and their readers."""

    results: tuple[ResultLayout, ...]
    readers: Sequence[Reader]
    answers: Answers
    stepped: Sequence[Reader]

    @classmethod
    def of(cls, results: tuple[ResultLayout, ...], kinds: Sequence[RowSpec]) -> _Answers:
        """Make the readers of results."""
        readers = [Reader(layout, kinds[layout.kind]) for layout in results]
        stepped = [reader for reader, layout in zip(readers, results) if not layout.is_single]
        return cls(results, readers, Answers(readers), stepped)

    def goes_with(self, results: tuple[ResultLayout, ...]) -> bool:
        """Return whether these are the same results, but for their positions."""
        return [one._replace(positions=()) for one in self.results] == [one._replace(positions=()) for one in results]


class Planned(NamedTuple):
    """Requests of one graph, ready to be handed in."""

    plan: Plan
    alike: Alike


MAX_ALIKE = 256
"""The most layouts of results that are remembered."""
MAX_SPECS = 4096
"""The most spec objects whose kinds are remembered: those of cells are asked for again and again."""


class Registry:
    """Cell types, kinds and constants of one engine. Written by the thread that registers, one at a time."""

    def __init__(self, processor: Processor, max_nodes: int) -> None:
        self._processor = processor
        self.max_nodes = max_nodes
        self.types: dict[int, CellType] = {}
        self.kinds: list[RowSpec] = []
        self._type_ids: dict[str, int] = {}
        """Types by identity; a cell with several has that of its newest form."""
        self._num_users: Counter[int] = Counter()
        """The number of models that use each cell type."""
        self.kind_ids: dict[RowSpec, int] = {}
        self._kinds_of: dict[int, tuple[RowSpec, int]] = {}
        """Kinds by spec object: hashing its fields takes a good part of a small request's time."""
        self.constants: dict[tuple[int, bytes], int] = {}
        """Permanent rows by kind and bits: the tensor that an unfolder gives may hold other numbers each time."""

    def name_of(self, type_id: int) -> str:
        """Return the name of a type's cell."""
        return self.types[type_id].cell.name

    def has_type(self, cell: Cell, form: CompiledForm | None) -> bool:
        """Return whether an equal cell is known, and runs in that form."""
        type_id = self._type_ids.get(cell.identity)
        return type_id is not None and self.types[type_id].form is form

    def kind(self, spec: RowSpec) -> int:
        """Return the kind of a row spec. Raise RequestError if no cell of the engine has such rows."""
        known = self._kinds_of.get(id(spec))
        if known is not None and known[0] is spec:
            return known[1]
        kind = self.kind_ids.get(spec.stored)
        if kind is None:
            raise RequestError(f"no cell of this engine has rows of {spec}")
        if len(self._kinds_of) < MAX_SPECS:
            self._kinds_of[id(spec)] = spec, kind
        return kind

    def constant_row(self, kind: int, content: bytes) -> int:
        """Return the permanent row of a constant, or -1: then it is sent with the request."""
        return self.constants.get((kind, content), -1)

    def add_kind(self, spec: RowSpec, worker_rows: int, host_rows: int) -> int:
        """Add a kind of rows; return its id."""
        kind = self._processor.add_kind(worker_rows, host_rows, bool(spec.page_size))
        self.kinds.append(spec)
        self.kind_ids[spec] = kind
        return kind

    def add_type(
        self, cell: Cell, form: CompiledForm | None, max_batch: Mapping[str, int] = NO_LIMITS
    ) -> CellType | None:
        """Add a cell type; return it, or None if an equal cell is known that runs in that form.

        ``max_batch``: the most rows of a task by cell name, where that is less than the cell takes.
        """
        if self.has_type(cell, form):
            return None
        names = list(cell.outputs)
        inputs = [
            Port(
                0 if spec.span else self.kind(spec),
                names.index(cell.carry[name]) if name in cell.carry else -1,
                spec.ragged,
                spec.page_size,
                spec.appends,
                bool(spec.span),
            )
            for name, spec in cell.inputs.items()
        ]
        outputs = [Port(self.kind(spec)) for spec in cell.outputs.values()]
        type_id = self._processor.add_type(
            inputs,
            outputs,
            max_batch=_most_rows(cell, max_batch),
            min_batch=cell.min_batch,
            # Inside a run the number of rows shrinks: not for cells that support certain sizes only.
            max_steps=1 if cell.batch_sizes and not cell.has_steps else 1 << 20,
            max_rows=self._most_task_rows(cell, outputs),
            is_whole=cell.is_whole,
        )
        made = CellType(type_id, cell, tuple(p.kind for p in inputs), tuple(p.kind for p in outputs), form)
        self.types[type_id] = made
        self._type_ids[cell.identity] = type_id
        return made

    def _most_task_rows(self, cell: Cell, outputs: Sequence[Port]) -> int:
        """Return the most rows of tasks of a cell whose nodes may have several.

        The module's results for this many rows take no more memory than a worker has for such rows. A cell that needs
        all rows of a node at once keeps its own limit.
        """
        if not cell.has_spans or cell.is_whole:
            return cell.max_batch_rows
        there = self._processor.tables.kinds["worker_rows"]
        return max(1, min([cell.max_batch_rows, *[int(there[port.kind]) for port in outputs]]))

    def use(self, cells: Iterable[Cell]) -> dict[str, int]:
        """Return the types of known cells, by identity; they stay as long as the model that asks (``release``)."""
        types = {cell.identity: self._type_ids[cell.identity] for cell in cells}
        self._num_users.update(types.values())
        return types

    def release(self, types: Mapping[str, int]) -> list[tuple[CellType, int | None]]:
        """Give up the types that ``use`` returned; return those removed, each with another one of its cell, if any."""
        self._num_users.subtract(types.values())
        unused = [self.types.pop(type_id) for type_id in types.values() if not self._num_users[type_id]]
        for made in unused:
            del self._num_users[made.id]
            identity = made.cell.identity
            if self._type_ids[identity] == made.id:
                del self._type_ids[identity]
                for other in self.types.values():  # in an older form, with requests that go on
                    if other.cell.identity == identity:
                        self._type_ids[identity] = other.id
        return [(made, self._type_ids.get(made.cell.identity)) for made in unused]


@dataclass(eq=False, slots=True)
class Origin:
    """The origin of a registered model, set by its loader; a model keeps it when its cells get other forms."""

    source: Any = None
    version: int = 0


class Model:
    """An unfolder bound to an engine, with the templates of the requests it has seen.

    Attributes:
        name: the unfolder's.
        number: one that no other model of the process has.
        types: the cell types that its requests may use, by identity.
        places: its part of the queue.
        plans_by_program: the plans of its requests' graphs, by their programs.
        states: the states that a session of the model keeps; from the example.
        origin: where it came from.
        priorities: the priorities of its cells that were chosen at registration, by name.
        max_batch: most rows of a task, by the names of cells, as chosen there.
        num_live: requests accepted and not ended; written in turns.
        num_sessions: open sessions.
        unfolding: an item for each client that unfolds for it (see ``Submission``), or waits with what it has unfolded.
        known_graphs: the function that tells a request's key, and what is known by key; None: requests have none.
        is_given_up: whether a turn found that nothing uses it: its cells' numbers may belong to others since.
    """

    def __init__(
        self,
        unfolder: Unfolder,
        registry: Registry,
        processor: Processor,
        types: Mapping[str, int],
        priorities: Mapping[str, int] | None = None,
        max_queue: QueueLimit = NO_LIMIT,
        max_cached_bytes: int = MAX_CACHED_BYTES,
    ) -> None:
        self.unfolder, self.name, self.types = unfolder, unfolder.name, types
        self.number = next(_NUMBERS)
        self.places = Places(f"model {unfolder.name!r}", max_queue)
        self.priorities, self.max_queue = dict(priorities or {}), max_queue
        self.max_batch: Mapping[str, int] = NO_LIMITS
        self.states: tuple[StateLayout, ...] = ()
        self.origin = Origin()
        self.num_live = self.num_sessions = 0
        self.unfolding: set[object] = set()
        self.is_given_up = False
        self._registry, self._processor = registry, processor
        self.kind, self.constant_row = registry.kind, registry.constant_row
        self.max_nodes = registry.max_nodes
        self.plans_by_program = TemplateCache[Plan](max_cached_bytes)
        self._latest: WeakKeyDictionary[Template, _Answers] = WeakKeyDictionary()
        self._alike: dict[tuple[ResultLayout, ...], _Answers] = {}
        """The results of graphs without lengths, by their positions."""
        self._known = KnownGraphs(unfolder)
        self.known_graphs = self._known.by_key()

    @property
    def is_idle(self) -> bool:
        """True if it has no request, no session and no client that unfolds for it; a turn may ask."""
        return not (self.num_live or self.num_sessions or self.places.num_unfinished or self.unfolding)

    def cell_type(self, cell: Cell) -> int:
        """Return the type id of a cell. Raise RequestError if the model does not have it."""
        type_id = self.types.get(cell.identity)
        if type_id is None:
            raise RequestError(
                f"cell {cell.name!r} is not one of the model's: the example request did not use it; "
                "name it in unfold(cells=[...])"
            )
        return type_id

    def known_graph_of(self, request: Any) -> Known | None:
        """Return what is known of the graph of requests with the key of one that was unfolded; None: nothing."""
        if self.known_graphs is None:
            return None
        key, by_key = self.known_graphs
        try:
            return by_key.get(key(request))
        except Exception:  # it was unfolded without the key's help
            return None

    def plans(self, requests: Sequence[Any]) -> list[Planned]:
        """Unfold requests and check them, in the caller's thread; those of one graph together.

        Raise RequestError, RequestTooLargeError.
        """
        found = self._known.record(self, requests)
        if len(found) == 1:  # as most are
            return [Planned(self.plan_of(found[0].recorded), found[0])]
        return [Planned(self.plan_of(alike.recorded), alike) for alike in found]

    def plan_of(self, recorded: Recorded) -> Plan:
        """Return the plan of a recording. Raise RequestTooLargeError."""
        plan = self.plans_by_program.get(recorded.program)
        if plan is None:
            plan = self._plan(self._compile(recorded.program), recorded)
            if self.plans_by_program.is_worth(recorded.program):
                self.plans_by_program.add(recorded.program, plan)
            return plan
        if plan.results != recorded.results or plan.states != recorded.states:
            return self._plan(plan.template, recorded)
        plan.comes_again = True
        return plan

    def _plan(self, template: SizedTemplate, recorded: Recorded) -> Plan:
        if not template.lengths.size:
            # Requests whose results lie alike are answered together, whatever their graphs: trees, of which only the
            # root is a result.
            alike = self._alike.get(recorded.results) or self._answers_of(recorded.results)
            return Plan(template, recorded, alike, alike)
        known = self._latest.get(template.template)
        if known is not None and known.results == recorded.results:
            return Plan(template, recorded, known, known)
        made = _Answers.of(recorded.results, self._registry.kinds)
        if known is None or not known.goes_with(recorded.results):
            known = self._latest[template.template] = made
        return Plan(template, recorded, made, known)

    def _answers_of(self, results: tuple[ResultLayout, ...]) -> _Answers:
        """Return the answers of a graph without lengths, and remember them."""
        if len(self._alike) >= MAX_ALIKE:
            self._alike = {}
        made = self._alike[results] = _Answers.of(results, self._registry.kinds)
        return made

    def _compile(self, program: bytes) -> SizedTemplate:
        try:
            template = self._processor.compile(np.frombuffer(program, np.int32))
        except RequestTooLargeError as error:
            raise RequestTooLargeError(f"model {self.name!r}: {error}") from None
        if not template.fits and (problem := self.why_never(template)):
            raise RequestTooLargeError(f"model {self.name!r}: the request needs {problem}")
        return template

    def why_never(self, template: SizedTemplate, session: int = -1) -> str | None:
        """Return what part of a request an empty engine has no room for, and which option makes it; None if it fits.

        ``session``: the session with whose state it goes on, or -1.
        """
        return why_never(template, self._processor, self._registry.kinds, session)


def _most_rows(cell: Cell, max_batch: Mapping[str, int]) -> int:
    """Return the most rows of a cell's tasks; a cell that supports certain numbers only keeps its own."""
    if cell.batch_sizes:
        return cell.max_batch
    return max(cell.min_batch, min(cell.max_batch, max_batch.get(cell.name, cell.max_batch)))
