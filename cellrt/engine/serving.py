"""The interface of all engines for clients: the same, whichever process the engine runs in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterable, AsyncIterator, Coroutine, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

from cellrt.definition.declaration import check_priority
from cellrt.engine.collector import Collector
from cellrt.engine.copies import NOT_PLAIN, begun, deep_copy, listed, plain_copy
from cellrt.engine.due import Due, check_seconds, due
from cellrt.engine.future import RequestFuture, Result, as_awaitable
from cellrt.engine.futures import Futures
from cellrt.engine.mapping import IN_FLIGHT, MapOptions, mapped, mapped_async
from cellrt.engine.option_checks import USUAL_PRIORITY, HandIn, check_number_or_none, check_numbers, not_plain
from cellrt.engine.stream import Channel, Stream
from cellrt.engine.submission import check_priority as check_priority_of_request
from cellrt.errors import DefinitionError, RequestError
from cellrt.numbers import as_real

CLOSE_S = 30.0


class Serving(ABC):
    """An engine that takes requests. It is safe from any thread and from asyncio.

    As a context manager it drains, unless an exception leaves the block, and closes.
    """

    _hand_in_fast: HandIn = staticmethod(not_plain)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.drain()
        finally:
            self.close()

    @abstractmethod
    def drain(self, timeout: float | None = None) -> bool:
        """Wait until every request has ended; return False after ``timeout`` seconds."""

    @abstractmethod
    def close(self, timeout: float = CLOSE_S) -> None:
        """Close the engine: requests that are not done end with EngineClosedError. It may be called twice."""

    @abstractmethod
    def _submit(
        self,
        model: str,
        requests: Sequence[Any],
        due: Due,
        priority: int,
        wait: bool,
        channel: Channel | None = None,
    ) -> Sequence[RequestFuture]:
        """Submit requests, all or none; with a channel, one request whose steps go there."""

    @abstractmethod
    def _submit_in(
        self,
        model: str,
        sessions: Sequence[Any],
        requests: Sequence[Any],
        due: Due,
        priority: int,
        wait: bool,
    ) -> Sequence[RequestFuture]:
        """Submit a request of each session, all or none. Raise RequestError if one is no session of this model."""

    @abstractmethod
    async def _submit_when_room(
        self, model: str, requests: Sequence[Any], due: Due, priority: int
    ) -> Sequence[RequestFuture]:
        """Submit requests, all or none, when there are places for them; others of the loop go on meanwhile."""

    @abstractmethod
    def _refuse_in_callback(self) -> None:
        """Raise RequestError in a future's callback, where waiting for the engine would never end."""

    def submit(
        self,
        model: str,
        request: Any,
        *,
        deadline: float | None = None,
        schedule_by: float | None = None,
        priority: int = 1,
        wait: bool = False,
    ) -> RequestFuture:
        """Submit a request; return at once with a future of its results (a dict of tensors on the CPU).

        Args:
            model: name of a registered model.
            request: what the model's unfolder takes; unfolded and checked here, in the caller's thread.
            deadline: seconds from now; the request ends with DeadlineError if it is not done by then.
            schedule_by: the same if its first task is not submitted to a worker by then; a request that has begun goes
                on.
            priority: 0 (lowest) to 3.
            wait: where the queue is full, wait for a place instead of raising OverloadError; no longer than the earlier
                of the two, then DeadlineError is raised.

        Raise UnknownModelError, RequestError, RequestTooLargeError, OverloadError, EngineClosedError.
        """
        if deadline is None and schedule_by is None and priority is USUAL_PRIORITY:
            future: RequestFuture | None = self._hand_in_fast(model, request, wait)
            if future is not None:
                return future
        return self._submit(model, [request], due(deadline, schedule_by), priority, wait)[0]

    def submit_many(
        self,
        model: str,
        requests: Iterable[Any],
        *,
        sessions: Iterable[Any] | None = None,
        deadline: float | None = None,
        schedule_by: float | None = None,
        priority: int = 1,
        wait: bool = False,
    ) -> Futures:
        """Submit several requests, all or none: raise as ``submit`` does, before any is submitted.

        Return a sequence of their futures; ``results()`` of it has the results of all, and so has awaiting it.

        Args:
            model, deadline, schedule_by, priority, wait: as of ``submit``.
            requests: what the model's unfolder takes, each. The items of a generator are copied before it goes on.
            sessions: the session of each request (see ``session``), all different: many clients' next steps at once.
        """
        _check_iterable("requests", requests, Iterable)
        together, when = listed(requests), due(deadline, schedule_by)
        if sessions is None:
            return Futures.of(self._submit(model, together, when, priority, wait))
        if not isinstance(sessions, Iterable):
            raise RequestError(f"sessions: expected one for each request, got {type(sessions).__name__}")
        self._collector.flush()
        its = list(sessions)
        if len(its) != len(together):
            raise RequestError(f"sessions: expected one for each of {len(together)} requests, got {len(its)}")
        return Futures.of(self._submit_in(model, its, together, when, priority, wait))

    def infer(
        self,
        model: str,
        request: Any,
        *,
        deadline: float | None = None,
        schedule_by: float | None = None,
        priority: int = 1,
        wait: bool = False,
    ) -> Coroutine[Any, Any, Result]:
        """Submit a request and await its results; cancelling the task cancels the request.

        Requests of a loop's coroutines between two of its rounds are unfolded and handed in together, at the end of the
        round. So the request is copied by the call, before anything is awaited. One with objects of other kinds than
        tensors, arrays, numbers, texts, lists, tuples and dicts is submitted by the call.

        ``wait``: as of ``submit``; other tasks go on meanwhile, and those that wait for one model go in their order.
        Errors are raised when it is awaited; with ``wait`` the call raises RequestError if it cannot copy the request.
        """
        if wait:
            return self._infer_when_room(model, deep_copy(request), deadline, schedule_by, priority)
        own = plain_copy(request) if type(model) is str else NOT_PLAIN  # anything but a name is reported there
        if own is NOT_PLAIN:
            how: Any = {"deadline": deadline, "schedule_by": schedule_by, "priority": priority}
            return begun(lambda: self.submit(model, request, **how))
        return self._infer(model, own, None, deadline, schedule_by, priority)

    async def _infer(
        self,
        model: str,
        request: Any,
        session: Any,
        deadline: float | None,
        schedule_by: float | None,
        priority: int,
    ) -> Result:
        """Return the results of a request, in a session or (None) in none, submitted with others of its loop."""
        priority = check_priority_of_request(priority)
        when = due(deadline, schedule_by)
        return await self._collector.infer(self._submit_collected, model, request, session, when, priority)

    async def _infer_when_room(
        self, model: str, request: Any, deadline: float | None, schedule_by: float | None, priority: int
    ) -> Result:
        when = due(deadline, schedule_by)
        return await as_awaitable((await self._submit_when_room(model, [request], when, priority))[0])

    def _submit_collected(
        self,
        model: str,
        requests: Sequence[Any],
        sessions: Sequence[Any] | None,
        due: Due,
        priority: int,
    ) -> Sequence[RequestFuture]:
        """Submit requests of coroutines together, all or none. Raise RequestError in a future's callback."""
        self._refuse_in_callback()
        if sessions is None:
            return self._submit(model, requests, due, priority, False)
        if len(sessions) == 1:  # its own model, whatever has its name by now
            how: Any = {"deadline": due.done_s, "schedule_by": due.begun_s, "priority": priority}
            return [sessions[0].submit(requests[0], **how)]
        return self._submit_in(model, sessions, requests, due, priority, False)

    @property
    def _collector(self) -> Collector:
        made: Collector | None = self.__dict__.get("_made_collector")
        return self.__dict__.setdefault("_made_collector", Collector()) if made is None else made

    def stream(
        self,
        model: str,
        request: Any,
        *,
        deadline: float | None = None,
        schedule_by: float | None = None,
        priority: int = 1,
        wait: bool = False,
        max_unread: int | None = None,
    ) -> Stream:
        """Submit a request and return its results as they are made: see ``Stream``.

        ``max_unread``: steps that may wait to be read; one more ends the request, and the stream with OverloadError.
        """
        channel = Channel(max_unread)
        when = due(deadline, schedule_by)
        return Stream(self._submit(model, [request], when, priority, wait, channel)[0], channel)

    def map(
        self,
        model: str,
        requests: Iterable[Any],
        *,
        max_in_flight: int = IN_FLIGHT,
        ordered: bool = True,
        return_errors: bool = False,
        progress: bool | str = False,
        deadline: float | None = None,
        schedule_by: float | None = None,
        priority: int = 1,
    ) -> Iterator[Any]:
        """Yield the results of any number of requests; one is taken from the iterable as a result is taken from here.

        The items of a slow iterable are submitted within a millisecond or so. Before its next item is asked for, all
        results that are there are yielded; if its next item depends on a result use ``map_async``. If the iterable
        raises, that is raised after the results of its earlier items.

        Args:
            model: name of a registered model.
            requests: what the model's unfolder takes, each.
            max_in_flight: requests at once that were submitted and whose results were not taken; where the engine's
                queue is full, places are waited for.
            ordered: results in the order of the requests; False: as they come, as pairs of the request's number and its
                result.
            return_errors: a request that fails gives its CellrtError in place of a result; else that is raised, and
                ends the map.
            progress: show a bar on standard error; a str is written before it.
            deadline, schedule_by, priority: of each request, as of ``submit``; the time counts from its submission.

        Leaving the iteration cancels what is in flight. Raise what ``submit`` raises.
        """
        _check_iterable("map", requests, Iterable)
        options, when = MapOptions(max_in_flight, ordered, return_errors, progress), due(deadline, schedule_by)
        return mapped(lambda together: self._submit(model, together, when, priority, True), requests, options)

    def map_async(
        self,
        model: str,
        requests: Iterable[Any] | AsyncIterable[Any],
        *,
        max_in_flight: int = IN_FLIGHT,
        ordered: bool = True,
        return_errors: bool = False,
        progress: bool | str = False,
        deadline: float | None = None,
        schedule_by: float | None = None,
        priority: int = 1,
    ) -> AsyncIterator[Any]:
        """Yield results as ``map`` does, for ``async for``; the requests may come asynchronously too."""
        _check_iterable("map", requests, Iterable | AsyncIterable)
        options, when = MapOptions(max_in_flight, ordered, return_errors, progress), due(deadline, schedule_by)

        async def submit(together: Sequence[Any]) -> Sequence[RequestFuture]:
            return await self._submit_when_room(model, together, when, priority)

        return mapped_async(submit, requests, options)

    def cancel(self, future: RequestFuture) -> bool:
        """Cancel a request, at any moment; return False if it has ended otherwise."""
        return future.cancel()


