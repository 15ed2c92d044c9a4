"""A client of the door: it hands in requests of whole numbers as ``engine/door.py`` does, and reads their answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellrt.core.processor import Processor, SizedTemplate
from cellrt.core.state.tables import (
    ANSWER,
    ANSWERS,
    LAST_STEP,
    MAX_SUBMISSIONS,
    MAX_TENSORS,
    NEVER,
    SUBMITTED,
    TAKEN,
    TOLD,
)
from cellrt.native.row_types import new_table

TAKEN_STEPS, VALUE = range(2)
"""Of a result, which is told as the last step of a loop is: how many steps there are, and the last."""


@dataclass(eq=False)
class Submission:
    """Requests of one graph: their answers ``[results, requests, 2]``, and what must stay where it is until then."""

    at: int
    answers: NDArray[np.int64]
    kept: list[Any]


class Client:
    """Hands in requests whose rows are numbers.

    Args:
        processor: whose tables they are.
        host: of each kind the host's rows.
    """

    def __init__(self, processor: Processor, host: NDArray[np.int64]) -> None:
        self.t, self._processor, self._host = processor.tables, processor, host
        for kind, rows in enumerate(host):
            processor.set_host_rows(kind, rows.ctypes.data, rows.itemsize)
        self._free = list(range(MAX_SUBMISSIONS))
        self.kept: dict[int, Submission] = {}
        """Those that have not ended, by their rows."""

    def hand_in(
        self,
        template: SizedTemplate,
        tensors: list[tuple[int, NDArray[np.int64]]],
        result_kinds: list[int],
        sequence: int,
        count: int = 1,
        priority: int = 0,
    ) -> Submission | None:
        """Hand in requests with their tensors, kind and ``[requests * rows]`` each; None if they bring too many."""
        if len(tensors) > MAX_TENSORS:
            return None
        at, words = self._free.pop(), self.t.door
        rows, answers = new_table(max(1, len(result_kinds)), ANSWER), np.full((len(result_kinds), count, 2), -7)
        places = np.arange(len(result_kinds), dtype=np.int32)
        for k, kind in enumerate(result_kinds):
            rows[k] = places[k:].ctypes.data, 1, kind, LAST_STEP, 8
        lengths = template.lengths
        addresses = template.template.address, lengths.ctypes.data, 0, rows.ctypes.data, answers.ctypes.data
        counts = lengths.size, len(result_kinds), count, 0, 0, priority, 0, 0, 0, 0, 0
        self.t.submissions[at] = (*addresses, 0, sequence, 1, NEVER, NEVER, 0.0, *counts)
        for k, (kind, values) in enumerate(tensors):
            self.t.tensors[at, 2 * k : 2 * k + 2] = values.ctypes.data, kind
        self.t.submitted[int(words[SUBMITTED]) % MAX_SUBMISSIONS] = at
        words[SUBMITTED] += 1
        self.kept[at] = Submission(at, answers, [template, rows, places, tensors])
        return self.kept[at]

    def ids_of(self, submission: Submission) -> list[int]:
        """The ids of its requests that are admitted and not answered, by their numbers."""
        ids = np.flatnonzero(self.t.requests["submission"] == submission.at + 1)
        return ids[np.argsort(self.t.requests["number"][ids])].tolist()  # type: ignore[no-any-return]

    def take_back(self) -> None:
        """Take out what was handed in and found no room."""
        self.t.door[TAKEN] = self.t.door[SUBMITTED]

    def take_over(self, submission: Submission) -> None:
        """Go on with its requests as if they had not come by the door."""
        self.t.requests["submission"][self.ids_of(submission)] = 0
        self.give_back(submission)

    def give_back(self, submission: Submission) -> None:
        """Have others get its row."""
        self.t.submissions["is_there"][submission.at] = 0
        self._free.append(submission.at)
        del self.kept[submission.at]

    def told(self) -> list[tuple[int, int]]:
        """Take out the row and the number of each request that was answered."""
        first, end = int(self.t.door[TOLD]), int(self.t.door[ANSWERS])
        self.t.door[TOLD] = end
        rows = [self.t.answered[at % len(self.t.answered)] for at in range(first, end)]
        return [(int(row["submission"]), int(row["number"])) for row in rows]
