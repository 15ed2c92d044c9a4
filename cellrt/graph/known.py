"""Unfolding many requests: those of one graph together, and none whose graph is known by its key.

A model may say that a request's graph depends on a key of it alone (``unfold(..., key=len)``). With the second request
of a key it is found out which parts of a request its graph reads, by unfolding a copy of it, whose parts are objects
that nobody else has. From then on a request of that key gives only these parts. Now and then one is unfolded in full
all the same, to see that the key tells what it should.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple, TypeVar

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
from cellrt.graph.sources import LISTS, NUMBERS, bits_of, bits_together, copied
from cellrt.graph.symbols import Output
from cellrt.graph.unfolder import Unfolder

log = logging.getLogger("cellrt")
T = TypeVar("T")
MAX_KEYS = 4096
"""Keys whose graphs are kept, for each model; the oldest leave."""

ONE = range(1)
CONSTANT = "a constant"
"""In place of an input: one that travels with requests, because the engine keeps no more of them."""
Path = tuple[Any, ...]
"""How one comes from a request to a part of it: by keys and positions."""
Externals = list[tuple[int, NDArray[Any]]]


class Alike(NamedTuple):
    """Requests of one graph.

    Attributes:
        recorded: what each of them recorded; with the tensors of all, one request behind the other.
        places: where each stands among those that were given.
    """

    recorded: Recorded
    places: Sequence[int]


class _Slot(NamedTuple):
    """A tensor that each request brings: ``path`` and ``spec`` of the part that it is, its shape there and as rows."""

    path: Path
    spec: RowSpec
    kind: int
    shape: tuple[int, ...]
    rows_shape: tuple[int, ...]

    def rows_of_one(self, request: Any) -> NDArray[Any]:
        """As ``rows``, of one request."""
        for step in self.path:
            request = request[step]
        bits = bits_of(self.spec, request)
        if bits.shape != self.shape:
            raise RequestError("another shape")
        if not isinstance(request, LISTS):
            bits = copied(bits)
        return bits if self.shape == self.rows_shape else bits.reshape(self.rows_shape)

    def rows(self, requests: Sequence[Any]) -> NDArray[Any]:
        """The rows of requests one behind the other, in memory of their own.

        Raises RequestError, LookupError or TypeError if one has no such part.
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


class _Known:
    """The graph of a key.

    Attributes:
        recorded: what its requests record, without their tensors; None until its second request.
        slots: what of a request it reads; None if that is not known.
        count: requests since it is known.
    """

    def __init__(self) -> None:
        self.recorded: Recorded | None = None
        self.slots: list[_Slot] | None = None
        self.count = 0

    def equals(self, recorded: Recorded) -> bool:
        """Whether that is the same graph."""
        return self.recorded == _without_tensors(recorded)

    def collect(self, requests: Sequence[Any]) -> Recorded | None:
        """What requests of this graph record; None if one of them does not fit it."""
        if self.slots is None or self.recorded is None:
            return None
        program, _, results, states = self.recorded
        try:
            if len(requests) == 1:
                externals = [(slot.kind, slot.rows_of_one(requests[0])) for slot in self.slots]
            else:
                externals = [(slot.kind, slot.rows(requests)) for slot in self.slots]
            return Recorded(program, externals, results, states)
        except (RequestError, LookupError, TypeError, ValueError):
            return None


