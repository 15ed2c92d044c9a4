"""The registration of a model: its example is unfolded, its new cells compiled, tried and measured, and arenas made."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.nn.modules.rnn import RNNCellBase

from cellrt.core.processor import Processor
from cellrt.core.state.tables import HOST
from cellrt.definition.cell import Cell
from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.resting import let_rest
from cellrt.definition.row_wise import refuse_unless_row_wise, warn_if_it_raises
from cellrt.definition.spec import RowSpec
from cellrt.definition.trial import INSTEAD
from cellrt.engine.announce import Announcement
from cellrt.engine.arena_sizes import ArenaSizes, NumRows
from cellrt.engine.cell_compiler import CellCompiler
from cellrt.engine.compilation import compilation_told
from cellrt.engine.discovery import Discovery
from cellrt.engine.places import QueueLimit
from cellrt.engine.priorities import default_priorities
from cellrt.engine.registry import Model, Registry
from cellrt.errors import DefinitionError, EngineClosedError, RequestTooLargeError
from cellrt.graph.forgotten import cells_that_forget, states_not_carried
from cellrt.graph.results import Recorded
from cellrt.graph.unfolder import Unfolder
from cellrt.worker.arenas import Arenas
from cellrt.worker.device.device import Device
from cellrt.worker.failed_rows import describe_error
from cellrt.worker.step_measurement import TURN_S, measure_steps, rows_that_pay

log = logging.getLogger("cellrt")
MAX_MEASURED = 4096
"""The most cells whose step times are remembered for others that differ in their weights alone."""


class Allocated(NamedTuple):
    """The memory of a kind: the number of rows, and the tensor at each location."""

    num_rows: NumRows
    by_location: list[torch.Tensor]


class Registrar:
    """Adds models to an engine; one thread at a time.

    Args:
        registry, processor, arenas, compiler: those of the engine; arenas by location, the host first.
        sizes: chooses the number of rows of each kind.
        device: where cells are measured; None: the CPU.
        num_threads: torch threads of a CPU worker.
        run_in_turn: calls a function while no other thread changes the engine's state.
        give_up: frees the parts of a model that no client has found yet.

    Attributes:
        on_renewed: called with the name of a model that was replaced by one with other forms.
    """

    def __init__(
        self,
        registry: Registry,
        processor: Processor,
        arenas: list[Arenas],
        compiler: CellCompiler,
        sizes: ArenaSizes,
        device: Device | None,
        num_threads: int,
        run_in_turn: Callable[[Callable[[], Any]], Any],
        give_up: Callable[[Model], None],
    ) -> None:
        self._registry, self._processor, self._arenas, self._sizes = registry, processor, arenas, sizes
        self._compiler = compiler
        self._device, self._num_threads, self._run_in_turn, self._give_up = device, num_threads, run_in_turn, give_up
        self._told: set[str] = set()
        """The cells that were reported to forget their state."""
        self._tried: set[str] = set()
        """The likenesses of cells that were found to be row-wise, or to raise."""
        self._measured: dict[tuple[str, str], dict[int, float]] = {}
        """Step times by likeness and form: cells with other weights take as long."""
        self.on_renewed: Callable[[str], None] = lambda _: None

    def prepare(
        self,
        unfolder: Unfolder,
        priorities: Mapping[str, int],
        warm_up: bool,
        max_queue: QueueLimit,
        max_batch: Mapping[str, int],
    ) -> Model:
        """Make a model that the engine can serve, with everything that it needs; no client finds it yet.

        Raise DefinitionError if the example does not unfold or fit, ``priorities`` or ``max_batch`` name no cell of it,
        or rows of a cell influence each other.
        """
        discovery = Discovery(self._registry)
        recorded = discovery.unfold(unfolder)
        names = {cell.name for cell in discovery.cells}
        for what, given in (("priorities", priorities), ("max_batch", max_batch)):
            if unknown := given.keys() - names:
                raise DefinitionError(
                    f"{what}: {sorted(unknown)} are no cells of {unfolder.name!r}; it has {sorted(names)}"
                )
        self._warn_of_forgotten_states(unfolder.name, recorded, discovery.cells)
        if warm_up:
            self._try_new(discovery.cells)
        forms = self._forms(unfolder.name, discovery.cells)
        with compilation_told(f"what {unfolder.name!r} calls"):
            times = self._prepare(discovery.cells, forms, warm_up)
        let_rest(cell.module for cell in discovery.cells)
        memory = self._allocate(discovery)
        types, new = self._run_in_turn(lambda: self._add(discovery, forms, times, memory, max_batch))
        model = Model(unfolder, self._registry, self._processor, types, priorities, max_queue)
        model.states, model.max_batch = recorded.states, max_batch
        try:
            typed = discovery.with_types(recorded, types)
            model.plan_of(typed)
            defaults = default_priorities(typed.program, {types[cell.identity]: cell for cell in discovery.cells})
            self._run_in_turn(lambda: self._set_priorities(new, types, priorities, defaults))
        except RequestTooLargeError as error:
            self._give_up(model)
            raise DefinitionError(f"the example request does not fit: {error}") from error
        except BaseException:
            self._give_up(model)
            raise
        return model

    def _warn_of_forgotten_states(self, model: str, recorded: Recorded, cells: list[Cell]) -> None:
        """Warn of cells that a model calls as if they had no state.

        Warn, too, of states that a chain never carries, and of torch's own cells that were given none.
        """
        for cell in cells_that_forget(recorded.program, cells):
            self._warn_once(
                cell,
                f"model {model!r}: cell {cell.name!r} is called several times, each time without its state "
                f"{list(cell.carry)}, which then begins with zeros, and only the last call is used. Give each call "
                f"what the one before made ({', '.join(f'{name}=...' for name in cell.carry)}), or use graph.chain",
            )
        for cell, lost in states_not_carried(recorded.program, cells):
            self._warn_once(
                cell,
                f"model {model!r}: in a chain of cell {cell.name!r} {list(lost)} are the same at every step, while "
                f"nobody reads outputs {list(lost.values())}, which are alike. If they are a state that goes from "
                f"step to step: cellrt.cell(..., carry={lost})",
            )
        for cell in cells:
            module = cell.module
            if isinstance(module, RNNCellBase) and len(cell.inputs) == 1:
                named = f"name its state, too: {{'input': {module.input_size}, 'hx': {module.hidden_size}}}"
                self._warn_once(
                    cell,
                    f"model {model!r}: cell {cell.name!r} has the one input {next(iter(cell.inputs))!r}, so each step "
                    f"of torch's {type(module).__name__} begins with zeros; {INSTEAD.get(type(module), named)}",
                )

    def _warn_once(self, cell: Cell, text: str) -> None:
        """Warn of a cell, pointing at the caller of Engine.register."""
        if cell.identity not in self._told:
            self._told.add(cell.identity)
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    def renew(self, model: Model) -> Model | None:
        """Return the model with the forms that its cells have by now, to take its place.

        Return None if it has these forms, or cannot be prepared again. Raise EngineClosedError.
        """
        types = {identity: self._registry.types[type_id] for identity, type_id in model.types.items()}
        forms = self._forms(model.name, [made.cell for made in types.values()])
        if all(made.form is forms[identity] for identity, made in types.items()):
            return None
        try:
            renewed = self.prepare(model.unfolder, model.priorities, True, model.max_queue, model.max_batch)
        except EngineClosedError:
            raise
        except Exception as error:
            log.warning("model %r goes on without the compiled forms of its cells: %s", model.name, error)
            return None
        renewed.origin = model.origin
        return renewed

    def _forms(self, model: str, cells: list[Cell]) -> dict[str, CompiledForm | None]:
        """Return the compiled forms of cells by identity; on a device they have none."""
        if self._device is not None:
            return dict.fromkeys((cell.identity for cell in cells), None)
        with compilation_told(f"the cells of {model!r}"):
            for cell in cells:
                cell.compiled_form  # noqa: B018 - those that modules bring are there before the compiler is waited for
        announcement = Announcement(f"cellrt compiles the cells of {model!r}, once for this machine")
        try:
            return self._compiler.forms_of(cells, announcement)
        finally:
            announcement.end()

    def _try_new(self, cells: list[Cell]) -> None:
        """Try each cell that is new on random rows; cells that differ in their weights alone once.

        Warn of one that raises, pointing at the caller of Engine.register. Raise DefinitionError for one whose rows
        influence each other.
        """
        seen = {made.cell.identity for made in list(self._registry.types.values())}
        for cell in cells:
            if cell.identity in seen or cell.likeness in self._tried:
                continue
            form = cell.compiled_form if self._device is None else None
            if form is not None and form.is_batch_invariant:  # it was compared with the module, and its rows are apart
                continue
            if self._device is not None or not warn_if_it_raises(cell, depth=4):  # a GPU's code may not run here
                refuse_unless_row_wise(cell)
            if cell.declaration.row_wise and len(self._tried) < MAX_MEASURED:
                self._tried.add(cell.likeness)

    def _prepare(
        self, cells: list[Cell], forms: Mapping[str, CompiledForm | None], warm_up: bool
    ) -> dict[str, dict[int, float]]:
        """Prepare new cells so that no request waits for it; return their step times by identity.

        Slow work is done once for cells that differ in their weights alone, as new versions of a model do.
        """
        if not warm_up:
            return {}
        new = [cell for cell in cells if not self._registry.has_type(cell, forms[cell.identity])]
        times = {cell.identity: self._measured.get(self._measured_as(cell, forms), {}) for cell in new}
        new = [cell for cell in new if self._device is not None or not times[cell.identity]]
        for cell in new:
            found = measure_steps(cell, forms[cell.identity], self._device, self._num_threads)
            times[cell.identity] = found
            if len(self._measured) < MAX_MEASURED:
                self._measured[self._measured_as(cell, forms)] = found
            if min(found.values(), default=0.0) > 0:
                log.info("%s", cost_of(cell, found))
        return times

    @staticmethod
    def _measured_as(cell: Cell, forms: Mapping[str, CompiledForm | None]) -> tuple[str, str]:
        """Return the key of a cell's step times."""
        form = forms[cell.identity]
        return cell.likeness, "" if form is None else form.origin

    def _allocate(self, discovery: Discovery) -> dict[RowSpec, Allocated]:
        """Allocate the memory of the kinds that are new; it takes long on a device, and no turn waits for it."""
        made = {}
        for spec, num_rows in self._sizes.choose(discovery.new_kinds, discovery.cells).items():
            counts = [num_rows.host, *[num_rows.worker] * (len(self._arenas) - 1)]
            try:
                memory = [arenas.allocate(spec, rows) for arenas, rows in zip(self._arenas, counts)]
            except (MemoryError, RuntimeError) as error:
                kinds = {cell.name: [*cell.inputs.values(), *cell.outputs.values()] for cell in discovery.cells}
                cells = [name for name, specs in kinds.items() if spec in [one.stored for one in specs]]
                option = "page_bytes" if spec.page_size else "arena_bytes"
                needed = " and ".join(f"{rows * spec.num_bytes / 1e9:.1f} GB" for rows in counts)
                raise DefinitionError(
                    f"cells {cells}: there is no memory for {needed} of rows {spec} at the host and the workers, "
                    f"{spec.num_bytes / 1e6:.0f} MB each (see Engine's {option}): {describe_error(error)}"
                ) from error
            made[spec] = Allocated(num_rows, memory)
        return made

    def _add(
        self,
        discovery: Discovery,
        forms: Mapping[str, CompiledForm | None],
        times: Mapping[str, Mapping[int, float]],
        memory: Mapping[RowSpec, Allocated],
        max_batch: Mapping[str, int],
    ) -> tuple[dict[str, int], list[Cell]]:
        """Add a model's kinds, constants and cells; in a turn, while tasks may run.

        Return its types by identity, which stay while the model does, and its cells that were not known.
        """
        for spec, (num_rows, allocated) in memory.items():
            kind = self._registry.add_kind(spec, num_rows.worker, num_rows.host)
            for arenas, each in zip(self._arenas, allocated):
                arenas.add(spec, each)
            self._processor.set_host_rows(kind, allocated[HOST].data_ptr(), spec.num_bytes)
        for kind, content, row in discovery.new_constants:
            spec = self._registry.kinds[kind]
            value = torch.frombuffer(bytearray(content), dtype=spec.dtype).reshape(spec.shape)
            for arenas in self._arenas:
                arenas.set_constant(kind, row, value)
            self._registry.constants[kind, content] = row
        new: list[Cell] = []
        for cell in discovery.cells:
            step_s = times.get(cell.identity, {})
            most = {} if (rows := _rows_that_pay(cell, step_s)) is None else {cell.name: rows}
            made = self._registry.add_type(cell, forms[cell.identity], {**most, **max_batch})
            if made is not None:
                new.append(cell)
                for rows, seconds in step_s.items():
                    self._processor.set_step_time(made.id, rows, seconds)
        self._compiler.keep({made.cell.identity for made in self._registry.types.values()})
        return self._registry.use(discovery.cells), new

    def _set_priorities(
        self, cells: list[Cell], types: Mapping[str, int], chosen: Mapping[str, int], defaults: Mapping[int, int]
    ) -> None:
        """Set the priorities of new cells: the one chosen by name, the cell's own, or the default of its type."""
        for cell in cells:
            type_id = types[cell.identity]
            default = defaults[type_id] if cell.priority is None else cell.priority
            self._processor.set_priority(type_id, chosen.get(cell.name, default))


