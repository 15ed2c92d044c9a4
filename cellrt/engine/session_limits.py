"""How many sessions an engine keeps, where, and for how long."""

from __future__ import annotations

from dataclasses import dataclass

from cellrt.engine.options import check_numbers, check_period
from cellrt.errors import DefinitionError


@dataclass(frozen=True)
class SessionLimits:
    """How many sessions an engine keeps, where, and for how long.

    Attributes:
        max_sessions: sessions that may be open at once; ``Engine.session`` raises OverloadError beyond.
        max_resident: sessions that may have their state at a worker; the others' is in host memory. None: as many as
            there are rows for.
        idle_timeout_s: a session that was idle for so long is closed. None: never.
    """

    max_sessions: int = 16_384
    max_resident: int | None = None
    idle_timeout_s: float | None = 3600.0

    def __post_init__(self) -> None:
        """Raises DefinitionError for what is none of these."""
        check_numbers(max_sessions=self.max_sessions)
        if self.max_resident is not None and (type(self.max_resident) is not int or self.max_resident < 0):
            raise DefinitionError(f"max_resident: expected an integer from 0 on, or None, got {self.max_resident!r}")
        check_period("idle_timeout_s", self.idle_timeout_s)
