"""The submissions of clients of this process that join and leave without Python (``core/requests/join_leave.py``)."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from ctypes import addressof, c_char
from struct import Struct
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellrt.core.processor import Processor
from cellrt.core.state.tables import (
    ANSWERS,
    LATE_AT,
    MAX_SUBMISSIONS,
    MAX_TENSORS,
    NEVER,
    SEQUENCE,
    SUBMISSION,
    SUBMITTED,
    TAKEN,
    TOLD,
    WATCHED,
)
from cellrt.engine.future import RequestFuture
from cellrt.engine.futures import Ends, Outcomes
from cellrt.engine.leases import Leases
from cellrt.engine.regions import Regions
from cellrt.engine.registry import Model
from cellrt.engine.request_group import RequestGroup
from cellrt.engine.together import SMALL_BYTES
from cellrt.native.answer_word import AT_THE_END, OPEN
from cellrt.native.atomics import added, stored
from cellrt.native.row_types import CACHE_LINE

ALONE = range(1)
_ROW, _TENSOR = Struct("10qd8i3q"), Struct("2q")
WORD_BYTES = CACHE_LINE
"""In front of results: see ``native/answer_word.py``."""


Counted: TypeAlias = tuple[int, int, int, int]
"""The times at which a request arrived, began and ended, and its rows."""
NONE_COUNTED: NDArray[np.int64] = np.zeros((0, 4), np.int64)


class Told(NamedTuple):
    """Requests of a model that have their results.

    Attributes:
        ended: of those that were submitted together the receiver of their ends, their numbers, and the group and number
            of the first in it.
        counted, come: of each that came from this process, and of each that came from another.
        sessions: of those from other processes, by their ids in the processor.
        arrays: ``[requests, 4]`` of further ones from this process.
    """

    ended: list[tuple[RequestFuture | Ends, Sequence[int], RequestGroup, int]]
    counted: list[Counted]
    come: list[Counted]
    sessions: list[int]
    arrays: NDArray[np.int64] = NONE_COUNTED


class Taken(NamedTuple):
    """Answers that C has taken out.

    Attributes:
        counted: ``[requests, 4]`` by model: when each arrived, began and ended, and its rows.
        together: of groups of several the numbers of the requests.
        others: where in the ring the others are, which it did not take out.
    """

    counted: dict[Model, NDArray[np.int64]]
    together: dict[RequestGroup, NDArray[np.int32]]
    others: list[int]


class Teller(Protocol):
    """The fast path, as the door knows it."""

    def tell(self, answered: NDArray[Any], first: int, end: int) -> Taken:
        """Take out answers, and end the futures of those that are plain."""


class _Memory:
    """Memory for results: small ones lie together, as to find out where memory begins takes as long as much else."""

    def __init__(self) -> None:
        self._shared, self._address, self._end = memoryview(b""), 0, 0

    def take(self, size: int) -> tuple[memoryview, int]:
        """Return so many bytes, and where they begin."""
        if size > SMALL_BYTES:
            own = bytearray(size)
            return memoryview(own), addressof(c_char.from_buffer(own))
        begin = self._end
        if begin + size > len(self._shared):
            made = bytearray(2 * SMALL_BYTES)
            self._shared, self._address, begin = memoryview(made), addressof(c_char.from_buffer(made)), 0
        self._end = begin + (size + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE
        return self._shared[begin : begin + size], self._address + begin


class Door:
    """The submissions that compiled code admits and answers.

    Clients hand in under the gate; whatever else is here belongs to the holder of the turn.

    Attributes:
        regions: those of clients in other processes.
    """

    def __init__(self, processor: Processor, leases: Leases, regions: Regions) -> None:
        t, self._leases, self.regions = processor.tables, leases, regions
        self._words, self._table, self._submitted = t.door, t.submissions, t.submitted
        self._answered, self._requests = t.answered, t.requests["submission"]
        self._numbers = t.requests["number"]
        self._rows, self._tensors = _bytes_of(t.submissions), _bytes_of(t.tensors)
        self._tensors_at = t.tensors.ctypes.data
        self._groups: list[RequestGroup | None] = [None] * MAX_SUBMISSIONS
        self._free, self._memory = deque(range(MAX_SUBMISSIONS)), _Memory()
        self._told_to = 0
        self.due: deque[RequestGroup] = deque()
        """The groups with deadlines that no turn in Python has seen."""
        self.fast_path: Teller | None = None
        """The fast path of clients, which ends plain futures, too."""
        self.is_shut = False
        """True if everything is handed in to Python: in an engine that keeps a timeline, and within ``hand_in``."""

    @property
    def has_answers(self) -> bool:
        """True if there are answers that clients were not told of."""
        return bool(self._words.item(TOLD) < self._words.item(ANSWERS))

    @property
    def memory(self) -> dict[str, Any]:
        """The memory that a client writes to, for compiled C: the objects, and the addresses of tables."""
        tables = self._words, self._submitted, self._table
        addresses = [table.__array_interface__["data"][0] for table in tables]
        names = zip(("words_at", "submitted_at", "rows_at"), addresses)
        return {"groups": self._groups, "free": self._free, "tensors_at": self._tensors_at, **dict(names)}

    def is_watched(self, is_so: bool) -> None:
        """Say whether answers must be counted at once."""
        self._words[WATCHED] = is_so

    def note_late_at(self, time_ns: int | None) -> None:
        """Say when the first is late of those whose deadlines Python knows."""
        self._words[LATE_AT] = time_ns or 0

    @property
    def is_empty(self) -> bool:
        """True if nothing is here: handed in, running or to be told."""
        return len(self._free) == MAX_SUBMISSIONS and self.regions.is_empty

    def take_sequences(self, count: int) -> int:
        """Return the first of so many numbers, which tell in which order requests came; from any thread."""
        return 1 + int(added(self._words, SEQUENCE, count))

    def hand_in(self, groups: Sequence[RequestGroup]) -> bool:
        """Hand in requests, all or none; return whether they are: some are for Python, or there is no place."""
        if self.is_shut or len(groups) > len(self._free):
            return False
        for group in groups:
            if not group.may_go_by_door:
                return False
            if group.sessions is not None and not all(map(self._leases.may_join, group.sessions)):
                return False
        at, free = self._words.item(SUBMITTED), self._free
        try:
            self.is_shut = True  # what a finalizer that runs meanwhile hands in is for Python
            for group in groups:
                row = free[0]
                self._write(row, group)
                self._submitted[at % MAX_SUBMISSIONS] = row
                self._groups[row], group.row = group, row
                free.popleft()
                at += 1
            stored(self._words, SUBMITTED, at)
        finally:
            self.is_shut = False
        if groups[0].has_deadline:  # now: a turn that finds them late takes over what was handed in
            self.due.extend(groups)
        return True

    def _write(self, row: int, group: RequestGroup) -> None:
        template, answers, count = group.plan.template, group.plan.answers, group.count
        for k, (kind, values) in enumerate(group.inputs):
            try:
                tensor_at = addressof(c_char.from_buffer(values))  # type: ignore[arg-type]
            except (TypeError, ValueError):  # it may not be written to, has gaps, or is empty
                values = np.ascontiguousarray(values)
                group.inputs[k] = kind, values
                tensor_at = values.__array_interface__["data"][0]
            _TENSOR.pack_into(self._tensors, (row * MAX_TENSORS + k) * _TENSOR.size, tensor_at, kind)
        memory, word_at = self._memory.take(WORD_BYTES + count * answers.num_bytes)
        group.memory, results_at = memory[WORD_BYTES:], word_at + WORD_BYTES
        if isinstance(group.outcome, RequestFuture | Outcomes):
            group.outcome.word_at = word_at
            memory[0] = OPEN if isinstance(group.outcome, RequestFuture) else AT_THE_END
        else:
            word_at = 0
        _ROW.pack_into(
            self._rows,
            row * SUBMISSION.itemsize,
            template.template.address,
            group.plan.lengths_address,
            self._sessions_at(group),
            answers.address,
            results_at,
            word_at,
            group.sequence,
            group.arrival_ns,
            NEVER if group.deadline_ns is None else group.deadline_ns,
            NEVER if group.schedule_by_ns is None else group.schedule_by_ns,
            group.order,
            template.lengths.size,
            answers.count,
            count,
            0,
            0,
            group.priority,
            group.client,
            0,
            0,
            0,
            0,
        )

    def _sessions_at(self, group: RequestGroup) -> int:
        """Return the address of the sessions of requests and their tickets; 0: they have none."""
        if group.sessions is None:
            return 0
        group.tickets = array("q", [word for record in group.sessions for word in (record.id, record.ticket)])
        return group.tickets.buffer_info()[0]

    def take_back(self) -> list[RequestGroup]:
        """Take out what was handed in and is not admitted, or (the first) not all of it; in order. What came from other
        processes is returned there."""
        self.regions.take_back_all()
        taken, end = self._words.item(TAKEN), self._words.item(SUBMITTED)
        found = [self._groups[self._submitted.item(at % MAX_SUBMISSIONS)] for at in range(taken, end)]
        stored(self._words, TAKEN, end)
        return [group for group in found if group is not None]

    def whose(self, request: int) -> RequestGroup | None:
        """Return the submission that a request came with, by its id in the processor; None: Python admitted it."""
        row = self._requests.item(request) - 1
        if row >= MAX_SUBMISSIONS:
            return self.regions.group_of(row)
        return self._groups[row] if row >= 0 else None

    def all(self) -> Iterator[RequestGroup]:
        """Return every submission of this process that was handed in and is here; a client may be handing in others."""
        is_there = self._table["is_there"]
        return (group for row, group in enumerate(self._groups) if group is not None and is_there[row])

    def num_admitted(self, group: RequestGroup) -> int:
        """Return the number of requests of a submission that is here which were admitted."""
        return int(self._table["num_admitted"][group.row])

    def give_up(self, group: RequestGroup) -> None:
        """Give up a submission of which no request was admitted."""
        if group.row >= MAX_SUBMISSIONS:
            self.regions.give_up(group.row)
            group.row = -1
        else:
            self._table["is_there"][group.row] = 0
            self._leave(group)

    def take_over(self, group: RequestGroup) -> tuple[int, dict[int, int]]:
        """Give up a submission: return how many of its requests were admitted, and the ids of those that are not
        answered by their numbers. Its answers must have been told."""
        row, admitted = group.row, self.num_admitted(group)
        ids = np.flatnonzero(self._requests == row + 1)
        left = dict(zip(self._numbers[ids].tolist(), ids.tolist()))
        self._requests[ids] = 0
        self.give_up(group)
        return admitted, left

    def take_answers(self) -> dict[Model, Told]:
        """Take out the answers that clients were not told of, by model; then they are counted, and ``note_told``."""
        told, end = self._words.item(TOLD), self._words.item(ANSWERS)
        size = len(self._answered)
        taken = Taken({}, {}, [at % size for at in range(told, end)])
        if self.fast_path is not None:
            taken = self.fast_path.tell(self._answered, told, end)
        found = {model: Told([], [], [], [], its) for model, its in taken.counted.items()}
        together = {group: numbers.tolist() for group, numbers in taken.together.items()}
        rows = self._answered[taken.others].tolist() if taken.others else []
        self._told_to = end
        for row, number, started_ns, ended_ns, arrival_ns, plan, session in rows:
            if plan:
                if (known := self.regions.known_of(row, plan)) is not None:
                    model, num_rows = known
                    come = _told_of(found, model)
                    come.come.append((arrival_ns, started_ns, ended_ns, num_rows))
                    if session >= 0:
                        come.sessions.append(session)
                continue
            group = self._groups[row]
            if group is None:
                continue
            its = _told_of(found, group.model)
            its.counted.append((arrival_ns, started_ns, ended_ns, group.plan.num_nodes))
            if group.count > 1:
                together.setdefault(group, []).append(number)
            else:
                its.ended.append((group.outcome, ALONE, group, 0))
                group.num_told = 1
                self._leave(group)
        for group, numbers in together.items():
            numbers.sort()
            ended = found[group.model].ended
            for run in _runs(numbers):
                ended.append((group.outcome, run, group, run[0]))
            group.num_told += len(numbers)
            if group.num_told == group.count:
                self._leave(group)
        return found

    def note_told(self) -> None:
        """Note that what ``take_answers`` has returned is counted."""
        self._words[TOLD] = self._told_to

    def _leave(self, group: RequestGroup) -> None:
        self._groups[group.row] = None
        self._free.append(group.row)
        group.row = -1

    def heal(self) -> None:
        """After a client was interrupted while it handed in: forget what it had begun to; under the gate, when all that
        was handed in is admitted or taken back."""
        is_there = self._table["is_there"]
        for row, group in enumerate(self._groups):
            if group is not None and not is_there[row] and group.num_told == 0:
                group.row = -1
                self._groups[row] = None
        self._free.clear()
        self._free.extend(row for row, group in enumerate(self._groups) if group is None)


def _told_of(found: dict[Model, Told], model: Model) -> Told:
    return found.get(model) or found.setdefault(model, Told([], [], [], []))


def _runs(numbers: Sequence[int]) -> Iterator[range]:
    """Yield the runs of numbers that follow each other, in ascending order."""
    first = before = numbers[0]
    if numbers[-1] - first == len(numbers) - 1:
        yield range(first, first + len(numbers))
        return
    for number in numbers[1:]:
        if number != before + 1:
            yield range(first, before + 1)
            first = number
        before = number
    yield range(first, before + 1)


def _bytes_of(table: NDArray[Any]) -> memoryview:
    return memoryview(table).cast("B")  # type: ignore[arg-type]
