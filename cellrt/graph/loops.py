"""Loops while they are written: of one cell, and of several, where a function that is called once says one step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from cellrt.core.templates.program import CARRY, FIXED, LAST, LEADS, NEXT, NOTHING, OP_LOOP, OP_MEMBER, SAME
from cellrt.definition.cell import CURRENT_GRAPH, Cell
from cellrt.definition.spec import RowSpec
from cellrt.errors import RequestError
from cellrt.graph.growing import carried_by, check_span
from cellrt.graph.recorder import Recorder, Source, carry_hint
from cellrt.graph.row_bits import LISTS, describe_source, num_steps
from cellrt.graph.symbols import GrowingState, Handle, Loop, LoopOfCells, Node, Output, State

Step = Callable[["LoopBody", State], Mapping[str, object]]
"""One step of a loop: ``(body, state) -> {name: output}``."""


class _Use(NamedTuple):
    """The first input that a state is."""

    cell: Cell
    name: str
    spec: RowSpec


class _Member(NamedTuple):
    """A call on a cell. Of its inputs those in ``own`` are outputs of the body, by number, or below 0 states; with
    ``words`` too, the value to begin with, one is carried from such an output."""

    cell: Cell
    type_id: int
    first: int
    words: list[Sequence[int]]
    own: dict[int, int]


class LoopBody:
    """One step of a loop of several cells under construction. The function that says it gets it as its first argument.

    Inside it cells are called on ``state``, on outputs of each other, and on whatever the graph has outside of the
    loop, which is the same at every step. Carried inputs that are not given are carried from the call's own outputs and
    begin as zeros.
    """

    def __init__(self, graph: Recorder, names: Sequence[str]) -> None:
        self._graph, self._names = graph, list(names)
        self._members: list[_Member] = []
        self._uses: list[_Use | None] = [None] * len(names)
        self._num_outputs = 0
        self._grown: set[int] = set()

    def call(self, cell: Cell, /, **inputs: Source) -> Node:
        """Add a cell to the step. Raise RequestError as ``Graph.call``."""
        graph = self._graph
        type_id = graph._begin(cell)
        graph._check_names(cell, inputs)
        if len(inputs) < len(cell.inputs):
            graph._check_state_is_whole(cell, inputs)
        graph._count_nodes(1, cell)
        member = _Member(cell, type_id, self._num_outputs, [], {})
        for number, (name, spec) in enumerate(cell.inputs.items()):
            if name in inputs:
                source = inputs[name]
                if isinstance(source, Node) and source._graph is self and len(source._cell.outputs) == 1:
                    source = getattr(source, next(iter(source._cell.outputs)))
                if isinstance(source, Output) and source.graph is self:
                    member.own[number] = self._read(cell, name, spec, source)
                    member.words.append(())
                else:
                    member.words.append(self._outside(cell, name, spec, source))
            elif spec.span:
                member.words.append((NOTHING, 0))
            else:
                member.own[number] = self._num_outputs + cell.output_index[cell.carry[name]]
                member.words.append((FIXED, graph._zero(spec)))
        self._members.append(member)
        self._num_outputs += len(cell.outputs)
        return Node(self, cell, member.first)

    def _outside(self, cell: Cell, name: str, spec: RowSpec, source: Source) -> Sequence[int]:
        """Return words of an input that is the same at every step."""
        if isinstance(source, GrowingState):
            if not spec.appends and source._number in self._grown:
                where = self._graph._where(cell, name)
                raise RequestError(f"{where}: another cell of the loop's step appends to it; how much is not known yet")
            if spec.appends:
                self._grown.add(source._number)
        return self._graph._words(cell, name, spec, source, is_loop=True)

    def _read(self, cell: Cell, name: str, spec: RowSpec, source: Output) -> int:
        """Return the output of the body, or state, that an input reads."""
        if spec.ragged or spec.has_nodes:
            where = self._graph._where(cell, name)
            raise RequestError(f"{where}: expected {spec}, got an output of the loop's own step, which is one row")
        if source.value < 0:
            use = self._uses[-1 - source.value]
            if use is None:
                self._uses[-1 - source.value] = _Use(cell, name, spec)
                return source.value
            expected = use.spec
        else:
            expected = source.spec
        if expected != spec:
            raise RequestError(f"{self._graph._where(cell, name)}: expected {spec}, got {expected}")
        return source.value

    def _state(self) -> State:
        unknown = RowSpec(())
        return State({name: Output(self, -1 - k, unknown) for k, name in enumerate(self._names)})

    def _made(self, made: object) -> dict[str, Output]:
        """Return the outputs that the function returned, by name."""
        if not isinstance(made, Mapping) or not self._members:
            raise RequestError(
                "loop: expected a function that calls cells and returns a dict of outputs, got "
                f"{describe_source(made)} of {len(self._members)} calls"
            )
        outputs: dict[str, Output] = {}
        for name, value in made.items():
            if isinstance(value, Node) and len(value._cell.outputs) == 1:
                value = getattr(value, next(iter(value._cell.outputs)))
            if not isinstance(value, Output) or value.graph is not self:
                raise RequestError(
                    f"loop, {name!r}: expected an output of a cell that the step calls, got {describe_source(value)}"
                )
            outputs[name] = value
        if missing := [name for name in self._names if name not in outputs]:
            raise RequestError(f"loop: the step returned {list(outputs)}; the state {missing} is missing")
        return outputs

    def _starts(self, outputs: Mapping[str, Output], given: Mapping[str, Source]) -> list[tuple[int, int]]:
        """Return two value numbers for each state: its value at the start, and the output it takes after a step.

        The second is -1 if a step leaves the state as it is.
        """
        starts: list[tuple[int, int]] = []
        for k, name in enumerate(self._names):
            use, after = self._uses[k], outputs[name]
            if after.value < 0 and after.value != -1 - k:
                raise RequestError(
                    f"loop, {name!r}: expected an output of a cell, got another state; a cell that returns its input "
                    "makes one of it"
                )
            if use is None:
                raise RequestError(
                    f"loop, {name!r}: it is given, but no cell of the step reads it as state.{name} (a carried input "
                    "that a call leaves out goes on from that call itself)"
                )
            if after.value >= 0 and after.spec != use.spec:
                raise RequestError(f"loop, {name!r}: it begins as {use.spec}, and is {after.spec} after a step")
            starts.append((self._graph._value(use.cell, use.name, use.spec, given[name]), after.value))
        return starts

    def _record(self, starts: list[tuple[int, int]], limit: int, stop: int) -> int:
        """Write the members to the program; return the value of their first output."""
        first = self._graph._take_values(self._num_outputs)
        for left, member in zip(reversed(range(len(self._members))), self._members):
            is_stop = 0 <= stop - member.first < len(member.cell.outputs)
            words = [OP_MEMBER, member.type_id, limit, stop - member.first if is_stop else -1, left]
            for number, given in enumerate(member.words):
                if number not in member.own:
                    words += given
                    continue
                output = member.own[number]
                if given:  # carried from its own output
                    words += (LAST, given[1], first + output)
                elif output >= 0:
                    words += (SAME, first + output)
                elif starts[-1 - output][1] < 0:
                    words += (FIXED, starts[-1 - output][0])
                else:
                    words += (LAST, starts[-1 - output][0], first + starts[-1 - output][1])
            self._graph._program.extend(words)
        return first


def loop_of_cells(
    graph: Recorder, step: Step, max_steps: int, until: str | None, given: Mapping[str, Source]
) -> LoopOfCells:
    """Record a loop whose step is what a function says; see ``Graph.loop``."""
    body = LoopBody(graph, list(given))
    token = CURRENT_GRAPH.set(body)
    try:
        outputs = body._made(step(body, body._state()))
    finally:
        CURRENT_GRAPH.reset(token)
    stop = -1
    if until is not None:
        if until not in outputs or outputs[until].value < 0 or outputs[until].spec.shape:
            raise RequestError(
                f"loop: until={until!r} must be an output of one number a row that a cell of the step makes; the step "
                f"returned { ({name: str(output.spec) for name, output in outputs.items()}) }"
            )
        stop = outputs[until].value
    first = body._record(body._starts(outputs, given), max_steps, stop)
    graph._loop_values.update({first + k: max_steps for k in range(body._num_outputs)})
    made = {name: Output(graph, first + each.value, each.spec) for name, each in outputs.items() if each.value >= 0}
    return LoopOfCells(made, max_steps)


def loop_of_layers(graph: Recorder, cells: Sequence[Cell], until: str | None, inputs: Mapping[str, Source]) -> Loop:
    """Record a loop whose first step is the first cell, its second the second; see ``Graph.loop``."""
    if not cells or not all(isinstance(each, Cell) for each in cells):
        raise RequestError(f"loop: expected a list of cells, got {describe_source(cells)}")
    cell = cells[0]
    for number, other in enumerate(cells):
        if (other.inputs, other.outputs, other.carry) != (cell.inputs, cell.outputs, cell.carry):
            raise RequestError(
                f"loop of {len(cells)} cells: all must have the same inputs, outputs and carried inputs; number "
                f"{number} is {other!r}, the first {cell!r}"
            )
    if any(spec.page_size for spec in cell.inputs.values()):
        raise RequestError(
            f"loop of {len(cells)} cells: cell {cell.name!r} has pages, of which each would need its own"
        )
    type_ids = [graph._begin(each) for each in cells]
    carried = carried_by(cell, None)
    graph._check_names(cell, inputs, carried)
    graph._count_nodes(1, cell)
    if not carried:
        raise _nothing_carried(cell)
    stop = _stop_of(cell, until)
    words: list[Sequence[int]] = []
    for name, spec in cell.inputs.items():
        if name in carried:
            start = graph._value(cell, name, spec, inputs[name]) if name in inputs else graph._zero(spec)
            words.append((LAST, start, cell.output_index[carried[name]]))
        else:
            words.append((NOTHING, 0) if spec.span else graph._words(cell, name, spec, inputs[name], is_loop=True))
    first = graph._take_values(len(cell.outputs))
    graph._program.extend((OP_MEMBER, type_ids[0], len(cells), stop, -len(cells), *type_ids))
    for each in words:
        graph._program.extend((LAST, each[1], first + each[2]) if each[0] == LAST else each)
    graph._loop_values.update({first + k: len(cells) for k in range(len(cell.outputs))})
    return Loop(graph, cell, first, len(cells))


def _nothing_carried(cell: Cell) -> RequestError:
    hints = "".join(carry_hint(cell, name) for name in cell.inputs if name in cell.outputs)
    return RequestError(f"loop of cell {cell.name!r}: no input is carried from an output (see cell(carry=...)){hints}")


def _stop_of(cell: Cell, until: str | None) -> int:
    """Return the output that ends a loop of the cell, or -1."""
    if until is not None and (until not in cell.outputs or cell.outputs[until].shape):
        raise RequestError(
            f"loop of cell {cell.name!r}: until={until!r} must be an output of one number a row; "
            f"outputs are { ({k: str(v) for k, v in cell.outputs.items()}) }"
        )
    return -1 if until is None else cell.output_index[until]


def loop_of_one(
    graph: Recorder,
    cell: Cell,
    max_steps: int,
    until: str | None,
    keep: bool | Collection[str],
    carry: Mapping[str, str] | None,
    inputs: Mapping[str, Source],
) -> Loop:
    """Record a loop of one cell; see ``Graph.loop``."""
    type_id = graph._begin(cell)
    carried = carried_by(cell, carry)
    graph._check_names(cell, inputs, carried)
    graph._count_nodes(1, cell)
    if not carried:
        raise _nothing_carried(cell)
    stop = _stop_of(cell, until)
    kept = graph._kept_inputs(cell, keep) if keep else ()
    starts = graph._starts(cell, inputs, kept)
    count = _num_leading(graph, cell, carried, inputs) if cell.has_spans else 1
    words: list[int] = []
    for name, spec in cell.inputs.items():
        if name in cell.carry:
            words += [CARRY, starts[name]]
        elif name in carried:
            words += _before_first(graph, cell, name, spec, inputs, count)
            words.append(cell.output_index[carried[name]])
        elif spec.span:
            words += [NOTHING, 0]
        else:
            words += graph._words(cell, name, spec, inputs[name], is_loop=True)
    graph._program.extend([OP_LOOP, type_id, max_steps, stop, *words])
    first = graph._take_values(len(cell.outputs))
    graph._loop_values.update({first + k: max_steps for k in range(len(cell.outputs))})
    graph._keep(cell, kept, starts, first, 1)
    return Loop(graph, cell, first, max_steps)


def _num_leading(graph: Recorder, cell: Cell, carried: Mapping[str, str], inputs: Mapping[str, Source]) -> int:
    """Return how many rows the first step of a loop reads. Raise RequestError if carried inputs differ in them."""
    counts = {name: abs(num_steps(inputs[name], cell.inputs[name])) if name in inputs else 1 for name in carried}
    count = max(counts.values())
    if count == 0:
        raise RequestError(f"loop of cell {cell.name!r}: its first step reads at least one row, got {counts}")
    if min(counts.values()) < count:
        for name in filter(inputs.__contains__, carried):  # of what is no row at all that is the error
            _before_first(graph, cell, name, cell.inputs[name], inputs, counts[name])
        raise RequestError(
            f"loop of cell {cell.name!r}: its first step reads as many rows of each carried input, got {counts}; what "
            "is not given is one row of zeros"
        )
    if cell.is_whole:
        check_span(cell, count)
    graph._count_nodes(count - 1, cell)
    return count


def _before_first(
    graph: Recorder, cell: Cell, name: str, spec: RowSpec, inputs: Mapping[str, Source], count: int
) -> Sequence[int]:
    """Return words of a carried input: what the first step reads.

    Raise RequestError if its rows do not lie together.
    """
    if name not in inputs:
        return NEXT, graph._zero(spec)
    source = inputs[name]
    if num_steps(source, spec) < 0:
        return NEXT, graph._value(cell, name, spec, source)
    values = graph._stepped(cell, name, spec, source)
    if count == 1:
        return NEXT, values[0]
    if not isinstance(values, range) or (isinstance(source, LISTS) and any(isinstance(row, Handle) for row in source)):
        where = graph._where(cell, name)
        raise RequestError(f"{where}: expected rows of the request or a chain's steps, got a list with outputs")
    return LEADS, values.start, values.step, count
