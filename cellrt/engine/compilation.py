"""What Numba compiles is told while it is compiled; what it loads from its cache on disk, however slowly, is not.

    python -m cellrt.engine.compilation

compiles the scheduler, so that the first engine of an installation need not.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from numba.core import event as events
from numba.core.dispatcher import Dispatcher

from cellrt.engine.announce import EVERY_S, QUIET_S, Announcement
from cellrt.worker.cpu.warm_up import warm_up

CORE = "cellrt.core"


@contextmanager
def compilation_told(
    what: str, package: str = "", quiet_s: float = QUIET_S, every_s: float = EVERY_S
) -> Iterator[None]:
    """Tell of what Numba compiles inside, in any thread, once that takes longer than ``quiet_s`` seconds.

    Args:
        what: in words.
        package: whose functions are counted, such as "cellrt.core": they are all compiled if one is. "": those of all
            packages, of which nobody knows how many there will be.
        quiet_s, every_s: seconds until something is said, and until it is said again in the log.
    """
    message = f"cellrt compiles {what}, only once"
    announcement = Announcement(message, num_functions(package) if package else 0, quiet_s, every_s)
    with events.install_listener("numba:compile", _Watch(announcement, package)):
        try:
            yield
        finally:
            announcement.end()


def num_functions(package: str) -> int:
    """Return how many functions of a package's imported modules are for Numba to compile."""
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    functions = {value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)}
    return sum(function.py_func.__module__.startswith(f"{package}.") for function in functions)


def warm_up_told() -> None:
    """Compile the scheduler, and tell of it, or load it from disk."""
    with compilation_told("its scheduler", CORE):
        warm_up()


class _Watch(events.Listener):  # type: ignore[misc]
    """Begins an announcement with the first function that is compiled, and counts those of a package."""

    def __init__(self, announcement: Announcement, package: str) -> None:
        self._announcement, self._package = announcement, package
        self._compiled: set[Dispatcher] = set()

    def on_start(self, event: events.Event) -> None:
        """Begin, if it has not begun."""
        self._announcement.begin()

    def on_end(self, event: events.Event) -> None:
        """Count a function, once whatever number of signatures it has."""
        function = event.data["dispatcher"]
        if function not in self._compiled and function.py_func.__module__.startswith(self._package):
            self._compiled.add(function)
            self._announcement.advance()


if __name__ == "__main__":
    warm_up_told()
