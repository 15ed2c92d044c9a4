"""A sign of life in work that may take long the first time."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

QUIET_S = 4.0


@contextmanager
def announced(message: str, num_steps: int = 0, quiet_s: float = QUIET_S) -> Iterator[Callable[[], None]]:
    """Tells of what runs inside if it takes longer than a few seconds, by a warning in the log, and of work in steps by
    one more for each; or by a progress bar, if the standard error is a terminal. Gives what counts a step, from any
    thread.
    """
    announcement = _Announcement(message, num_steps)
    timer = threading.Timer(quiet_s, announcement.show)
    timer.daemon = True
    timer.start()
    try:
        yield announcement.advance
    finally:
        timer.cancel()
        announcement.end()


class _Announcement:
    """What is said of some work, by a thread of its own; nothing once the work is over."""

    def __init__(self, message: str, num_steps: int) -> None:
        self._message, self._num_steps, self._num_done = message, num_steps, 0
        self._lock, self._is_over, self._is_said = threading.Lock(), False, False
        self._bar: Progress | None = None

    def show(self) -> None:
        """Says it."""
        with self._lock:
            if self._is_over:
                return
            if self._num_steps and sys.stderr.isatty():
                with suppress(ImportError):
                    self._bar = progress_bar(is_transient=True)
            if self._bar is None:
                logging.getLogger("cellrt").warning(self._message)
                self._is_said = True
                return
            self._bar.add_task(self._message, total=self._num_steps, completed=self._num_done)
            self._bar.start()

    def advance(self) -> None:
        """Counts a step that is done."""
        with self._lock:
            self._num_done += 1
            if self._bar is not None:
                self._bar.advance(self._bar.task_ids[0])
            elif self._is_said and not self._is_over:
                logging.getLogger("cellrt").warning("%s: %d of %d", self._message, self._num_done, self._num_steps)

    def end(self) -> None:
        """Takes the bar away."""
        with self._lock:
            self._is_over = True
            if self._bar is not None:
                self._bar.stop()


def progress_bar(is_transient: bool = False) -> Progress:
    """A bar on the standard error, to be started; one that is transient leaves no trace. Raises ImportError without
    rich, which a bare machine with a GPU need not have.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=is_transient)