def _rows_that_pay(cell: Cell, step_s: Mapping[int, float]) -> int | None:
    """Return the most rows of tasks of a cell whose larger tasks take clearly longer a row; else None.

    It is None, too, for a cell with spans, whose nodes may have many rows.
    """
    return None if cell.has_spans else rows_that_pay(step_s)


def cost_of(cell: Cell, step_s: Mapping[int, float]) -> str:
    """Return what one call of a cell takes, of the seconds of its steps by rows, and whether its grain is too fine."""
    rows, seconds = max(step_s.items())
    calls = ", ".join(f"{1e6 * each:.0f} with {count}" for count, each in sorted(step_s.items()))
    text = (
        f"cell {cell.name!r}: one call of it takes, in microseconds by rows: {calls}; "
        f"that is {1e6 * seconds / rows:.2f} a row with {rows}"
    )
    if (most := _rows_that_pay(cell, step_s)) is not None:
        each_us = 1e6 * step_s[most] / most
        text += f", {each_us:.2f} with {most}, the most that its tasks have (see register(max_batch=...))"
    if seconds < TURN_S:
        text += (
            f". What the engine adds to a task, about {1e6 * TURN_S:.0f}, is more: if requests allow, make several "
            "such cells one (docs/grain.md)"
        )
    return text
