"""The one way in which tests wait for something that nobody tells them of, as the end of a process."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

WAIT_S = 60.0
EVERY_S = 0.005


def until(is_so: Callable[[], object], what: str, seconds: float = WAIT_S) -> None:
    """Waits until something holds; fails after ``seconds``, saying what did not come.

    Args:
        is_so: Whether it holds: asked now and every five milliseconds.
        what: What is waited for, in words.
        seconds: How long at most.
    """
    end_s = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end_s, f"it never came to that: {what}"
        time.sleep(EVERY_S)


def is_running(pid: int) -> bool:
    """Whether a process is there, and has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
