"""Read the results of requests, stream their steps, and answer each client exactly once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from cellrt.core.processor import Processor
from cellrt.core.state.event_log import read_events
from cellrt.core.state.tables import HOST
from cellrt.engine.door import Told
from cellrt.engine.future import PackedResults, RequestFuture, Result
from cellrt.engine.futures import Ends, finish_all
from cellrt.engine.mailbox import WakingAtTheEnd
from cellrt.engine.places import Places, Size
from cellrt.engine.registry import Model
from cellrt.engine.request_group import RequestGroup
from cellrt.engine.statistics import Statistics
from cellrt.engine.stream import Channel
from cellrt.engine.together import Together
from cellrt.engine.trace import Trace
from cellrt.errors import CellrtError, InternalError
from cellrt.worker.arenas import Arenas

STORY_LINES = 40


class _Made:
    """One item of a stream."""

    def __init__(self, item: Result) -> None:
        self._item = item

    def of(self, number: int) -> Result:
        """Return the item."""
        return self._item

    def of_many(self, numbers: Sequence[int]) -> list[Result]:
        """Return the item once for each number."""
        return [self._item for _ in numbers]

    def stacked(self, count: int) -> None:
        """Return None: an item is not results of several requests."""


class Replies:
    """Answers clients; called by the holder of the turn.

    Args:
        processor: the engine's processor.
        arenas: the engine's arenas by location, the host first.
        places: the count of unfinished requests, and its limit, for the whole engine.
        statistics: the engine's statistics, which count every end.
        clock_ns: the engine's clock.
    """

    def __init__(
        self,
        processor: Processor,
        arenas: list[Arenas],
        places: Places,
        statistics: Statistics,
        clock_ns: Callable[[], int],
    ) -> None:
        self._processor, self._arenas, self.places, self._statistics = processor, arenas, places, statistics
        self._clock_ns = clock_ns
        self.trace: Trace | None = None
        self._ended: list[tuple[RequestFuture | Ends, Sequence[int], PackedResults, int]] = []
        """The requests of whose results ``tell`` notifies the clients."""
        self._stepped: dict[RequestGroup, None] = {}
        """The requests whose new steps ``tell`` sends to the clients, in order."""

    def read(self, alike: Sequence[tuple[RequestGroup, Sequence[int]]], requests: NDArray[np.int32]) -> Together:
        """Return the results of complete requests whose plans answer together, given their ids in the processor."""
        host, first = self._arenas[HOST], alike[0][0].plan.readers
        if len(alike) == 1 or all([group.plan.readers is first for group, _ in alike]):
            return Together([reader.read(self._processor, host, requests) for reader in first])
        each = zip(*(group.plan.readers for group, numbers in alike for _ in numbers))
        return Together([its[0].read(self._processor, host, requests, its) for its in each])

    def note_steps(self, request: RequestGroup) -> None:
        """Note that a streamed request has new complete steps, which ``tell`` sends."""
        self._stepped[request] = None

    def stream(self) -> None:
        """Send the steps of streamed requests that are complete in every result that has steps."""
        alike: dict[int, list[RequestGroup]] = {}
        for request in self._stepped:
            if not request.is_answered(0):
                alike.setdefault(id(request.plan.answered_with), []).append(request)
        self.forget_steps()
        for requests in alike.values():
            rows, channels = self._steps_of(requests)
            if channels:
                readers = requests[0].plan.stepped
                host = self._arenas[HOST]
                steps = Together([one.read_rows(host, its) for one, its in zip(readers, rows)])
                for number, channel in enumerate(channels):
                    channel.put(steps, number)
                for channel in dict.fromkeys(channels):
                    channel.wake()

    def forget_steps(self) -> None:
        """Forget the steps that were noted, and do not send them."""
        self._stepped.clear()

    def _steps_of(self, requests: Sequence[RequestGroup]) -> tuple[NDArray[np.int32], list[Channel]]:
        """Return the host rows ``[results, steps]`` of complete steps that were not sent, and each step's channel."""
        rows: list[list[int]] = []
        channels: list[Channel] = []
        for request in requests:
            channel, places = request.channel, self._processor.tables.places
            positions = [reader.positions for reader in request.plan.stepped]
            for step in range(request.num_streamed, min(map(len, positions), default=0)):
                its = [places.item(request.results_at + one[step]) for one in positions]
                if channel is None or min(its) < 0:  # not complete
                    break
                rows.append(its)
                channels.append(channel)
                request.num_streamed = step + 1
        return np.ascontiguousarray(np.array(rows, np.int32).T), channels

    def answer(
        self, requests: Sequence[tuple[RequestGroup, Sequence[int]]], started_ns: NDArray[np.int64], results: Together
    ) -> None:
        """Count complete requests of one model as finished; ``tell`` notifies their clients.

        ``started_ns`` has the time at which the first task of each request was launched.
        """
        now_ns, first = self._clock_ns(), requests[0][0]
        size = Size(started_ns.size, sum([group.num_rows(len(numbers)) for group, numbers in requests]))
        if first.channel is not None:
            self._stream_rest(first, results.of(0, is_copy=True))
        self.places.give_back(size)
        first.model.places.give_back(size)
        if self.trace is not None:
            for group, numbers in requests:
                for number in numbers:
                    self.trace.end(group, number, now_ns)
        arrivals_ns = [(group.arrival_ns, len(numbers)) for group, numbers in requests]
        self._statistics.count_done(first.model.name, arrivals_ns, started_ns, now_ns)
        first_number = 0
        for group, numbers in requests:
            self._ended.append((group.outcome, numbers, results, first_number))
            first_number += len(numbers)

    def answer_by_door(self, told: Mapping[Model, Told]) -> None:
        """Count requests that compiled code has answered as finished; ``tell`` notifies their clients."""
        for its in told.values():  # first, so that clients are notified even if the rest fails
            self._ended += its.ended
        for model, (_, counted, come, _, arrays) in told.items():
            every = np.concatenate((arrays, np.array(counted + come, np.int64).reshape(-1, 4)))
            num_here, rows = len(arrays) + len(counted), every[:, 3]
            here, elsewhere = (Size(len(its), int(its.sum())) for its in (rows[:num_here], rows[num_here:]))
            for places in (self.places, model.places):
                places.note_passed(here)
                places.give_back(elsewhere)
            arrivals_ns = np.column_stack((every[:, 0], np.ones_like(rows)))
            self._statistics.count_done(model.name, arrivals_ns, every[:, 1], every[:, 2])

    def tell(self) -> None:
        """Send steps to clients that stream, notify clients whose requests were answered, and run their callbacks.

        It is called at the end of a turn, as a client that woke before could only wait for the interpreter lock. When
        all requests are answered it is called at once, as there is nothing left to launch.
        """
        if self._stepped or self._ended:
            with WakingAtTheEnd():
                if self._stepped:
                    self.stream()
                while self._ended:  # callbacks may add to them
                    ended, self._ended = self._ended, []
                    finish_all(ended)

    def refuse(self, group: RequestGroup, number: int, error: CellrtError) -> None:
        """Count a request as finished, give its client an error, and run its callbacks."""
        size = Size(1, group.plan.num_nodes)
        self.places.give_back(size)
        group.model.places.give_back(size)
        self._statistics.count_error(group.model.name, error)
        if self.trace is not None:
            self.trace.end(group, number, self._clock_ns())
        if isinstance(group.outcome, RequestFuture):
            group.outcome.finish(error)
        else:
            group.outcome.fail(number, error)

    def _stream_rest(self, request: RequestGroup, results: Result) -> None:
        """Send the steps that longer results have beyond the shortest one; then the results without steps, together."""
        if request.channel is None:
            return
        layouts = request.plan.results
        stepped = {result.name: results[result.name] for result in layouts if not result.is_single}
        for step in range(request.num_streamed, max(map(len, stepped.values()), default=0)):
            item = {name: value[step].clone() for name, value in stepped.items() if step < len(value)}
            request.channel.put(_Made(item), 0)
        single = {result.name: results[result.name] for result in layouts if result.is_single}
        if single:
            request.channel.put(_Made(single), 0)

    def internal_error(self, what: str, sequence: int | None = None) -> InternalError:
        """Return an InternalError with the last events of a request (its sequence number is given), or of all."""
        events = read_events(self._processor.tables, sequence=sequence)[-STORY_LINES:]
        story = "\n".join(f"  {event}" for event in events)
        return InternalError(f"{what}; what happened before:\n{story}" if story else what)
