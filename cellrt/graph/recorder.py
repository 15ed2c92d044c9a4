"""Recording: checks what a graph's builders are given and writes it as words of a program."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.copying import LARGE_BYTES
from cellrt.core.program import (
    CARRY,
    FIXED,
    LIST,
    OP_CHAIN,
    OP_CONSTANT,
    OP_EXTERNAL,
    OP_KEEP,
    OP_NODE,
    OP_STATE,
    STEP,
)
from cellrt.core.tables import MAX_STATES
from cellrt.definition.bits import NUMPY_DTYPES, as_bits
from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.errors import RequestError
from cellrt.graph.results import StateLayout
from cellrt.graph.symbols import Chain, Loop, LoopSteps, Node, Output, State, Steps


class Binding(Protocol):
    """What a graph must know of the engine it is built for."""

    max_nodes: int

    def cell_type(self, cell: Cell) -> int:
        """Id of a cell's type. Raises RequestError if the model does not have the cell."""

    def kind(self, spec: RowSpec) -> int:
        """Id of a row kind."""

    def constant_row(self, spec: RowSpec, value: torch.Tensor) -> int:
        """Permanent row of a constant, or -1 if there is none."""


Source = object
"""What may be an input: an Output, a tensor or number of one row; a list of them for a ragged input."""