def _check_iterable(what: str, requests: object, kind: Any) -> None:
    if not isinstance(requests, kind):
        raise RequestError(f"{what}: expected an iterable of requests, got {type(requests).__name__}")


def check_timeout(timeout: object) -> float:
    """Return a client's time in seconds. Raise RequestError unless it is 0 or a number of seconds above."""
    return 0.0 if as_real(timeout) == 0 else check_seconds("timeout", timeout)


class Registration(NamedTuple):
    """The options of ``register`` that have numbers in them."""

    priorities: dict[str, int]
    max_queue: int | None
    max_queue_rows: int | None
    max_batch: dict[str, int]


def check_registration(
    priorities: object, warm_up: object, max_queue: object, max_queue_rows: object, max_batch: object, replace: object
) -> Registration:
    """Return the options of ``register``. Raise DefinitionError for values of other kinds."""
    for name, value in (("warm_up", warm_up), ("replace", replace)):
        if not isinstance(value, bool):
            raise DefinitionError(f"{name}: expected True or False, got {value!r:.80}")
    limits = check_number_or_none("max_queue", max_queue), check_number_or_none("max_queue_rows", max_queue_rows)
    most = {
        cell: check_numbers(**{f"max_batch of {cell!r}": rows})[0] for cell, rows in _by_cell("max_batch", max_batch)
    }
    chosen: dict[str, int] = {}
    for cell, given in _by_cell("priorities", priorities):
        priority = check_priority(cell, given)
        if priority is None:
            raise DefinitionError(f"priorities: expected an integer for {cell!r}, got None")
        chosen[cell] = priority
    return Registration(chosen, *limits, most)


def _by_cell(name: str, given: object) -> Iterable[tuple[str, object]]:
    """Return the value for each cell, by name. Raise DefinitionError if they are no such dict, nor None."""
    if given is None:
        return ()
    if isinstance(given, Mapping) and all(isinstance(cell, str) for cell in given):
        return given.items()
    raise DefinitionError(f"{name}: expected a dict by cell name, got {given!r:.80}")
