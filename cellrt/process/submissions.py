"""The message of a submission: its requests' numbers, templates, tensors, times and priority."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import NamedTuple

from cellrt.engine.due import Due
from cellrt.graph.known import Alike
from cellrt.process.recorded import tensor_parts
from cellrt.process.shared_memory import Part

HEAD = struct.Struct("<QIIqddiiI4x")
SESSION_BYTES = 4
NO_DEADLINE = -1.0


class Submission(NamedTuple):
    """Requests that are submitted together, all or none.

    Attributes:
        first_id, num_requests: their numbers, consecutive and chosen by the client.
        sessions: the number of each request's session, graph by graph; empty if they have none.
        now_ns: the time of submission, on the monotonic clock, which all processes of a machine share.
        due: seconds from then.
        priority: 0 to 3.
        is_streamed, may_wait: whether steps are to be sent; whether it waits for room in the queue.
        is_each: whether requests are refused one by one.
        follows: whether the engine may not be done with what a session of theirs was asked by the region.
    """

    first_id: int
    num_requests: int
    sessions: Sequence[int]
    now_ns: int
    due: Due
    priority: int
    is_streamed: bool
    may_wait: bool
    is_each: bool
    follows: bool = False

    @property
    def ids(self) -> range:
        """The numbers of its requests."""
        return range(self.first_id, self.first_id + self.num_requests)

    @property
    def end_s(self) -> float | None:
        """The time until which it may wait, on the monotonic clock."""
        first_s = self.due.first_s
        return None if first_s is None else self.now_ns / 1e9 + first_s


def submission_parts(submission: Submission, templates: Sequence[int], groups: Sequence[Alike]) -> list[Part]:
    """Return a submission as the parts of a message.

    ``templates``: the number of the template of each group of requests.
    """
    first_id, count, sessions, now_ns, due, priority, is_streamed, may_wait, is_each, follows = submission
    flags = is_streamed | may_wait << 1 | is_each << 2 | follows << 3
    times_s = [NO_DEADLINE if time_s is None else time_s for time_s in due]
    head = HEAD.pack(first_id, count, len(sessions), now_ns, *times_s, priority, flags, len(groups))
    numbers = [number for template, alike in zip(templates, groups) for number in (template, len(alike.indices))]
    parts: list[Part] = [head, array("i", numbers).tobytes()]
    if sessions:
        parts.append(array("I", sessions).tobytes())
    return parts + tensor_parts(groups)


def read_submission(body: memoryview) -> tuple[Submission, list[tuple[int, int]], bytes]:
    """Return the submission in a message, the template and number of requests of each group, and a copy of their
    tensors.
    """
    first_id, count, num_sessions, now_ns, *times_s, priority, flags, num_groups = HEAD.unpack_from(body)
    begin = HEAD.size + 8 * num_groups
    end = begin + SESSION_BYTES * num_sessions
    numbers = memoryview(bytes(body[HEAD.size : begin])).cast("i").tolist()
    sessions = memoryview(bytes(body[begin:end])).cast("I").tolist()
    how = bool(flags & 1), bool(flags & 2), bool(flags & 4), bool(flags & 8)
    due = Due(*[None if time_s < 0 else time_s for time_s in times_s])
    submission = Submission(first_id, count, sessions, now_ns, due, priority, *how)
    return submission, list(zip(numbers[::2], numbers[1::2])), bytes(body[end:])
