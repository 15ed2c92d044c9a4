"""The tables' clock, which decisions use, and the smoothed time between arrivals."""

from __future__ import annotations

from collections.abc import Sequence

from cellrt.core.state.tables import Tables


class Clock:
    """The clock of one scheduler. Its owner tells it the time; compiled code reads it in the tables' settings."""

    def __init__(self, tables: Tables) -> None:
        # Columns, because looking one up by its name takes a notable part of a small turn.
        settings = tables.settings
        self._now_ns, self._gap_ns, self._last_ns = (
            settings[name] for name in ("now_ns", "arrival_gap_ns", "last_arrival_ns")
        )
        self._longest_ns = 2 * max(float(settings["max_run_ns"][0]), float(settings["join_budget_ns"][0]))

    def set(self, now_ns: int) -> None:
        """Set the time that scheduling decisions and the event log use."""
        self._now_ns[0] = now_ns

    def note_arrivals(self, arrivals_ns: Sequence[int]) -> None:
        """Note arrivals, in order, for the smoothed time between them, which bounds runs at low load."""
        gap, last, longest = float(self._gap_ns[0]), int(self._last_ns[0]), self._longest_ns
        for now_ns in arrivals_ns:
            # A long silence only means that a run may be as long as any: else the next hundred arrivals of a
            # burst would meet runs of that length.
            gap += (min(now_ns - last, longest) - gap) / 16
            last = now_ns
        self._gap_ns[0], self._last_ns[0] = gap, last
