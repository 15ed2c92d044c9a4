"""Replies: reads what a request has made, streams its steps, and answers its client exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.core.event_log import read_events
from cellrt.core.processor import Processor
from cellrt.core.tables import HOST
from cellrt.engine.future import Result
from cellrt.engine.places import Places
from cellrt.engine.records import LiveRequest
from cellrt.engine.registry import Plan
from cellrt.engine.statistics import Statistics
from cellrt.engine.trace import Trace
from cellrt.errors import CellrtError, InternalError
from cellrt.graph.results import ResultLayout
from cellrt.worker.arenas import Arenas

STORY_LINES = 40


class Replies:
    """Belongs to the holder of the turn.

    Args:
        processor, arenas: of the engine; arenas by location, the host first.
        places: the engine's queue.
        statistics: counts every end.
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
        self._processor, self._arenas, self._places, self._statistics = processor, arenas, places, statistics
        self._clock_ns = clock_ns
        self.trace: Trace | None = None
        self._started_ns = processor.tables.requests["started_ns"]

    def read(self, request: LiveRequest, plan: Plan) -> Result:
        """The results of a request whose nodes are complete: fresh tensors."""
        rows = self._processor.results(request.results_at, plan.template.num_results)
        return {result.name: self._read_result(result, rows) for result in plan.results}

    def _read_result(self, result: ResultLayout, rows: NDArray[np.int32]) -> torch.Tensor:
        host = self._arenas[HOST]
        if len(result.positions) == 1 and result.is_single:
            return host.get_row(result.kind, int(rows[result.positions[0]]))
        wanted = _at(rows, result.positions)
        if result.is_loop:
            wanted = wanted[wanted >= 0]
        return host.get_row(result.kind, int(wanted[-1])) if result.is_single else host.get(result.kind, wanted)

    def stream(self, request: LiveRequest, plan: Plan) -> None:
        """Sends the steps that are complete in all results that have steps."""
        if request.channel is None or request.is_answered:
            return
        host = self._arenas[HOST]
        rows = self._processor.ready_results(request.results_at, plan.template.num_results)
        stepped = [(result, _at(rows, result.positions)) for result in plan.results if not result.is_single]
        ready = min((_num_leading(wanted) for _, wanted in stepped), default=0)
        for step in range(request.num_streamed, ready):
            request.channel.put({r.name: host.get(r.kind, wanted[step : step + 1])[0] for r, wanted in stepped})
            request.num_streamed = step + 1

    def answer(self, request: LiveRequest, outcome: Result | CellrtError) -> None:
        """Gives the request's places back, then tells the client and runs its callbacks."""
        now_ns = self._clock_ns()
        if request.channel is not None and not isinstance(outcome, CellrtError):
            self._stream_rest(request, outcome)
        self._give_places(request)
        started_ns = int(self._started_ns[request.id]) if request.id >= 0 else 0
        error = outcome if isinstance(outcome, CellrtError) else None
        self._statistics.count_end(request.model.name, error, request.arrival_ns, started_ns, now_ns)
        if self.trace is not None:
            self.trace.end(request, now_ns)
        request.future.finish(outcome)

    def _stream_rest(self, request: LiveRequest, results: Result) -> None:
        """Sends the steps that longer results have beyond the shortest, then together the results that have none."""
        if request.channel is None or request.plan is None:
            return
        stepped = {result.name: results[result.name] for result in request.plan.results if not result.is_single}
        for step in range(request.num_streamed, max(map(len, stepped.values()), default=0)):
            request.channel.put({name: value[step] for name, value in stepped.items() if step < len(value)})
        single = {result.name: results[result.name] for result in request.plan.results if result.is_single}
        if single:
            request.channel.put(single)

    def _give_places(self, request: LiveRequest) -> None:
        self._places.give_back()
        request.model.places.give_back()

    def internal_error(self, what: str, request: LiveRequest | None = None) -> InternalError:
        """An error of ours with the last events of a request, or of all."""
        sequence = None if request is None else request.job.sequence
        events = read_events(self._processor.tables, sequence=sequence)[-STORY_LINES:]
        story = "\n".join(f"  {event}" for event in events)
        return InternalError(f"{what}; what happened before:\n{story}" if story else what)


def _at(rows: NDArray[np.int32], positions: Sequence[int]) -> NDArray[np.int32]:
    """Result rows at these positions."""
    if isinstance(positions, range):
        return rows[positions.start : positions.stop]
    return rows[list(positions)]


def _num_leading(rows: NDArray[np.int32]) -> int:
    """How many results are there before the first that is not."""
    missing = np.flatnonzero(rows < 0)
    return int(missing[0]) if missing.size else len(rows)
