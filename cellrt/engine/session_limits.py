"""The limits of an engine's sessions: how many there are, where their states are, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from cellrt.engine.option_checks import check_choice, check_number_or_none, check_numbers, check_period
from cellrt.errors import DefinitionError
from cellrt.numbers import as_integer

CLOSE, REFUSE = WHEN_FULL = ("close", "refuse")


@dataclass(frozen=True)
class SessionLimits:
    """The limits of an engine's sessions: how many there are, where their states are, and for how long.

    Attributes:
        max_sessions: sessions that may be open at once; ``Engine.session`` raises OverloadError beyond.
        max_resident: sessions that may have their state at a worker; the others' is in host memory. None: as many as
            there are rows for.
        idle_timeout_s: a session that was idle for this many seconds is closed. None: never.
        max_saved_bytes: host memory that the states may take which are not at a worker, in bytes, beside the arenas.
            None: a quarter of what is free when the engine is made.
        when_full: what happens when there is no room for one more such state: "close" closes the sessions that were
            idle longest, and their next requests get SessionError; "refuse" closes none, and a request gets
            OverloadError if another state would have to make room for it, or if it brings one.
    """

    max_sessions: int = 16_384
    max_resident: int | None = None
    idle_timeout_s: float | None = 3600.0
    max_saved_bytes: int | None = None
    when_full: str = CLOSE

    def __post_init__(self) -> None:
        """Raise DefinitionError for values of another kind."""
        (most,), resident = check_numbers(max_sessions=self.max_sessions), as_integer(self.max_resident)
        saved = check_number_or_none("max_saved_bytes", self.max_saved_bytes)
        check_choice("when_full", self.when_full, WHEN_FULL)
        if self.max_resident is not None and (resident is None or resident < 0):
            raise DefinitionError(f"max_resident: expected an integer from 0 on, or None, got {self.max_resident!r}")
        idle_s = check_period("idle_timeout_s", self.idle_timeout_s)
        taken = {"max_sessions": most, "max_resident": resident, "idle_timeout_s": idle_s, "max_saved_bytes": saved}
        for name, value in taken.items():
            object.__setattr__(self, name, value)
