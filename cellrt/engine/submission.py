"""Submission: a client's request is unfolded in the client's thread, gets its places in the queues and is handed in."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakKeyDictionary

from cellrt.core.policy import BatchMakerPolicy, Job, lane_of
from cellrt.core.tables import NUM_PRIORITIES
from cellrt.engine.future import RequestFuture
from cellrt.engine.manager import Manager
from cellrt.engine.records import LiveRequest, SessionRecord
from cellrt.engine.registry import Model, Plan
from cellrt.engine.stream import Channel
from cellrt.errors import (
    DeadlineError,
    EngineClosedError,
    OverloadError,
    RequestError,
    SessionError,
    UnknownModelError,
)
from cellrt.graph.graph import Recorded
from cellrt.graph.unfolder import Unfolder

LONGEST_S = 1e9
TINY_S = 1e-6


class Submission:
    """The way in, for any thread.

    Args:
        manager: takes requests in.
        models: those that take requests, by name; changed under the gate.
        policy: says in which order requests are admitted.
    """

    def __init__(self, manager: Manager, models: Mapping[str, Model], policy: BatchMakerPolicy) -> None:
        self._manager, self._models, self._policy = manager, models, policy
        self._sequence = itertools.count(1)
        self._queues: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[str, asyncio.Lock]] = WeakKeyDictionary()
        """Of each loop: who waits for places of a model."""

    def model(self, name: object) -> Model:
        """The model of that name. Raises UnknownModelError."""
        if not isinstance(name, str):
            given = f"{name!r}; its name is {name.name!r}" if isinstance(name, Unfolder) else type(name).__name__
            raise UnknownModelError(f"expected the name of a registered model, got {given}")
        model = self._models.get(name)
        if model is None:
            raise UnknownModelError(f"model {name!r} is not registered; registered are {sorted(self._models)}")
        return model

    def submit(
        self,
        name: str,
        requests: Sequence[Any],
        deadline: float | None,
        priority: int,
        wait: bool,
        channel: Channel | None = None,
    ) -> list[RequestFuture]:
        """Submits requests of a model, all or none: see ``Engine.submit``."""
        while True:
            model = self.model(name)
            plans = [model.plan(request) for request in requests]
            with self._manager.turns.gate:
                if wait:
                    self._wait_for_room(model, len(plans), deadline)
                if self._models.get(name) is model:
                    return self._enqueue(model, plans, deadline, priority, channel, None)
            # Another has taken its place, or it was unregistered: plans name the cells of the one they were made for.

    async def submit_when_room(
        self, name: str, requests: Sequence[Any], deadline: float | None, priority: int
    ) -> list[RequestFuture]:
        """As ``submit`` with ``wait``, for a coroutine: others of its loop go on meanwhile."""
        end_s = None if deadline is None else time.monotonic() + check_seconds("deadline", deadline)
        loop, may_have_room = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits there any more
                loop.call_soon_threadsafe(may_have_room.set)

        # One of each loop and model looks for places, the others queue here: a turn wakes few, however many wait.
        queue = self._queues.setdefault(loop, {}).setdefault(name, asyncio.Lock())
        try:
            async with asyncio.timeout(None if end_s is None else max(0.0, end_s - time.monotonic())), queue:
                with self._manager.room.watched(wake):
                    while True:
                        may_have_room.clear()
                        with suppress(OverloadError):
                            self._check_room(name, len(requests))
                            left_s = None if end_s is None else max(TINY_S, end_s - time.monotonic())
                            return self.submit(name, requests, left_s, priority, False)
                        await may_have_room.wait()
        except TimeoutError:
            raise DeadlineError("the deadline passed while the request waited for a place in the queue") from None

    def _check_room(self, name: str, count: int) -> None:
        """Raises as ``submit`` does if there is no place for so many; nothing is unfolded for it."""
        with self._manager.turns.gate:
            self.refuse_if_closed()
            for one in (self._manager.places, self.model(name).places):
                one.check(count)

    def submit_in(
        self,
        session: SessionRecord,
        request: Any,
        deadline: float | None,
        priority: int,
        wait: bool,
        channel: Channel | None,
    ) -> RequestFuture:
        """Submits a request of a session: see ``Session.submit``."""
        if session.error is not None:
            raise SessionError(str(session.error))
        plan = session.model.plan(request)
        _check_states(plan, session)
        with self._manager.turns.gate:
            if wait:
                self._wait_for_room(session.model, 1, deadline)
            return self._enqueue(session.model, [plan], deadline, priority, channel, session)[0]

    def submit_recorded(
        self,
        model: Model,
        recorded: Sequence[Recorded],
        now_ns: int,
        deadline: float | None,
        priority: int,
        channel: Channel | None,
        session: SessionRecord | None,
    ) -> list[RequestFuture]:
        """Submits what was recorded elsewhere for this model, all or none, as if at ``now_ns`` of the engine's clock.

        The model may have been taken out or replaced since, but must be pinned. Raises as ``submit`` does.
        """
        if session is not None and session.error is not None:
            raise SessionError(str(session.error))
        plans = [model.plan_of(one) for one in recorded]
        if session is not None:
            for plan in plans:
                _check_states(plan, session)
        with self._manager.turns.gate:
            return self._enqueue(model, plans, deadline, priority, channel, session, now_ns)

    def refuse_if_closed(self) -> None:
        """Raises EngineClosedError unless the engine takes requests; under the gate."""
        stopped = self._manager.turns.stopped
        if stopped is not None:
            raise EngineClosedError(str(stopped))
        if self._manager.is_closing:
            raise EngineClosedError("the engine is closed")
        if not self._manager.has_workers:
            raise EngineClosedError("the engine has no worker left")

    def _wait_for_room(self, model: Model, count: int, deadline: float | None) -> None:
        """Waits for places in the queue, at most so many seconds; under the gate."""
        manager, places = self._manager, (self._manager.places, model.places)
        if not all(one.has_room(count) for one in places):
            manager.refuse_in_callback()
            end_s = None if deadline is None else time.monotonic() + check_seconds("deadline", deadline)
            manager.room.wait(places, count, end_s, manager.closed)

    def _enqueue(
        self,
        model: Model,
        plans: Sequence[Plan],
        deadline: float | None,
        priority: int,
        channel: Channel | None,
        session: SessionRecord | None,
        now_ns: int | None = None,
    ) -> list[RequestFuture]:
        """Hands in requests, all or none, whatever interrupts it: they count from ``hand_in`` on."""
        check_priority(priority)
        now_ns, manager = time.perf_counter_ns() if now_ns is None else now_ns, self._manager
        deadline_ns = None if deadline is None else now_ns + int(1e9 * check_seconds("deadline", deadline))
        places = (manager.places, model.places)
        with manager.turns.gate:
            self.refuse_if_closed()
            for one in places:
                one.check(len(plans))
            requests: list[LiveRequest] = []
            for plan in plans:
                job = Job(next(self._sequence), plan.num_nodes, priority, deadline)
                order, lane = float(self._policy.admission_key(job)), lane_of(self._policy, job)
                future = RequestFuture(manager)
                future.number = job.sequence
                requests.append(
                    LiveRequest(future, plan, model, job, now_ns, deadline_ns, channel, order, lane, session)
                )
            if requests:
                manager.hand_in(requests, places)
        return [request.future for request in requests]


def _check_states(plan: Plan, session: SessionRecord) -> None:
    """Raises RequestError unless a request keeps what its session does."""
    if plan.states != session.states:
        kept, wanted = ([layout.name for layout in states] for states in (plan.states, session.states))
        raise RequestError(f"{session}: expected a request that keeps {wanted}, got one that keeps {kept}")


def check_priority(given: object) -> None:
    """Raises RequestError unless it is a request's priority."""
    if not isinstance(given, int) or not 0 <= given < NUM_PRIORITIES:
        raise RequestError(f"priority: expected 0 to {NUM_PRIORITIES - 1}, got {given!r}")


def check_seconds(what: str, given: object) -> float:
    """A time of a client's. Raises RequestError unless it is a number of seconds above 0."""
    with suppress(TypeError, ValueError, OverflowError):
        if not isinstance(given, bool | str) and 0 < (seconds := float(given)) <= LONGEST_S:  # type: ignore[arg-type]
            return seconds
    raise RequestError(f"{what}: expected seconds from now, more than 0 and at most {LONGEST_S:g}, got {given!r:.80}")
