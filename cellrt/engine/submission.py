"""Submission: a client's request is unfolded in the client's thread, gets its places in the queues and is handed in."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

from cellrt.core.state.tables import NUM_PRIORITIES
from cellrt.engine.due import ANY_TIME, Due
from cellrt.engine.future import RequestFuture
from cellrt.engine.futures import Ends, Futures, Outcomes
from cellrt.engine.interrupts import interruptible
from cellrt.engine.manager import Manager
from cellrt.engine.option_checks import USUAL_PRIORITY, HandIn, not_plain
from cellrt.engine.places import Places, Size, check_places
from cellrt.engine.registry import Model, Planned
from cellrt.engine.request_group import RequestGroup, SessionRecord, alone, together
from cellrt.engine.stream import Channel
from cellrt.errors import (
    DeadlineError,
    EngineClosedError,
    OverloadError,
    RequestError,
    SessionError,
    UnknownModelError,
)
from cellrt.graph.known import Alike, record_at
from cellrt.graph.unfolder import Unfolder
from cellrt.numbers import as_integer

Asked: TypeAlias = tuple[Model, Sequence[Planned]]
"""Requests of a model, by their graphs."""


class Submission:
    """The way in, for any thread.

    Args:
        manager: takes requests in; its workers were started.
        models: those that take requests, by name; changed under the gate.
        admit_by: in which order requests are admitted (``core/scheduling/policy.py``).
    """

    def __init__(self, manager: Manager, models: Mapping[str, Model], admit_by: str) -> None:
        self._manager, self._models, self._admit_by = manager, models, admit_by
        self._fast_path = manager.fast_path if self.is_by_arrival else None
        self.hand_in: HandIn = not_plain if self._fast_path is None else self._fast_path.hand_in
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Lock]] = WeakKeyDictionary()
        """The lock of each loop and model: its holder waits for places, the others for it."""

    @property
    def is_by_arrival(self) -> bool:
        """True if requests are admitted in the order in which they come."""
        return self._admit_by == "arrival"

    def model(self, name: object) -> Model:
        """Return the model of that name. Raise UnknownModelError."""
        if not isinstance(name, str):
            given = f"{name!r}; its name is {name.name!r}" if isinstance(name, Unfolder) else type(name).__name__
            raise UnknownModelError(f"expected the name of a registered model, got {given}")
        model = self._models.get(name)
        if model is None:
            raise UnknownModelError(f"model {name!r} is not registered; registered are {sorted(self._models)}")
        return model

    @interruptible
    def submit(
        self,
        name: str,
        requests: Sequence[Any],
        due: Due,
        priority: int,
        wait: bool,
        channel: Channel | None = None,
    ) -> Sequence[RequestFuture]:
        """Submit requests of a model, all or none: see ``Engine.submit``."""
        while True:
            model, token = self.model(name), object()
            try:
                model.unfolding.add(token)
                if self._models.get(name) is model:  # with the item there: its cells stay while this unfolds
                    asked = [(model, model.plans(requests))]
                    if len(requests) == 1 and due is ANY_TIME and priority is USUAL_PRIORITY and channel is None:
                        future = self._hand_in_fast(model, requests[0], asked[0][1][0], wait)
                        if future is not None:
                            return [future]
                    with self._manager.turns.gate:
                        if wait:
                            due = self._wait_for_room(asked, due)
                        if self._models.get(name) is model:
                            return self._enqueue(asked, due, priority, channel, None)
            except OverloadError:
                if not self._manager.catch_up():
                    raise
            finally:
                self._note_unfolded(model, token)
            # Another has taken its place, or it was unregistered: plans name the cells of the one they were made for.

    def _hand_in_fast(self, model: Model, request: Any, planned: Planned, wait: bool) -> RequestFuture | None:
        """Hand in a plain request that was unfolded by the fast path, and have it know the next by its key; return None
        if it cannot."""
        path = self._fast_path
        if path is None:
            return None
        path.prepare(model, request, planned.plan)
        return path.hand_in_unfolded(model, planned.plan, planned.alike.recorded.externals, wait)

    async def submit_when_room(
        self,
        name: str,
        requests: Sequence[Any],
        due: Due,
        priority: int,
        session: SessionRecord | None = None,
    ) -> Sequence[RequestFuture]:
        """Do as ``submit`` with ``wait``, for a coroutine: others of its loop go on meanwhile.

        With a session, submit its one request.
        """
        begin_s, first_s = time.monotonic(), due.first_s
        loop, may_have_room = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(may_have_room.set)

        # One of each loop and model looks for places, the others queue here: a turn wakes few, however many wait.
        queue = self._queues.setdefault(loop, {}).setdefault(name, asyncio.Lock())
        try:
            async with asyncio.timeout(first_s), queue:
                with self._manager.room.watched(wake):
                    while True:
                        may_have_room.clear()
                        with suppress(OverloadError):
                            model = self.model(name) if session is None else session.model
                            self._check_room(model, Size(len(requests), 0))  # rows are known once it is unfolded
                            left = due.after(time.monotonic() - begin_s)
                            if session is None:
                                return self.submit(name, requests, left, priority, False)
                            return self.submit_in([session], requests, left, priority, False)
                        self._manager.refuse_in_callback()
                        await may_have_room.wait()
        except TimeoutError:
            raise DeadlineError("the deadline passed while the request waited for a place in the queue") from None

    def _check_room(self, model: Model, size: Size) -> None:
        """Raise as ``submit`` does if there is no place for this many; nothing is unfolded for it."""
        with self._manager.turns.gate:
            self.refuse_if_closed()
            check_places([(self._manager.places, size), (model.places, size)])

    @interruptible
    def submit_in(
        self,
        sessions: Sequence[SessionRecord],
        requests: Sequence[Any],
        due: Due,
        priority: int,
        wait: bool,
        channel: Channel | None = None,
    ) -> Sequence[RequestFuture]:
        """Submit a request of each session, all or none: see ``Session.submit``. None may be there twice."""
        models, token = {session.model for session in sessions}, object()
        try:
            for model in models:
                model.unfolding.add(token)
            _check_sessions(sessions)  # with the items there: one that is open has its model, whose cells stay
            asked = _planned_in(sessions, requests)
            while True:
                try:
                    with self._manager.turns.gate:
                        if wait:
                            due = self._wait_for_room(asked, due)
                        return self._enqueue(asked, due, priority, channel, sessions)
                except OverloadError:
                    if not self._manager.catch_up():
                        raise
        finally:
            for model in models:
                self._note_unfolded(model, token)

    def _note_unfolded(self, model: Model, token: object) -> None:
        """Note that a client unfolds for a model no more; if that was all that kept the model, a turn gives it up."""
        model.unfolding.discard(token)
        if self._models.get(model.name) is not model:
            self._manager.turns.wake()

    def submit_recorded(
        self,
        asked: Mapping[Model, Sequence[Alike]],
        now_ns: int,
        due: Due,
        priority: int,
        channel: Channel | None,
        sessions: Sequence[SessionRecord] | None,
        ends: Sequence[Callable[[RequestGroup], Ends]],
        client: int,
    ) -> None:
        """Submit what was recorded elsewhere for models, all or none, as if at ``now_ns`` of the engine's clock.

        ``ends``: of each graph of ``asked`` the function that makes the receiver of its requests' ends. ``client``: a
        number for policies. The models may be taken out or replaced since, but must be pinned.

        Raise as ``submit`` does.
        """
        _check_sessions(sessions or ())
        planned: list[Asked] = []
        for model, groups in asked.items():
            parts = [Planned(model.plan_of(alike.recorded), alike) for alike in groups]
            if sessions is not None:
                _check_states(parts, sessions)
            planned.append((model, parts))
        while True:
            try:
                with self._manager.turns.gate:
                    self._enqueue(planned, due, priority, channel, sessions, now_ns, ends, client)
                    return
            except OverloadError:
                if not self._manager.catch_up():
                    raise

    def refuse_if_closed(self) -> None:
        """Raise EngineClosedError unless the engine takes requests; under the gate."""
        stopped = self._manager.turns.stopped
        if stopped is not None:
            raise EngineClosedError(str(stopped))
        if self._manager.is_closing:
            raise EngineClosedError("the engine is closed")
        if not self._manager.has_workers:
            raise EngineClosedError("the engine has no worker left")

    def _wait_for_room(self, asked: Sequence[Asked], due: Due) -> Due:
        """Wait for places in the queue, as long as the requests may; return the time that is left. Under the gate."""
        manager, wanted = self._manager, self._places_for(asked)
        if manager.room.must_wait(wanted):
            if manager.turns.is_held_here and all(places.has_room(size) for places, size in wanted):
                return due  # a callback, which cannot wait for those before it
            manager.refuse_in_callback()
            begin_s, first_s = time.monotonic(), due.first_s
            end_s = None if first_s is None else begin_s + first_s
            manager.room.wait(wanted, end_s, lambda: manager.is_over)
            return due.after(time.monotonic() - begin_s)
        return due

    def _places_for(self, asked: Sequence[Asked]) -> list[tuple[Places, Size]]:
        """Return the places that requests need in each queue: the engine's and their models'."""
        if len(asked) == 1:  # as most are
            model, parts = asked[0]
            size = size_of(parts)
            return [(self._manager.places, size), (model.places, size)]
        by_model = [(model.places, size_of(parts)) for model, parts in asked]
        sizes = [size for _, size in by_model]
        whole = Size(sum(size.requests for size in sizes), sum(size.rows for size in sizes))
        return [(self._manager.places, whole), *by_model]

    def _enqueue(
        self,
        asked: Sequence[Asked],
        due: Due,
        priority: int,
        channel: Channel | None,
        sessions: Sequence[SessionRecord] | None,
        now_ns: int | None = None,
        ends: Sequence[Callable[[RequestGroup], Ends]] | None = None,
        client: int = 0,
    ) -> Sequence[RequestFuture]:
        """Hand in requests, all or none, whatever interrupts it, under the gate: they count from ``hand_in`` on."""
        priority = check_priority(priority)
        now_ns, manager = time.perf_counter_ns() if now_ns is None else now_ns, self._manager
        due_ns = due.at(now_ns)
        self.refuse_if_closed()
        wanted = self._places_for(asked)
        check_places(wanted)
        groups: list[RequestGroup] = []
        usual: Callable[[RequestGroup], RequestFuture | Ends] = alone if wanted[0][1].requests == 1 else together
        for model, parts in asked:
            for plan, ((_, inputs, *_), members) in parts:
                count = len(members)
                sequence = manager.take_sequences(count)
                order = self._order_of(plan.num_nodes, due_ns)
                its = None if sessions is None else [sessions[index] for index in members]
                what = manager, model, plan, inputs, sequence, count, priority
                told = usual if ends is None else ends[len(groups)]
                groups.append(RequestGroup(*what, now_ns, *due_ns, channel, its, order, told, client))
        futures = _in_order(groups, asked) if ends is None else ()
        if groups:
            manager.hand_in(groups, wanted)
        return futures

    def _order_of(self, num_nodes: int, due_ns: tuple[int | None, int | None]) -> float:
        """Return the place of a request among those that wait for room: in ascending order of this, then by arrival."""
        if self._admit_by == "arrival":
            return 0.0
        if self._admit_by == "length":
            return float(num_nodes)
        return min([math.inf, *[time_ns for time_ns in due_ns if time_ns is not None]])


def size_of(parts: Sequence[Planned]) -> Size:
    """Return the numbers of requests and rows."""
    if len(parts) == 1:  # as most are
        ((plan, (_, indices)),) = parts
        return Size(len(indices), len(indices) * plan.num_nodes)
    counts = [(len(part.alike.indices), part.plan.num_nodes) for part in parts]
    return Size(sum(count for count, _ in counts), sum(count * rows for count, rows in counts))


def _in_order(groups: Sequence[RequestGroup], asked: Sequence[Asked]) -> Sequence[RequestFuture]:
    """Return the futures of requests in the order in which they were given."""
    outcomes = [group.outcome for group in groups]
    if len(outcomes) == 1:
        (only,) = outcomes
        if isinstance(only, RequestFuture):
            return (only,)
        if isinstance(only, Outcomes):
            return Futures(only.future, groups[0].count, [(only, range(groups[0].count))])
    of_groups = [part.alike.indices for _, parts in asked for part in parts]
    known = [(its, indices) for its, indices in zip(outcomes, of_groups) if isinstance(its, Outcomes)]
    where = {index: (outcomes, number) for outcomes, indices in known for number, index in enumerate(indices)}

    def future_of(index: int) -> RequestFuture:
        outcomes, number = where[index]
        return outcomes.future(number)

    return Futures(future_of, len(where), known)


def _planned_in(sessions: Sequence[SessionRecord], requests: Sequence[Any]) -> list[Asked]:
    """Unfold a request of each session, for the model that it was opened with: another may have taken its place."""
    indices_of: dict[Model, list[int]] = {}
    for index, session in enumerate(sessions):
        indices_of.setdefault(session.model, []).append(index)
    asked: list[Asked] = []
    for model, indices in indices_of.items():
        parts = [
            Planned(plan, alike._replace(indices=[indices[index] for index in alike.indices]))
            for plan, alike in record_at(model.plans, requests, indices)
        ]
        _check_states(parts, sessions)
        asked.append((model, parts))
    return asked


def _check_sessions(sessions: Sequence[SessionRecord]) -> None:
    """Raise SessionError if one has ended, RequestError if one is there twice."""
    for session in sessions:
        if session.error is not None:
            raise SessionError(str(session.error))
    if len(sessions) > 1 and len(set(map(id, sessions))) < len(sessions):
        first: dict[SessionRecord, int] = {}
        for index, session in enumerate(sessions):
            if (before := first.setdefault(session, index)) != index:
                raise RequestError(
                    f"sessions: {session} is there twice, at indices {before} and {index}; its second request must be "
                    "submitted after its first"
                )


def _check_states(parts: Sequence[Planned], sessions: Sequence[SessionRecord]) -> None:
    """Raise RequestError unless requests keep what their sessions do."""
    for plan, (_, indices) in parts:
        session = sessions[indices[0]]
        if plan.states != session.states:
            kept, wanted = ([layout.name for layout in states] for states in (plan.states, session.states))
            raise RequestError(f"{session}: expected a request that keeps {wanted}, got one that keeps {kept}")


def check_priority(given: object) -> int:
    """Return a request's priority. Raise RequestError for anything else."""
    priority = as_integer(given)
    if priority is None or not 0 <= priority < NUM_PRIORITIES:
        raise RequestError(f"priority: expected 0 to {NUM_PRIORITIES - 1}, got {given!r}")
    return priority
