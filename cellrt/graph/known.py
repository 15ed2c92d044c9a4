"""Unfolding many requests: those of one graph together, and none whose graph is known by its key.

A model may say that a request's graph depends on a key of it alone (``unfold(..., key=len)``). At the second request of
a key the parts of a request that its graph reads are found. For that a copy of the request is unfolded, whose parts are
objects that appear nowhere else. From then on a request of that key gives only these parts. Now and then one is
unfolded in full all the same, to see that the key tells what it should.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from cellrt.errors import RequestError
from cellrt.graph.binding import Binding
from cellrt.graph.results import Recorded
from cellrt.graph.slots import Slots, collect, trace, without_tensors
from cellrt.graph.unfolder import Unfolder

log = logging.getLogger("cellrt")
T = TypeVar("T")
MAX_KEYS = 4096
"""Keys whose graphs are kept, for each model; the oldest leave."""

ONE = range(1)


class Alike(NamedTuple):
    """Requests of one graph.

    Attributes:
        recorded: what each of them recorded; with the tensors of all, one request behind the other.
        indices: where each stands among those that were given.
    """

    recorded: Recorded
    indices: Sequence[int]


class Counting(Protocol):
    """An object that hands in requests of a known graph by itself, and counts them."""

    count: int


class Known:
    """The graph of a key.

    Attributes:
        recorded: what its requests record, without their tensors; None until its second request.
        slots: what of a request it reads; None if that is not known.
        prepared: an object that hands in its requests without unfolding them, and counts them; or None.
        may_be_prepared: False if no object can.
    """

    def __init__(self) -> None:
        self.recorded: Recorded | None = None
        self.slots: Slots | None = None
        self.prepared: Counting | None = None
        self.may_be_prepared = True
        self._count = 0

    @property
    def count(self) -> int:
        """The requests since it is known."""
        return self._count if self.prepared is None else self.prepared.count

    @count.setter
    def count(self, count: int) -> None:
        if self.prepared is None:
            self._count = count
        else:
            self.prepared.count = count

    def prepare(self, prepared: Counting) -> None:
        """Have its requests handed in by ``prepared``."""
        prepared.count = self.count
        self.prepared = prepared

    def equals(self, recorded: Recorded) -> bool:
        """Return whether a recording has the known graph."""
        return self.recorded == without_tensors(recorded)

    def collect(self, requests: Sequence[Any]) -> Recorded | None:
        """Return the recording of these requests, all of this graph; None if one of them does not fit it."""
        if self.slots is None or self.recorded is None:
            return None
        return collect(self.recorded, self.slots, requests)


class KnownGraphs:
    """The graphs of one model's requests, always for one binding. Safe from any thread."""

    def __init__(self, unfolder: Unfolder) -> None:
        self._unfolder = unfolder
        self._by_key: OrderedDict[Hashable, Known] = OrderedDict()
        self._lock = threading.Lock()

    def by_key(self) -> tuple[Callable[[Any], Hashable], Mapping[Hashable, Known]] | None:
        """Return the function that tells a request's key, and what is known by key; None: requests have none."""
        return None if self._unfolder.key is None else (self._unfolder.key, self._by_key)

    def record(self, binding: Binding, requests: Sequence[Any]) -> list[Alike]:
        """Unfold requests, those of one graph together. Raise RequestError, RequestTooLargeError."""
        if self._unfolder.key is None:
            if len(requests) == 1:
                return [Alike(self._unfolder.record(binding, requests[0]), ONE)]
            return self._unfold(binding, requests, range(len(requests)))
        if len(requests) == 1 and (alike := self._collect_one(requests)) is not None:
            return [alike]
        found: list[Alike] = []
        others: list[int] = []
        for key, indices in self._keys(binding, requests).items():
            known = self._by_key.get(key)
            if known is None:
                known = self._add(key)
                if len(indices) == 1:  # most keys that come once never come again
                    others += indices
                    continue
            if known.recorded is None:
                self._learn(binding, known, requests, indices[0])
            recorded = known.collect([requests[index] for index in indices])
            if recorded is None:
                others += indices
            else:
                self._check(binding, key, known, requests[indices[-1]], len(indices))
                found.append(Alike(recorded, indices))
        return found + self._unfold(binding, requests, others) if others else found

    def _collect_one(self, requests: Sequence[Any]) -> Alike | None:
        """Return the usual case: one request of a known key, which is not to be unfolded in full."""
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

    def _unfold(self, binding: Binding, requests: Sequence[Any], indices: Sequence[int]) -> list[Alike]:
        """Unfold the requests at these indices."""
        if len(indices) == 1:
            return [Alike(self._record_one(binding, requests, indices[0]), indices)]
        by_graph: dict[bytes, list[list[tuple[int, Recorded]]]] = {}
        for index in indices:
            recorded = self._record_one(binding, requests, index)
            groups = by_graph.setdefault(recorded.program, [])
            for group in groups:
                if group[0][1].results == recorded.results and group[0][1].states == recorded.states:
                    group.append((index, recorded))
                    break
            else:
                groups.append([(index, recorded)])
        return [_together(group) for groups in by_graph.values() for group in groups]

    def _record_one(self, binding: Binding, requests: Sequence[Any], index: int) -> Recorded:
        """Unfold one of several requests; an error says which."""
        try:
            return self._unfolder.record(binding, requests[index])
        except RequestError as error:
            if len(requests) == 1:
                raise
            raise type(error)(f"{one_of(index, requests)}: {error}") from error

    def _keys(self, binding: Binding, requests: Sequence[Any]) -> dict[Hashable, Sequence[int]]:
        """Return the indices of requests by their keys."""
        try:
            keys = [self._unfolder.key(request) for request in requests]  # type: ignore[misc]
            if keys.count(keys[0] if keys else None) == len(keys):
                return {keys[0]: range(len(keys))} if keys else {}
            by_key: dict[Hashable, list[int]] = {}
            for index, key in enumerate(keys):
                by_key.setdefault(key, []).append(index)
            return by_key  # type: ignore[return-value]
        except Exception as error:
            for index, request in enumerate(requests):  # what is wrong with one is better told by its unfolding
                self._record_one(binding, requests, index)
                try:
                    hash(self._unfolder.key(request))  # type: ignore[misc]
                except Exception as its:
                    which = f"{one_of(index, requests)}: " if len(requests) > 1 else ""
                    raise RequestError(
                        f"{which}model {self._unfolder.name!r}: its key raised {type(its).__name__}: {its}"
                    ) from its
            raise RequestError(
                f"model {self._unfolder.name!r}: its key raised {type(error).__name__}: {error}"
            ) from error

    def _add(self, key: Hashable) -> Known:
        """Note that there is a key."""
        known = Known()
        with self._lock:
            self._by_key[key] = known
            if len(self._by_key) > MAX_KEYS:
                self._by_key.popitem(last=False)
        return known

    def _learn(self, binding: Binding, known: Known, requests: Sequence[Any], index: int) -> None:
        """Find out the graph of a key, and what of a request it reads."""
        request, recorded = requests[index], self._record_one(binding, requests, index)
        known.slots = trace(self._unfolder, binding, request, recorded)
        known.recorded = without_tensors(recorded)

    def _check(self, binding: Binding, key: Hashable, known: Known, request: Any, count: int) -> None:
        """Count requests of a key; whenever their number has doubled, one is unfolded in full."""
        before, known.count = known.count, known.count + count
        has_doubled = before.bit_length() != known.count.bit_length()
        if has_doubled and not known.equals(self._unfolder.record(binding, request)):
            known.slots = known.prepared = None
            known.may_be_prepared = False
            wrong = (
                f"model {self._unfolder.name!r}: the key {key!r:.80} is that of requests with different graphs; a key "
                "must tell whatever the graph depends on"
            )
            log.warning("%s; from now on each request of that key is unfolded", wrong)  # a map tries them again
            raise RequestError(wrong)


def record_at(record: Callable[[Sequence[Any]], T], requests: Sequence[Any], indices: Sequence[int]) -> T:
    """Call ``record`` with the requests at some indices. An error about one request names its index among all."""
    try:
        return record([requests[index] for index in indices])
    except RequestError:
        for index in indices if len(indices) < len(requests) else ():
            try:
                record([requests[index]])
            except RequestError as error:
                raise type(error)(f"{one_of(index, requests)}: {error}") from error
        raise


def one_of(index: int, requests: Sequence[Any]) -> str:
    """Return a text for errors that says which of several requests this is: its number from 1, and its index."""
    return f"request {index + 1} of {len(requests)} (index {index})"


def _together(group: Sequence[tuple[int, Recorded]]) -> Alike:
    """Return one recording of several requests that have the same graph."""
    recorded = group[0][1]
    if len(group) > 1:
        externals = [
            (kind, np.concatenate([one.externals[k][1] for _, one in group]))
            for k, (kind, _) in enumerate(recorded.externals)
        ]
        recorded = recorded._replace(externals=externals)
    return Alike(recorded, [index for index, _ in group])
