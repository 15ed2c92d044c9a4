"""Sessions that requests of the door may go on with, without Python (``core/requests/join_leave.py``).

Python leases a session that has nothing to do and whose state lies in rows of a worker, or is new. The next request is
then admitted by compiled code, which gives the session back with the answer, so that another may follow. Whatever else
a session is asked waits until Python has it again.
"""

from __future__ import annotations

from cellrt.core.processor import Processor
from cellrt.core.state.moves import SessionState
from cellrt.core.state.region_layout import MAX_SEATS
from cellrt.engine.request_group import SessionRecord


class Leases:
    """Belongs to the holder of the turn, but for ``may_join``."""

    def __init__(self, processor: Processor) -> None:
        t = processor.tables
        self._tickets, self._is_wanted = t.leases["ticket"], t.leases["is_wanted"]
        self._seats, self._seated, self._clients = t.seats, t.seats["number"], t.regions["client"]
        self._wanted: dict[SessionRecord, None] = {}

    def grant(self, record: SessionRecord) -> None:
        """Lease a session that has nothing to do, if its state is where the next request finds it."""
        is_near = record.id >= 0 and record.saved is None and record.num_rows == len(record.states)
        if is_near and record.is_free and record.state is SessionState.IDLE and record.error is None:
            self._tickets[record.id] = record.ticket
            for seat in record.seats:
                at = seat.region * MAX_SEATS + seat.number % MAX_SEATS
                if self._clients.item(seat.region) == seat.client and self._seated.item(at) in (0, seat.number):
                    self._seats[at] = record.id, record.ticket, seat.number, record.model.number

    def clear_seats(self, record: SessionRecord) -> None:
        """Let no client in another process name a session any more, as it has ended."""
        for seat in record.seats:
            at = seat.region * MAX_SEATS + seat.number % MAX_SEATS
            if self._seats["ticket"].item(at) == record.ticket:
                self._seated[at] = 0

    def recall(self, record: SessionRecord) -> bool:
        """Have Python have a session; return False if a request goes on with it: then ``take_recalled`` has it as soon
        as that is over."""
        if record.id < 0 or not self._tickets.item(record.id):
            return True
        if self._tickets.item(record.id) < 0:
            self._is_wanted[record.id] = 1
            self._wanted[record] = None
            return False
        self._tickets[record.id] = 0
        return True

    def is_in_use(self, record: SessionRecord) -> bool:
        """Return whether a request goes on with a session."""
        return record.id >= 0 and self._tickets.item(record.id) < 0

    def take_recalled(self) -> list[SessionRecord]:
        """Take out the sessions that Python wanted, and has now."""
        if not self._wanted:
            return []
        found = [record for record in self._wanted if not self.is_in_use(record)]
        for record in found:
            del self._wanted[record]
        return found

    def take_over(self, record: SessionRecord) -> None:
        """Have Python have a session whose request it has taken over, or which ends."""
        if record.id >= 0:
            self._tickets[record.id] = self._is_wanted[record.id] = 0
        self._wanted.pop(record, None)

    def may_join(self, record: SessionRecord) -> bool:
        """Return whether the next request of a session may come by the door, as far as a client can see: nothing that
        it was asked waits for a turn in Python, and it is leased."""
        session = record.id
        return session >= 0 and record.num_asked == record.num_heard and self._tickets.item(session) == record.ticket
