"""The graph that an unfolder writes: calls on cells, recorded as a program for the core.

Nothing is computed here. Every call checks its inputs against the cell's specs and appends a few integers to the program; equal
programs are compiled once (``unfold.py`` keeps them), so a request of a known shape costs only the recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.arena import NUMPY_DTYPES, as_bits
from cellrt.cell import Cell
from cellrt.core.program import (
    CARRY,
    FIXED,
    LIST,
    OP_CHAIN,
    OP_CONSTANT,
    OP_EXTERNAL,
    OP_LOOP,
    OP_NODE,
    OP_RESULT,
    OP_RESULT_LAST,
    OP_RESULT_STEPS,
    STEP,
)
from cellrt.core.trees import tree_program
from cellrt.errors import RequestError
from cellrt.spec import RowSpec


class Binding(Protocol):
    """What a graph must know of the engine it is built for."""

    max_nodes: int

    def cell_type(self, cell: Cell) -> int:
        """Id of a cell's type. Raises RequestError if the model does not have the cell."""

    def kind(self, spec: RowSpec) -> int:
        """Id of a row kind."""

    def constant_row(self, spec: RowSpec, value: torch.Tensor) -> int:
        """Permanent row of a constant, or -1 if there is none."""


class Output:
    """One output of one node: an input for other nodes, or a result."""

    __slots__ = ("graph", "spec", "value")

    def __init__(self, graph: Graph, value: int, spec: RowSpec) -> None:
        self.graph, self.value, self.spec = graph, value, spec

    def __repr__(self) -> str:
        return f"Output({self.spec})"


class Node:
    """A node's outputs, one attribute each."""

    __slots__ = ("_cell", "_first", "_graph")

    def __init__(self, graph: Graph, cell: Cell, first: int) -> None:
        self._graph, self._cell, self._first = graph, cell, first

    def __getattr__(self, name: str) -> Output:
        outputs = self._cell.outputs
        if name not in outputs:
            raise AttributeError(f"cell {self._cell.name!r} has outputs {list(outputs)}, not {name!r}")
        return Output(self._graph, self._first + list(outputs).index(name), outputs[name])

    def __repr__(self) -> str:
        return f"Node({self._cell.name!r})"


class State:
    """Zero (or other) starting values for the carried inputs of a cell, one attribute each."""

    def __init__(self, values: dict[str, Output]) -> None:
        self.__dict__.update(values)

    def __repr__(self) -> str:
        return f"State({', '.join(self.__dict__)})"

    def __getattr__(self, name: str) -> Output:
        raise AttributeError(f"the state has {list(self.__dict__)}, not {name!r}")


class Steps(Sequence[Output]):
    """The same output of each node of a chain, in the order of the chain's inputs."""

    __slots__ = ("_base", "_count", "_stride", "graph", "spec")

    def __init__(self, graph: Graph, base: int, stride: int, count: int, spec: RowSpec) -> None:
        self.graph, self.spec = graph, spec
        self._base, self._stride, self._count = base, stride, count

    def __repr__(self) -> str:
        return f"Steps({self._count} of {self.spec})"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int | slice) -> Output | list[Output]:  # type: ignore[override]
        if isinstance(index, slice):
            return [self._at(k) for k in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"step {index} of a chain of {self._count}")
        return self._at(index % self._count)

    def __iter__(self) -> Iterator[Output]:
        return (self._at(k) for k in range(self._count))

    def values(self) -> range:
        """The value ids of the outputs, in order."""
        return range(self._base, self._base + self._count * self._stride, self._stride)

    def _at(self, index: int) -> Output:
        return Output(self.graph, self._base + index * self._stride, self.spec)


class Chain:
    """A chain's outputs: ``chain.h`` is every step's, ``chain.last.h`` the last executed step's."""

    __slots__ = ("_cell", "_count", "_first", "_graph", "_reverse", "last")

    def __init__(self, graph: Graph, cell: Cell, first: int, count: int, reverse: bool) -> None:
        self._graph, self._cell, self._first, self._count, self._reverse = graph, cell, first, count, reverse
        self.last = Node(graph, cell, first + (count - 1) * len(cell.outputs))

    def __repr__(self) -> str:
        return f"Chain({self._cell.name!r}, {self._count} nodes)"

    def __getattr__(self, name: str) -> Steps:
        outputs = self._cell.outputs
        if name not in outputs:
            raise AttributeError(f"cell {self._cell.name!r} has outputs {list(outputs)}, not {name!r}")
        stride = len(outputs)
        base = self._first + list(outputs).index(name)
        if self._reverse:
            base, stride = base + (self._count - 1) * stride, -stride
        return Steps(self._graph, base, stride, self._count, outputs[name])


