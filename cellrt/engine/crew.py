"""The workers of an engine: which get tasks, which tasks they completed, and what is done if one dies.

It belongs to the holder of the turn.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from time import perf_counter_ns

from cellrt.core.processor import Processor
from cellrt.core.state.notices import Notices
from cellrt.core.state.tables import STUCK
from cellrt.core.state.views import note_copies, take_copies
from cellrt.worker.base import Done, Launch, Worker

MAX_DEATHS = 3
"""The number of deaths of a worker, without a completed task in between, after which it is not replaced again."""

LATE = 1.5
"""The factor by which another worker's task may be late until a worker that leaves its work to it looks again."""


class Crew:
    """The workers of one engine, by location 1, 2, ...

    Args:
        processor: forms their tasks.
        workers: the engine's workers; a replacement takes the index of the worker that died.
        queue_depth: tasks that a worker may have before the next is formed.
        copy: copies a page of a kind from one handle to another.
        evict: frees rows and pages of sessions that are idle; returns False if there are none, or none may be evicted.
        give_way: ends a request at a location that waits for pages which no session may give; returns False if there is
            none.
    """

    def __init__(
        self,
        processor: Processor,
        workers: list[Worker],
        queue_depth: int,
        copy: Callable[[int, int, int], None],
        evict: Callable[[], bool],
        give_way: Callable[[int], bool],
    ) -> None:
        self._copy, self._evict, self._give_way = copy, evict, give_way
        self._processor, self._workers, self._queue_depth = processor, workers, queue_depth
        self._make: Callable[[int], Worker] | None = None
        self._lost: set[int] = set()
        self._deaths: dict[int, int] = {}
        self._is_watched = False
        """True if a worker must be checked even if nothing happens."""
        self.is_closing = self.has_workers = False

    def start(self, make: Callable[[int], Worker], count: int) -> None:
        """Start workers at locations 1 to ``count``, made by a function that may be called again for a location."""
        self._make = make
        self._workers.extend(make(location) for location in range(1, count + 1))
        self._is_watched = any(worker.check_every_s is not None for worker in self._workers)
        self.has_workers = bool(self._workers)
        for worker in self._workers:
            worker.start()

    @property
    def rest_addresses(self) -> list[int]:
        """The addresses of the words at which workers rest (``Worker.rest_address``); none if one has no such word."""
        addresses = [worker.rest_address for worker in self._workers]
        return addresses if all(addresses) else []

    @property
    def check_every_s(self) -> float | None:
        """The seconds between checks of the workers when nothing happens; None: no checks."""
        if not self._is_watched:
            return None
        periods = [worker.check_every_s for worker in self._workers if worker.num_outstanding]
        return min((period for period in periods if period is not None), default=None)

    def poll(self) -> Iterator[tuple[int, Done]]:
        """Yield the tasks that were completed, with the location of their worker."""
        for location, worker in enumerate(self._workers, 1):
            if worker.has_finished():
                for done in worker.poll():
                    yield location, done

    def take_notices(self) -> Iterator[Notices]:
        """Yield the scheduler's notices of tasks that workers have taken in themselves."""
        for worker in self._workers:
            if (notices := worker.take_notices()) is not None:
                yield notices

    def find_dead(self) -> list[int]:
        """Return the locations whose worker has died since the last call.

        Call it before ``poll``: the tasks that they completed before can be polled then.
        """
        return [
            location
            for location, worker in enumerate(self._workers, 1)
            if not worker.is_alive() and location not in self._lost and not (self.is_closing and worker.error is None)
        ]

    def replace(self, location: int) -> tuple[BaseException | None, list[Launch] | None]:
        """Replace a dead worker if that is possible; return the error that killed it, and the tasks that it died in.

        Its successor runs the tasks that it had not begun. None instead of tasks: there is no successor.
        """
        dead = self._workers[location - 1]
        if dead.has_completed():
            self._deaths.pop(location, None)
        self._deaths[location] = self._deaths.get(location, 0) + 1
        can_return = dead.is_replaceable and not self.is_closing and self._deaths[location] <= MAX_DEATHS
        if self._make is None or not can_return:
            self._lost.add(location)
            self.has_workers = len(self._lost) < len(self._workers)
            logging.getLogger("cellrt").error("worker %d died and is lost: %r", location, dead.error)
            return dead.error, None
        logging.getLogger("cellrt").error("worker %d died and is replaced: %r", location, dead.error)
        self._workers[location - 1] = made = self._make(location)
        begun, waiting = dead.take_unfinished()
        for launch in waiting:
            made.launch(*launch)
        made.start()
        return dead.error, begun

    def launch(self, on_launch: Callable[[int], None]) -> None:
        """Give tasks to every worker that can take some, idle ones first; ``on_launch`` is called with each task."""
        for depth in range(self._queue_depth):
            for location, worker in enumerate(self._workers, 1):
                while location not in self._lost and worker.num_outstanding <= depth:
                    if not self._launch_at(location, worker, on_launch):
                        break

    @property
    def is_whole(self) -> bool:
        """True if no worker was lost."""
        return not self._lost

    def _launch_at(self, location: int, worker: Worker, on_launch: Callable[[int], None]) -> bool:
        """Form tasks for a worker and queue them; return False if nothing is ready for it."""
        idle = int(not worker.num_outstanding)
        if len(self._workers) > 1:
            idle = sum([not other.num_outstanding for k, other in enumerate(self._workers, 1) if k not in self._lost])
        tasks = self._processor.schedule(location, idle)
        if self._processor.has_pages:
            tasks = self._relieve(location, idle, tasks)
            self._copy_pages()
        if not tasks and (left_s := self._processor.left_s):
            worker.rest(LATE * left_s)
        for task in tasks:
            on_launch(task)
            worker.launch(task, self._processor.counts_of(task)[0], self._processor.task_buffer(task))
        return bool(tasks)

    def _copy_pages(self) -> None:
        """Copy the pages that move, and record how long that takes."""
        if copies := take_copies(self._processor.tables):
            begin_ns = perf_counter_ns()
            for copied in copies:
                self._copy(*copied)
            note_copies(self._processor.tables, len(copies), perf_counter_ns() - begin_ns)

    def _relieve(self, location: int, idle: int, tasks: list[int]) -> list[int]:
        """Take pages from idle sessions if work of a worker found none; return the worker's tasks.

        If nothing that has pages can go on there, take them from a request, whatever else keeps the worker busy. The
        returned tasks are those that can be formed then, if there were none.
        """
        processor = self._processor
        while starved := processor.starvation(location):
            is_stuck = starved == STUCK
            if not (self._evict() or (is_stuck and (processor.suspend(location) or self._give_way(location)))):
                break
            if tasks:  # the next look finds what is free now
                break
            tasks = processor.schedule(location, idle)
        return tasks

    def end(self) -> None:
        """Tell the workers to end, without waiting; called when nothing can be launched any more."""
        for worker in self._workers:
            worker.end()
