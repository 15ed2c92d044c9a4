"""Finds the parts of a request that its graph reads, so that later requests with the same graph skip unfolding.

To find them, a copy of a request is unfolded. Every part of the copy is an object that appears nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.errors import DefinitionError, RequestError
from cellrt.graph.binding import Binding
from cellrt.graph.graph import Graph
from cellrt.graph.recorder import Source
from cellrt.graph.results import Recorded
from cellrt.graph.row_bits import ARRAYS, LISTS, NUMBERS, bits_of, bits_together, copied, integers_of
from cellrt.graph.symbols import Output
from cellrt.graph.unfolder import Unfolder

INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
CONSTANT = "a constant"
"""A mark in place of an input that travels with requests, because the engine keeps no more constants."""
Path = tuple[Any, ...]
"""The keys and positions that lead from a request to a part of it."""
Externals = list[tuple[int, NDArray[Any]]]


class Slot(NamedTuple):
    """A tensor that each request brings: ``path`` and ``spec`` of the part that it is, its shape there and as rows."""

    path: Path
    spec: RowSpec
    kind: int
    shape: tuple[int, ...]
    rows_shape: tuple[int, ...]

    def rows_of_one(self, request: Any) -> NDArray[Any]:
        """Return the rows of one request, as ``rows`` does for several."""
        for step in self.path:
            request = request[step]
        bits = integers_of(self.spec, request)
        if bits is None:
            bits = bits_of(self.spec, request)
        if bits.shape != self.shape:
            raise RequestError("another shape")
        if not isinstance(request, LISTS):
            bits = copied(bits)
        return bits if self.shape == self.rows_shape else bits.reshape(self.rows_shape)

    def rows(self, requests: Sequence[Any]) -> NDArray[Any]:
        """Return the rows of requests one behind the other, in memory of their own.

        Raise RequestError, LookupError or TypeError if one has no such part.
        """
        parts = requests
        for step in self.path:
            parts = [part[step] for part in parts]
        bits = bits_together(self.spec, parts)
        if bits is None:
            bits = np.stack([bits_of(self.spec, part) for part in parts])
        if bits.shape[1:] != self.shape:
            raise RequestError("another shape")
        return bits.reshape(len(parts) * self.rows_shape[0], *self.rows_shape[1:])


class Told(NamedTuple):
    """A number that the key tells, and so the same in each request: its row."""

    kind: int
    row: NDArray[Any]

    def rows_of_one(self, request: Any) -> NDArray[Any]:
        """Return the row for one request, as ``Slot.rows_of_one`` does."""
        return self.row.copy()

    def rows(self, requests: Sequence[Any]) -> NDArray[Any]:
        """Return the row once for each request, as ``Slot.rows`` does."""
        return np.concatenate([self.row] * len(requests))


class Empty(NamedTuple):
    """A part without rows, such as a list of no nodes: no tensor tells whether a request has the like of it."""

    path: Path
    what: object

    def is_in(self, request: Any) -> bool:
        """Return whether a request has such a part there. Raise LookupError or TypeError if it has none."""
        for step in self.path:
            request = request[step]
        return _emptiness(request) == self.what


class Slots(NamedTuple):
    """The parts of a request that its graph reads: the tensors it brings, in order, and the parts that must be
    empty.
    """

    brought: list[Slot | Told]
    empty: list[Empty]


def collect(recorded: Recorded, slots: Slots, requests: Sequence[Any]) -> Recorded | None:
    """Return the recording of requests of a known graph from these slots alone; None if one of them does not fit."""
    program, _, results, states = recorded
    try:
        for empty in slots.empty:
            if not all(map(empty.is_in, requests)):
                return None
        if len(requests) == 1:
            externals = [(slot.kind, slot.rows_of_one(requests[0])) for slot in slots.brought]
        else:
            externals = [(slot.kind, slot.rows(requests)) for slot in slots.brought]
        return Recorded(program, externals, results, states)
    except (RequestError, LookupError, TypeError, ValueError):
        return None


def check_key(unfolder: Unfolder, binding: Binding, recorded: Recorded) -> None:
    """Check the key of a model on its example, of which that was recorded. Raise DefinitionError."""
    if unfolder.key is None:
        return
    try:
        hash(unfolder.key(unfolder.example))
    except Exception as error:
        raise DefinitionError(
            f"model {unfolder.name!r}: its key raised {type(error).__name__} of the example: {error}"
        ) from error
    if not _is_told_by_key(unfolder, binding, unfolder.example, recorded):
        raise DefinitionError(
            f"model {unfolder.name!r}: its key is the same for the example and for one with other numbers in it, but "
            "their graphs differ, in a constant, say; a key must tell whatever the graph depends on"
        )
    found = _Trace(unfolder, binding, unfolder.example)
    if found.recorded is None or without_tensors(found.recorded) != without_tensors(recorded):
        raise DefinitionError(f"model {unfolder.name!r}: with a key, equal requests must unfold to equal graphs")
    for where in found.untraced:
        if where != CONSTANT:
            raise DefinitionError(
                f"model {unfolder.name!r}: with a key, the graph may read tensors, arrays and lists of the request "
                f"only as they are in it (in dicts, lists and tuples), and numbers that the key has; {where} reads "
                "something else"
            )


def trace(unfolder: Unfolder, binding: Binding, request: Any, recorded: Recorded) -> Slots | None:
    """Return the slots of a request's graph; None if unfolding reads more than the slots can describe.

    Slots describe the request's own tensors, arrays and lists, and numbers of its key.
    """
    found = _Trace(unfolder, binding, request)
    if not _is_told_by_key(unfolder, binding, request, recorded):
        return None
    if found.recorded is None or found.untraced or without_tensors(found.recorded) != without_tensors(recorded):
        return None
    collected = collect(recorded, found.slots, [request])
    return found.slots if collected is not None and _are_equal(collected.externals, recorded.externals) else None


def _is_told_by_key(unfolder: Unfolder, binding: Binding, request: Any, recorded: Recorded) -> bool:
    """Return whether a request of the same key with other numbers in it unfolds to the same graph, as far as it
    unfolds.
    """
    if unfolder.key is None:
        return True
    key = unfolder.key(request)
    for kind in (float, int):
        try:
            other = _with_other_numbers(request, kind)
            if unfolder.key(other) != key:
                continue
            found = unfolder.record(binding, other)
        except Exception:  # numbers that this model does not take
            continue
        if without_tensors(found) != without_tensors(recorded):
            return False
    return True


def without_tensors(recorded: Recorded) -> Recorded:
    """Return the part of a recording that is the same for all requests with the same graph."""
    return recorded._replace(externals=[])


class _Trace:
    """Unfolds a copy of a request; ``slots`` are the parts that its graph reads, ``untraced`` names what is none."""

    def __init__(self, unfolder: Unfolder, binding: Binding, request: Any) -> None:
        self.slots = Slots([], [])
        self.untraced: list[str] = []
        self.recorded: Recorded | None = None
        paths: dict[int, Path] = {}
        copy = _copy(request, (), paths)
        told = _numbers_of_key(unfolder, copy)
        _find_empty(copy, (), self.slots.empty)
        graph = _TracedGraph(binding)
        try:
            self.recorded = unfolder.record_in(graph, copy)
        except RequestError:
            return
        for (where, source, spec), (kind, rows) in zip(graph.given, self.recorded.externals):
            path = paths.get(id(source))
            if path is not None:
                self.slots.brought.append(Slot(path, spec, kind, bits_of(spec, source).shape, rows.shape))
            elif any(source is part for part in told):
                self.slots.brought.append(Told(kind, rows))
            else:
                self.untraced.append(where)


class _TracedGraph(Graph):
    """A graph that notes what each of the request's tensors was made of."""

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding)
        self.given: list[tuple[str, object, RowSpec]] = []
        """The inputs from outside, in order: which input it is, its source, and the spec."""
        self._source: tuple[str, object] = "", None

    def _external(self, spec: RowSpec, rows: NDArray[Any]) -> int:
        self.given.append((*self._source, spec))
        return super()._external(spec, rows)

    def _value(self, cell: Cell, name: str, spec: RowSpec, source: Source, position: int = -1) -> int:
        self._source = self._where(cell, name, position), source
        return super()._value(cell, name, spec, source, position)

    def _many(self, cell: Cell, name: str, spec: RowSpec, source: Source) -> list[int]:
        self._source = self._where(cell, name), source
        return super()._many(cell, name, spec, source)

    def _listed(self, cell: Cell, name: str, spec: RowSpec, sources: Sequence[Source]) -> Sequence[int]:
        self._source = self._where(cell, name), sources
        return super()._listed(cell, name, spec, sources)

    def _stepped(self, cell: Cell, name: str, spec: RowSpec, source: Source) -> Sequence[int]:
        self._source = self._where(cell, name), source
        return super()._stepped(cell, name, spec, source)

    def constant(self, value: float | torch.Tensor | np.ndarray, spec: RowSpec | None = None) -> Output:
        """Return a constant, as ``Graph.constant`` does, and note that the request did not bring it."""
        self._source = CONSTANT, None
        return super().constant(value, spec)


