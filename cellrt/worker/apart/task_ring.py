"""The protocol of an engine and a worker's process: counters and records in memory, the words of tasks in slots.

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
from cellrt.worker.apart.pool import Place
from cellrt.worker.failed_rows import Failure

PLACES = 256
"""The most tasks that a worker may have."""
LAUNCHED, BEGUN, COMPLETED, READY = 0, 8, 16, 24
"""The counters, each in a cache line of its own; the last counts that the process is ready."""
FIRST = 32
FAILURE_BYTES = 1 << 16
"""The room for failures at the beginning of a slot; the task's words follow."""
MOST_TEXT = 2000
EVERY = [-1]
"""A mark in place of rows: all rows that failed."""


class Record(NamedTuple):
    """A task in the ring, int64 each."""

    type_id: int
    type_offset: int
    type_bytes: int
    """The bytes of the type's description in the engine's pool, as of ``cells.py``."""
    slot_offset: int
    slot_bytes: int
    num_words: int
    """The words of the task; 0: there is no task, the type is to be loaded."""
    location: int
    """The location of the worker whose task it is, or in whose place it runs."""


class Result(NamedTuple):
    """The result of a task, int64 each; the times are those of ``Done``."""

    start_ns: int
    end_ns: int
    busy_ns: int
    num_retries: int
    failure_bytes: int


WORDS = len(Record._fields) + len(Result._fields)
RING_BYTES = 8 * (FIRST + PLACES * WORDS)


class TaskRing:
    """The ring, for both sides; ``memory`` is RING_BYTES long."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory.cast("q")

    def __getitem__(self, counter: int) -> int:
        return self._words[counter]

    def count(self, counter: int) -> None:
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
        return FIRST + number % PLACES * WORDS


class Slot:
    """The memory of one task's words and its failures."""

    def __init__(self, place: Place, memory: memoryview) -> None:
        self.place, self._failures = place, memory[:FAILURE_BYTES]
        self.words = memory[FAILURE_BYTES:].cast("i")

    @staticmethod
    def bytes_for(num_words: int) -> int:
        """Return the bytes of a slot for so many words, with room so that other tasks can use it again."""
        return FAILURE_BYTES + max(4096, 4 << num_words.bit_length())

    def put_failures(self, failures: Sequence[Failure]) -> int:
        """Write failures; return their bytes. If they do not fit, one text stands for all."""
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
            data = json.dumps({next(iter(rows)): EVERY}).encode()
        self._failures[: len(data)] = data
        return len(data)

    def take_failures(self, size: int, failed: Sequence[int]) -> list[Failure]:
        """Return the failures of a task, by row; ``failed`` are the rows that its words mark as failed."""
        if not size:
            return []
        failures = []
        for text, rows in json.loads(bytes(self._failures[:size])).items():
            for row in failed if rows == EVERY else rows:
                failures.append(Failure(row, CellError(text)))
        return sorted(failures, key=lambda failure: failure.row)
