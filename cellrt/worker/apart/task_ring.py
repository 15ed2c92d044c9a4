"""The protocol of an engine and a worker's process: counters and records in shared memory, and tasks in slots.

A task is an array of *words*: int32 numbers (``task_layout.py``).

The engine writes a record and then counts it as launched. The process counts it as begun, runs it, writes the result
into the same record and counts it as completed, in order. Each counter has one writer, and a reader of a counter may
read everything that was written before it, as x86-64 keeps the order of writes. An eventfd on either side wakes a side
that sleeps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from cellrt.errors import CellError
from cellrt.worker.apart.pool import Segment
from cellrt.worker.failed_rows import Failure

CAPACITY = 256
"""The number of records, and so the most tasks that a worker may have."""
LAUNCHED, BEGUN, COMPLETED, READY = 0, 8, 16, 24
"""The counters, each in a cache line of its own; the last counts that the process is ready."""
RECORDS_AT = 32
"""The number of words in front of the records."""
FAILURE_BYTES = 1 << 16
"""The bytes for failures at the beginning of a slot. The task's words follow."""
MOST_TEXT = 2000
"""The most characters of an error that are kept."""
ALL_FAILED = [-1]
"""A list that stands for the rows of an error: all rows that failed."""


class Record(NamedTuple):
    """A task in the ring, int64 each."""

    type_id: int
    type_offset: int
    type_bytes: int
    """The size of the type's description, which ``cells.py`` wrote to the engine's pool."""
    slot_offset: int
    slot_bytes: int
    num_words: int
    """The number of words of the task; 0: there is no task, and the process only loads the type."""
    location: int
    """The location of the worker whose task it is. It is another worker's if that died and this one stands in."""


class Result(NamedTuple):
    """The result of a task, int64 each; the times are those of ``Done``."""

    start_ns: int
    end_ns: int
    busy_ns: int
    num_retries: int
    failure_bytes: int


WORDS = len(Record._fields) + len(Result._fields)
RING_BYTES = 8 * (RECORDS_AT + CAPACITY * WORDS)


class TaskRing:
    """The ring, as both processes use it. ``memory`` has RING_BYTES bytes."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("q")

    def __getitem__(self, counter: int) -> int:
        return self._words[counter]

    def increment(self, counter: int) -> None:
        """Add one to a counter; only its one writer may call this."""
        self._words[counter] += 1

    def write(self, number: int, record: Record) -> None:
        """Write the record of the task with that number."""
        at = self._at(number)
        for k, word in enumerate(record):
            self._words[at + k] = word

    def read(self, number: int) -> Record:
        """Return the record of a task."""
        at = self._at(number)
        return Record(*self._words[at : at + len(Record._fields)])

    def write_result(self, number: int, result: Result) -> None:
        """Write the result of a task."""
        at = self._at(number) + len(Record._fields)
        for k, word in enumerate(result):
            self._words[at + k] = word

    def read_result(self, number: int) -> Result:
        """Return the result of a task."""
        at = self._at(number)
        return Result(*self._words[at + len(Record._fields) : at + WORDS])

    @staticmethod
    def _at(number: int) -> int:
        return RECORDS_AT + number % CAPACITY * WORDS


class Slot:
    """The memory of one task's words and its failures."""

    def __init__(self, segment: Segment, memory: memoryview) -> None:
        self.segment, self._failures = segment, memory[:FAILURE_BYTES]
        self.words = memory[FAILURE_BYTES:].cast("i")

    @staticmethod
    def bytes_for(num_words: int) -> int:
        """Return the size of a slot for this number of words, rounded up so that other tasks can use it again."""
        return FAILURE_BYTES + max(4096, 4 << num_words.bit_length())

    def put_failures(self, failures: Sequence[Failure]) -> int:
        """Write failures; return the number of bytes written. If they do not fit, keep one error's text for all."""
        if not failures:
            return 0
        rows: dict[str, list[int]] = {}
        for failure in failures:
            rows.setdefault(str(failure.error)[:MOST_TEXT], []).append(failure.row)
        data = json.dumps(rows).encode()
        if len(data) > FAILURE_BYTES:
            text = next(iter(rows))
            data = json.dumps({f"{text} (one of {len(rows)} errors)": [each.row for each in failures]}).encode()
        if len(data) > FAILURE_BYTES:
            data = json.dumps({next(iter(rows)): ALL_FAILED}).encode()
        self._failures[: len(data)] = data
        return len(data)

    def take_failures(self, size: int, failed: Sequence[int]) -> list[Failure]:
        """Return the failures of a task, sorted by row. ``failed``: the rows that its words mark as failed."""
        if not size:
            return []
        failures = []
        for text, rows in json.loads(bytes(self._failures[:size])).items():
            for row in failed if rows == ALL_FAILED else rows:
                failures.append(Failure(row, CellError(text)))
        return sorted(failures, key=lambda failure: failure.row)
