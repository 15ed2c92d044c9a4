"""Recording: checks what a graph's builders are given and writes it as words of a program."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellrt.core.templates.program import (
    EACH,
    EMITTED,
    FIXED,
    LIST,
    OP_CONSTANT,
    OP_EXTERNAL,
    RANGE,
    STEP,
)
from cellrt.definition.bits import NUMPY_DTYPES
from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.errors import RequestError, RequestTooLargeError
from cellrt.graph.binding import ENDED, Binding
from cellrt.graph.growing import GrowingStates
from cellrt.graph.results import StateLayout
from cellrt.graph.row_bits import ARRAYS, LISTS, NUMBERS, bits_of, copied, describe_source, num_steps, rows_of
from cellrt.graph.states import SessionStates
from cellrt.graph.symbols import Handle, LoopSteps, Node, Output, Steps

OF_A_LOOP = "; what a loop is given is the same at every step: a row for each step is for graph.chain"
Source = object
"""An input's value: an Output, a tensor or number for one row, or a list of them for a ragged input."""


class Recorder:
    """The program of one request under construction, and the checks of every input that goes into it."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._program = array("i")
        self._externals: list[tuple[int, NDArray[Any]]] = []
        self._num_values = 0
        self._num_nodes = 0
        self._current = 0
        """First node of the operation that is being recorded."""
        self._zeros: dict[int, int] = {}
        self._constants: set[int] = set()
        self._loop_values: dict[int, int] = {}
        self._emitted: dict[int, None] = {}
        """Outputs of loops that other cells read at every step, in order."""

    def end(self) -> None:
        """Close the graph: any later attempt to add to it raises RequestError."""
        self._binding = ENDED

    def _check_open(self) -> None:
        """Raise RequestError behind ``end``."""
        _ = self._binding.max_nodes

    @cached_property
    def _keepers(self) -> list[tuple[int, int, Cell]]:
        """Chains and loops with ``keep``: the first of their values, how many steps have values, and their cell."""
        return []

    # Most graphs have none of either, and a small one costs little more than making them.
    @cached_property
    def _states(self) -> SessionStates:
        return SessionStates(self._program)

    @cached_property
    def _growing(self) -> GrowingStates:
        return GrowingStates(self._program, self._states)

    def _take_values(self, count: int) -> int:
        first = self._num_values
        self._num_values += count
        return first

    def _count_nodes(self, count: int, cell: Cell) -> None:
        self._num_nodes += count
        most = self._binding.max_nodes
        if self._num_nodes > most:
            raise RequestTooLargeError(
                f"cell {cell.name!r}: the graph has {self._num_nodes} nodes, at most {most} are allowed "
                "(see Engine(max_nodes=...))"
            )

    def _zero(self, spec: RowSpec) -> int:
        kind = self._binding.kind(spec)
        if kind not in self._zeros:
            self._program.extend([OP_CONSTANT, kind, 0])
            self._zeros[kind] = self._take_values(1)
            self._constants.add(self._zeros[kind])
        return self._zeros[kind]

    def _state(self, cell: Cell, output: str, start: int = -1) -> int:
        """Return the value that an output of the cell has in the request's session; if that is new or there is none,
        what value ``start`` is, or zeros.
        """
        kind, state = self._binding.kind(cell.outputs[output]), self._take_values(1)
        self._states.take(state, StateLayout(f"{cell.name}.{output}", kind, cell.identity[:16]), start)
        self._constants.add(state)
        return state

    def _kept_inputs(self, cell: Cell, keep: bool | str | Collection[str]) -> Collection[str]:
        """Return the carried inputs whose state the session keeps."""
        names = cell.carry if keep is True else (keep,) if isinstance(keep, str) else tuple(keep or ())
        for name in names:
            if name not in cell.carry:
                raise RequestError(f"{self._where(cell, name)}: keep={keep!r}, but only {list(cell.carry)} are carried")
        if not names:
            raise RequestError(
                f"cell {cell.name!r}, node {self._current}: keep={keep!r}: expected a carried input to keep "
                "(see cell(carry=...))"
            )
        return names

    def _starts(self, cell: Cell, inputs: Mapping[str, Source], kept: Collection[str]) -> dict[str, int]:
        """Return each carried input's value before the first step: the session's state, what was given, or zeros."""
        starts: dict[str, int] = {}
        states: dict[str, tuple[int, int]] = {}
        """The state of each output, and the value that it begins with."""
        for name, output in cell.carry.items():
            given = self._value(cell, name, cell.inputs[name], inputs[name]) if name in inputs else -1
            if name not in kept:
                starts[name] = given if given >= 0 else self._zero(cell.inputs[name])
                continue
            if given >= 0:
                self._check_is_one_state(cell, name, given)
            if output not in states:
                states[output] = self._state(cell, output, given), given
            starts[name], start = states[output]
            if start != given:
                raise RequestError(
                    f"{self._where(cell, name)}: keep: carried from {output!r} like another input, and so begins like "
                    "it: give both the same output, or none"
                )
        return starts

    def _check_is_one_state(self, cell: Cell, name: str, given: int) -> None:
        """Raise RequestError if what is kept begins with what another chain or loop keeps: from the session's second
        request on each would go on from its own end.
        """
        for first, count, other in self._keepers:
            index = (given - first) % len(other.outputs)
            if first <= given < first + count * len(other.outputs) and index in map(
                other.output_index.__getitem__, other.carry.values()
            ):
                raise RequestError(
                    f"{self._where(cell, name)}: keep: it begins with what cell {other.name!r} keeps, and so a session "
                    "would have two states, of which this one goes on from its own end from the second request on. "
                    f"Keep one: state = graph.state({other.name}), start the first from it and this one from the "
                    "first's .last, both without keep, then graph.keep(state, after=...) with this one's .last; two "
                    f"on purpose are graph.state({cell.name}, ...) and graph.keep (docs/unfolding.md, State that stays)"
                )

    def _keep(self, cell: Cell, kept: Collection[str], starts: Mapping[str, int], first: int, count: int) -> None:
        """Keep outputs of a chain (or of a loop: one step) that begins at value ``first``."""
        self._keepers.append((first, count, cell))
        for name in kept:
            self._states.keep(starts[name], first + cell.output_index[cell.carry[name]], len(cell.outputs), count)

    def _external(self, spec: RowSpec, rows: NDArray[Any]) -> int:
        kind, count = self._binding.kind(spec), len(rows)
        self._program.fromlist([OP_EXTERNAL, kind, count])
        self._externals.append((kind, rows))
        return self._take_values(count)

    def _where(self, cell: Cell, name: str, position: int = -1) -> str:
        """Return a text for errors that names an input, or one of the sources in its list."""
        source = name if position < 0 else f"{name}[{position}]"
        return f"cell {cell.name!r}, node {self._current}, input {source!r}"

    def _begin(self, cell: object) -> int:
        """Begin an operation on a cell; return the cell's type."""
        self._current = self._num_nodes
        if not isinstance(cell, Cell):
            raise RequestError(f"node {self._current}: expected a cell, got {type(cell).__name__}")
        return self._binding.cell_type(cell)

    def _check_names(self, cell: Cell, inputs: Mapping[str, object], carried: Mapping[str, str] | None = None) -> None:
        """Raise RequestError for inputs that are unknown or missing; those that are carried may be left out."""
        may_miss = cell.carry if carried is None else carried
        for name in inputs:
            if name not in cell.inputs:
                raise RequestError(f"{self._where(cell, name)}: unknown; the cell has inputs {list(cell.inputs)}")
            if cell.has_spans and cell.inputs[name].span:
                raise RequestError(f"{self._where(cell, name)}: nobody gives a span; the cell gets it with its task")
        if len(inputs) < len(cell.inputs):
            for name, spec in cell.inputs.items():
                if name not in inputs and name not in may_miss and not spec.span:
                    raise RequestError(f"{self._where(cell, name)}: missing; expected {spec}{carry_hint(cell, name)}")

    def _check_state_is_whole(self, cell: Cell, inputs: Mapping[str, object]) -> None:
        """Raise RequestError where some carried inputs of one node are given and others forgotten."""
        given = [name for name in cell.carry if name in inputs]
        if given:
            forgotten = next(name for name in cell.carry if name not in inputs)
            raise RequestError(
                f"{self._where(cell, forgotten)}: missing; expected {cell.inputs[forgotten]}, as {given} are given too "
                "(graph.zeros has zeros)"
            )

    def _check_result(
        self, handle: Output | Steps | LoopSteps, name: str, position: int = -1, what: str = "result"
    ) -> None:
        if handle.graph is not self:
            wrong = _elsewhere(handle)
        elif isinstance(handle, Output) and handle.value in self._constants:
            wrong = "expected an output of a node, got a constant"
        else:
            return
        raise RequestError(f"{what} {name!r}{f'[{position}]' if position >= 0 else ''}: {wrong}")

    def _check_source(
        self, cell: Cell, name: str, spec: RowSpec, source: Output | Steps | LoopSteps, position: int = -1
    ) -> None:
        if source.graph is not self:
            raise RequestError(f"{self._where(cell, name, position)}: {_elsewhere(source)}")
        if source.spec is not spec and source.spec != spec:
            raise RequestError(f"{self._where(cell, name, position)}: expected {spec}, got {source.spec}")

    def _words(self, cell: Cell, name: str, spec: RowSpec, source: Source, is_loop: bool = False) -> Sequence[int]:
        """Return words for an input of one node, chain or loop, that is the same at every step."""
        if spec.page_size:
            return self._growing.words(self, self._where(cell, name), spec, source, is_loop)
        if spec.ragged:
            return self._many(cell, name, spec, source)
        try:
            return FIXED, self._value(cell, name, spec, source)
        except RequestError as error:
            if is_loop and num_steps(source, spec) >= 0:
                raise RequestError(f"{error}{OF_A_LOOP}") from None
            raise

    def _value(self, cell: Cell, name: str, spec: RowSpec, source: Source, position: int = -1) -> int:
        """Return the value of an input that is one row; ``position`` of the source if it is one of a list."""
        if isinstance(source, Node) and len(source._cell.outputs) == 1:
            source = Output(source._graph, source._first, next(iter(source._cell.outputs.values())))
        if isinstance(source, Output):
            self._check_source(cell, name, spec, source, position)
            return source.value
        if isinstance(source, Handle):
            where = self._where(cell, name, position)
            raise RequestError(f"{where}: expected {spec}, got {source!r}, not an output of one node")
        row = self._bits(cell, name, spec, source, position)
        if row.shape != spec.shape:
            where = self._where(cell, name, position)
            raise RequestError(f"{where}: expected {spec}, got {RowSpec(row.shape, spec.dtype)}")
        return self._external(spec, copied(row)[None])

    def _many(self, cell: Cell, name: str, spec: RowSpec, source: Source) -> list[int]:
        """Return words for a ragged input: a list of outputs or rows, a chain's or loop's steps, or ``[n, *shape]``."""
        row = RowSpec(spec.shape, spec.dtype)
        if isinstance(source, Steps):
            self._check_source(cell, name, row, source)
            given = source.values()
            return _range_words(given) if isinstance(given, range) else [LIST, len(given), *given]
        if isinstance(source, LoopSteps):
            self._check_source(cell, name, row, source)
            self._emitted[source.value] = None
            return [EMITTED, source.value, source.limit]
        if isinstance(source, ARRAYS):
            rows = self._bits(cell, name, spec, source)
            if rows.ndim == 0 or rows.shape[1:] != spec.shape:
                raise RequestError(f"{self._where(cell, name)}: expected rows of {spec}, got shape {list(rows.shape)}")
            first = self._external(row, copied(rows)) if len(rows) else 0
            return _range_words(range(first, first + len(rows)))
        if not isinstance(source, LISTS):
            raise RequestError(f"{self._where(cell, name)}: expected a list for {spec}, got {describe_source(source)}")
        values = self._listed(cell, name, row, source)
        return _range_words(values) if isinstance(values, range) else [LIST, len(values), *values]

    def _listed(self, cell: Cell, name: str, spec: RowSpec, sources: Sequence[Source]) -> Sequence[int]:
        """Return the values of a list, which may mix outputs with rows of the request.

        Those in a row are recorded at once.
        """
        if not sources:
            return range(0)
        # Of the usual list of numbers, NumPy finds out fastest; of one of tensors, it takes long.
        may_be_plain = isinstance(sources[0], NUMBERS) or not any(map(_is_handle, sources))
        rows = rows_of(spec, sources) if may_be_plain else None
        if rows is not None:
            first = self._external(spec, rows)
            return range(first, first + len(rows))
        values: list[int] = []
        for is_handle, run in groupby(sources, _is_handle):
            items = list(run)
            rows = None if is_handle else rows_of(spec, items)
            if rows is not None:
                first = self._external(spec, rows)
                values += range(first, first + len(rows))
            else:  # one by one, to name what is wrong
                values += [self._value(cell, name, spec, item, len(values) + k) for k, item in enumerate(items)]
        return values

    def _bits(self, cell: Cell, name: str, spec: RowSpec, source: Source, position: int = -1) -> NDArray[Any]:
        """Return the bits of a source (see ``bits_of``).

        The caller must copy them: a client may change its tensor as soon as ``submit`` has returned.
        """
        try:
            return bits_of(spec, source)
        except RequestError as error:
            raise RequestError(f"{self._where(cell, name, position)}: {error}") from None

    def _chain_lengths(self, cell: Cell, inputs: Mapping[str, Source]) -> dict[str, int]:
        """Return the inputs that have a value for each step of a chain, with the number of steps: at least one, all
        equal.
        """
        lengths: dict[str, int] = {}
        for name, spec in cell.may_step.items():
            if (count := num_steps(inputs[name], spec)) >= 0:
                lengths[name] = count
        if len(lengths) == 1 and 0 not in lengths.values():  # as most have
            return lengths
        if not lengths:
            raise RequestError(f"chain of cell {cell.name!r}: {_why_no_steps(cell, inputs)}")
        if len(set(lengths.values())) > 1:
            raise RequestError(f"chain of cell {cell.name!r}: inputs have different numbers of steps: {lengths}")
        if 0 in lengths.values():
            raise RequestError(f"chain of cell {cell.name!r}: no steps; a chain needs at least one")
        return lengths

    def _step_words(self, cell: Cell, name: str, spec: RowSpec, source: Source, reverse: bool) -> Sequence[int]:
        """Return words of an input that differs by the step of a chain: evenly spaced values by their base and
        stride.
        """
        values = self._stepped(cell, name, spec, source)
        if reverse:
            values = values[::-1]
        return (STEP, values.start, values.step) if isinstance(values, range) else (EACH, len(values), *values)

    def _stepped(self, cell: Cell, name: str, spec: RowSpec, source: Source) -> Sequence[int]:
        """Return the values of an input with one for each step of a chain; a range if they are evenly spaced."""
        if (  # the usual, in half the time
            type(source) is np.ndarray
            and source.dtype is NUMPY_DTYPES.get(spec.dtype)
            and source.ndim
            and source.shape[1:] == spec.shape
        ):
            first = self._external(spec, copied(source))
            return range(first, first + len(source))
        if isinstance(source, Steps):
            self._check_source(cell, name, spec, source)
            return source.values()
        if isinstance(source, LISTS):
            values = self._listed(cell, name, spec, source)
            if isinstance(values, range):
                return values
            stride = values[1] - values[0] if len(values) > 1 else 1
            even = range(values[0], values[0] + len(values) * stride, stride) if stride else range(0)
            return even if list(even) == values else values
        try:
            rows = bits_of(spec, source)
        except RequestError as error:
            reason = str(error).replace(f"expected {spec}", f"expected {spec} for each step")
            told, semicolon, hint = reason.partition(";")
            of_all = " for all steps" if isinstance(source, ARRAYS) else ""
            raise RequestError(f"{self._where(cell, name)}: {told}{of_all}{semicolon}{hint}") from None
        if rows.shape[1:] != spec.shape:
            got = RowSpec(rows.shape[1:], spec.dtype)
            raise RequestError(f"{self._where(cell, name)}: expected {spec} for each step, got {got}")
        first = self._external(spec, copied(rows))
        return range(first, first + len(rows))


