"""The handles that an unfolder holds: nodes, their outputs, and the outputs of chains and loops.

A handle only names a value. The value exists when the request runs, long after its graph was written. Code that tries
to look at one while it writes the graph gets an error (``Handle``), not a wrong truth value, comparison or length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from cellrt.core.templates.node_sets import first_values
from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.errors import RequestError

INSTEAD = (
    "values are not known while the graph is written. What ends on a value is a graph.loop(until=...); what is "
    "computed from one belongs in a cell"
)


def _refused(what: str) -> Any:
    """Return a special method that tells that ``what`` cannot be asked of a handle, and what to do instead."""

    def refuse(self: object, *_: object, **__: object) -> NoReturn:
        raise RequestError(f"{self!r} {what}: {INSTEAD}")

    return refuse


class Handle:
    """Something of a graph whose value is not known yet; equal to itself alone.

    Raises RequestError where the value would be needed: as a condition, in a comparison or calculation, as a number, by
    a function of torch or NumPy.
    """

    __slots__ = ()

    __hash__ = object.__hash__  # which defining __eq__ takes away
    __bool__ = _refused("is neither true nor false")
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _refused("cannot be compared")
    __int__ = __float__ = __complex__ = __index__ = __round__ = _refused("is no number")
    __trunc__ = __floor__ = __ceil__ = __int__
    __len__ = _refused("has no length")
    __iter__ = _refused("cannot be iterated over or unpacked (outputs go by name)")
    __contains__ = _refused("cannot be searched")
    __getitem__ = _refused("cannot be indexed")
    __neg__ = __pos__ = __abs__ = __invert__ = _refused("cannot be calculated with")
    __add__ = __sub__ = __mul__ = __truediv__ = __floordiv__ = __mod__ = __divmod__ = __pow__ = __matmul__ = __neg__
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rdivmod__ = __rpow__ = __neg__
    __rmatmul__ = __and__ = __or__ = __xor__ = __lshift__ = __rshift__ = __neg__
    __rand__ = __ror__ = __rxor__ = __rlshift__ = __rrshift__ = __neg__
    __array_ufunc__ = __array_function__ = __neg__
    __array__ = _refused("is no array")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{self!r} has no {name!r}, as a tensor might have: {INSTEAD}")

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., object], types: object, args: tuple[object, ...] = (), kwargs: object = None
    ) -> NoReturn:
        given = next((each for each in args if isinstance(each, Handle)), cls.__name__)  # or in a list, or by name
        name = getattr(function, "__name__", str(function))
        raise RequestError(f"{given!r} cannot be given to torch's {name!r}: {INSTEAD}")


class Output(Handle):
    """One output of one node: an input for other nodes, or a result."""

    __slots__ = ("graph", "spec", "value")

    def __init__(self, graph: object, value: int, spec: RowSpec) -> None:
        self.graph, self.value, self.spec = graph, value, spec

    def __repr__(self) -> str:
        return f"Output({self.spec})"


class Node(Handle):
    """A node's outputs, one attribute each."""

    __slots__ = ("_cell", "_first", "_graph")

    def __init__(self, graph: object, cell: Cell, first: int) -> None:
        self._graph, self._cell, self._first = graph, cell, first

    def __getattr__(self, name: str) -> Output:
        index = self._cell.output_index.get(name)
        if index is None:
            raise _no_output(self._cell, name)
        return Output(self._graph, self._first + index, self._cell.outputs[name])

    def __repr__(self) -> str:
        return f"Node({self._cell.name!r})"


class Tree(Node):
    """A tree: the outputs of its root, one attribute each, and under ``nodes`` those of every node.

    ``tree.nodes.h`` is output ``h`` of each node, in the order of the tree's parents.
    """

    __slots__ = ("_cells", "_first_node", "_parents")

    def __init__(
        self, graph: object, cells: tuple[Cell, Cell], parents: NDArray[np.int32], first: int, root: int
    ) -> None:
        self._cells, self._parents, self._first_node = cells, parents, first
        self._graph, self._cell, self._first = graph, cells[parents.size > 1], root

    @property
    def nodes(self) -> TreeNodes:
        """The outputs of every node."""
        leaf, inner = self._cells
        firsts = first_values(self._parents, len(leaf.outputs), len(inner.outputs), self._first_node)
        return TreeNodes(self._graph, self._cells, self._parents, firsts)