class LoopSteps:
    """An output of every step of a loop: a result only, because how many steps there are is known when it ends."""

    __slots__ = ("graph", "limit", "spec", "value")

    def __init__(self, graph: Graph, value: int, spec: RowSpec, limit: int) -> None:
        self.graph, self.value, self.spec, self.limit = graph, value, spec, limit

    def __repr__(self) -> str:
        return f"LoopSteps(up to {self.limit} of {self.spec})"


class Loop:
    """A loop's outputs: ``loop.token`` is every step's (a result), ``loop.last.h`` the last step's."""

    __slots__ = ("_cell", "_first", "_graph", "_limit", "last")

    def __init__(self, graph: Graph, cell: Cell, first: int, limit: int) -> None:
        self._graph, self._cell, self._first, self._limit = graph, cell, first, limit
        self.last = Node(graph, cell, first)

    def __repr__(self) -> str:
        return f"Loop({self._cell.name!r}, up to {self._limit} steps)"

    def __getattr__(self, name: str) -> LoopSteps:
        outputs = self._cell.outputs
        if name not in outputs:
            raise AttributeError(f"cell {self._cell.name!r} has outputs {list(outputs)}, not {name!r}")
        return LoopSteps(self._graph, self._first + list(outputs).index(name), outputs[name], self._limit)


class ResultLayout(NamedTuple):
    """Where a named result lies among the request's result rows.

    ``positions`` are the rows in order. ``is_loop``: only the rows of the steps that were taken are there.
    ``is_single``: one row without a step dimension; of a loop the last that is there.
    """

    name: str
    kind: int
    positions: Sequence[int]
    is_loop: bool
    is_single: bool


class Recorded(NamedTuple):
    """What an unfolder recorded for one request."""

    program: tuple[int, ...]
    externals: list[tuple[int, NDArray[Any]]]
    """(kind, rows ``[n, *shape]`` as ``arena.as_bits``) of the request's own tensors, in order of their values."""
    results: tuple[ResultLayout, ...]


Source = object
"""What may be an input: an Output, a tensor or number of one row; a list of them for a ragged input."""


