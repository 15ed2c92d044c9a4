"""The graph that an unfolder writes: calls on cells, recorded as a program for the core.

Nothing is computed here. Every call checks its inputs against the cell's specs and appends a few integers to the
program (``recorder.py``); equal programs are compiled once (``registry.py`` keeps them), so a request of a known shape
costs only the recording.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.program import CARRY, FIXED, OP_CONSTANT, OP_KEEP, OP_LOOP, OP_NODE
from cellrt.core.trees import count_leaves, tree_program, why_no_tree
from cellrt.definition.bits import as_bits
from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.errors import RequestError
from cellrt.graph.recorder import Recorder, Source
from cellrt.graph.results import Placement, ResultLayout, StateLayout
from cellrt.graph.symbols import Chain, Loop, LoopSteps, Node, Output, State, Steps, Tree

RESULTS = (Output, Steps, LoopSteps)
"""What a named result may be, beside a list of outputs."""


class Recorded(NamedTuple):
    """What an unfolder recorded for one request."""

    program: bytes
    """The int32 words of ``core/program.py``."""
    externals: list[tuple[int, NDArray[Any]]]
    """(kind, rows ``[n, *shape]`` as ``arena.as_bits``) of the request's own tensors, in order of their values."""
    results: tuple[ResultLayout, ...]
    states: tuple[StateLayout, ...] = ()
    """What a session keeps."""


@lru_cache(maxsize=1024)
def _number(is_integer: bool, value: float) -> torch.Tensor:
    """The tensor of a constant number, one and the same for each: ints are int64, floats float32."""
    return torch.tensor(value, dtype=torch.int64 if is_integer else torch.float32)


