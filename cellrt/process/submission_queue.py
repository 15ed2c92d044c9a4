"""A queue of submissions that wait for room in the engine's queue, with their clients: first come first served.

There is a queue for each model: while a submission waits for its model's own queue, those of other models go on. One
for several models waits in the queue of its first. A waiting submission keeps its models, which its client may release
meanwhile.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from cellrt.engine.places import Places, Size, check_places
from cellrt.engine.registry import Model
from cellrt.errors import CellrtError, DeadlineError, InternalError, OverloadError
from cellrt.graph.known import ONE, Alike
from cellrt.process.recorded import Template
from cellrt.process.submissions import Submission

log = logging.getLogger("cellrt")


class Submitter(Protocol):
    """The client connection that a waiting submission belongs to."""

    def hand_in(self, queued: QueuedSubmission) -> None:
        """Submit requests, all or none. Raise what ``Engine.submit`` does."""

    def refuse(self, submission: Submission, error: CellrtError) -> None:
        """Send the client the error for which its requests were not submitted."""


@dataclass(eq=False)
class QueuedSubmission:
    """A submission of a client that may wait.

    Attributes:
        connection: the connection of the client.
        submission: times, priority and ids of the requests.
        asked: its requests by graph, for each model that they were unfolded for: several, where sessions go on with one
            that was replaced.
        template: the template of the first request.
        cancelled: the ids of requests that its client has cancelled since.
        number: by arrival among those that wait.
    """

    connection: Submitter
    submission: Submission
    asked: Mapping[Model, Sequence[Alike]]
    template: Template
    cancelled: set[int] = field(default_factory=set)
    number: int = 0

    @cached_property
    def num_rows(self) -> int:
        """The rows of all nodes of its requests."""
        return sum(
            len(alike.indices) * model.plan_of(alike.recorded).num_nodes
            for model, groups in self.asked.items()
            for alike in groups
        )

    def each(self) -> Iterator[QueuedSubmission]:
        """Yield each of its requests as a submission of its own."""
        submission = self.submission
        for model, groups in self.asked.items():
            for recorded, indices in groups:
                rows_of = [(kind, len(rows) // len(indices), rows) for kind, rows in recorded.externals]
                for number, index in enumerate(indices):
                    own = [(kind, rows[number * size : (number + 1) * size]) for kind, size, rows in rows_of]
                    alone = submission._replace(
                        first_id=submission.first_id + index,
                        num_requests=1,
                        sessions=submission.sessions[index : index + 1],
                    )
                    asked = {model: [Alike(recorded._replace(externals=own), ONE)]}
                    yield QueuedSubmission(self.connection, alone, asked, self.template)

    @property
    def is_cancelled(self) -> bool:
        """True if all of its requests are cancelled."""
        return len(self.cancelled) == self.submission.num_requests


class SubmissionQueue:
    """The queues of waiting submissions. They belong to the main thread of the engine's process.

    Args:
        places: the engine's queue places.
        wake: makes the engine take a turn, which removes models without users.
    """

    def __init__(self, places: Places, wake: Callable[[], None]) -> None:
        self._places, self._wake = places, wake
        self._lines: dict[Model, deque[QueuedSubmission]] = {}
        self._next_end_s: float | None = None
        self._num_added = 0
        self._is_engine_full = False
        """True if a submission waits for room in the engine: then all others wait, too."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def until_end_s(self) -> float | None:
        """Return the seconds until the first deadline of a waiting submission; None: never."""
        return None if self._next_end_s is None else max(0.0, self._next_end_s - time.monotonic())

    def submit(self, queued: QueuedSubmission) -> None:
        """Submit a submission, or let it wait if there is no room, or others wait for it."""
        model = next(iter(queued.asked))
        if self._is_engine_full or model in self._lines or not self._try(queued):
            queued.number = self._num_added = self._num_added + 1
            for each in queued.asked:
                each.unfolding.add(queued)
            self._lines.setdefault(model, deque()).append(queued)
            self._note_end_of(queued)

    def look(self) -> None:
        """Submit those for which there is room now; refuse those whose deadline has passed."""
        count = len(self)
        if self.until_end_s() == 0.0:
            self._expire()
        self._is_engine_full = False
        firsts = [(line[0].number, model) for model, line in self._lines.items() if line]
        heapq.heapify(firsts)
        while firsts and not self._is_engine_full:
            _, model = heapq.heappop(firsts)
            line = self._lines[model]
            if line[0].is_cancelled or self._try(line[0]):
                self._let_go(line.popleft())
                if line:
                    heapq.heappush(firsts, (line[0].number, model))
        self._lines = {model: line for model, line in self._lines.items() if line}
        if len(self) < count:
            self._wake()

    def _try(self, queued: QueuedSubmission) -> bool:
        """Submit a submission; return False if there is no room for it yet."""
        count = queued.submission.num_requests
        wanted = [(self._places, Size(count, 0))]  # rows are counted when it is handed in
        for model, groups in queued.asked.items():
            wanted.append((model.places, Size(sum(len(alike.indices) for alike in groups), 0)))
        try:
            check_places(wanted)
            queued.connection.hand_in(queued)
        except OverloadError:
            try:
                self._is_engine_full = not self._places.has_room(Size(count, queued.num_rows))
            except CellrtError as error:  # it never fits in the tables
                queued.connection.refuse(queued.submission, error)
                return True
            return False
        except CellrtError as error:
            queued.connection.refuse(queued.submission, error)
        except Exception as error:  # a bug costs this submission alone
            log.exception("a submission that waited could not be handed in")
            queued.connection.refuse(queued.submission, InternalError(f"{type(error).__name__}: {error}"))
        return True

    def _let_go(self, queued: QueuedSubmission) -> None:
        """Record that a submission waits no more."""
        for model in queued.asked:
            model.unfolding.discard(queued)

    def refuse_all(self, error: CellrtError) -> None:
        """Refuse all waiting submissions, at the end of the engine."""
        lines, self._lines = self._lines, {}
        for line in lines.values():
            for queued in line:
                queued.connection.refuse(queued.submission, error)

    def _expire(self) -> None:
        now_s, self._next_end_s = time.monotonic(), None
        error = DeadlineError("the deadline passed while the request waited for a place in the queue")
        for model, line in self._lines.items():
            left = deque[QueuedSubmission]()
            for queued in line:
                end_s = queued.submission.end_s
                is_late = end_s is not None and end_s <= now_s
                if is_late and not queued.is_cancelled:
                    queued.connection.refuse(queued.submission, error)
                if is_late or queued.is_cancelled:
                    self._let_go(queued)
                else:
                    left.append(queued)
                    self._note_end_of(queued)
            self._lines[model] = left

    def _note_end_of(self, queued: QueuedSubmission) -> None:
        end_s = queued.submission.end_s
        if end_s is not None:
            self._next_end_s = end_s if self._next_end_s is None else min(self._next_end_s, end_s)
