"""The times by which a request must be done, and must have begun."""

from __future__ import annotations

from typing import NamedTuple

from cellrt.engine.option_checks import LONGEST_S
from cellrt.errors import RequestError
from cellrt.numbers import as_real

TINY_S = 1e-6


class Due(NamedTuple):
    """The seconds that a request has; None: any time.

    Attributes:
        done_s: until it must be done.
        begun_s: until its first task must be submitted to a worker.
    """

    done_s: float | None = None
    begun_s: float | None = None

    @property
    def first_s(self) -> float | None:
        """The earlier of the two, which is how long a request may wait for a place in a queue."""
        if self.done_s is None or self.begun_s is None:
            return self.begun_s if self.done_s is None else self.done_s
        return min(self.done_s, self.begun_s)

    def after(self, passed_s: float) -> Due:
        """Return the seconds that are left after this many.

        It is at least a moment, as the request has not ended while it waits.
        """
        return Due(*[None if time_s is None else max(TINY_S, time_s - passed_s) for time_s in self])

    def at(self, now_ns: int) -> tuple[int | None, int | None]:
        """Return both as times of a clock that says ``now_ns``, in ns."""
        done_s, begun_s = self
        done_ns = None if done_s is None else now_ns + int(1e9 * done_s)
        return done_ns, None if begun_s is None else now_ns + int(1e9 * begun_s)


ANY_TIME = Due()


def due(deadline: float | None, schedule_by: float | None = None) -> Due:
    """Return the times of a client's request. Raise RequestError unless they are None or seconds above 0."""
    if deadline is schedule_by is None:  # as most are
        return ANY_TIME
    given = ("deadline", deadline), ("schedule_by", schedule_by)
    return Due(*[None if time is None else check_seconds(name, time) for name, time in given])


def check_seconds(what: str, given: object) -> float:
    """Return a client's time in seconds. Raise RequestError unless it is a number of seconds above 0."""
    seconds = as_real(given)
    if seconds is not None and 0 < seconds <= LONGEST_S:
        return seconds
    raise RequestError(f"{what}: expected seconds from now, more than 0 and at most {LONGEST_S:g}, got {given!r:.80}")
