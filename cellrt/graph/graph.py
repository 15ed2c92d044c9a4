"""The graph that an unfolder writes: calls on cells, recorded as a program for the core.

Nothing is computed here. Every call checks its inputs against the cell's specs and appends a few integers to the
program (``recorder.py``). Equal programs are compiled once (``registry.py`` keeps them), so a request of a known shape
costs only the recording.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, overload

import numpy as np
import torch

from cellrt.core.templates.program import CARRY, FIXED, NOTHING, OP_CHAIN, OP_CONSTANT, OP_NODE, OP_RESULT
from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.errors import RequestError
from cellrt.graph.dags import dag_of_cell, tree_of_cells
from cellrt.graph.growing import check_span
from cellrt.graph.loops import Step, loop_of_cells, loop_of_layers, loop_of_one
from cellrt.graph.recorder import Recorder, Source
from cellrt.graph.results import RESULTS, Placement, Recorded, ResultLayout, only_result
from cellrt.graph.row_bits import bits_of, copied, describe_source, spec_of
from cellrt.graph.symbols import (
    Chain,
    Dag,
    GrowingState,
    ListedOutputs,
    Loop,
    LoopOfCells,
    LoopSteps,
    Node,
    Output,
    State,
    Steps,
    Tree,
)
from cellrt.numbers import as_integer


class Graph(Recorder):
    """One request's cell graph under construction. The unfolder gets it as its first argument.

    Writing one costs time in the client's thread (one core of a server, hidden 64). ``call`` takes 2.5 us a node, and 3
    us more for each tensor or number of the request among its inputs. ``chain`` and ``loop`` take 10 us and 3 ns a step
    (15 ns if the steps are a Python list). ``tree`` and ``dag`` take 13 us and 12 ns a node. A graph not seen before is
    also compiled, in 7 us, and 0.15 us for each node outside chains and loops. So what is a chain, a tree or another
    acyclic graph of one cell should be written as one.

    The engine then takes up to 0.1 us to schedule a node, and batches nodes of one cell alone. So a cell is the largest
    piece that requests have in common and that nobody has to wait inside: one whole step of an LSTM, not a product. It
    is divided where requests differ (few steps need the output layer), and where one half needs no state, which is
    then batched over all steps at once. See ``docs/grain.md``.
    """

    def call(self, cell: Cell, /, **inputs: Source) -> Node:
        """Add one node. Inputs by name; if no carried input is given, all are zeros.

        Raise RequestError naming cell, node and input, with what was expected and what came.
        """
        type_id = self._begin(cell)
        self._check_names(cell, inputs)
        if len(inputs) < len(cell.inputs):
            self._check_state_is_whole(cell, inputs)
        self._count_nodes(1, cell)
        words = [OP_NODE, type_id]
        for name, spec in cell.inputs.items():
            if name in inputs:
                words += self._words(cell, name, spec, inputs[name])
            else:
                words += (NOTHING, 0) if spec.span else (FIXED, self._zero(spec))
        self._program.extend(words)
        return Node(self, cell, self._take_values(len(cell.outputs)))

    def zeros(self, cell: Cell) -> State:
        """Return zeros for the carried inputs of a cell: ``state.h``, ``state.c``, ..., by the names of the outputs.

        Raise RequestError for a cell that carries none.
        """
        self._check_carries(cell, "zeros")
        return State(
            {
                output: Output(self, self._zero(cell.outputs[output]), cell.outputs[output])
                for output in cell.carry.values()
            }
        )

    def constant(self, value: float | torch.Tensor | np.ndarray, spec: RowSpec | None = None) -> Output:
        """Return a value that is the same for every request, kept at each worker for good: what it is now, whatever
        becomes of the tensor.

        ``spec`` defaults to that of the tensor or array; an int is int64 and a float float32 without a shape. A float
        tensor is converted to another float dtype. Raise RequestError if the value does not fit the spec.
        """
        if spec is None:
            spec = spec_of(value)
        elif isinstance(value, torch.Tensor) and value.is_floating_point() and spec.dtype.is_floating_point:
            value = value.to(spec.dtype)
        if spec is None:
            raise RequestError(f"constant: expected a number, a tensor or an array, got {describe_source(value)}")
        try:
            bits = bits_of(spec, value)
        except RequestError as error:
            raise RequestError(f"constant: {error}") from None
        if bits.shape != spec.shape:
            raise RequestError(f"constant: expected {spec}, got shape {list(bits.shape)}")
        kind = self._binding.kind(spec)
        row = self._binding.constant_row(kind, bits.tobytes())
        if row < 0:
            made = self._external(spec, copied(bits)[None])
        else:
            self._program.extend((OP_CONSTANT, kind, row))
            made = self._take_values(1)
        self._constants.add(made)
        return Output(self, made, spec)

    def state(self, cell: Cell, /, **start: Source) -> State:
        """Return the state that ``keep`` kept after the session's last request, for graphs that call the cell
        themselves.

        A new session begins with ``start``, by the names of the outputs, or with zeros; so does a request without one.
        Use ``chain(..., keep=True)`` or ``loop(..., keep=True)`` where they fit: these leave the state of the last
        completed step even if the request ends early, this one that of the last completed request.
        """
        self._begin(cell)
        self._check_carries(cell, "state")
        names = dict.fromkeys(cell.carry.values())
        for name in start:
            if name not in names:
                raise RequestError(f"{self._where(cell, name)}: graph.state: unknown; the cell carries {list(names)}")
        values: dict[str, Output] = {}
        for name in names:
            spec = cell.outputs[name]
            given = self._value(cell, name, spec, start[name]) if name in start else -1
            values[name] = Output(self, self._state(cell, name, given), spec)
        return State(values)

    def _check_carries(self, cell: Cell, what: str) -> None:
        """Raise RequestError for a cell without a state."""
        if not isinstance(cell, Cell):
            raise RequestError(f"graph.{what}: expected a cell, got {describe_source(cell)}")
        if not cell.carry:
            inputs, outputs = ({name: str(spec) for name, spec in part.items()} for part in (cell.inputs, cell.outputs))
            raise RequestError(
                f"graph.{what}: cell {cell.name!r} carries no state: no input of {inputs} has the name and shape of an "
                f"output of {outputs}; see cellrt.cell(carry=...)"
            )

    def keep(self, state: State, after: Node | Mapping[str, Output]) -> None:
        """Set the session's state after the request: the same outputs of node ``after``, or those given.

        Raise RequestError if ``state`` does not come from ``state``, was kept already, or ``after`` does not fit it.
        """
        self._check_open()
        for name, before in vars(state).items():
            if before.graph is not self or not self._states.is_open(before.value):
                raise RequestError(f"keep, state {name!r}: expected one that graph.state gave and that is not kept yet")
            made = after[name] if isinstance(after, Mapping) else getattr(after, name)
            if not isinstance(made, Output):
                raise RequestError(f"keep, state {name!r}: expected an output of a node, got {describe_source(made)}")
            self._check_result(made, name, what="keep, state")
            if made.spec != before.spec:
                raise RequestError(f"keep, state {name!r}: expected {before.spec}, got {made.spec}")
            self._states.keep(before.value, made.value, 0, 0)

    def pages(self, cell: Cell, input: str | None = None, *, keep: bool = False) -> GrowingState:
        """Return a state that grows by a row a step, for an input of the cell that ``cellrt.grows`` made.

        It begins empty. With ``keep`` the session keeps it, and it begins as it was after the session's last request.

        Give it to that cell, and to others with an input of the same rows and pages. Each step of a cell that grows it
        appends a row, in the order of the calls here. A cell that only reads it (``cellrt.pages``) sees the rows of
        calls before its own. Raise RequestError if the cell has no such input, or several and none is named.
        """
        self._begin(cell)
        return self._growing.new(self, self._binding.kind, cell, input, keep)

    def chain(
        self, cell: Cell, /, *, reverse: bool = False, keep: bool | Collection[str] = False, **inputs: Source
    ) -> Chain:
        """Add a chain: one node a step, each reading the carried state of the one before.

        Of a cell with pages or spans a task takes any number of its steps, each a row, in order.

        Args:
            reverse: run from the last step's input to the first's.
            keep: the carried inputs that the request's session keeps: True for all, or their names. They begin with
                what they were after the last step of the last completed task; in a new session, and without one, with
                what is given. The others begin with what is given in every request.
            inputs: carried inputs are the state before the first step (default zeros). Of the others at least one has a
                value for each step: a tensor ``[steps, *shape]``, a list of numbers, rows and outputs, or a chain's
                output. One Output, or one row, serves every step.

        Raise RequestError, RequestTooLargeError.
        """
        type_id = self._begin(cell)
        self._check_names(cell, inputs)
        stepped = self._chain_lengths(cell, inputs)
        count = next(iter(stepped.values()))
        self._count_nodes(count, cell)
        if cell.is_whole:
            check_span(cell, count)
        if keep and reverse:
            raise RequestError(f"chain of cell {cell.name!r}: one that runs backwards cannot be continued: keep=True")
        kept = self._kept_inputs(cell, keep) if keep else ()
        starts = self._starts(cell, inputs, kept)
        words = [OP_CHAIN, type_id, count]
        for name, spec in cell.inputs.items():
            if name in starts:
                words += (CARRY, starts[name])
            elif name in stepped:
                words += self._step_words(cell, name, spec, inputs[name], reverse)
            elif spec.span:
                words += (NOTHING, 0)
            else:
                words += self._words(cell, name, spec, inputs[name])
        self._program.extend(words)
        first = self._take_values(count * len(cell.outputs))
        if kept:
            self._keep(cell, kept, starts, first, count)
        return Chain(self, cell, first, count, reverse)

    @overload
    def loop(
        self,
        cell: Cell,
        /,
        *,
        max_steps: int,
        until: str | None = None,
        keep: bool | Collection[str] = False,
        carry: Mapping[str, str] | None = None,
        **inputs: Source,
    ) -> Loop: ...

    @overload
    def loop(
        self,
        cell: Sequence[Cell],
        /,
        *,
        max_steps: None = None,
        until: str | None = None,
        keep: Literal[False] = False,
        carry: None = None,
        **inputs: Source,
    ) -> Loop: ...

    @overload
    def loop(
        self,
        cell: Step,
        /,
        *,
        max_steps: int,
        until: str | None = None,
        keep: Literal[False] = False,
        carry: None = None,
        **inputs: Source,
    ) -> LoopOfCells: ...

    def loop(
        self,
        cell: Cell | Step | Sequence[Cell],
        /,
        *,
        max_steps: int | None = None,
        until: str | None = None,
        keep: bool | Collection[str] = False,
        carry: Mapping[str, str] | None = None,
        **inputs: Source,
    ) -> Loop | LoopOfCells:
        """Add a loop: the cell again and again on its own carried outputs, until one of them says stop.

        Of several cells a function says one step: ``(body, state) -> {name: output}``, where ``state`` has what
        ``inputs`` names, at first as given there and then as the step before returned it under that name. It is called
        once, here. It calls cells on ``state``, on outputs of each other, and on outputs outside, which are the same at
        every step. Carried inputs that it leaves out are carried from the call itself, from zeros on. Each cell is
        batched by itself, with whatever else needs it; a request's next step begins when all have done this.

        Of a list of cells that differ in their weights alone, such as a stack of layers, each is one step, in order.

        Args:
            max_steps: the most steps; of a list, as many as it has.
            until: name of an output of one number a row; the step that makes it non-zero is the last. None: run
                ``max_steps`` steps.
            keep: see ``chain``; not of several cells, whose state ``state`` and ``keep`` keep.
            carry: the output from which each input is carried, for a cell with pages or spans, which declares none.
                Default: the output of its name and spec.
            inputs: carried inputs are the state before the first step (default zeros); the others are the same at
                every step. The first step of a cell with pages or spans may read several rows: ``[rows, *shape]`` or a
                chain's steps, as many of each carried input. Its outputs are those of the last row.
        """
        if isinstance(cell, list | tuple):
            if max_steps is not None or keep or carry is not None:
                raise RequestError("loop of a list of cells: it takes as many steps as it has, and no keep and carry")
            return loop_of_layers(self, cell, until, inputs)
        where = f"loop of cell {cell.name!r}" if isinstance(cell, Cell) else f"loop of {cell!r}"
        most = as_integer(max_steps)
        if most is None or not 1 <= most < 1 << 20:
            raise RequestError(f"{where}: expected max_steps as an int from 1 to {(1 << 20) - 1}, got {max_steps!r}")
        if isinstance(cell, Cell):
            return loop_of_one(self, cell, most, until, keep, carry, inputs)
        if not callable(cell) or keep or carry is not None:
            raise RequestError(
                f"{where}: expected a cell, a list of cells, or a function that says one step, without keep and carry "
                "(see graph.state and graph.keep)"
            )
        return loop_of_cells(self, cell, most, until, inputs)

    def tree(
        self,
        parents: Sequence[int] | np.ndarray,
        *,
        leaf: Cell,
        inner: Cell,
        leaf_inputs: Mapping[str, Source] | None = None,
        inner_inputs: Mapping[str, Source] | None = None,
    ) -> Tree:
        """Add a tree: ``leaf`` at nodes without children, ``inner`` at the others; return the root.

        ``.h`` of it is the root's output, ``.nodes.h`` a sequence of every node's, in the order of ``parents``.

        Args:
            parents: ``[nodes]``: each node's parent, -1 for the one root, in any order.
            leaf, inner: may be the same cell; a ragged input of a leaf is empty.
            leaf_inputs, inner_inputs: a tensor ``[leaves, *shape]`` (``[inner nodes, *shape]``) or a list of rows and
                outputs, one a node in the order of ``parents``, or one Output or row for all. Missing ones are zeros if
                the cell carries them.

        An inner cell reads its children (in the order of ``parents``) by name: a ragged input ``h`` gets output ``h``
        of all children, inputs ``h_0``, ``h_1``, ... (or ``h_left``, ``h_right``) that of one child each; then every
        inner node must have that many children.
        """
        return tree_of_cells(self, parents, leaf, inner, leaf_inputs or {}, inner_inputs or {})

    def dag(
        self,
        cell: Cell,
        /,
        offsets: Sequence[int] | np.ndarray | torch.Tensor,
        sources: Sequence[int] | np.ndarray | torch.Tensor,
        inputs: Mapping[str, Source] | None = None,
    ) -> Dag:
        """Add an acyclic graph: the cell at every node, which reads nodes before it.

        ``.h`` is every node's output ``h``, in order, like a chain's steps. It is a result ``[nodes, *shape]``, a
        ragged input, or an input with a row for each node of another dag. ``.h[n]`` is that of node n.

        Args:
            offsets, sources: integers ``[nodes + 1]`` from 0 on and ``[sources]``: node n reads nodes
                ``sources[offsets[n]:offsets[n + 1]]``, each of a number below n, in that order.
            inputs: a tensor ``[nodes, *shape]`` or a list of rows and outputs, one a node, or one Output or row for
                all. Missing ones are zeros if the cell carries them. Of a ragged input that is not named like an output
                ``[sources, *shape]``, one a source.

        A ragged input ``h`` gets output ``h`` of all that a node reads, nothing if it reads none. Raise RequestError
        naming the node or the input, with what was expected and what came; RequestTooLargeError.
        """
        return dag_of_cell(self, cell, offsets, sources, inputs or {})

    @property
    def max_nodes(self) -> int:
        """The most nodes that the graph may have, for unfolders that count before they build."""
        return self._binding.max_nodes

    def record(self, results: object) -> Recorded:
        """End the recording: the request's results are what the unfolder returned."""
        if type(results) is not dict and isinstance(results, Node):
            results = {name: getattr(results, name) for name in results._cell.outputs}
        if type(results) is not dict and not isinstance(results, Mapping):
            raise RequestError(f"an unfolder must return a dict of results, got {type(results).__name__}")
        if not self._num_nodes:
            raise RequestError("the graph is empty: the unfolder called no cell")
        if not results:
            raise RequestError("the graph has no result: the unfolder returned an empty dict")
        states = self._states.end() if "_states" in vars(self) else ()
        if len(results) == 1 and not self._loop_values:
            ((name, result),) = results.items()
            if type(result) is Output and type(name) is str:  # the usual, in half the time
                self._check_result(result, name)
                self._program.fromlist([OP_RESULT, result.value, 1, 1])
                layouts = only_result(name, self._binding.kind(result.spec))
                return Recorded(self._program.tobytes(), self._externals, layouts, states)
        placement = Placement(self._program, self._loop_values)
        if self._loop_values:
            for result in results.values():
                if isinstance(result, LoopSteps) and result.graph is self:
                    placement.of_steps(result.value)
            for value in self._emitted:
                placement.of_steps(value)
        layouts = tuple([self._layout(name, result, placement) for name, result in results.items()])
        return Recorded(self._program.tobytes(), self._externals, layouts, states)

    def _layout(self, name: object, result: object, placement: Placement) -> ResultLayout:
        """Place one named result and say where it lies."""
        if type(name) is not str:
            raise RequestError(f"the name of a result: expected a str, got {name!r:.80} ({type(name).__name__})")
        if type(result) is not Output and isinstance(result, Node) and len(result._cell.outputs) == 1:
            result = Output(result._graph, result._first, next(iter(result._cell.outputs.values())))
        if isinstance(result, RESULTS):
            self._check_result(result, name)
            kind = self._binding.kind(result.spec)
            if isinstance(result, Output):
                is_loop = result.value in self._loop_values
                return ResultLayout(name, kind, placement.of_value(result.value), is_loop, True)
            if isinstance(result, ListedOutputs):
                return ResultLayout(name, kind, placement.of_listed(result.values()), False, False)
            if isinstance(result, Steps):
                return ResultLayout(name, kind, placement.of_chain(result), False, False)
            return ResultLayout(name, kind, placement.of_steps(result.value), True, False)
        if not isinstance(result, list | tuple) or not result or not all(isinstance(item, Output) for item in result):
            outputs = (
                f" with outputs {list(result._cell.outputs)}" if isinstance(result, Node | Chain | Dag | Loop) else ""
            )
            raise RequestError(
                f"result {name!r}: expected an output of a node, a chain's or loop's steps or a list of outputs, got "
                f"{type(result).__name__}{outputs}"
            )
        for k, output in enumerate(result):
            self._check_result(output, name, k)
            if output.spec != result[0].spec:
                raise RequestError(
                    f"result {name!r}[{k}]: expected {result[0].spec} as of the first, got {output.spec}"
                )
            if output.value in self._loop_values:
                raise RequestError(f"result {name!r}[{k}]: an output of a loop must be a result of its own")
        positions = tuple(placement.of_value(output.value)[0] for output in result)
        return ResultLayout(name, self._binding.kind(result[0].spec), positions, False, False)
