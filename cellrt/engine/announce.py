"""Progress messages of work that may take long the first time."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

QUIET_S, EVERY_S = 4.0, 15.0


@contextmanager
def announced(
    message: str, num_steps: int = 0, quiet_s: float = QUIET_S, every_s: float = EVERY_S
) -> Iterator[Callable[[], None]]:
    """Report on the work within the block if it takes longer than ``quiet_s`` seconds.

    Yield a function that counts a step; any thread may call it. On a terminal a progress bar shows, elsewhere a warning
    in the log, again every ``every_s`` seconds.
    """
    announcement = Announcement(message, num_steps, quiet_s, every_s)
    announcement.begin()
    try:
        yield announcement.advance
    finally:
        announcement.end()


class Announcement:
    """The report on some work, by a thread of its own; none once the work is over, or if it is over soon.

    Args:
        message: the name of the work.
        num_steps: the number of its steps, each of cost 1; 0: it is unknown, or set by ``expect``.
        quiet_s, every_s: seconds until the first report, and until the next in the log.
    """

    def __init__(self, message: str, num_steps: int = 0, quiet_s: float = QUIET_S, every_s: float = EVERY_S) -> None:
        self._message, self._num_steps, self._num_done = message, num_steps, 0
        self._cost, self._cost_done, self._cost_before = float(num_steps), 0.0, 0.0
        self._quiet_s, self._every_s = quiet_s, every_s
        self._lock, self._over = threading.Lock(), threading.Event()
        self._bar: Progress | None = None
        self._began: float | None = None

    def begin(self) -> None:
        """Begin to count the time, if it is not counted yet."""
        with self._lock:
            if self._began is None:
                self._began, self._cost_before = time.monotonic(), self._cost_done
                threading.Thread(target=self._tell, name="cellrt-announcement", daemon=True).start()

    def expect(self, num_steps: int, cost: float) -> None:
        """Add further steps that are to be done; ``cost`` is that of all of them."""
        with self._lock:
            self._num_steps, self._cost = self._num_steps + num_steps, self._cost + cost
            self._draw()

    def advance(self, cost: float = 1.0) -> None:
        """Count a step that is done."""
        with self._lock:
            self._num_done, self._cost_done = self._num_done + 1, self._cost_done + cost
            self._draw()

    def end(self) -> None:
        """Remove the bar."""
        self._over.set()
        with self._lock:
            if self._bar is not None:
                self._bar.stop()

    def _tell(self) -> None:
        """Report until the work is over: by a bar, or line by line."""
        wait_s = self._quiet_s
        while not self._over.wait(wait_s):
            wait_s = self._every_s
            with self._lock:
                if self._over.is_set() or self._has_bar():
                    return
                logging.getLogger("cellrt").warning(self._line())

    def _has_bar(self) -> bool:
        """Show a bar, and return whether there is one: on a terminal, if rich is installed."""
        if not sys.stderr.isatty():
            return False
        with suppress(ImportError):
            bar = progress_bar(is_transient=True, counts="{task.fields[count]}")
            bar.add_task(self._message, count="")
            self._bar = bar
            self._draw()
            bar.start()
        return self._bar is not None

    def _draw(self) -> None:
        """Update the bar, if there is one."""
        if self._bar is not None:
            task, count = self._bar.task_ids[0], f"{self._num_done}/{self._num_steps or '?'}"
            self._bar.update(task, total=self._cost or None, completed=self._cost_done, count=count)

    def _line(self) -> str:
        """Return the message with the number of steps that are done, and about how long the others take."""
        if not self._num_steps:
            return f"{self._message} ({self._num_done} done)" if self._num_done else self._message
        line = f"{self._message} ({min(self._num_done, self._num_steps)} of {self._num_steps} done"
        done, left = self._cost_done - self._cost_before, self._cost - self._cost_done
        if self._began is not None and self._num_done < self._num_steps and done > 0 and left > 0:
            left_s = (time.monotonic() - self._began) * left / done
            line += f", about {left_s:.0f} s left"
        return line + ")"


def progress_bar(is_transient: bool = False, counts: str = "") -> Progress:
    """Return a bar on the standard error, to be started; one that is transient leaves no trace.

    ``counts``: the format of the text of its steps; default: those that are done of all.

    Raise ImportError without rich, which a bare machine with a GPU need not have.
    """
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = TextColumn(counts, markup=False) if counts else MofNCompleteColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), count, TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True), transient=is_transient)