class Graph(Recorder):
    """One request's cell graph under construction. The unfolder gets it as its first argument."""

    def call(self, cell: Cell, /, **inputs: Source) -> Node:
        """Adds one node. Inputs by name; if no carried input is given, all are zeros.

        Raises RequestError naming cell, node and input, with what was expected and what came.
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
                words += (FIXED, self._zero(spec))
        self._program.extend(words)
        return Node(self, cell, self._take_values(len(cell.outputs)))

    def zeros(self, cell: Cell) -> State:
        """Zeros for the carried inputs of a cell: ``state.h``, ``state.c``, ..., by the names of the outputs."""
        return State(
            {
                output: Output(self, self._zero(cell.outputs[output]), cell.outputs[output])
                for output in cell.carry.values()
            }
        )

    def constant(self, value: float | torch.Tensor, spec: RowSpec | None = None) -> Output:
        """A value that is the same for every request, kept at each worker for good.

        ``spec`` defaults to that of the tensor; an int is int64 and a float float32 without a shape.
        """
        tensor = value if isinstance(value, torch.Tensor) else _number(isinstance(value, int), value)
        spec = spec or RowSpec(tuple(tensor.shape), tensor.dtype)
        if tuple(tensor.shape) != spec.shape:
            raise RequestError(f"constant: expected {spec}, got shape {list(tensor.shape)}")
        tensor = tensor.to(spec.dtype)
        row = self._binding.constant_row(spec, tensor)
        if row < 0:
            made = self._external(spec, as_bits(tensor)[None])
        else:
            self._program.extend([OP_CONSTANT, self._binding.kind(spec), row])
            made = self._take_values(1)
        self._constants.add(made)
        return Output(self, made, spec)

    def state(self, cell: Cell) -> State:
        """As ``zeros``, but what ``keep`` kept of the session's last request, for graphs that call the cell themselves.

        Use ``chain(..., keep=True)`` or ``loop(..., keep=True)`` where they fit: these leave the state of the last
        completed step even if the request ends early, this one that of the last completed request.
        """
        return State(
            {
                output: Output(self, self._state(cell, output), cell.outputs[output])
                for output in dict.fromkeys(cell.carry.values())
            }
        )

    def keep(self, state: State, after: Node | Mapping[str, Output]) -> None:
        """Says what the session's state is after the request: the same outputs of node ``after``, or those given.

        Raises RequestError if ``state`` does not come from ``state``, was kept already, or ``after`` does not fit it.
        """
        for name, before in vars(state).items():
            if before.value not in self._unkept:
                raise RequestError(f"keep, state {name!r}: expected one that graph.state gave and that is not kept yet")
            made = after[name] if isinstance(after, Mapping) else getattr(after, name)
            self._check_result(made, name, what="keep, state")
            if made.spec != before.spec:
                raise RequestError(f"keep, state {name!r}: expected {before.spec}, got {made.spec}")
            self._program.extend([OP_KEEP, before.value, made.value, 0, 0])
            self._states.append(self._unkept.pop(before.value))

    def chain(self, cell: Cell, /, *, reverse: bool = False, keep: bool = False, **inputs: Source) -> Chain:
        """Adds a chain: one node a step, each reading the carried state of the one before.

        Carried inputs are the state before the first step (default zeros). Of the others at least one has a value for
        each step: a tensor ``[steps, *shape]``, a list of numbers or outputs, or a chain's output. One Output, or one
        row, serves every step. With ``reverse`` the chain runs from the last step's input to the first's. With ``keep``
        the carried inputs that are not given begin with the state of the request's session, which keeps what they are
        after the last step of the last completed task; without a session they begin with zeros.
        """
        type_id = self._begin(cell)
        self._check_names(cell, inputs)
        stepped = self._chain_lengths(cell, inputs)
        count = next(iter(stepped.values()))
        self._count_nodes(count, cell)
        if keep and reverse:
            raise RequestError(f"chain of cell {cell.name!r}: one that runs backwards cannot be continued: keep=True")
        starts = self._starts(cell, inputs, keep)
        parts: dict[str, Sequence[int]] = {}
        """By input: words of a chain's input, or the values of an input with one for each step."""
        for name, spec in cell.inputs.items():
            if name in cell.carry:
                parts[name] = (CARRY, starts[name])
            elif name in stepped:
                values = self._stepped(cell, name, spec, inputs[name])
                parts[name] = values[::-1] if reverse else values
            else:
                parts[name] = self._words(cell, name, spec, inputs[name])
        self._record_chain(cell, type_id, count, parts, stepped)
        first = self._take_values(count * len(cell.outputs))
        if keep:
            states = {cell.carry[name]: start for name, start in starts.items() if name not in inputs}
            self._keep(cell, states, first, count)
        return Chain(self, cell, first, count, reverse)

    def loop(
        self, cell: Cell, /, *, max_steps: int, until: str | None = None, keep: bool = False, **inputs: Source
    ) -> Loop:
        """Adds a loop: the cell again and again on its own carried outputs, until one of them says stop.

        Args:
            max_steps: the most steps.
            until: name of an output of one number a row; the step that makes it non-zero is the last. None: run
                ``max_steps`` steps.
            keep: as of ``chain``.
            inputs: carried inputs are the state before the first step (default zeros); the others are the same at
                every step.
        """
        type_id = self._begin(cell)
        self._check_names(cell, inputs)
        self._count_nodes(1, cell)
        if not cell.carry:
            raise RequestError(f"loop of cell {cell.name!r}: no input is carried from an output (see cell(carry=...))")
        if not 1 <= max_steps < 1 << 20:
            raise RequestError(f"loop of cell {cell.name!r}: expected 1 <= max_steps < 2**20, got {max_steps}")
        stop = -1
        if until is not None:
            if until not in cell.outputs or cell.outputs[until].shape:
                raise RequestError(
                    f"loop of cell {cell.name!r}: until={until!r} must be an output of one number a row; "
                    f"outputs are { ({k: str(v) for k, v in cell.outputs.items()}) }"
                )
            stop = cell.places[until]
        starts = self._starts(cell, inputs, keep)
        words: list[int] = []
        for name, spec in cell.inputs.items():
            if name in cell.carry:
                words += [CARRY, starts[name]]
            else:
                words += self._words(cell, name, spec, inputs[name])
        self._program.extend([OP_LOOP, type_id, max_steps, stop, *words])
        first = self._take_values(len(cell.outputs))
        self._loop_values.update({first + k: max_steps for k in range(len(cell.outputs))})
        if keep:
            self._keep(
                cell, {cell.carry[name]: start for name, start in starts.items() if name not in inputs}, first, 1
            )
        return Loop(self, cell, first, max_steps)

    def tree(
        self,
        parents: Sequence[int] | np.ndarray,
        *,
        leaf: Cell,
        inner: Cell,
        leaf_inputs: Mapping[str, Source] | None = None,
        inner_inputs: Mapping[str, Source] | None = None,
    ) -> Tree:
        """Adds a tree: ``leaf`` at nodes without children, ``inner`` at the others; returns the root.

        ``.h`` of it is the root's output, ``.nodes.h`` the list of every node's, in the order of ``parents``.

        Args:
            parents: ``[nodes]``: each node's parent, -1 for the one root, in any order.
            leaf, inner: may be the same cell; a ragged input of a leaf is empty.
            leaf_inputs, inner_inputs: a tensor ``[leaves, *shape]`` (``[inner nodes, *shape]``), one row a node in the
                order of ``parents``, or one Output or row for all. Missing ones are zeros if the cell carries them.

        An inner cell reads its children (in the order of ``parents``) by name: a ragged input ``h`` gets output ``h``
        of all children, inputs ``h_0``, ``h_1``, ... (or ``h_left``, ``h_right``) that of one child each; then every
        inner node must have that many children.
        """
        parents = np.ascontiguousarray(parents, dtype=np.int32)
        if parents.ndim != 1 or not parents.size:
            raise RequestError(f"tree: expected parents [nodes], at least one, got shape {list(parents.shape)}")
        num_leaves = count_leaves(parents)
        if num_leaves < 0:
            raise RequestError(f"tree: {why_no_tree(parents)}")
        num_inner = parents.size - num_leaves
        leaf_type, inner_type = self._begin(leaf), self._begin(inner)
        self._count_nodes(parents.size, inner)
        leaf_words = self._tree_words(leaf, leaf_inputs or {}, num_leaves, None)
        inner_words = self._tree_words(inner, inner_inputs or {}, num_inner, leaf)
        first = self._num_values
        words, firsts, problem = tree_program(
            parents,
            leaf_type,
            inner_type,
            len(leaf.outputs),
            len(inner.outputs),
            leaf_words,
            inner_words,
            first,
        )
        if problem >= 0:
            named = 1 + int(inner_words[inner_words[:, 0] == CARRY, 1].max())
            given = int((parents == problem).sum())
            raise RequestError(f"tree: node {problem} has {given} children, cell {inner.name!r} reads {named} by name")
        self._program.frombytes(words.tobytes())
        self._num_values = first + num_leaves * len(leaf.outputs) + num_inner * len(inner.outputs)
        return Tree(self, (leaf, inner), parents, firsts)

    def record(self, results: object) -> Recorded:
        """Ends the recording: the request's results are what the unfolder returned."""
        if isinstance(results, Node):
            results = {name: getattr(results, name) for name in results._cell.outputs}
        if type(results) is not dict and not isinstance(results, Mapping):
            raise RequestError(f"an unfolder must return a dict of results, got {type(results).__name__}")
        if not self._num_nodes:
            raise RequestError("the graph is empty: the unfolder called no cell")
        if not results:
            raise RequestError("the graph has no result: the unfolder returned an empty dict")
        if self._unkept:
            unkept = [state.name for state in self._unkept.values()]
            raise RequestError(f"graph.state: {unkept} is never kept: see graph.keep")
        placement = Placement(self._program, self._loop_values)
        if self._loop_values:
            for result in results.values():
                if isinstance(result, LoopSteps) and result.graph is self:
                    placement.of_steps(result.value)
        layouts = tuple([self._layout(str(name), result, placement) for name, result in results.items()])
        return Recorded(self._program.tobytes(), self._externals, layouts, tuple(self._states))

    def _layout(self, name: str, result: object, placement: Placement) -> ResultLayout:
        """Places one named result and says where it lies."""
        if isinstance(result, Node) and len(result._cell.outputs) == 1:
            result = Output(result._graph, result._first, next(iter(result._cell.outputs.values())))
        if isinstance(result, RESULTS):
            self._check_result(result, name)
            kind = self._binding.kind(result.spec)
            if isinstance(result, Output):
                is_loop = result.value in self._loop_values
                return ResultLayout(name, kind, placement.of_value(result.value), is_loop, True)
            if isinstance(result, Steps):
                return ResultLayout(name, kind, placement.of_chain(result), False, False)
            return ResultLayout(name, kind, placement.of_steps(result.value), True, False)
        if not isinstance(result, list | tuple) or not result or not all(isinstance(item, Output) for item in result):
            outputs = f" with outputs {list(result._cell.outputs)}" if isinstance(result, Node) else ""
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