class TreeNodes(Handle):
    """The same output of each node of a tree, one attribute each."""

    __slots__ = ("_cells", "_firsts", "_graph", "_parents")

    def __init__(
        self, graph: object, cells: tuple[Cell, Cell], parents: NDArray[np.int32], firsts: NDArray[np.int32]
    ) -> None:
        self._graph, self._cells, self._parents, self._firsts = graph, cells, parents, firsts

    def __repr__(self) -> str:
        return f"TreeNodes({self._parents.size} nodes)"

    def __getattr__(self, name: str) -> ListedOutputs:
        leaf, inner = self._cells if self._parents.size > 1 else self._cells[:1] * 2
        for cell in (leaf, inner):
            if name not in cell.output_index:
                raise _no_output(cell, name)
        spec = leaf.outputs[name]
        if inner.outputs[name] != spec:
            raise AttributeError(
                f"output {name!r} is {spec} of cell {leaf.name!r}, but {inner.outputs[name]} of cell {inner.name!r}"
            )
        outputs = np.full(self._parents.size, leaf.output_index[name])
        outputs[self._parents[self._parents >= 0]] = inner.output_index[name]
        return ListedOutputs(self._graph, (self._firsts + outputs).tolist(), spec)


class State(Handle):
    """Zero (or other) starting values for the carried inputs of a cell, one attribute each."""

    def __init__(self, values: dict[str, Output]) -> None:
        self.__dict__.update(values)

    def __repr__(self) -> str:
        return f"State({', '.join(self.__dict__)})"

    def __getattr__(self, name: str) -> Output:
        raise AttributeError(f"the state has {list(self.__dict__)}, not {name!r}")


class GrowingState(Handle):
    """A state that grows by a row a step: an input for cells that append to it or read it (see ``Graph.pages``)."""

    __slots__ = ("_is_open", "_number", "graph", "spec")

    def __init__(self, graph: object, number: int, spec: RowSpec) -> None:
        self.graph, self.spec, self._number = graph, spec, number
        self._is_open = True
        """True while more may be appended; False once a loop appends, as its number of steps is not known."""

    def __repr__(self) -> str:
        return f"GrowingState({self.spec})"


class Steps(Handle):
    """The same output of each node of a chain, in the order of its inputs, or of a dag: a sequence of outputs.

    Its length is known, its values are not.
    """

    __slots__ = ("_base", "_count", "_stride", "graph", "spec")

    def __init__(self, graph: object, base: int, stride: int, count: int, spec: RowSpec) -> None:
        self.graph, self.spec = graph, spec
        self._base, self._stride, self._count = base, stride, count

    def __repr__(self) -> str:
        return f"Steps({self._count} of {self.spec})"

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int | slice) -> Output | list[Output]:
        if isinstance(index, slice):
            return [self._at(k) for k in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"step {index} of {self._count}")
        return self._at(index % self._count)

    def __iter__(self) -> Iterator[Output]:
        return (self._at(k) for k in range(self._count))

    def values(self) -> range | list[int]:
        """Return the value ids of the outputs, in order."""
        return range(self._base, self._base + self._count * self._stride, self._stride)

    def _at(self, index: int) -> Output:
        return Output(self.graph, self._base + index * self._stride, self.spec)


class ListedOutputs(Steps):
    """The same output of each node of a tree, in the order of its parents: a sequence of outputs.

    As a list of them, but made when asked for one.
    """

    __slots__ = ("_values",)

    def __init__(self, graph: object, values: list[int], spec: RowSpec) -> None:
        super().__init__(graph, 0, 1, len(values), spec)
        self._values = values

    def __repr__(self) -> str:
        return f"ListedOutputs({self._count} of {self.spec})"

    def values(self) -> list[int]:
        """Return the value ids of the outputs, in order."""
        return self._values

    def __add__(self, others: Sequence[object]) -> list[object]:
        return [*self, *others]

    def __radd__(self, others: Sequence[object]) -> list[object]:
        return [*others, *self]

    def _at(self, index: int) -> Output:
        return Output(self.graph, self._values[index], self.spec)