# Tuples, because a union of types is made anew wherever it is written.
ARRAYS = (torch.Tensor, np.ndarray)
LISTS = (list, tuple)
NUMBERS = (int, float)
NODES = (Output, Node)
HANDLES = (Node, Steps, Chain, Loop, LoopSteps, State)
"""What a user may mistake for an output of one node."""


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
        self._states: list[StateLayout] = []
        self._unkept: dict[int, StateLayout] = {}
        """States that were asked for and have no value after the request yet."""

    def _take_values(self, count: int) -> int:
        first = self._num_values
        self._num_values += count
        return first

    def _count_nodes(self, count: int, cell: Cell) -> None:
        self._num_nodes += count
        most = self._binding.max_nodes
        if self._num_nodes > most:
            raise RequestError(
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

    def _state(self, cell: Cell, output: str) -> int:
        """The value that an output of the cell has in the request's session; zeros if that is new or there is none."""
        if len(self._states) + len(self._unkept) >= MAX_STATES:
            raise RequestError(f"cell {cell.name!r}, output {output!r}: a session has at most {MAX_STATES} states")
        kind = self._binding.kind(cell.outputs[output])
        self._program.extend([OP_STATE, kind])
        state = self._take_values(1)
        self._constants.add(state)
        self._unkept[state] = StateLayout(f"{cell.name}.{output}", kind, cell.identity[:16])
        return state

    def _starts(self, cell: Cell, inputs: Mapping[str, Source], keep: bool) -> dict[str, int]:
        """For each carried input the value before the first step: what was given, the session's state, or zeros."""
        starts: dict[str, int] = {}
        states: dict[str, int] = {}
        for name, output in cell.carry.items():
            if name in inputs:
                starts[name] = self._value(cell, name, cell.inputs[name], inputs[name])
            elif not keep:
                starts[name] = self._zero(cell.inputs[name])
            else:
                if output not in states:
                    states[output] = self._state(cell, output)
                starts[name] = states[output]
        if keep and not states:
            raise RequestError(
                f"cell {cell.name!r}, node {self._current}: keep=True, but no carried input begins with the session's "
                f"state: leave out those of {list(cell.carry)} that it should keep"
            )
        return starts

    def _keep(self, cell: Cell, states: Mapping[str, int], first: int, count: int) -> None:
        """Keeps outputs of a chain (or of a loop: one step) that begins at value ``first``. ``states``: by output."""
        for output, state in states.items():
            self._program.extend([OP_KEEP, state, first + cell.places[output], len(cell.outputs), count])
            self._states.append(self._unkept.pop(state))

    def _external(self, spec: RowSpec, rows: NDArray[Any]) -> int:
        kind, count = self._binding.kind(spec), len(rows)
        self._program.extend([OP_EXTERNAL, kind, count])
        self._externals.append((kind, rows))
        return self._take_values(count)

    def _where(self, cell: Cell, name: str, position: int = -1) -> str:
        """For errors: an input, or one of the sources in its list."""
        source = name if position < 0 else f"{name}[{position}]"
        return f"cell {cell.name!r}, node {self._current}, input {source!r}"

    def _begin(self, cell: object) -> int:
        """Begins an operation on a cell; returns its type."""
        self._current = self._num_nodes
        if not isinstance(cell, Cell):
            raise RequestError(f"node {self._current}: expected a cell, got {type(cell).__name__}")
        return self._binding.cell_type(cell)

    def _check_names(self, cell: Cell, inputs: Mapping[str, object]) -> None:
        for name in inputs:
            if name not in cell.inputs:
                raise RequestError(f"{self._where(cell, name)}: unknown; the cell has inputs {list(cell.inputs)}")
        if len(inputs) < len(cell.inputs):
            for name, spec in cell.inputs.items():
                if name not in inputs and name not in cell.carry:
                    raise RequestError(f"{self._where(cell, name)}: missing; expected {spec}{carry_hint(cell, name)}")

    def _check_state_is_whole(self, cell: Cell, inputs: Mapping[str, object]) -> None:
        """Raises RequestError where some carried inputs of one node are given and others forgotten."""
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
            wrong = "the node belongs to another graph"
        elif isinstance(handle, Output) and handle.value in self._constants:
            wrong = "expected an output of a node, got a constant"
        else:
            return
        raise RequestError(f"{what} {name!r}{f'[{position}]' if position >= 0 else ''}: {wrong}")

    def _check_source(self, cell: Cell, name: str, spec: RowSpec, source: Output | Steps, position: int = -1) -> None:
        if source.graph is not self:
            raise RequestError(f"{self._where(cell, name, position)}: the node belongs to another graph")
        if source.spec is not spec and source.spec != spec:
            raise RequestError(f"{self._where(cell, name, position)}: expected {spec}, got {source.spec}")

    def _words(self, cell: Cell, name: str, spec: RowSpec, source: Source) -> Sequence[int]:
        """Words for an input of one node."""
        return self._many(cell, name, spec, source) if spec.ragged else (FIXED, self._value(cell, name, spec, source))

    def _value(self, cell: Cell, name: str, spec: RowSpec, source: Source, position: int = -1) -> int:
        """The value of an input that is one row; ``position`` of the source if it is one of a list."""
        if isinstance(source, Node) and len(source._cell.outputs) == 1:
            source = Output(source._graph, source._first, next(iter(source._cell.outputs.values())))
        if isinstance(source, Output):
            self._check_source(cell, name, spec, source, position)
            return source.value
        if isinstance(source, HANDLES):
            where = self._where(cell, name, position)
            raise RequestError(f"{where}: expected {spec}, got {source!r}, not an output of one node")
        array = self._array(cell, name, spec, source, position)
        if array.shape != spec.shape:
            where = self._where(cell, name, position)
            raise RequestError(f"{where}: expected {spec}, got {RowSpec(array.shape, spec.dtype)}")
        return self._external(spec, array[None])

    def _many(self, cell: Cell, name: str, spec: RowSpec, source: Source) -> list[int]:
        """Words for a ragged input: a list of outputs or tensors, a chain's steps, or a tensor ``[n, *shape]``."""
        row = RowSpec(spec.shape, spec.dtype)
        if isinstance(source, Steps):
            self._check_source(cell, name, row, source)
            return [LIST, len(source), *source.values()]
        if isinstance(source, ARRAYS):
            array = self._array(cell, name, spec, source)
            if array.ndim == 0 or array.shape[1:] != spec.shape:
                raise RequestError(f"{self._where(cell, name)}: expected rows of {spec}, got shape {list(array.shape)}")
            first = self._external(row, array) if len(array) else 0
            return [LIST, len(array), *range(first, first + len(array))]
        if not isinstance(source, LISTS):
            raise RequestError(f"{self._where(cell, name)}: expected a list for {spec}, got {type(source).__name__}")
        return [LIST, len(source), *(self._value(cell, name, row, item, k) for k, item in enumerate(source))]

    def _array(self, cell: Cell, name: str, spec: RowSpec, source: Source, position: int = -1) -> NDArray[Any]:
        """The bits of a tensor, array, number or list of numbers in the spec's dtype; nothing is rounded silently.

        Always a copy: the client may change its tensor as soon as ``submit`` has returned.
        """
        if isinstance(source, torch.Tensor):
            if source.dtype != spec.dtype:
                got = RowSpec(tuple(source.shape), source.dtype)
                raise RequestError(f"{self._where(cell, name, position)}: expected {spec}, got {got}")
            if source.requires_grad or not source.is_cpu:
                source = source.detach().cpu()
            return _copy(as_bits(source))
        wanted = NUMPY_DTYPES.get(spec.dtype)
        try:
            if wanted is None:
                return as_bits(torch.as_tensor(source).to(spec.dtype))
            array = np.asarray(source)
        except (TypeError, ValueError, RuntimeError) as error:
            raise RequestError(
                f"{self._where(cell, name, position)}: expected {spec}, got {type(source).__name__}: {error}"
            ) from None
        if array.dtype == wanted:
            return array if isinstance(source, LISTS) else _copy(array)
        are_integers = array.dtype.kind in "iu" and np.dtype(wanted).kind in "iu"
        is_given = isinstance(source, np.ndarray | np.generic)
        if is_given or not (are_integers or np.can_cast(array.dtype, wanted, "same_kind")):
            where = self._where(cell, name, position)
            raise RequestError(f"{where}: expected {spec}, got {array.dtype}{list(array.shape)}")
        converted = array.astype(wanted)
        if are_integers and (converted != array).any():
            where = self._where(cell, name, position)
            raise RequestError(f"{where}: expected {spec}, got a number that does not fit: {source}")
        return converted

    def _chain_lengths(self, cell: Cell, inputs: Mapping[str, Source]) -> dict[str, int]:
        """The inputs that have a value for each step of a chain, with the number of steps: at least one, all equal."""
        lengths: dict[str, int] = {}
        for name, spec in cell.inputs.items():
            if name not in cell.carry and not spec.ragged and (count := num_steps(inputs[name], spec)) >= 0:
                lengths[name] = count
        if not lengths:
            raise RequestError(
                f"chain of cell {cell.name!r}: no input has a value for each step (a tensor [steps, ...] or a list)"
            )
        if len(lengths) > 1 and len(set(lengths.values())) > 1:
            raise RequestError(f"chain of cell {cell.name!r}: inputs have different numbers of steps: {lengths}")
        if 0 in lengths.values():
            raise RequestError(f"chain of cell {cell.name!r}: no steps; a chain needs at least one")
        return lengths

    def _record_chain(
        self, cell: Cell, type_id: int, count: int, parts: Mapping[str, Sequence[int]], stepped: Mapping[str, int]
    ) -> None:
        """Records a chain, in one operation if the values of its steps are evenly spaced, else node by node."""
        words = [OP_CHAIN, type_id, count]
        for name, part in parts.items():
            if name not in stepped:
                words += part
            elif isinstance(part, range):
                words += (STEP, part.start, part.step)
            else:
                break
        else:
            self._program.extend(words)
            return
        for step in range(count):
            words = [OP_NODE, type_id]
            before = self._num_values + (step - 1) * len(cell.outputs)
            for name, part in parts.items():
                if name in stepped:
                    words += (FIXED, part[step])
                elif name not in cell.carry:
                    words += part
                else:
                    words += (FIXED, part[1] if step == 0 else before + cell.places[cell.carry[name]])
            self._program.extend(words)

    def _stepped(self, cell: Cell, name: str, spec: RowSpec, source: Source) -> Sequence[int]:
        """The values of an input with one for each step of a chain; a range if they are evenly spaced."""
        if isinstance(source, Steps):
            self._check_source(cell, name, spec, source)
            return source.values()
        if isinstance(source, LISTS) and _has_handle(source):
            values = [self._value(cell, name, spec, item, k) for k, item in enumerate(source)]
            stride = values[1] - values[0] if len(values) > 1 else 1
            even = range(values[0], values[0] + len(values) * stride, stride) if stride else range(0)
            return even if list(even) == values else values
        array = self._array(cell, name, spec, source)
        shape = array.shape
        if shape[1:] != spec.shape:
            got = RowSpec(shape[1:], spec.dtype)
            raise RequestError(f"{self._where(cell, name)}: expected {spec} for each step, got {got}")
        first = self._external(spec, array)
        return range(first, first + shape[0])

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
            elif name in inputs and (given := num_steps(inputs[name], spec)) >= 0:
                if given != count:
                    raise RequestError(f"{self._where(cell, name)}: expected {count} rows, one a node, got {given}")
                values = self._stepped(cell, name, spec, inputs[name]) if count else range(1)
                if not isinstance(values, range):
                    raise RequestError(f"{self._where(cell, name)}: expected rows or evenly spaced outputs (a chain's)")
                words.append((STEP, values.start, values.step))
            elif name in inputs:
                words.append((FIXED, self._value(cell, name, spec, inputs[name]), 0))
            elif child is not None:
                word = child_word(cell, name, child)
                if isinstance(word, str):
                    raise RequestError(f"{self._where(cell, name)}: {word}")
                words.append(word)
            elif name in cell.carry:
                words.append((FIXED, self._zero(spec), 0))
            else:
                raise RequestError(f"{self._where(cell, name)}: missing; expected {spec}")
        return np.array(words, np.int32).reshape(-1, 3)


@lru_cache(maxsize=256)
def child_word(cell: Cell, name: str, child: Cell) -> tuple[int, int, int] | str:
    """Which output of which child an inner cell's input reads, from the input's name; or what is wrong with it."""
    spec = cell.inputs[name]
    stem, _, suffix = name.rpartition("_")
    row = RowSpec(spec.shape, spec.dtype)
    index = {"left": 0, "right": 1}.get(suffix, int(suffix) if suffix.isdigit() else -1)
    output = name if spec.ragged else stem
    if (not spec.ragged and index < 0) or output not in cell.outputs or output not in child.outputs:
        return f"missing, and not the name of a child's output; expected {spec}"
    for maker in (cell, child):
        if maker.outputs[output] != row or maker.places[output] != cell.places[output]:
            return f"expected {row}, got {maker.outputs[output]} of {maker.name!r}"
    place = cell.places[output]
    return (LIST, place, 0) if spec.ragged else (CARRY, index, place)


def _copy(array: NDArray[Any]) -> NDArray[Any]:
    """A copy in C order, made without giving up the interpreter lock: NumPy does, and then waits to get it back."""
    if not array.flags.c_contiguous or array.nbytes > LARGE_BYTES:
        return np.array(array, order="C")
    return np.frombuffer(bytearray(array.data), array.dtype).reshape(array.shape)


def carry_hint(cell: Cell, name: str) -> str:
    """For an error about a missing input: how it is carried from step to step, if an output could be its next value."""
    for output, spec in cell.outputs.items():
        if spec == cell.inputs[name] and output not in cell.carry.values():
            return f" (if it is a state that goes from step to step: cellrt.cell(..., carry={ ({name: output}) }))"
    return ""


def _has_handle(sources: Sequence[object]) -> bool:
    """Whether a list has an output or node in it; quick for the usual list of numbers."""
    if isinstance(sources[0], NUMBERS):
        return False
    return any(isinstance(source, NODES) for source in sources)


def num_steps(source: Source, spec: RowSpec) -> int:
    """How many values a source has if it has one for each step; -1 if it is one row for all."""
    if isinstance(source, ARRAYS):
        shape = source.shape
        return int(shape[0]) if len(shape) == len(spec.shape) + 1 else -1
    if isinstance(source, Steps):
        return len(source)
    if not isinstance(source, LISTS):
        return -1
    first = source[0] if source else 0
    if isinstance(first, NUMBERS):
        return -1 if spec.shape else len(source)
    return len(source) if isinstance(first, NODES) or np.ndim(first) == len(spec.shape) else -1
