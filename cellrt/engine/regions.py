"""Clients in other processes whose requests join and leave by shared memory, as the engine knows them.

``core/requests/region_entries.py`` admits the requests. Here are the plans that clients may name, and the ways of
requests that compiled code cannot carry to their end.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from ctypes import string_at
from typing import NamedTuple, Protocol

import numpy as np

from cellrt.core.processor import Processor
from cellrt.core.state.region_layout import MAX_PLANS, MAX_SEATS, NUM_SLOTS
from cellrt.core.state.tables import (
    MAX_QUEUES,
    MAX_REGIONS,
    MAX_SUBMISSIONS,
    MAX_TENSORS,
    NUM_REGIONS,
    REGION_PLAN,
)
from cellrt.engine.futures import Ends
from cellrt.engine.places import Places
from cellrt.engine.registry import Model, Plan
from cellrt.engine.request_group import NO_INPUTS, Canceller, RequestGroup, SessionRecord
from cellrt.native.answer_word import say_elsewhere
from cellrt.native.row_types import new_table

ENGINE = 0
"""The engine's row of ``queues``."""
ALIGNMENT = 8
"""The alignment in bytes of tensors that a client gets back."""


class Returned(NamedTuple):
    """A request that found no room, or no place in a queue.

    Attributes:
        plan: its number.
        id: the client's number of the request.
        tensors: each padded to whole words, one behind the other.
        arrival_ns, priority: as it was handed in.
        session: the client's number of its session; 0: it has none.
    """

    plan: int
    id: int
    tensors: bytes
    arrival_ns: int
    priority: int
    session: int


class RegionClient(Protocol):
    """A client in another process, as its connection knows it. All are called in turns."""

    def ends_of(self, id: int) -> Callable[[RequestGroup], Ends]:
        """Return a function that makes the receiver of a request's end, for a request that Python goes on with."""

    def return_request(self, returned: Returned) -> None:
        """Take back a request, to be submitted as by a message."""

    def note_broken(self) -> None:
        """Note that the client handed in data that is no valid request."""


class _Known(NamedTuple):
    """A plan that a client names by a number. ``tensors``: kind and bytes of each of a request's tensors.

    ``binding``: the client's number of the model, with which it goes.
    """

    model: Model
    plan: Plan
    tensors: np.ndarray[tuple[int, int], np.dtype[np.int64]]
    binding: int