def _numbers_of_key(unfolder: Unfolder, copy: Any) -> list[object]:
    """Return the copy's own numbers that its key has; none if the key does not take such numbers."""
    try:
        key = None if unfolder.key is None else unfolder.key(copy)
    except Exception:
        return []
    return [part for part in (key if isinstance(key, tuple) else (key,)) if type(part) in (_Int, _Float)]


class _Int(int):
    """A number of a copied request: Python has one object for all small ones that are equal."""


class _Float(float):
    """A float that records its use, as ``_Int`` does for an int."""


def _copy(value: Any, path: Path, paths: dict[int, Path]) -> Any:
    """Return a copy of a part of a request, made of objects that appear nowhere else; ``paths`` gets the place of each.

    In lists of nothing else, numbers stay what they are.
    """
    made: Any
    if type(value) in (int, float):
        return _Int(value) if type(value) is int else _Float(value)
    if type(value) is torch.Tensor:
        made = value.detach()
    elif type(value) is np.ndarray:
        made = value.view()
    elif type(value) is dict:
        made = {key: _copy(item, (*path, key), paths) for key, item in value.items()}
    elif _is_list(value) and value:
        are_numbers = type(value) in LISTS and all(isinstance(item, NUMBERS) for item in value)
        items = value if are_numbers else [_copy(item, (*path, k), paths) for k, item in enumerate(value)]
        made = _like(value, list(items))
    else:
        return value
    paths[id(made)] = path
    return made


