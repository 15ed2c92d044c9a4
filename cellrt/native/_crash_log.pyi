"""The types of ``crash_log.c``."""

def install() -> None:
    """Have the logs written when a signal ends the process."""

def watch(events_at: int, size: int, count_at: int, /) -> int:
    """Add a log: where its events are, how many, and where their count is; return its number, or -1."""

def forget(number: int, /) -> None:
    """Take out a log by its number."""

def name(what: int, text: str, /) -> None:
    """Say what an event is called."""

def layout() -> tuple[int, int, int, int, int, int]:
    """Return the offsets of an event's fields, and its size."""