def carry_hint(cell: Cell, name: str) -> str:
    """Return a hint for an error about a missing input, that says why it is not carried, or how it could be.

    It is empty unless an output could be the input's next value.
    """
    of_name = cell.outputs.get(name, cell.inputs[name])
    if of_name != cell.inputs[name]:
        return f"; output {name!r} is {of_name}, so it is not carried to input {name!r}, {cell.inputs[name]}"
    for output, spec in cell.outputs.items() if not cell.has_spans else ():  # these carry nothing by themselves
        if spec == cell.inputs[name] and output not in cell.carry.values():
            return f" (if it is a state that goes from step to step: cellrt.cell(..., carry={ ({name: output}) }))"
    return ""


def _why_no_steps(cell: Cell, inputs: Mapping[str, Source]) -> str:
    """Return a text for errors that describes a chain's inputs, none of which has a value for each step."""
    told: list[str] = []
    for name, spec in cell.inputs.items():
        if name in inputs and name not in cell.carry and not spec.ragged and not spec.has_nodes:
            dtype, shape = str(spec.dtype).removeprefix("torch."), ", ".join(map(str, ("steps", *spec.shape)))
            told.append(f"input {name!r}: expected {dtype}[{shape}] or a list, got {describe_source(inputs[name])}")
    if not told:
        return f"no input is read step by step: {list(cell.inputs)} are carried or ragged (see cell(carry=...))"
    batched = [
        name
        for name, spec in cell.inputs.items()
        if isinstance(inputs.get(name), ARRAYS) and len(inputs[name].shape) == len(spec.shape) + 2  # type: ignore[attr-defined]
    ]
    hint = f" (a request is one sequence, without a batch dimension: {batched[0]}[0])" if batched else ""
    return f"no input has a value for each step: {'; '.join(told)}{hint}"


def _range_words(values: range) -> list[int]:
    """Return words for a ragged input of evenly spaced values."""
    return [RANGE, values.start, values.step, len(values)] if values else [LIST, 0]


def _is_handle(source: Source) -> bool:
    return isinstance(source, Handle)


def _elsewhere(handle: Output | Steps | LoopSteps) -> str:
    """Return why a handle does not belong to this graph, for errors."""
    if isinstance(handle.graph, Recorder):
        return "the node belongs to another graph"
    return "what is inside a loop's step is read by cells that the step calls; others read what it returned"