Sequence.register(Steps)  # not its base: whether something is Steps is asked at every input, and would then take long


class Chain(Handle):
    """A chain's outputs: ``chain.h`` is every step's, ``chain.last.h`` the last executed step's."""

    __slots__ = ("_cell", "_count", "_first", "_graph", "_reverse", "last")

    def __init__(self, graph: object, cell: Cell, first: int, count: int, reverse: bool) -> None:
        self._graph, self._cell, self._first, self._count, self._reverse = graph, cell, first, count, reverse
        self.last = Node(graph, cell, first + (count - 1) * len(cell.outputs))

    def __repr__(self) -> str:
        return f"Chain({self._cell.name!r}, {self._count} nodes)"

    def __getattr__(self, name: str) -> Steps:
        index = self._cell.output_index.get(name)
        if index is None:
            raise _no_output(self._cell, name)
        base, stride = self._first + index, len(self._cell.outputs)
        if self._reverse:
            base, stride = base + (self._count - 1) * stride, -stride
        return Steps(self._graph, base, stride, self._count, self._cell.outputs[name])


class Dag(Handle):
    """An acyclic graph's outputs: ``dag.h`` is every node's, in order, ``dag.h[n]`` that of node n."""

    __slots__ = ("_cell", "_count", "_first", "_graph")

    def __init__(self, graph: object, cell: Cell, first: int, count: int) -> None:
        self._graph, self._cell, self._first, self._count = graph, cell, first, count

    def __repr__(self) -> str:
        return f"Dag({self._cell.name!r}, {self._count} nodes)"

    def __getattr__(self, name: str) -> Steps:
        index = self._cell.output_index.get(name)
        if index is None:
            raise _no_output(self._cell, name)
        return Steps(self._graph, self._first + index, len(self._cell.outputs), self._count, self._cell.outputs[name])


class LoopSteps(Handle):
    """An output of every step of a loop: a result, or a ragged input of a node, which runs when the loop is over."""

    __slots__ = ("graph", "limit", "spec", "value")

    def __init__(self, graph: object, value: int, spec: RowSpec, limit: int) -> None:
        self.graph, self.value, self.spec, self.limit = graph, value, spec, limit

    def __repr__(self) -> str:
        return f"LoopSteps(up to {self.limit} of {self.spec})"


class Loop(Handle):
    """A loop's outputs: ``loop.token`` is every step's (a result or a ragged input), ``loop.last.h`` the last's."""

    __slots__ = ("_cell", "_first", "_graph", "_limit", "last")

    def __init__(self, graph: object, cell: Cell, first: int, limit: int) -> None:
        self._graph, self._cell, self._first, self._limit = graph, cell, first, limit
        self.last = Node(graph, cell, first)

    def __repr__(self) -> str:
        return f"Loop({self._cell.name!r}, up to {self._limit} steps)"

    def __getattr__(self, name: str) -> LoopSteps:
        index = self._cell.output_index.get(name)
        if index is None:
            raise _no_output(self._cell, name)
        return LoopSteps(self._graph, self._first + index, self._cell.outputs[name], self._limit)


class LoopOfCells(Handle):
    """The outputs of a loop of several cells: ``loop.token`` of every step, ``loop.last.token`` of the last."""

    __slots__ = ("_limit", "_outputs", "last")

    def __init__(self, outputs: dict[str, Output], limit: int) -> None:
        self._outputs, self._limit = outputs, limit
        self.last = State(outputs)

    def __repr__(self) -> str:
        return f"LoopOfCells({', '.join(self._outputs)}, up to {self._limit} steps)"

    def __getattr__(self, name: str) -> LoopSteps:
        if name not in self._outputs:
            raise AttributeError(f"the loop's step returned {list(self._outputs)}, not {name!r}")
        output = self._outputs[name]
        return LoopSteps(output.graph, output.value, output.spec, self._limit)


def _no_output(cell: Cell, name: str) -> AttributeError:
    return AttributeError(f"cell {cell.name!r} has outputs {list(cell.outputs)}, not {name!r}")
