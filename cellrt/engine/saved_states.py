"""The saved states of sessions, in host memory and not in arenas: their sizes, and the longest idle first."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from numpy.typing import NDArray

from cellrt.engine.request_group import SessionRecord


class SavedStates:
    """The saved states of sessions; ``SessionRecord.saved`` is set only here.

    It belongs to the holder of the turn; ``num_bytes`` may be read from any thread.
    """

    def __init__(self) -> None:
        self.num_bytes = 0
        self._bytes_of: OrderedDict[SessionRecord, int] = OrderedDict()

    def set(self, record: SessionRecord, saved: list[NDArray[Any]] | None) -> None:
        """Replace a session's saved state by another, or by none."""
        self.num_bytes -= self._bytes_of.pop(record, 0)
        record.saved = saved
        if saved is not None:
            self._bytes_of[record] = size = size_of(saved)
            self.num_bytes += size

    def bytes_of(self, record: SessionRecord) -> int:
        """Return the bytes of a session's saved state; 0 if it has none."""
        return self._bytes_of.get(record, 0)

    def note_used(self, record: SessionRecord) -> None:
        """Note that a session was not idle, though its state is saved still."""
        if record in self._bytes_of:
            self._bytes_of.move_to_end(record)

    def longest_idle(self, other: SessionRecord) -> SessionRecord | None:
        """Return the session with nothing to do whose state was saved first, except ``other``, or None."""
        return next((record for record in self._bytes_of if record.is_free and record is not other), None)


def size_of(saved: list[NDArray[Any]]) -> int:
    """Return the bytes of a state."""
    return sum(value.nbytes for value in saved)
