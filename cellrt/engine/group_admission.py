"""Admit groups of requests: reserve rows for them, and copy their tensors and their sessions' states there."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from cellrt.core.processor import Processor, SizedTemplate
from cellrt.core.state.tables import HOST, NEVER
from cellrt.engine.registry import Plan
from cellrt.engine.request_group import RequestGroup
from cellrt.engine.sessions import Sessions
from cellrt.worker.arenas import Arenas

Asking: TypeAlias = tuple[RequestGroup, Sequence[int]]
"""Requests of a group that are to be admitted, by their numbers in it."""


class GroupAdmission:
    """Admits groups of requests; called by the holder of the turn.

    Args:
        processor: the engine's processor.
        arenas: the engine's arenas by location, the host first.
        sessions: the sessions whose states are copied to their requests.
    """

    def __init__(self, processor: Processor, arenas: list[Arenas], sessions: Sessions) -> None:
        self._processor, self._arenas, self._sessions = processor, arenas, sessions

    def admit(self, together: Sequence[Asking]) -> list[tuple[RequestGroup, Sequence[int], list[int]]]:
        """Admit requests in order, as far as there is room; return them with their ids in the processor.

        The requests are of one template, or of any templates without lengths. Raise RequestTooLargeError if there is
        never room for the first of them, besides the state that its session has kept.
        """
        first, sequences, sessions = together[0][0], _sequences(together), _sessions(together)
        plans = [group.plan for group, _ in together]
        template: SizedTemplate | list[SizedTemplate] = plans[0].template
        lengths, is_one = None, len(plans) == 1
        if not is_one:
            is_one = all([plan.template.template is plans[0].template.template for plan in plans])
        if is_one:
            lengths = _lengths(together, plans) if len(plans) > 1 else None
        else:
            template = [group.plan.template for group, numbers in together for _ in numbers]
        how = first.priority, first.channel is not None, sessions, lengths, _deadlines(together), first.client
        ids, rows = self._processor.admit_many(template, sequences, *how)
        admitted: list[tuple[RequestGroup, Sequence[int], list[int]]] = []
        begin = 0
        for group, numbers in together:
            if begin == len(ids):
                break
            its = ids[begin : begin + len(numbers)]
            admitted.append((group, numbers[: len(its)], its))
            begin += len(its)
        if not admitted:
            return admitted
        asking = [(group, numbers) for group, numbers, _ in admitted]
        if not is_one:
            self._copy_in_any(asking, rows)
        elif lengths is None:
            self._copy_in(asking, rows)
        else:
            self._copy_in_each(asking, rows)
        if first.sessions is not None:
            self._begin_states(admitted, rows.reshape(-1))
        if first.channel is not None:
            first.results_at = int(rows[0, -1])
        return admitted

    def _begin_states(
        self, admitted: Sequence[tuple[RequestGroup, Sequence[int], list[int]]], rows: NDArray[np.int32]
    ) -> None:
        """Give requests the states of their sessions; copy saved states to the requests' host rows."""
        end = 0
        for group, numbers, ids in admitted:
            others = group.plan.template.num_states + 1
            size = sum(group.input_counts()) + others
            for number, request in zip(numbers, ids):
                record, end = group.session_of(number), end + size
                if record is not None:
                    self._sessions.copy_in(record, request, rows[end - others : end])
                    self._sessions.note_admitted(record)

    def _copy_in(self, together: Sequence[Asking], rows: NDArray[np.int32]) -> None:
        """Copy the tensors of requests of equal lengths to their host rows."""
        group, first = together[0][0], 0
        for k, ((kind, _), count) in enumerate(zip(group.inputs, group.input_counts())):
            self._arenas[HOST].put_columns(kind, rows, first, count, _tensors(k, together))
            first += count

    def _copy_in_each(self, together: Sequence[Asking], rows: NDArray[np.int32]) -> None:
        """Copy the tensors of requests of one template and different lengths to their host rows."""
        group = together[0][0]
        kinds, others = [kind for kind, _ in group.inputs], group.plan.template.num_states + 1
        each = [its for group, numbers in together for its in repeat(group.input_counts(), len(numbers))]
        counts = [count for its in each for count in (*its, others)]
        owners = np.arange(len(counts)) % (len(kinds) + 1)
        owner_of_row = np.repeat(owners, counts)
        for k, kind in enumerate(kinds):
            self._arenas[HOST].put(kind, rows[: owner_of_row.size][owner_of_row == k], _tensors(k, together))

    def _copy_in_any(self, together: Sequence[Asking], rows: NDArray[np.int32]) -> None:
        """Copy the tensors of requests of different templates to their host rows."""
        at, found = 0, dict[int, tuple[list[NDArray[np.int32]], list[NDArray[Any]]]]()
        for group, numbers in together:
            for number in numbers:
                for k, (kind, _) in enumerate(group.inputs):
                    values = group.input_rows(k, range(number, number + 1))
                    its, tensors = found.setdefault(kind, ([], []))
                    its.append(rows[at : at + len(values)])
                    tensors.append(values)
                    at += len(values)
                at += group.plan.template.num_states + 1
        for kind, (its, tensors) in found.items():
            self._arenas[HOST].put(kind, np.concatenate(its), np.concatenate(tensors))


def _lengths(requests: Sequence[Asking], plans: Sequence[Plan]) -> NDArray[np.int32] | None:
    """Return ``[requests, lengths]`` of requests of one template; None if all have the same plan."""
    if all([plan is plans[0] for plan in plans]):
        return None
    each = [group.plan.template.lengths for group, numbers in requests for _ in numbers]
    return np.concatenate(each).reshape(len(each), -1)


def _tensors(index: int, requests: Sequence[Asking]) -> NDArray[Any]:
    """Return the rows of the tensor ``index`` of all requests, one request after the other."""
    found = [group.input_rows(index, numbers) for group, numbers in requests]
    return found[0] if len(found) == 1 else np.concatenate(found)


def _sequences(requests: Sequence[Asking]) -> NDArray[np.int64]:
    """Return the sequence numbers of requests."""
    if len(requests) == 1 and isinstance(requests[0][1], range):
        first, numbers = requests[0][0].sequence, requests[0][1]
        return np.arange(first + numbers.start, first + numbers.stop)
    return np.array([group.sequence + number for group, numbers in requests for number in numbers])


def _deadlines(requests: Sequence[Asking]) -> NDArray[np.int64] | None:
    """Return by when each request must be done and must have begun, ``[requests, 2]``; None if none has a limit."""
    each = [(group.deadline_ns, group.schedule_by_ns) for group, _ in requests]
    if all([times_ns == (None, None) for times_ns in each]):
        return None
    known = [[NEVER if time_ns is None else time_ns for time_ns in times_ns] for times_ns in each]
    return np.repeat(np.array(known, np.int64), [len(numbers) for _, numbers in requests], axis=0)


def _sessions(requests: Sequence[Asking]) -> NDArray[np.int32] | None:
    """Return the ids of the requests' sessions in the processor; None if they have no sessions."""
    if requests[0][0].sessions is None:
        return None
    records = [group.session_of(number) for group, numbers in requests for number in numbers]
    return np.array([-1 if record is None else record.id for record in records], np.int32)
