"""Submissions that wait for places in the engine's queue, as their clients do: first come first.

There is a line for each model: while one waits for its model's own queue, those of other models go on. One for several
models waits in the line of its first. Each keeps its models: its client may give them up meanwhile.
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
    """Who has submitted."""

    def hand_in(self, patient: Patient) -> None:
        """Hands in requests, all or none. Raises what ``Engine.submit`` does."""

    def refuse(self, submission: Submission, error: CellrtError) -> None:
        """Tells the client that what it submitted was not handed in."""


@dataclass(eq=False)
class Patient:
    """A submission that came.

    Attributes:
        asked: its requests by graph, for each model that they were unfolded for: several, where sessions go on with one
            that was replaced.
        template: of the first.
        cancelled: requests that its client has given up since.
        number: by arrival among those that wait.
    """

    guest: Submitter
    submission: Submission
    asked: Mapping[Model, Sequence[Alike]]
    template: Template
    cancelled: set[int] = field(default_factory=set)
    number: int = 0

    @cached_property
    def num_rows(self) -> int:
        """The rows of all nodes of its requests."""
        return sum(
            len(alike.places) * model.plan_of(alike.recorded).num_nodes
            for model, groups in self.asked.items()
            for alike in groups
        )

    def each(self) -> Iterator[Patient]:
        """Each of its requests as a submission of its own."""
        submission = self.submission
        for model, groups in self.asked.items():
            for recorded, places in groups:
                rows_of = [(kind, len(rows) // len(places), rows) for kind, rows in recorded.externals]
                for number, place in enumerate(places):
                    own = [(kind, rows[number * size : (number + 1) * size]) for kind, size, rows in rows_of]
                    alone = submission._replace(
                        first_id=submission.first_id + place,
                        num_requests=1,
                        sessions=submission.sessions[place : place + 1],
                    )
                    asked = {model: [Alike(recorded._replace(externals=own), ONE)]}
                    yield Patient(self.guest, alone, asked, self.template)

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody waits for any of it."""
        return len(self.cancelled) == self.submission.num_requests


class WaitingRoom:
    """Belongs to the doorkeeper's thread.

    Args:
        places: of the engine.
        wake: has the engine take a turn, which gives up models that nobody keeps any more.
    """

    def __init__(self, places: Places, wake: Callable[[], None]) -> None:
        self._places, self._wake = places, wake
        self._lines: dict[Model, deque[Patient]] = {}
        self._next_end_s: float | None = None
        self._num_added = 0
        self._is_engine_full = False
        """Whether somebody waits for places of the engine: then all others do, too."""

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def until_end_s(self) -> float | None:
        """Seconds until somebody has waited too long; None: never."""
        return None if self._next_end_s is None else max(0.0, self._next_end_s - time.monotonic())

    def submit(self, patient: Patient) -> None:
        """Hands a submission in, or has it wait if there are no places, or others wait for them."""
        model = next(iter(patient.asked))
        if self._is_engine_full or model in self._lines or not self._try(patient):
            patient.number = self._num_added = self._num_added + 1
            for each in patient.asked:
                each.unfolding.add(patient)
            self._lines.setdefault(model, deque()).append(patient)
            self._note_end_of(patient)

    def look(self) -> None:
        """Hands in those for whom there are places now; refuses those who have waited too long."""
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

    def _try(self, patient: Patient) -> bool:
        """Hands a submission in; False if there are no places for it yet."""
        count = patient.submission.num_requests
        wanted = [(self._places, Size(count, 0))]  # rows are counted when it is handed in
        for model, groups in patient.asked.items():
            wanted.append((model.places, Size(sum(len(alike.places) for alike in groups), 0)))
        try:
            check_places(wanted)
            patient.guest.hand_in(patient)
        except OverloadError:
            try:
                self._is_engine_full = not self._places.has_room(Size(count, patient.num_rows))
            except CellrtError as error:  # it never fits in the tables
                patient.guest.refuse(patient.submission, error)
                return True
            return False
        except CellrtError as error:
            patient.guest.refuse(patient.submission, error)
        except Exception as error:  # of this submission: everybody else is still served
            log.exception("a submission that waited could not be handed in")
            patient.guest.refuse(patient.submission, InternalError(f"{type(error).__name__}: {error}"))
        return True

    def _let_go(self, patient: Patient) -> None:
        """Takes in that a submission waits no more."""
        for model in patient.asked:
            model.unfolding.discard(patient)

    def refuse_all(self, error: CellrtError) -> None:
        """At the end of the engine: nobody gets a place any more."""
        lines, self._lines = self._lines, {}
        for line in lines.values():
            for patient in line:
                patient.guest.refuse(patient.submission, error)

    def _expire(self) -> None:
        now_s, self._next_end_s = time.monotonic(), None
        error = DeadlineError("the deadline passed while the request waited for a place in the queue")
        for model, line in self._lines.items():
            left = deque[Patient]()
            for patient in line:
                end_s = patient.submission.end_s
                is_late = end_s is not None and end_s <= now_s
                if is_late and not patient.is_cancelled:
                    patient.guest.refuse(patient.submission, error)
                if is_late or patient.is_cancelled:
                    self._let_go(patient)
                else:
                    left.append(patient)
                    self._note_end_of(patient)
            self._lines[model] = left

    def _note_end_of(self, patient: Patient) -> None:
        end_s = patient.submission.end_s
        if end_s is not None:
            self._next_end_s = end_s if self._next_end_s is None else min(self._next_end_s, end_s)
