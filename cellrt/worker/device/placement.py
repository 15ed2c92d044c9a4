"""A cell placed on a device: a copy with its weights there, and the ways to call it."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from cellrt.definition.cell import Cell
from cellrt.definition.compiled_form import is_changed
from cellrt.definition.examples import zero_nodes
from cellrt.definition.fused import (
    ChainModule,
    FusedModule,
    IndexedRows,
    RunChainRows,
    RunRows,
    RunSizes,
    SpannedRows,
    StepRows,
    is_reading_outputs,
    is_reading_ragged,
    is_reading_spans,
)
from cellrt.definition.modes import torch_threads
from cellrt.definition.spec import CellInput, RowSpec
from cellrt.errors import CellError, InternalError
from cellrt.worker.device.compilations import COMPILATIONS
from cellrt.worker.device.limits import Limits, find_limits
from cellrt.worker.device.moved import move
from cellrt.worker.device.torch_compile import (
    CompiledFunction,
    CompiledStep,
    as_function,
    check_compilable,
    warn_not_compiled,
)
from cellrt.worker.failed_rows import describe_error
from cellrt.worker.torch_state import HOST_THREADS, on_a_new_thread

EXAMPLE_ROWS = 64
"""The rows of the first call of a compiled step: it is compiled for any number, and best for about as many."""


class Forms(NamedTuple):
    """The forms of a cell that a device may use.

    Attributes:
        fused: ``run_rows`` of modules that have it: always, never, or (None) if it measures faster.
        chains: ``run_chain_rows`` too: always, never, or (None) where it measures faster.
        backend: the backend of ``torch.compile`` for cells that do not run fused; None: these are not compiled.
    """

    fused: bool | None = None
    chains: bool | None = None
    backend: str | None = None


class Chains:
    """A cell's ``run_chain_rows``, and the choice of runs for it (``always``; None: those that measure faster).

    The choice is kept for runs of about as many rows and steps; separately for tasks that are launched call by call and
    for
    those in captured graphs, where calls cost the host nothing.
    """

    def __init__(self, run: RunChainRows, always: bool | None) -> None:
        self.run, self.always = run, always
        self._chosen: dict[tuple[int, int, bool], bool] = {}

    def find(self, sizes: Sequence[int], is_captured: bool) -> bool | None:
        """Return the choice for a run with these sizes, or None if there is none yet."""
        return self._chosen.get(_run_class(sizes, is_captured)) if self.always is None else self.always

    def keep(self, sizes: Sequence[int], is_captured: bool, choice: bool) -> None:
        """Store the choice for such runs."""
        self._chosen[_run_class(sizes, is_captured)] = choice


class PlacedCell:
    """A cell with its weights on a device. ``call`` is as ``Cell.run``; ``steps`` as ``Cell.run_steps``.

    Attributes:
        device: the device of its weights.
        limits: the limits of the cell's integer inputs, by name.
        run_rows: its fused form, or the compiled one; None: it has neither.
        chains: its form for whole runs, if it has one.
        reads_spans: whether these read the number of rows on the device.
        reads_ragged: whether ``run_rows`` takes ragged inputs.
        pads_ragged: whether tasks of its plain form are padded: it has ragged inputs, and works padded and captured.
        not_compiled: the error of ``torch.compile`` for a cell that then runs as it is; "": there was none.
        is_measured: whether ``run_rows`` is to be used only where it measures faster than the plain form.
        prefers_plain: whether the plain form measured faster.
        prefers_steps: whether its author's ``steps`` takes runs, and ``run_rows`` only single steps.
        goes_by_steps: whether runs go over captured steps all the same, as those measured faster than ``steps``.
    """

    not_compiled = ""

    def __init__(self, cell: Cell, device: torch.device, forms: Forms = Forms()) -> None:  # noqa: B008 - immutable
        self.cell = cell
        self.device = device
        self._names_device = False
        self.prefers_steps, self.is_measured, self.prefers_plain = False, forms.fused is None, False
        self.goes_by_steps: bool | None = None
        self._times: dict[int, tuple[float, float]] = {}
        self.limits = find_limits(cell)
        if device.type != "cpu":
            with torch.inference_mode(False):
                self.cell = cell.with_module(move(cell.module, device))
        self.run_rows = _fused_form(self.cell) if forms.fused is not False else None
        self.chains = _chain_form(self.cell, forms.chains) if self.run_rows is not None else None
        self.reads_spans = _reads_spans(self.cell, self.run_rows, self.chains)
        self.reads_ragged = self.run_rows is not None and is_reading_ragged(self.run_rows)
        self.pads_ragged = any(spec.ragged for spec in cell.inputs.values())
        if forms.backend is not None and self.run_rows is None:
            self._compile(forms.backend)

    def call(self, inputs: Sequence[CellInput]) -> list[torch.Tensor]:
        """Run one step; return its outputs."""
        return self._on_device(lambda: self.cell.run_step(*inputs))

    def steps(self, sizes: Sequence[int], inputs: Sequence[CellInput]) -> list[torch.Tensor]:
        """Run several steps, packed; return their outputs."""
        return self._on_device(lambda: self.cell.run_steps(list(sizes), *inputs))

    def example_step(self, rows: int) -> Callable[[], object]:
        """Return a function that runs a step of this many rows of zeros, in the form that is used on this device."""
        return self.plain_step(rows) if self.run_rows is None or self.prefers_plain else self.fused_step(rows)

    def plain_step(self, rows: int) -> Callable[[], object]:
        """Return a function that runs such a step in the plain form: gather, compute and scatter, like a task."""
        inputs = self.cell.example_inputs(rows, str(self.device))
        if self.cell.has_spans:
            return lambda: self.call(inputs)
        given, made = self._example_rows(rows, False)
        ragged = {name: value for (name, spec), value in zip(self.cell.inputs.items(), inputs) if spec.ragged}

        def step() -> None:
            taken = {name: one.values.index_select(0, one.rows) for name, one in given.items() if name not in ragged}
            outputs = self.call([ragged[name] if name in ragged else taken[name] for name in given])
            for arena, output in zip(made.values(), outputs):
                arena.values.index_copy_(0, arena.rows, output)

        return step

    def step_of_nodes(self, nodes: int, rows: int, keys: int) -> Callable[[], object]:
        """Return a function that runs a step of a cell that gets the rows of each node, on inputs of ``zero_nodes``."""
        inputs = zero_nodes(self.cell.inputs.values(), nodes, rows, keys, str(self.device))
        return lambda: self.call(inputs)

    def fused_step(self, rows: int) -> Callable[[], object]:
        """Return a function that runs such a step in the fused form, which must exist."""
        run_rows = self.run_rows
        if run_rows is None:
            raise InternalError(f"cell {self.cell.name!r} has no fused form")
        given, made = self._example_rows(rows, False)
        inputs = zip(self.cell.inputs.items(), self.cell.example_inputs(rows, str(self.device)))
        ragged = {name: value for (name, spec), value in inputs if spec.ragged and self.reads_ragged}
        read, written = {**self._as_served(given), **ragged}, self._as_served(made)
        return lambda: run_rows(read, written)  # brings nothing from the host: that would wait, and be timed

    def authors_run(self, rows: int, steps: int) -> Callable[[], object]:
        """Return a function that runs this many steps of this many rows of zeros by its author's ``steps``."""
        inputs = [
            zeros(spec, self.device, rows if name in self.cell.carry else rows * steps)
            for name, spec in self.cell.inputs.items()
        ]
        return lambda: self.steps([rows] * steps, inputs)

    def example_run(self, rows: int, steps: int) -> Callable[[], bool] | None:
        """Return a function that runs this many steps of zeros in one call, if the cell has a form for that."""
        chains = self.chains
        if chains is None:
            return None
        given, made = self._example_rows(rows * steps, False)
        for name in self.cell.carry:
            given[name] = IndexedRows(given[name].values, given[name].rows[:rows])
        sizes = RunSizes((rows,) * steps, torch.full((steps,), rows, device=self.device))
        return lambda: chains.run(sizes, given, made)

    def keep_times(self, fused: Mapping[int, float], plain: Mapping[int, float]) -> None:
        """Store the seconds of a step by rows, in both forms: all tasks use the one that is faster in the geometric
        mean.

        The first times stay: requests and sessions that began in a form go on in it.
        """
        if not self._times:
            self._times = {rows: (fused[rows], plain[rows]) for rows in sorted(fused)}
            self.prefers_plain = sum(math.log(plain_s / fused_s) for fused_s, plain_s in self._times.values()) < 0

    @property
    def has_times(self) -> bool:
        """True if both forms were timed."""
        return bool(self._times)

    def __repr__(self) -> str:
        """Return the cell's name, its forms, and the measured times."""
        forms = ["plain", *(["fused"] if self.run_rows else []), *(["chain"] if self.chains else [])]
        times = (
            f"{rows} rows: fused {1e6 * fused_s:.1f} us, plain {1e6 * plain_s:.1f} us"
            for rows, (fused_s, plain_s) in self._times.items()
        )
        refused = [f"not compiled, because of {self.not_compiled}"] if self.not_compiled else []
        return f"PlacedCell({', '.join([repr(self.cell.name), *forms, *refused, *times])})"

    def _as_served(self, given: Mapping[str, IndexedRows]) -> Mapping[str, StepRows]:
        """Return a step's rows in the form that tasks have."""
        if not self.reads_spans:
            return given
        count = len(next(iter(given.values())).rows)
        span = torch.tensor([0, count], device=self.device)
        return {name: SpannedRows(values, rows, count, span) for name, (values, rows) in given.items()}

    @torch.inference_mode()
    def _example_rows(self, rows: int, from_host: bool) -> tuple[dict[str, IndexedRows], dict[str, IndexedRows]]:
        """Return inputs and outputs of zeros that lie like those of a task: rows of one kind in one tensor.

        With ``from_host`` the inputs apart from state lie in a ring. Arenas are no inference tensors, views of a ring
        are: torch compiles for one or the other.
        """
        cell = self.cell
        homes = [(spec, from_host and name not in cell.carry) for name, spec in cell.inputs.items()]
        homes += [(spec, False) for spec in cell.outputs.values()]
        tensors = {}
        for spec, is_ring in dict.fromkeys(homes):
            with torch.inference_mode(is_ring):
                tensors[spec, is_ring] = zeros(spec, self.device, homes.count((spec, is_ring)) * rows + 1)
        made = []
        for number, home in enumerate(homes):
            first = homes[:number].count(home) * rows
            made.append(IndexedRows(tensors[home], torch.arange(first, first + rows, device=self.device)))
        return dict(zip(cell.inputs, made)), dict(zip(cell.outputs, made[len(cell.inputs) :]))

    def _compile(self, backend: str) -> None:
        """Compile the cell, if that is possible; else warn and leave it as it is."""
        try:
            check_compilable(self.cell)
            plain, step, count = on_a_new_thread(lambda: self._compiled(backend))
        except Exception as error:
            self.not_compiled = warn_not_compiled(self.cell.name, error)
            return
        COMPILATIONS.note(count)
        self.cell = plain
        if step is not None:
            self.run_rows, self.prefers_steps = step.run_rows, plain.has_steps

    def _compiled(self, backend: str) -> tuple[Cell, CompiledStep | None, int]:
        """Return the plain form; a step, unless rows are ragged; and the number of compilations."""
        before = COMPILATIONS.of_this_thread()
        with torch_threads(HOST_THREADS):
            plain = self._compiled_plain(backend)
            is_ragged = any(spec.ragged for spec in self.cell.inputs.values())
            step = None if is_ragged else self._compiled_step(backend)
        return plain, step, COMPILATIONS.of_this_thread() - before

    def _compiled_step(self, backend: str) -> CompiledStep:
        """Return a step with its gather and scatter, for inputs from the arenas and from the host."""
        cell = copy.copy(self.cell)
        cell.module = as_function(cell.module)
        step = CompiledStep(cell, backend, self.limits)
        for from_host in (False, True):
            step.compile(*self._example_rows(self._most_rows, from_host))
        return step

    def _compiled_plain(self, backend: str) -> Cell:
        """Return the plain form, which loops use."""
        cell = copy.copy(self.cell)
        # The function itself copies what it writes to, as a call that cannot be compiled is made twice.
        function = CompiledFunction(cell.name, cell.guarded(as_function(cell.module)), backend, is_whole=False)
        cell.module = function.compiled
        with torch.inference_mode():
            for rows in (
                self._most_rows,
                cell.batch_sizes[0] if cell.batch_sizes else 1,
            ):  # torch makes one for one row
                cell.run_step(*cell.example_inputs(rows, str(self.device)))
        cell.module = function
        return cell

    @property
    def _most_rows(self) -> int:
        sizes = self.cell.batch_sizes
        return sizes[-1] if sizes else min(EXAMPLE_ROWS, self.cell.max_batch)

    def _on_device(self, run: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Run a cell; if it fails, run it once more with new tensors made on the device, as its author may have meant.

        That costs a little at each operation, so it is done only for cells that need it.
        """
        if self.device.type == "cpu":
            return run()
        if not self._names_device:
            try:
                return run()
            except RuntimeError:
                with self.device:
                    outputs = run()
                self._names_device = True
                return outputs
        with self.device:
            return run()


class UnplacedCell(PlacedCell):
    """A cell that cannot be placed on a device: every call raises the reason."""

    def __init__(self, cell: Cell, error: BaseException) -> None:
        self.cell, self._error = cell, error
        self.run_rows, self.chains, self.prefers_steps = None, None, False
        self.reads_spans, self.reads_ragged, self.pads_ragged = False, False, False
        self.is_measured, self.prefers_plain, self.goes_by_steps, self._times = False, False, None, {}
        self.limits: Mapping[str, Limits] = {}

    def call(self, inputs: Sequence[CellInput]) -> list[torch.Tensor]:
        """Raise CellError."""
        said = describe_error(self._error)
        raise CellError(f"cell {self.cell.name!r} cannot be placed on its device: {said}") from self._error

    def steps(self, sizes: Sequence[int], inputs: Sequence[CellInput]) -> list[torch.Tensor]:
        """Raise CellError."""
        return self.call(inputs)


class Placements:
    """The cells on a device, each placed once: at registration, or by its first task. Safe from any thread."""

    def __init__(self, device: torch.device, forms: Forms) -> None:
        self._device, self._forms = device, forms
        self._placed: dict[str, PlacedCell] = {}
        self._lock = threading.Lock()

    def of(self, cell: Cell) -> PlacedCell:
        """Return the cell with its weights on the device; they are copied the first time."""
        placed = self._placed.get(cell.identity)
        if placed is not None:  # without the lock, which is held while cells are compiled
            return placed
        with self._lock:
            placed = self._placed.get(cell.identity)
            if placed is None:
                placed = self._placed[cell.identity] = PlacedCell(cell, self._device, self._forms)
            return placed

    def num_not_compiled(self) -> int:
        """Return the number of cells that ``torch.compile`` was asked for and could not compile."""
        return sum(bool(placed.not_compiled) for placed in list(self._placed.values()))

    def forget(self, identity: str) -> None:
        """Drop a cell's weights; the next use copies them again."""
        self._placed.pop(identity, None)


def zeros(spec: RowSpec, device: torch.device, *rows: int) -> torch.Tensor:
    """Return zero rows of a kind."""
    return torch.zeros((*rows, *spec.shape), dtype=spec.dtype, device=device)


def _fused_form(cell: Cell) -> RunRows | None:
    """Return ``run_rows`` of a cell's module, if it has one that does what ``forward`` does and
    takes the cell's rows.
    """
    module: object = cell.module
    if not isinstance(module, FusedModule) or is_changed(module, "run_rows"):
        return None
    if is_reading_outputs(module.run_rows) and not _carries_by_name(cell):
        return None
    can_run_rows: Callable[..., bool] | None = getattr(module, "can_run_rows", None)
    return module.run_rows if can_run_rows is None or can_run_rows(cell.inputs, cell.outputs) else None


def _chain_form(cell: Cell, always: bool | None) -> Chains | None:
    """Return ``run_chain_rows`` of a cell's module, if it has one that carries what the cell does."""
    module: object = cell.module
    if always is False or not isinstance(module, ChainModule) or is_changed(module, "run_chain_rows"):
        return None
    return Chains(module.run_chain_rows, always) if _carries_by_name(cell) else None


def _carries_by_name(cell: Cell) -> bool:
    """Return whether a cell carries all outputs that are also inputs, by name and rows, and nothing else."""
    return {name: name for name, spec in cell.inputs.items() if cell.outputs.get(name) == spec} == cell.carry


def _reads_spans(cell: Cell, run_rows: RunRows | None, chains: Chains | None) -> bool:
    """Return whether all fused forms of a cell that takes any number of rows read spans."""
    if run_rows is None or cell.batch_sizes:
        return False
    return is_reading_spans(run_rows) and (chains is None or is_reading_spans(chains.run))


def _run_class(sizes: Sequence[int], is_captured: bool) -> tuple[int, int, bool]:
    """Return the class of a run: rows and steps in one class differ by less than a factor of two."""
    return sizes[0].bit_length(), len(sizes).bit_length(), is_captured