class KnownGraphs:
    """The graphs of one model's requests, always for one binding. Safe from any thread."""

    def __init__(self, unfolder: Unfolder) -> None:
        self._unfolder = unfolder
        self._by_key: OrderedDict[Hashable, _Known] = OrderedDict()
        self._lock = threading.Lock()

    def record(self, binding: Binding, requests: Sequence[Any]) -> list[Alike]:
        """Unfolds requests, those of one graph together. Raises RequestError, RequestTooLargeError."""
        if self._unfolder.key is None:
            if len(requests) == 1:
                return [Alike(self._unfolder.record(binding, requests[0]), ONE)]
            return self._unfold(binding, requests, range(len(requests)))
        if len(requests) == 1 and (alike := self._collect_one(requests)) is not None:
            return [alike]
        found: list[Alike] = []
        others: list[int] = []
        for key, places in self._keys(binding, requests).items():
            known = self._by_key.get(key)
            if known is None:
                known = self._add(key)
                if len(places) == 1:  # most keys that come once never come again
                    others += places
                    continue
            if known.recorded is None:
                self._learn(binding, known, requests[places[0]])
            recorded = known.collect([requests[place] for place in places])
            if recorded is None:
                others += places
            else:
                self._check(binding, key, known, requests[places[-1]], len(places))
                found.append(Alike(recorded, places))
        return found + self._unfold(binding, requests, others) if others else found

    def _collect_one(self, requests: Sequence[Any]) -> Alike | None:
        """The usual case: one request of a known key, which is not to be unfolded in full."""
        try:
            known = self._by_key.get(self._unfolder.key(requests[0]))  # type: ignore[misc]
        except Exception:
            return None
        if known is None or known.count & (known.count + 1) == 0:
            return None
        recorded = known.collect(requests)
        if recorded is None:
            return None
        known.count += 1
        return Alike(recorded, ONE)

    def _unfold(self, binding: Binding, requests: Sequence[Any], places: Sequence[int]) -> list[Alike]:
        """Unfolds the requests at these places."""
        if len(places) == 1:
            return [Alike(self._record_one(binding, requests, places[0]), places)]
        by_graph: dict[bytes, list[list[tuple[int, Recorded]]]] = {}
        for place in places:
            recorded = self._record_one(binding, requests, place)
            groups = by_graph.setdefault(recorded.program, [])
            for group in groups:
                if group[0][1].results == recorded.results and group[0][1].states == recorded.states:
                    group.append((place, recorded))
                    break
            else:
                groups.append([(place, recorded)])
        return [_together(group) for groups in by_graph.values() for group in groups]

    def _record_one(self, binding: Binding, requests: Sequence[Any], place: int) -> Recorded:
        """Unfolds one of several requests; an error says which."""
        try:
            return self._unfolder.record(binding, requests[place])
        except RequestError as error:
            if len(requests) == 1:
                raise
            raise type(error)(f"request {place} of {len(requests)}: {error}") from error

    def _keys(self, binding: Binding, requests: Sequence[Any]) -> dict[Hashable, Sequence[int]]:
        """The places of requests by their keys."""
        try:
            keys = [self._unfolder.key(request) for request in requests]  # type: ignore[misc]
            if keys.count(keys[0] if keys else None) == len(keys):
                return {keys[0]: range(len(keys))} if keys else {}
            by_key: dict[Hashable, list[int]] = {}
            for place, key in enumerate(keys):
                by_key.setdefault(key, []).append(place)
            return by_key  # type: ignore[return-value]
        except Exception as error:
            for place in range(len(requests)):  # what is wrong with one is better told by its unfolding
                self._record_one(binding, requests, place)
            raise RequestError(
                f"model {self._unfolder.name!r}: its key raised {type(error).__name__}: {error}"
            ) from error

    def _add(self, key: Hashable) -> _Known:
        """Notes that there is a key."""
        known = _Known()
        with self._lock:
            self._by_key[key] = known
            if len(self._by_key) > MAX_KEYS:
                self._by_key.popitem(last=False)
        return known

    def _learn(self, binding: Binding, known: _Known, request: Any) -> None:
        """Finds out the graph of a key, and what of a request it reads."""
        recorded = self._unfolder.record(binding, request)
        known.slots = _trace(self._unfolder, binding, request, recorded)
        known.recorded = _without_tensors(recorded)

    def _check(self, binding: Binding, key: Hashable, known: _Known, request: Any, count: int) -> None:
        """Counts requests of a key; whenever their number has doubled, one is unfolded in full."""
        before, known.count = known.count, known.count + count
        has_doubled = before.bit_length() != known.count.bit_length()
        if has_doubled and not known.equals(self._unfolder.record(binding, request)):
            known.slots = None
            wrong = (
                f"model {self._unfolder.name!r}: the key {key!r:.80} is that of requests with different graphs; a key "
                "must tell whatever the graph depends on"
            )
            log.warning("%s; from now on each request of that key is unfolded", wrong)  # a map tries them again
            raise RequestError(wrong)


def record_at(record: Callable[[Sequence[Any]], T], requests: Sequence[Any], places: Sequence[int]) -> T:
    """What ``record`` makes of the requests at some places; what is wrong with one names its place among all."""
    try:
        return record([requests[place] for place in places])
    except RequestError:
        for place in places if len(places) < len(requests) else ():
            try:
                record([requests[place]])
            except RequestError as error:
                raise type(error)(f"request {place} of {len(requests)}: {error}") from error
        raise


