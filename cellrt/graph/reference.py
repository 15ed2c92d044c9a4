"""The truth to compare with: a request's cell graph run node by node, with plain torch and one row at a time.

It shares the recording of the graph with the runtime (``graph.py``) and nothing after it: no scheduler, no arena, no
batch. The recorded program (its operations are in ``core/templates/program.py``) is interpreted in order, which is a
topological order because an unfolder can only name outputs that are there already.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cellrt.core.templates.program import (
    CARRY,
    EMITTED,
    LAST,
    LEADS,
    NEXT,
    OP_CONSTANT,
    OP_EXTERNAL,
    OP_KEEP,
    OP_LOOP,
    OP_MEMBER,
    OP_PAGES,
    OP_RESULT,
    OP_RESULT_LAST,
    OP_RESULT_STEPS,
    OP_STATE,
    PAGED,
    SAME,
)
from cellrt.core.templates.program_operations import Input, Operation, operations
from cellrt.definition.cell import Cell
from cellrt.definition.modes import workers_modes
from cellrt.definition.spans import PagedRows, Spans, nodes_of
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec
from cellrt.errors import CellError
from cellrt.graph.results import Recorded, ResultLayout
from cellrt.graph.unfolder import Unfolder

Row = torch.Tensor
"""One row of an input or output, ``[*shape]`` without a row dimension."""


def run_one_by_one(unfolder: Unfolder, request: Any, state: list[Row] | None = None) -> dict[str, torch.Tensor]:
    """Run a request of a model without an engine, slowly; what an engine returns must equal this within tolerance.

    Args:
        unfolder: a model, as made by ``cellrt.unfold``; it need not be registered anywhere.
        request: what its function takes.
        state: the state of the request's session, in the order in which the graph keeps it; replaced by the state
            after the request. Empty for a new session.

    Returns results by name: ``[*shape]`` for one output, ``[steps, *shape]`` for a chain's, a list's or a loop's
    (of a loop, the steps that were taken).

    Raise RequestError as ``Engine.submit`` does, and CellError if a cell raises, returns wrong shapes, or a value that
    is not finite where the cell declares finite ones.
    """
    binding = _OpenBinding()
    recorded = unfolder.record(binding, request)
    interpreter = _Interpreter(binding, recorded, state or [])
    interpreter.run()
    if state is not None:
        state[:] = interpreter.kept
    return {layout.name: _assemble(layout, interpreter.results) for layout in recorded.results}


class _OpenBinding:
    """Accepts every cell, row spec and constant, and numbers them in order of appearance."""

    def __init__(self) -> None:
        self.max_nodes = 1 << 30
        self.cells: list[Cell] = []
        self.specs: list[RowSpec] = []
        self.constants: list[Row] = []

    def cell_type(self, cell: Cell) -> int:
        for number, known in enumerate(self.cells):
            if known is cell:
                return number
        self.cells.append(cell)
        return len(self.cells) - 1

    def kind(self, spec: RowSpec) -> int:
        spec = spec.stored
        if spec not in self.specs:
            self.specs.append(spec)
        return self.specs.index(spec)

    def constant_row(self, kind: int, content: bytes) -> int:
        spec = self.specs[kind]
        self.constants.append(torch.frombuffer(bytearray(content), dtype=spec.dtype).reshape(spec.shape))
        return len(self.constants)  # row 0 is zeros, of every kind


def _no_rows(spec: RowSpec) -> Row:
    """Return a growing state of no rows; ``spec`` is that of its pages."""
    return torch.zeros(spec.shape, dtype=spec.dtype, device="cpu").movedim(spec.page_dim, 0)[:0]


class _PageList:
    """A growing state: pages in order, each made when the one before is full."""

    def __init__(self, spec: RowSpec, rows: Row) -> None:
        self.spec, self.length = spec, 0
        self.pages = torch.zeros((0, *spec.shape), dtype=spec.dtype, device="cpu")
        self.make_room(len(rows))
        self.length = len(rows)
        for row, value in enumerate(rows):
            self.pages.select(0, row // spec.page_size).select(spec.page_dim, row % spec.page_size).copy_(value)

    def make_room(self, count: int) -> None:
        """Make pages for this many rows more."""
        wanted = -(-(self.length + count) // self.spec.page_size) - len(self.pages)
        self.pages = torch.cat([self.pages, self.pages.new_zeros((wanted, *self.spec.shape))])

    def values(self) -> Row:
        """Return all rows ``[length, *shape]``."""
        return self.pages.movedim(1 + self.spec.page_dim, 1).flatten(0, 1)[: self.length].clone()

    def seen_by(self, spec: RowSpec, rows: int) -> PagedRows:
        """Return the pages as a node of this many rows sees them; append the rows first if the input appends."""
        before, appended = self.length, rows if spec.appends else 0
        self.make_room(appended)
        self.length += appended
        positions = torch.arange(before, before + rows, device="cpu") if appended else torch.zeros(rows, device="cpu")
        offsets, length = torch.tensor([0, rows], device="cpu").int(), torch.tensor([self.length], device="cpu").int()
        table = torch.arange(len(self.pages), device="cpu")[None].int()
        return PagedRows(
            self.pages,
            table,
            length,
            offsets,
            nodes_of(offsets),
            positions.int(),
            offsets.new_ones(rows) > 0,
            self.spec.page_dim,
        )


class _Interpreter:
    """Runs a recorded program; afterwards ``results`` has its result rows, None for steps that a loop did not take."""

    def __init__(self, binding: _OpenBinding, recorded: Recorded, state: list[Row]) -> None:
        self._binding = binding
        self._operations = operations(
            recorded.program, [(len(cell.inputs), len(cell.outputs)) for cell in binding.cells]
        )
        self._externals = iter(recorded.externals)
        self._values: list[Row] = []
        self._steps: dict[int, list[Row]] = {}
        self._step_before: dict[int, Row] = {}
        """The values that a loop of several cells made at its step before; empty at the first."""
        num_rows = sum(not layout.page_size for layout in recorded.states)
        self._state, self._saved_pages = iter(state[:num_rows]), iter(state[num_rows:])
        self._page_lists: list[_PageList] = []
        self._kept_pages: list[_PageList] = []
        self.kept: list[Row] = []
        self.results: list[Row | None] = []

    def run(self) -> None:
        """Execute every operation in order. What the session keeps that grows comes behind its other states."""
        for operation in self._operations:
            kind, first, values = operation.kind, operation.first, self._values
            if operation.is_unit:
                self._unit(operation)
            elif operation.op == OP_EXTERNAL:
                self._external(kind)
            elif operation.op == OP_CONSTANT:
                row = operation.row
                values.append(self._binding.constants[row - 1] if row else self._zeros(kind))
            elif operation.op == OP_STATE:
                new = values[operation.start] if operation.start >= 0 else self._zeros(kind)
                values.append(next(self._state, new))
            elif operation.op == OP_PAGES:
                self._pages(kind, bool(operation.keeps))
            elif operation.op == OP_KEEP:
                self.kept.append(values[first + max(0, operation.length - 1) * operation.stride])
            elif operation.op == OP_RESULT:
                self.results += [values[first + k * operation.stride] for k in range(operation.length)]
            elif operation.op == OP_RESULT_STEPS:
                taken = self._steps[first]
                self.results += [*taken, *[None] * (operation.length - len(taken))]
            elif operation.op == OP_RESULT_LAST:
                self.results.append(values[first])
        self.kept += [state.values() for state in self._kept_pages]

    def _pages(self, kind: int, is_kept: bool) -> None:
        spec = self._binding.specs[kind]
        state = _PageList(spec, next(self._saved_pages, _no_rows(spec)) if is_kept else _no_rows(spec))
        if is_kept:
            self._kept_pages.append(state)
        self._page_lists.append(state)

    def _external(self, kind: int) -> None:
        _, rows = next(self._externals)
        self._values += torch.from_numpy(np.array(rows)).view(self._binding.specs[kind].dtype).unbind(0)

    def _zeros(self, kind: int) -> Row:
        spec = self._binding.specs[kind]
        return torch.zeros(spec.shape, dtype=spec.dtype, device="cpu")

    def _unit(self, unit: Operation) -> None:
        cell = self._binding.cells[unit.cell_type]
        if unit.op == OP_MEMBER:
            self._loop_of_cells(unit)
        elif unit.op == OP_LOOP:
            self._loop(cell, unit.length, unit.stop, unit.inputs)
        elif cell.is_whole:
            for outputs in self._span(cell, unit.inputs, 0, unit.num_steps):
                self._values += outputs
        else:
            outputs = []
            for step in range(unit.num_steps):
                outputs = self._node(cell, unit.inputs, step, outputs)
                self._values += outputs

    def _loop(self, cell: Cell, limit: int, stop: int, sources: list[Input]) -> None:
        """Run the cell on its own outputs until output ``stop`` is not zero, at most ``limit`` times."""
        outputs: list[Row] = []
        steps: list[list[Row]] = []
        first = max((source.count for source in sources if source.mode == LEADS), default=1)
        while len(steps) < limit and not (steps and stop >= 0 and bool(outputs[stop])):
            if first > 1 and not steps:
                outputs = self._span(cell, sources, 0, first)[-1]
            else:
                outputs = self._node(cell, sources, first - 1 + len(steps), outputs)
            steps.append(outputs)
        for output, value in enumerate(outputs):
            self._steps[len(self._values)] = [step[output] for step in steps]
            self._values.append(value)

    def _loop_of_cells(self, unit: Operation) -> None:
        """Run the members of a body in order, again and again, until one of them says stop."""
        limit, first, layers = unit.length, len(self._values), [self._binding.cells[k] for k in unit.layers]
        others = [next(self._operations) for _ in range(max(0, unit.left))]
        members = [(self._binding.cells[each.cell_type], each.stop, each.inputs) for each in (unit, *others)]
        history: list[list[Row]] = []
        has_stopped = False
        while len(history) < limit and not has_stopped:
            self._step_before = dict(enumerate(self._values[first:], first))
            del self._values[first:]
            for cell, stop, sources in members:
                outputs = self._node(layers[len(history)] if layers else cell, sources, len(history), [])
                has_stopped |= stop >= 0 and bool(outputs[stop])
                self._values += outputs
            history.append(self._values[first:])
        for output in range(len(history[-1])):
            self._steps[first + output] = [made[output] for made in history]

    def _node(self, cell: Cell, sources: list[Input], step: int, previous: list[Row]) -> list[Row]:
        """Run one node: step ``step`` of its operation, after one that returned ``previous``."""
        if cell.has_spans:
            return self._span(cell, sources, step, 1, previous)[0]
        names = list(cell.outputs)
        rows: list[list[Row]] = []
        for name, source in zip(cell.inputs, sources):
            if source.mode == CARRY and step > 0:
                rows.append([previous[names.index(cell.carry[name])]])
            else:
                rows.append(self._read(source, step))
        return _run_alone(cell, rows)

    def _read(self, source: Input, step: int) -> list[Row]:
        """Return the rows that a step reads; of a carried input those before the first step."""
        if source.mode == EMITTED:
            return self._steps[source.value]
        if source.mode == LAST:
            return [self._step_before.get(source.value, self._values[source.first])]
        if source.mode == SAME:
            return [self._values[source.value]]
        return [self._values[value] for value in source.named_at(step)]

    def _span(
        self, cell: Cell, sources: list[Input], first: int, count: int, previous: list[Row] | None = None
    ) -> list[list[Row]]:
        """Run this many steps of one chain or loop together, from step ``first`` on; return the outputs of each."""
        steps, inputs = range(first, first + count), list[CellInput]()
        for spec, source in zip(cell.inputs.values(), sources):
            if spec.span:
                offsets, positions = (torch.tensor(each, device="cpu").int() for each in ((0, count), steps))
                inputs.append(Spans(offsets, positions, torch.ones(count, device="cpu") > 0))
            elif source.mode == PAGED:
                inputs.append(self._page_lists[source.state].seen_by(spec, count))
            elif source.mode in (NEXT, LEADS) and previous:
                inputs.append(previous[source.output][None])
            else:
                given = [self._read(source, step) for step in steps]
                inputs.append(_ragged(spec, given) if spec.ragged else torch.stack([row for (row,) in given]))
        outputs = _call(cell, inputs, count, count)
        return [[value[row].clone() for value in outputs] for row in range(count)]


def _ragged(spec: RowSpec, given: list[list[Row]]) -> RaggedRows:
    values = [row for rows in given for row in rows]
    counts = torch.tensor([0, *map(len, given)], device="cpu")
    empty = torch.zeros((0, *spec.shape), dtype=spec.dtype, device="cpu")
    return RaggedRows(torch.stack(values) if values else empty, counts.cumsum(0))


@workers_modes()
@torch.inference_mode()
def _call(cell: Cell, inputs: list[CellInput], size: int, rows: int) -> list[torch.Tensor]:
    """Run a cell on ``size`` rows, of which the first ``rows`` matter, and check the outputs."""
    try:
        outputs = cell.run_step(*inputs)
        cell.check_outputs(outputs, size)
    except CellError:
        raise
    except Exception as error:
        raise CellError(f"cell {cell.name!r} raised {type(error).__name__}: {error}") from error
    for name, value in zip(cell.outputs, outputs):
        if name in cell.finite and not torch.isfinite(value[:rows]).all():
            raise CellError(f"cell {cell.name!r}, output {name!r}: a value is not finite")
    return outputs


def _run_alone(cell: Cell, rows: list[list[Row]]) -> list[Row]:
    """Run a cell on one node's inputs and check what it declares.

    A cell that names its batch sizes gets the smallest, filled up with zero rows.
    """
    size = cell.batch_sizes[0] if cell.batch_sizes else 1
    inputs: list[CellInput] = []
    for spec, given in zip(cell.inputs.values(), rows):
        if spec.ragged:
            inputs.append(_ragged(spec, [given, *[[]] * (size - 1)]))
        else:
            padded = torch.zeros((size, *spec.shape), dtype=spec.dtype, device="cpu")
            padded[0] = given[0]
            inputs.append(padded)
    return [value[0].clone() for value in _call(cell, inputs, size, 1)]


def _assemble(layout: ResultLayout, rows: list[Row | None]) -> torch.Tensor:
    """Return a named result of the rows that are there."""
    there = [row for row in (rows[k] for k in layout.positions) if row is not None]
    return there[-1].clone() if layout.is_single else torch.stack(there)