class Graph:
    """One request's cell graph under construction. The unfolder gets it as its first argument."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._program: list[int] = []
        self._externals: list[tuple[int, NDArray[Any]]] = []
        self._num_values = 0
        self._num_nodes = 0
        self._current = 0
        """First node of the operation that is being recorded."""
        self._zeros: dict[int, int] = {}
        self._loop_values: dict[int, int] = {}

    def call(self, cell: Cell, /, **inputs: Source) -> Node:
        """Adds one node. Inputs by name; carried inputs that are not given are zeros.

        Raises RequestError naming cell, node and input, with what was expected and what came.
        """
        self._begin(cell)
        self._check_names(cell, inputs)
        self._count_nodes(1, cell)
        words: list[int] = []
        for name, spec in cell.inputs.items():
            if name in inputs:
                words += self._one(cell, name, spec, inputs[name])
            else:
                words += [FIXED, self._zero(spec)]
        self._program += [OP_NODE, self._binding.cell_type(cell), *words]
        return Node(self, cell, self._take_values(len(cell.outputs)))

    def zeros(self, cell: Cell) -> State:
        """Zeros for the carried inputs of a cell: ``state.h``, ``state.c``, ..., by the names of the outputs."""
        return State(
            {output: Output(self, self._zero(cell.outputs[output]), cell.outputs[output]) for output in cell.carry.values()}
        )

    def constant(self, value: float | torch.Tensor, spec: RowSpec | None = None) -> Output:
        """A value that is the same for every request, kept at each worker for good.

        ``spec`` defaults to that of the tensor; an int is int64 and a float float32 without a shape.
        """
        tensor = torch.as_tensor(value)
        if not isinstance(value, torch.Tensor):
            tensor = tensor.to(torch.int64 if isinstance(value, int) else torch.float32)
        spec = spec or RowSpec(tuple(tensor.shape), tensor.dtype)
        if tuple(tensor.shape) != spec.shape:
            raise RequestError(f"constant: expected {spec}, got shape {list(tensor.shape)}")
        row = self._binding.constant_row(spec, tensor.to(spec.dtype))
        if row < 0:
            return Output(self, self._external(spec, as_bits(tensor.to(spec.dtype))[None]), spec)
        self._program += [OP_CONSTANT, self._binding.kind(spec), row]
        return Output(self, self._take_values(1), spec)

    def chain(self, cell: Cell, /, *, reverse: bool = False, **inputs: Source) -> Chain:
        """Adds a chain: one node a step, each reading the carried state of the one before.

        Carried inputs are the state before the first step (default zeros). Of the others at least one has a value for
        each step: a tensor ``[steps, *shape]``, a list of numbers or outputs, or a chain's output. One Output, or one
        row, serves every step. With ``reverse`` the chain runs from the last step's input to the first's.
        """
        self._begin(cell)
        self._check_names(cell, inputs)
        count = self._chain_length(cell, inputs)
        self._count_nodes(count, cell)
        parts: dict[str, Sequence[int]] = {}
        """By input: words of a chain's input, or the values of an input with one for each step."""
        stepped: set[str] = set()
        for name, spec in cell.inputs.items():
            if name in cell.carry:
                parts[name] = [CARRY, self._one(cell, name, spec, inputs[name])[1] if name in inputs else self._zero(spec)]
            elif spec.ragged or not _is_stepped(inputs[name], spec):
                parts[name] = self._one(cell, name, spec, inputs[name])
            else:
                values = self._stepped(cell, name, spec, inputs[name])
                parts[name] = values[::-1] if reverse else values
                stepped.add(name)
        self._record_chain(cell, count, parts, stepped)
        return Chain(self, cell, self._take_values(count * len(cell.outputs)), count, reverse)

    def loop(self, cell: Cell, /, *, max_steps: int, until: str | None = None, **inputs: Source) -> Loop:
        """Adds a loop: the cell again and again on its own carried outputs, until one of them says stop.

        Args:
            max_steps: the most steps.
            until: name of an output of one number a row; the step that makes it non-zero is the last. None: run
                ``max_steps`` steps.
            inputs: carried inputs are the state before the first step (default zeros); the others are the same at
                every step.
        """
        self._begin(cell)
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
                    f"outputs are {({k: str(v) for k, v in cell.outputs.items()})}"
                )
            stop = list(cell.outputs).index(until)
        words: list[int] = []
        for name, spec in cell.inputs.items():
            if name in cell.carry:
                words += [CARRY, self._one(cell, name, spec, inputs[name])[1] if name in inputs else self._zero(spec)]
            else:
                words += self._one(cell, name, spec, inputs[name])
        self._program += [OP_LOOP, self._binding.cell_type(cell), max_steps, stop, *words]
        first = self._take_values(len(cell.outputs))
        self._loop_values.update({first + k: max_steps for k in range(len(cell.outputs))})
        return Loop(self, cell, first, max_steps)

    def tree(
        self,
        parents: Sequence[int] | np.ndarray,
        *,
        leaf: Cell,
        inner: Cell,
        leaf_inputs: Mapping[str, Source] | None = None,
        inner_inputs: Mapping[str, Source] | None = None,
    ) -> Node:
        """Adds a tree: ``leaf`` at nodes without children, ``inner`` at the others; returns the root.

        Args:
            parents: ``[nodes]``: each node's parent, -1 for the one root, in any order.
            leaf, inner: may be the same cell; a ragged input of a leaf is empty.
            leaf_inputs, inner_inputs: a tensor ``[leaves, *shape]`` (``[inner nodes, *shape]``), one row a node in the
                order of ``parents``, or one Output or row for all. Missing ones are zeros if the cell carries them.

        An inner cell reads its children (in the order of ``parents``) by name: a ragged input ``h`` gets output ``h`` of
        all children, inputs ``h_0``, ``h_1``, ... (or ``h_left``, ``h_right``) that of one child each; then every inner node
        must have that many children.
        """
        parents = np.ascontiguousarray(parents, dtype=np.int32)
        if parents.ndim != 1 or not parents.size:
            raise RequestError(f"tree: expected parents [nodes], at least one, got shape {list(parents.shape)}")
        if parents.min() < -1 or parents.max() >= parents.size or (parents < 0).sum() != 1:
            raise RequestError("tree: parents must be node numbers, and -1 for exactly one root")
        self._begin(leaf)
        self._begin(inner)
        self._count_nodes(parents.size, inner)
        has_child = np.zeros(parents.size, bool)
        has_child[parents[parents >= 0]] = True
        leaf_words = self._tree_words(leaf, leaf_inputs or {}, int((~has_child).sum()), None)
        inner_words = self._tree_words(inner, inner_inputs or {}, int(has_child.sum()), leaf)
        first = self._num_values
        words, root, problem = tree_program(
            parents,
            self._binding.cell_type(leaf),
            self._binding.cell_type(inner),
            len(leaf.outputs),
            len(inner.outputs),
            leaf_words,
            inner_words,
            first,
        )
        if problem == -2:
            raise RequestError("tree: the parents form a cycle")
        if problem >= 0:
            raise RequestError(
                f"tree: node {problem} does not have the number of children that cell {inner.name!r} reads by name"
            )
        self._program += words.tolist()
        self._num_values = first + int((~has_child).sum()) * len(leaf.outputs) + int(has_child.sum()) * len(inner.outputs)
        return Node(self, inner if has_child.any() else leaf, root)

    def record(self, results: object) -> Recorded:
        """Ends the recording: the request's results are what the unfolder returned."""
        if isinstance(results, Node):
            results = {name: getattr(results, name) for name in results._cell.outputs}
        if not isinstance(results, Mapping):
            raise RequestError(f"an unfolder must return a dict of results, got {type(results).__name__}")
        if not self._num_nodes:
            raise RequestError("the graph is empty: the unfolder called no cell")
        if not results:
            raise RequestError("the graph has no result: the unfolder returned an empty dict")
        placement = _Placement(self._program, self._loop_values)
        for result in results.values():
            if isinstance(result, LoopSteps) and result.graph is self:
                placement.of_steps(result.value)
        layouts = tuple(self._layout(str(name), result, placement) for name, result in results.items())
        return Recorded(tuple(self._program), self._externals, layouts)

    def _layout(self, name: str, result: object, placement: _Placement) -> ResultLayout:
        """Places one named result and says where it lies."""
        if isinstance(result, Node) and len(result._cell.outputs) == 1:
            result = Output(result._graph, result._first, next(iter(result._cell.outputs.values())))
        if isinstance(result, Output | Steps | LoopSteps):
            self._check_graph(result, f"result {name!r}")
            kind = self._binding.kind(result.spec)
        if isinstance(result, LoopSteps):
            return ResultLayout(name, kind, placement.of_steps(result.value), True, False)
        if isinstance(result, Output):
            return ResultLayout(name, kind, placement.of_value(result.value), result.value in self._loop_values, True)
        if isinstance(result, Steps):
            return ResultLayout(name, kind, placement.of_chain(result), False, False)
        if not isinstance(result, list | tuple) or not result or not all(isinstance(item, Output) for item in result):
            outputs = f" with outputs {list(result._cell.outputs)}" if isinstance(result, Node) else ""
            raise RequestError(
                f"result {name!r}: expected an output of a node, a chain's or loop's steps or a list of outputs, got "
                f"{type(result).__name__}{outputs}"
            )
        for k, output in enumerate(result):
            self._check_graph(output, f"result {name!r}[{k}]")
            if output.spec != result[0].spec:
                raise RequestError(f"result {name!r}[{k}]: expected {result[0].spec} as of the first, got {output.spec}")
            if output.value in self._loop_values:
                raise RequestError(f"result {name!r}[{k}]: an output of a loop must be a result of its own")
        positions = tuple(placement.of_value(output.value)[0] for output in result)
        return ResultLayout(name, self._binding.kind(result[0].spec), positions, False, False)

    def _take_values(self, count: int) -> int:
        first = self._num_values
        self._num_values += count
        return first

    def _count_nodes(self, count: int, cell: Cell) -> None:
        self._num_nodes += count
        if self._num_nodes > self._binding.max_nodes:
            raise RequestError(
                f"cell {cell.name!r}: the graph has {self._num_nodes} nodes, at most {self._binding.max_nodes} are allowed"
            )

    def _zero(self, spec: RowSpec) -> int:
        kind = self._binding.kind(spec)
        if kind not in self._zeros:
            self._program += [OP_CONSTANT, kind, 0]
            self._zeros[kind] = self._take_values(1)
        return self._zeros[kind]

    def _external(self, spec: RowSpec, rows: NDArray[Any]) -> int:
        kind, count = self._binding.kind(spec), len(rows)
        self._program += [OP_EXTERNAL, kind, count]
        self._externals.append((kind, rows))
        return self._take_values(count)

    def _where(self, cell: Cell, name: str) -> str:
        return f"cell {cell.name!r}, node {self._current}, input {name!r}"

    def _begin(self, cell: object) -> None:
        self._current = self._num_nodes
        if not isinstance(cell, Cell):
            raise RequestError(f"node {self._current}: expected a cell, got {type(cell).__name__}")

    def _check_names(self, cell: Cell, inputs: Mapping[str, object]) -> None:
        for name in inputs:
            if name not in cell.inputs:
                raise RequestError(f"{self._where(cell, name)}: unknown; the cell has inputs {list(cell.inputs)}")
        for name, spec in cell.inputs.items():
            if name not in inputs and name not in cell.carry:
                raise RequestError(f"{self._where(cell, name)}: missing; expected {spec}")

    def _check_graph(self, handle: Output | Steps | LoopSteps, where: str) -> None:
        if handle.graph is not self:
            raise RequestError(f"{where}: the node belongs to another graph")

    def _one(self, cell: Cell, name: str, spec: RowSpec, source: Source) -> list[int]:
        """Words for an input of one node."""
        if spec.ragged:
            return self._many(cell, name, spec, source)
        if isinstance(source, Node) and len(source._cell.outputs) == 1:
            source = Output(source._graph, source._first, next(iter(source._cell.outputs.values())))
        if isinstance(source, Output):
            self._check_graph(source, self._where(cell, name))
            if source.spec != spec:
                raise RequestError(f"{self._where(cell, name)}: expected {spec}, got {source.spec}")
            return [FIXED, source.value]
        if isinstance(source, Node | Steps | Chain | Loop | LoopSteps | State):
            raise RequestError(f"{self._where(cell, name)}: expected {spec}, got {source!r}, not one output of one node")
        array = self._array(cell, name, spec, source)
        if array.shape != spec.shape:
            raise RequestError(f"{self._where(cell, name)}: expected {spec}, got {RowSpec(array.shape, spec.dtype)}")
        return [FIXED, self._external(spec, array[None])]

    def _many(self, cell: Cell, name: str, spec: RowSpec, source: Source) -> list[int]:
        """Words for a ragged input: a list of outputs or tensors, a chain's steps, or a tensor ``[n, *shape]``."""
        row = RowSpec(spec.shape, spec.dtype)
        if isinstance(source, Steps):
            self._check_graph(source, self._where(cell, name))
            if source.spec != row:
                raise RequestError(f"{self._where(cell, name)}: expected {spec}, got {source.spec}")
            return [LIST, len(source), *source.values()]
        if isinstance(source, torch.Tensor | np.ndarray):
            array = self._array(cell, name, spec, source)
            if array.ndim == 0 or array.shape[1:] != spec.shape:
                raise RequestError(f"{self._where(cell, name)}: expected rows of {spec}, got shape {list(array.shape)}")
            first = self._external(row, array) if len(array) else 0
            return [LIST, len(array), *range(first, first + len(array))]
        if not isinstance(source, list | tuple):
            raise RequestError(f"{self._where(cell, name)}: expected a list for {spec}, got {type(source).__name__}")
        return [LIST, len(source), *(self._one(cell, f"{name}[{k}]", row, item)[1] for k, item in enumerate(source))]

    def _array(self, cell: Cell, name: str, spec: RowSpec, source: Source) -> NDArray[Any]:
        """The bits of a tensor, array, number or list of numbers in the spec's dtype; nothing is rounded silently."""
        if isinstance(source, torch.Tensor):
            if source.dtype != spec.dtype:
                got = RowSpec(tuple(source.shape), source.dtype)
                raise RequestError(f"{self._where(cell, name)}: expected {spec}, got {got}")
            return as_bits(source.detach().cpu())
        wanted = NUMPY_DTYPES.get(spec.dtype)
        try:
            if wanted is None:
                return as_bits(torch.as_tensor(source).to(spec.dtype))
            array = np.asarray(source)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestError(f"{self._where(cell, name)}: expected {spec}, got {type(source).__name__}: {error}") from None
        given = isinstance(source, np.ndarray | np.generic)
        if (given and array.dtype != wanted) or not np.can_cast(array.dtype, wanted, "same_kind"):
            raise RequestError(f"{self._where(cell, name)}: expected {spec}, got {array.dtype}{list(array.shape)}")
        converted = array.astype(wanted, copy=False)
        if array.dtype.kind in "iu" and converted.dtype.itemsize < array.dtype.itemsize and (converted != array).any():
            raise RequestError(f"{self._where(cell, name)}: expected {spec}, got {source!r}, which does not fit")
        return converted

    def _chain_length(self, cell: Cell, inputs: Mapping[str, Source]) -> int:
        lengths: dict[str, int] = {}
        for name, spec in cell.inputs.items():
            if name not in cell.carry and not spec.ragged and _is_stepped(inputs[name], spec):
                lengths[name] = len(inputs[name])  # type: ignore[arg-type]
        if not lengths:
            raise RequestError(
                f"chain of cell {cell.name!r}: no input has a value for each step (a tensor [steps, ...] or a list)"
            )
        if len(set(lengths.values())) > 1:
            raise RequestError(f"chain of cell {cell.name!r}: inputs have different numbers of steps: {lengths}")
        if not next(iter(lengths.values())):
            raise RequestError(f"chain of cell {cell.name!r}: no steps; a chain needs at least one")
        return next(iter(lengths.values()))

    def _record_chain(self, cell: Cell, count: int, parts: Mapping[str, Sequence[int]], stepped: set[str]) -> None:
        """Records a chain, in one operation if the values of its steps are evenly spaced, else node by node."""
        type_id = self._binding.cell_type(cell)
        if all(isinstance(parts[name], range) for name in stepped):
            self._program += [OP_CHAIN, type_id, count]
            for part in parts.values():
                self._program += [STEP, part.start, part.step] if isinstance(part, range) else part
            return
        outputs = list(cell.outputs)
        for step in range(count):
            self._program += [OP_NODE, type_id]
            before = self._num_values + (step - 1) * len(outputs)
            for name, part in parts.items():
                if name in stepped:
                    self._program += [FIXED, part[step]]
                elif name not in cell.carry:
                    self._program += part
                else:
                    self._program += [FIXED, part[1] if step == 0 else before + outputs.index(cell.carry[name])]

    def _stepped(self, cell: Cell, name: str, spec: RowSpec, source: Source) -> Sequence[int]:
        """The values of an input with one for each step of a chain; a range if they are evenly spaced."""
        if isinstance(source, Steps):
            self._check_graph(source, self._where(cell, name))
            if source.spec != spec:
                raise RequestError(f"{self._where(cell, name)}: expected {spec}, got {source.spec}")
            return source.values()
        if isinstance(source, list | tuple) and _has_handle(source):
            values = [self._one(cell, f"{name}[{k}]", spec, item)[1] for k, item in enumerate(source)]
            stride = values[1] - values[0] if len(values) > 1 else 1
            even = range(values[0], values[0] + len(values) * stride, stride) if stride else range(0)
            return even if list(even) == values else values
        array = self._array(cell, name, spec, source)
        if array.shape[1:] != spec.shape:
            got = RowSpec(array.shape[1:], spec.dtype)
            raise RequestError(f"{self._where(cell, name)}: expected {spec} for each step, got {got}")
        first = self._external(spec, array)
        return range(first, first + len(array))

    def _tree_words(self, cell: Cell, inputs: Mapping[str, Source], count: int, child: Cell | None) -> np.ndarray:
        """For each input of a tree's cell (mode, a, b), as ``core/trees.py`` reads them."""
        words: list[tuple[int, int, int]] = []
        for name in inputs:
            if name not in cell.inputs:
                raise RequestError(f"{self._where(cell, name)}: unknown; the cell has inputs {list(cell.inputs)}")
        for name, spec in cell.inputs.items():
            if spec.ragged and name in inputs:
                raise RequestError(f"{self._where(cell, name)}: reads the children of a node and cannot be given")
            if spec.ragged and child is None:
                words.append((LIST, 0, 0))
            elif name in inputs and _is_stepped(inputs[name], spec):
                if len(inputs[name]) != count:  # type: ignore[arg-type]
                    raise RequestError(
                        f"{self._where(cell, name)}: expected {count} rows, one a node, got {len(inputs[name])}"  # type: ignore[arg-type]
                    )
                values = self._stepped(cell, name, spec, inputs[name]) if count else range(1)
                if not isinstance(values, range):
                    raise RequestError(f"{self._where(cell, name)}: expected evenly spaced outputs (as a chain's), or rows")
                words.append((STEP, values.start, values.step))
            elif name in inputs:
                words.append((FIXED, self._one(cell, name, spec, inputs[name])[1], 0))
            elif child is not None:
                words.append(self._child_word(cell, name, spec, child))
            elif name in cell.carry:
                words.append((FIXED, self._zero(spec), 0))
            else:
                raise RequestError(f"{self._where(cell, name)}: missing; expected {spec}")
        return np.array(words, np.int32).reshape(-1, 3)

    def _child_word(self, cell: Cell, name: str, spec: RowSpec, child: Cell) -> tuple[int, int, int]:
        """Which output of which child an inner cell's input reads, from the input's name."""
        stem, _, suffix = name.rpartition("_")
        row = RowSpec(spec.shape, spec.dtype)
        index = {"left": 0, "right": 1}.get(suffix, int(suffix) if suffix.isdigit() else -1)
        output = name if spec.ragged else stem
        if (not spec.ragged and index < 0) or output not in cell.outputs or output not in child.outputs:
            raise RequestError(f"{self._where(cell, name)}: missing, and not the name of a child's output; expected {spec}")
        for maker in (cell, child):
            if maker.outputs[output] != row or list(maker.outputs).index(output) != list(cell.outputs).index(output):
                raise RequestError(f"{self._where(cell, name)}: expected {row}, got {maker.outputs[output]} of {maker.name!r}")
        place = list(cell.outputs).index(output)
        return (LIST, place, 0) if spec.ragged else (CARRY, index, place)