def check_key(unfolder: Unfolder, binding: Binding, recorded: Recorded) -> None:
    """Checks the key of a model on its example, of which that was recorded. Raises DefinitionError."""
    if unfolder.key is None:
        return
    try:
        hash(unfolder.key(unfolder.example))
    except Exception as error:
        raise DefinitionError(
            f"model {unfolder.name!r}: its key raised {type(error).__name__} of the example: {error}"
        ) from error
    found = _Trace(unfolder, binding, unfolder.example)
    if found.recorded is None or _without_tensors(found.recorded) != _without_tensors(recorded):
        raise DefinitionError(f"model {unfolder.name!r}: with a key, equal requests must unfold to equal graphs")
    for where in found.untraced:
        if where != CONSTANT:
            raise DefinitionError(
                f"model {unfolder.name!r}: with a key, the graph may read tensors, arrays and lists of the request "
                f"only as they are in it; {where} reads something else"
            )


def _trace(unfolder: Unfolder, binding: Binding, request: Any, recorded: Recorded) -> list[_Slot] | None:
    """What of a request its graph reads; None if that is not the request's own tensors, arrays and lists alone."""
    found = _Trace(unfolder, binding, request)
    if found.recorded is None or found.untraced or _without_tensors(found.recorded) != _without_tensors(recorded):
        return None
    known = _Known()
    known.recorded, known.slots = _without_tensors(recorded), found.slots
    collected = known.collect([request])
    return found.slots if collected is not None and _are_equal(collected.externals, recorded.externals) else None


def _without_tensors(recorded: Recorded) -> Recorded:
    return recorded._replace(externals=[])


class _Trace:
    """Unfolds a copy of a request; ``slots`` are the parts that its graph reads, ``untraced`` names what is none."""

    def __init__(self, unfolder: Unfolder, binding: Binding, request: Any) -> None:
        self.slots: list[_Slot] = []
        self.untraced: list[str] = []
        self.recorded: Recorded | None = None
        paths: dict[int, Path] = {}
        copy = _copy(request, (), paths)
        graph = _TracedGraph(binding)
        try:
            self.recorded = unfolder.record_in(graph, copy)
        except RequestError:
            return
        for (where, source, spec), (kind, rows) in zip(graph.given, self.recorded.externals):
            path = paths.get(id(source))
            if path is None:
                self.untraced.append(where)
            else:
                self.slots.append(_Slot(path, spec, kind, bits_of(spec, source).shape, rows.shape))


class _TracedGraph(Graph):
    """A graph that notes what each of the request's tensors was made of."""

    def __init__(self, binding: Binding) -> None:
        super().__init__(binding)
        self.given: list[tuple[str, object, RowSpec]] = []
        """Of each external: which input it is, its source, and what that is to be."""
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
        """See ``Graph.constant``."""
        self._source = CONSTANT, None
        return super().constant(value, spec)


def _copy(value: Any, path: Path, paths: dict[int, Path]) -> Any:
    """A part of a request as objects that nobody else has; ``paths`` gets where each is. Numbers stay what they are."""
    made: Any
    if type(value) is torch.Tensor:
        made = value.detach()
    elif type(value) is np.ndarray:
        made = value.view()
    elif type(value) is dict:
        made = {key: _copy(item, (*path, key), paths) for key, item in value.items()}
    elif type(value) in LISTS and value:
        are_numbers = isinstance(value[0], NUMBERS)
        items = list(value) if are_numbers else [_copy(item, (*path, k), paths) for k, item in enumerate(value)]
        made = items if type(value) is list else tuple(items)
    else:
        return value
    paths[id(made)] = path
    return made


def _together(group: Sequence[tuple[int, Recorded]]) -> Alike:
    """Recorded requests of one graph."""
    recorded = group[0][1]
    if len(group) > 1:
        externals = [
            (kind, np.concatenate([one.externals[k][1] for _, one in group]))
            for k, (kind, _) in enumerate(recorded.externals)
        ]
        recorded = recorded._replace(externals=externals)
    return Alike(recorded, [place for place, _ in group])


def _are_equal(one: Externals, other: Externals) -> bool:
    """Whether these are the same rows, bit by bit."""
    return len(one) == len(other) and all(
        kind == known and rows.shape == values.shape and rows.tobytes() == values.tobytes()
        for (kind, rows), (known, values) in zip(one, other)
    )
