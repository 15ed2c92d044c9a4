"""Admission: requests of one template get rows, and what they bring is copied there: tensors, and sessions' states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellrt.core.processor import Processor
from cellrt.core.tables import HOST
from cellrt.engine.records import Bulk
from cellrt.engine.sessions import Sessions
from cellrt.worker.arenas import Arenas

Asking: TypeAlias = tuple[Bulk, Sequence[int]]
"""Requests of a bulk, by their numbers."""


class Admission:
    """Belongs to the holder of the turn.

    Args:
        processor, arenas: of the engine; arenas by location, the host first.
        sessions: whose states go to their requests.
    """

    def __init__(self, processor: Processor, arenas: list[Arenas], sessions: Sessions) -> None:
        self._processor, self._arenas, self._sessions = processor, arenas, sessions

    def admit(self, together: Sequence[Asking]) -> list[tuple[Bulk, Sequence[int], list[int]]]:
        """Admits requests of one template in order, as far as there is room; returns them with their ids in the
        processor.

        Raises RequestTooLargeError if the first never has room, with what its session has kept.
        """
        first = together[0][0]
        lengths = _lengths(together)
        how = first.lane, first.channel is not None, _sessions(together), lengths
        ids, rows = self._processor.admit_many(first.plan.template, _sequences(together), *how)
        admitted: list[tuple[Bulk, Sequence[int], list[int]]] = []
        begin = 0
        for bulk, numbers in together:
            if begin == len(ids):
                break
            its = ids[begin : begin + len(numbers)]
            admitted.append((bulk, numbers[: len(its)], its))
            begin += len(its)
        if not admitted:
            return admitted
        asking = [(bulk, numbers) for bulk, numbers, _ in admitted]
        if lengths is None:
            self._copy_in(asking, rows)
        else:
            self._copy_in_each(asking, rows)
        if first.sessions is not None:
            self._begin_states(admitted, rows.reshape(-1))
        if first.channel is not None:
            first.results_at = int(rows[0, -1])
        return admitted

    def _begin_states(self, admitted: Sequence[tuple[Bulk, Sequence[int], list[int]]], rows: NDArray[np.int32]) -> None:
        """Has sessions' states go to their requests; what is saved of them is copied to the requests' host rows."""
        end = 0
        for bulk, numbers, ids in admitted:
            others = bulk.plan.template.num_states + 1
            share = sum(len(values) // bulk.size for _, values in bulk.externals) + others
            for number, request in zip(numbers, ids):
                record, end = bulk.session_of(number), end + share
                if record is not None:
                    self._sessions.copy_in(record, request, rows[end - others : end])
                    self._sessions.note_admitted(record)

    def _copy_in(self, together: Sequence[Asking], rows: NDArray[np.int32]) -> None:
        """Copies requests' tensors to their host rows."""
        host, first, bulk = self._arenas[HOST], 0, together[0][0]
        for k, (kind, values) in enumerate(bulk.externals):
            count = len(values) // bulk.size
            if len(together) > 1:
                values = np.concatenate([one.tensor(k, numbers) for one, numbers in together])
            elif len(together[0][1]) < bulk.size:
                values = bulk.tensor(k, together[0][1])
            host.put_columns(kind, rows, first, count, values)
            first += count

    def _copy_in_each(self, together: Sequence[Asking], rows: NDArray[np.int32]) -> None:
        """As ``_copy_in``, of requests that differ in their lengths."""
        tensors, others = together[0][0].externals, together[0][0].plan.template.num_states + 1
        counts: list[int] = []
        for bulk, numbers in together:
            counts += [*(len(values) // bulk.size for _, values in bulk.externals), others] * len(numbers)
        owners = np.arange(len(counts)) % (len(tensors) + 1)
        owner_of_row = np.repeat(owners, counts)
        for k, (kind, _) in enumerate(tensors):
            values = np.concatenate([bulk.tensor(k, numbers) for bulk, numbers in together])
            self._arenas[HOST].put(kind, rows[: owner_of_row.size][owner_of_row == k], values)


def _lengths(requests: Sequence[Asking]) -> NDArray[np.int32] | None:
    """``[requests, lengths]`` of requests of one template; None if they are those of the first."""
    first = requests[0][0].plan
    if len(requests) == 1 or all([bulk.plan is first for bulk, _ in requests]):
        return None
    each = [bulk.plan.template.lengths for bulk, numbers in requests for _ in numbers]
    return np.concatenate(each).reshape(len(each), -1)


def _sequences(requests: Sequence[Asking]) -> NDArray[np.int64]:
    """Their sequence numbers."""
    if len(requests) == 1 and isinstance(requests[0][1], range):
        first, numbers = requests[0][0].sequence, requests[0][1]
        return np.arange(first + numbers.start, first + numbers.stop)
    return np.array([bulk.sequence + number for bulk, numbers in requests for number in numbers])


def _sessions(requests: Sequence[Asking]) -> NDArray[np.int32] | None:
    """The numbers of their sessions in the processor; None if they have none."""
    if requests[0][0].sessions is None:
        return None
    records = [bulk.session_of(number) for bulk, numbers in requests for number in numbers]
    return np.array([-1 if record is None else record.id for record in records], np.int32)