class _Placement:
    """Gives each value that is a result its rows, once, and records the operations that say so."""

    def __init__(self, program: list[int], loop_limits: Mapping[int, int]) -> None:
        self._program, self._loop_limits = program, loop_limits
        self._end = 0
        self._steps: dict[int, range] = {}
        self._values: dict[int, int] = {}
        self._chains: dict[tuple[int, int, int], range] = {}

    def of_steps(self, value: int) -> range:
        """Rows of a loop's output at every step."""
        if value not in self._steps:
            limit = self._loop_limits[value]
            self._program += [OP_RESULT_STEPS, value, limit]
            self._steps[value] = self._take(limit)
        return self._steps[value]

    def of_value(self, value: int) -> Sequence[int]:
        """The row of one output; of a loop whose every step is a result: those rows."""
        if value in self._steps:
            return self._steps[value]
        if value not in self._values:
            for (base, stride, count), rows in self._chains.items():
                step, rest = divmod(value - base, stride)
                if rest == 0 and 0 <= step < count:
                    self._values[value] = rows[step]
        if value not in self._values:
            is_loop = value in self._loop_limits
            self._program += [OP_RESULT_LAST, value] if is_loop else [OP_RESULT, value, 1, 1]
            self._values[value] = self._take(1)[0]
        return (self._values[value],)

    def of_chain(self, steps: Steps) -> Sequence[int]:
        """Rows of an output of each node of a chain."""
        key = (steps._base, steps._stride, len(steps))
        if key in self._chains:
            return self._chains[key]
        if self._values or self._chains:
            return tuple(self.of_value(output.value)[0] for output in steps)
        self._program += [OP_RESULT, *key]
        self._chains[key] = self._take(len(steps))
        return self._chains[key]

    def _take(self, count: int) -> range:
        self._end += count
        return range(self._end - count, self._end)


def _has_handle(sources: Sequence[object]) -> bool:
    """Whether a list has an output or node in it; quick for the usual list of numbers."""
    if isinstance(sources[0], int | float):
        return False
    return any(isinstance(source, Output | Node) for source in sources)


def _is_stepped(source: Source, spec: RowSpec) -> bool:
    """Whether a source has one value for each step (rather than one row for all)."""
    if isinstance(source, Steps):
        return True
    if isinstance(source, torch.Tensor | np.ndarray):
        return source.ndim == len(spec.shape) + 1
    if not isinstance(source, list | tuple):
        return False
    if source and isinstance(source[0], Output | Node):
        return True
    return np.ndim(source[0] if len(source) else 0) == len(spec.shape)  # type: ignore[arg-type]


UnfoldFunction = Callable[[Graph, object], object]