class Regions:
    """The regions of an engine's clients. What is not said to be for any thread is for the holder of the turn.

    Args:
        processor: the processor of the engine.
        places: the engine's queue.
        sessions_of: returns sessions, given their ids in the processor.
        manager: the engine's manager, for requests that Python goes on with.
    """

    def __init__(
        self,
        processor: Processor,
        places: Places,
        sessions_of: Callable[[Iterable[int]], list[SessionRecord]],
        manager: Canceller,
    ) -> None:
        self._sessions_of, self._requests, self._seats = sessions_of, processor.tables.requests, processor.tables.seats
        self._processor, self._manager = processor, weakref.ref(manager)
        t = processor.tables
        self._words, self._rows, self._table, self._tensors = t.door, t.regions, t.submissions, t.tensors
        self._queues = memoryview(t.queues).cast("B").cast("q")  # type: ignore[arg-type]
        self._width = len(t.queues.dtype.names or ())
        self._free_queues = list(range(MAX_QUEUES - 1, ENGINE, -1))
        places.show(self._queues_row(ENGINE))
        self._queue_of: weakref.WeakKeyDictionary[Model, int] = weakref.WeakKeyDictionary()
        self._clients: list[RegionClient | None] = [None] * MAX_REGIONS
        self._plans = [new_table(0, REGION_PLAN) for _ in range(MAX_REGIONS)]
        self._known: list[dict[int, _Known]] = [{} for _ in range(MAX_REGIONS)]
        """The plans of each region, by number."""
        self._num_plans = 0
        """The number of plans that were named: no number is given twice."""

    def open(self, client: RegionClient, address: int, number: int, bell: int) -> int:
        """Have turns look for requests in a client's region; return which it is, or -1 if there are too many. By one
        thread at a time.

        ``number``: the client's, for policies; ``bell``: the descriptor of an eventfd.
        """
        at = next((at for at, its in enumerate(self._clients) if its is None), -1)
        if at < 0:
            return -1
        plans = self._plans[at] = new_table(MAX_PLANS, REGION_PLAN)
        self._clients[at] = client
        row = self._rows[at : at + 1]
        row["at"], row["plans_at"], row["taken"] = address, plans.ctypes.data, 0
        row["first"], row["client"], row["bell"] = MAX_SUBMISSIONS + at * NUM_SLOTS, number, bell
        row["is_wanted"] = row["is_broken"] = row["lifted"] = 0
        self._seats["number"][at * MAX_SEATS : (at + 1) * MAX_SEATS] = 0
        self._words[NUM_REGIONS] = max(int(self._words[NUM_REGIONS]), at + 1)
        row["is_open"] = 1
        return at

    def publish(self, at: int, model: Model, plan: Plan, tensors: Sequence[tuple[int, int]], binding: int) -> int:
        """Let a client name what runs for its requests; return the number, or 0 if there are too many, or requests of
        this plan do not go by a region. By one thread at a time, under the gate.

        ``tensors``: kind and bytes of each of a request's tensors; ``binding``: see ``forget``.
        """
        queue = self._queue_of_model(model)
        if len(tensors) > MAX_TENSORS or len(self._known[at]) >= MAX_PLANS or queue < 0:
            return 0
        number = self._num_plans + 1
        row = self._plans[at][number % MAX_PLANS : number % MAX_PLANS + 1]
        while int(row["number"][0]) in self._known[at]:
            number += 1
            row = self._plans[at][number % MAX_PLANS : number % MAX_PLANS + 1]
        self._num_plans = number
        given = np.array([*tensors, *[(0, 0)] * (MAX_TENSORS - len(tensors))], np.int64)
        self._known[at][number] = _Known(model, plan, given, binding)
        row["template_at"], row["lengths_at"] = plan.template.template.address, plan.lengths_address
        row["answers_at"], row["tensors_at"] = plan.answers.address, given.ctypes.data
        row["num_tensors"], row["num_lengths"] = len(tensors), plan.template.lengths.size
        row["num_answers"] = plan.answers.count
        row["num_rows"], row["queue"], row["model"] = plan.num_nodes, queue, model.number
        row["number"] = number
        return number

    def _queue_of_model(self, model: Model) -> int:
        """Return a model's row of ``queues``; -1 if there is none left."""
        queue = self._queue_of.get(model, -1)
        if queue < 0 and self._free_queues:
            queue = self._queue_of[model] = self._free_queues.pop()
            model.places.show(self._queues_row(queue))
            weakref.finalize(model, self._free_queues.append, queue).atexit = False
        return queue

    def _queues_row(self, at: int) -> memoryview:
        return self._queues[at * self._width : (at + 1) * self._width]

    def forget(self, at: int, binding: int | None) -> None:
        """Have a client name no plans any more that were named for a binding, or none at all, after what it has handed
        in so far."""
        self.take_back(at)
        busy = {int(self._table["plan"][row]) for row in self._busy(at)}
        for number, known in list(self._known[at].items()):
            if binding in (None, known.binding):
                self._plans[at]["number"][number % MAX_PLANS] = 0
                if number not in busy:
                    del self._known[at][number]

    def close(self, at: int) -> list[RequestGroup]:
        """Look for no requests of a client any more; return those of its requests that run, with which Python must go
        on before the memory goes: then call ``let_go``."""
        self.take_back(at)
        self._rows[at : at + 1]["is_open"] = 0
        return [group for row in self._busy(at) if (group := self.group_of(row)) is not None]

    def let_go(self, at: int) -> None:
        """Give a region up of which nothing runs."""
        self._rows[at : at + 1]["at"] = 0
        self._known[at], self._clients[at] = {}, None

    def find(self, at: int, id: int) -> RequestGroup | None:
        """Return a request that was admitted, by its client's number of it; None if it is not here."""
        return next((self.group_of(row) for row in self._busy(at) if self._table["id"][row] == id), None)

    @property
    def is_closed(self) -> bool:
        """True if no client has a region."""
        return not any(self._clients)

    @property
    def is_empty(self) -> bool:
        """True if no requests are here, handed in or running."""
        count = int(self._words[NUM_REGIONS])
        if not count:
            return True
        return not self._table["is_there"][MAX_SUBMISSIONS : MAX_SUBMISSIONS + count * NUM_SLOTS].any() and not (
            self._processor.has_calls
        )

    def _busy(self, at: int) -> list[int]:
        """Return the submissions of a region that are here, and were admitted."""
        first = MAX_SUBMISSIONS + at * NUM_SLOTS
        rows = self._table[first : first + NUM_SLOTS]
        found: list[int] = (first + np.flatnonzero(rows["is_there"] & rows["num_admitted"])).tolist()
        return found

    def all(self, *, in_sessions: bool = False) -> Iterator[RequestGroup]:
        """Yield the requests that are here, of all clients; ``in_sessions``: those of sessions alone."""
        for at in range(int(self._words[NUM_REGIONS])):
            for row in self._busy(at):
                if in_sessions and not self._table["session"][row]:
                    continue
                if (group := self.group_of(row)) is not None:
                    yield group

    def group_of(self, row: int) -> RequestGroup | None:
        """Return the request of a submission that was admitted: Python is about to go on with it."""
        at = (row - MAX_SUBMISSIONS) // NUM_SLOTS
        client, its, manager = self._clients[at], self._table[row], self._manager()
        known = self._known[at].get(int(its["plan"]))
        if client is None or known is None or manager is None:
            return None
        when, ends, sessions = int(its["arrival_ns"]), client.ends_of(int(its["id"])), None
        if its["session"]:
            ids = self._requests["session"][self._requests["submission"] == row + 1]
            sessions = self._sessions_of(ids.tolist()) or None
        what = manager, known.model, known.plan, NO_INPUTS, int(its["sequence"]), 1, int(its["priority"])
        group = RequestGroup(*what, when, None, None, None, sessions, 0.0, ends, int(its["client"]))
        group.row = row
        return group

    def known_of(self, row: int, plan: int) -> tuple[Model, int] | None:
        """Return the model of a submission, and its nodes."""
        known = self._known[(row - MAX_SUBMISSIONS) // NUM_SLOTS].get(plan)
        return None if known is None else (known.model, known.plan.num_nodes)

    def give_up(self, row: int) -> None:
        """Python goes on with a request: its client is told so."""
        self._table["is_there"][row] = 0
        say_elsewhere(int(self._table["word_at"][row]))

    def take_back_all(self) -> None:
        """Return to their clients what they have handed in and no turn has admitted."""
        for at in range(int(self._words[NUM_REGIONS])):
            self.take_back(at)

    def take_back(self, at: int) -> None:
        """Return to a client what it has handed in and no turn has admitted."""
        client, region = self._clients[at], self._rows[at]
        if client is None:
            return
        for row in self._processor.take_out(at):
            its, known = self._table[row], self._known[at].get(int(self._table["plan"][row]))
            if known is not None:
                tensors = self._bytes_of(row, known.tensors)
                when = int(its["arrival_ns"]), int(its["priority"]), int(its["session"])
                client.return_request(Returned(int(its["plan"]), int(its["id"]), tensors, *when))
            self.give_up(row)
        if region["is_broken"]:
            self._rows[at : at + 1]["is_broken"] = 0
            client.note_broken()

    def _bytes_of(self, row: int, tensors: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> bytes:
        found = []
        for k, size in enumerate(tensors[:, 1].tolist()):
            found.append(string_at(int(self._tensors[row, 2 * k]), size) + bytes(-size % ALIGNMENT) if size else b"")
        return b"".join(found)