def _is_list(value: Any) -> bool:
    """Return whether a value is a list or a tuple, named ones included."""
    return type(value) in LISTS or (isinstance(value, tuple) and hasattr(value, "_fields"))


def _like(value: Any, items: list[Any]) -> Any:
    """Return these items as a list or tuple of the type of ``value``."""
    return value._make(items) if hasattr(value, "_fields") else type(value)(items)


def _find_empty(value: Any, path: Path, found: list[Empty]) -> None:
    """Add the parts without rows of a request's part."""
    if (what := _emptiness(value)) is not None:
        found.append(Empty(path, what))
    elif type(value) is dict or _is_list(value):
        for step, item in value.items() if type(value) is dict else enumerate(value):
            _find_empty(item, (*path, step), found)


def _emptiness(value: Any) -> object:
    """Return what two empty parts must share to stand for each other (type, dtype, shape); None of a part with rows."""
    if type(value) in ARRAYS:
        return (type(value), value.dtype, tuple(value.shape)) if 0 in value.shape else None
    return type(value) if _is_list(value) and not value else None


def _with_other_numbers(value: Any, kind: type[int | float]) -> Any:
    """Return a request with each number of a kind one larger; numbers of its tensors, too."""
    if type(value) is torch.Tensor:
        is_kind = value.dtype.is_floating_point if kind is float else value.dtype in INTEGERS
        return value.detach() + 1 if is_kind else value
    if type(value) is np.ndarray:
        return value + value.dtype.type(1) if value.dtype.kind in ("f" if kind is float else "iu") else value
    if type(value) is dict:
        return {key: _with_other_numbers(item, kind) for key, item in value.items()}
    if _is_list(value):
        return _like(value, [_with_other_numbers(item, kind) for item in value])
    return value + 1 if type(value) is kind else value


def _are_equal(one: Externals, other: Externals) -> bool:
    """Return whether two requests bring the same rows, bit by bit."""
    return len(one) == len(other) and all(
        kind == known and rows.shape == values.shape and rows.tobytes() == values.tobytes()
        for (kind, rows), (known, values) in zip(one, other)
    )
