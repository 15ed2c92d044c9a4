"""Progress messages while Numba compiles; loading from its cache on disk, however slow, is not reported.

    python -m cellrt.engine.compilation

compiles the scheduler, so that the first engine of an installation need not.

Numba compiles with one core. If there are two, a second process does half of the scheduler and leaves it on disk, where
this one finds it. Whatever becomes of that process: what it has not left there is compiled here.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from numba.core import event as events
from numba.core.dispatcher import Dispatcher

from cellrt.engine.announce import EVERY_S, QUIET_S, Announcement
from cellrt.worker.cpu.warm_up import warm_up, warm_up_second_half

CORE, MODULE = "cellrt.core", "cellrt.engine.compilation"
SECOND_HALF = "second-half"
MOST_S = 600.0
"""The most seconds that a second process may take."""
MACHINE_CODE = 0.55
"""The cost of machine code, relative to what comes before it.

It was measured on the scheduler, whose estimate it is for.
"""


@contextmanager
def compilation_told(
    what: str, package: str = "", quiet_s: float = QUIET_S, every_s: float = EVERY_S
) -> Iterator[Callable[[str], None]]:
    """Report what Numba compiles within the block, in any thread, once that takes longer than ``quiet_s`` seconds.

    Args:
        what: in words.
        package: whose functions are counted, such as "cellrt.core": they are all compiled if one is. "": those of any
            package that are compiled and that these call.
        quiet_s, every_s: seconds until the first report, and until the next in the log.

    Yield a function that counts a function, by its name, that another process compiled.
    """
    message = f"cellrt compiles {what}, only once"
    announcement = Announcement(message, quiet_s=quiet_s, every_s=every_s)
    watch = _Watch(announcement, package)
    with events.install_listener("numba:compile", watch):
        try:
            yield watch.count
        finally:
            announcement.end()


def functions_of(package: str) -> set[Dispatcher]:
    """Return the functions of a package's imported modules that are for Numba to compile."""
    modules = [module for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    functions = {value for module in modules for value in vars(module).values() if isinstance(value, Dispatcher)}
    return {function for function in functions if function.py_func.__module__.startswith(f"{package}.")}


def reached_from(function: Dispatcher) -> set[Dispatcher]:
    """Return a function with all that it calls, directly or not, by the names of its module or closure."""
    found, waiting = set[Dispatcher](), [function]
    while waiting:
        one = waiting.pop()
        if one not in found:
            found.add(one)
            held = [cell.cell_contents for cell in one.py_func.__closure__ or ()]
            held += [one.py_func.__globals__.get(name) for name in one.py_func.__code__.co_names]
            waiting += [value for value in held if isinstance(value, Dispatcher)]
    return found


def cost_of(function: Dispatcher) -> float:
    """Return about what it costs to compile a function, in bytes of Python's code.

    A part (``native/parts.py``) costs by its own code; a function with machine code, by that of all that it calls as
    well.
    """
    cost = _size(function)
    if not function.targetoptions.get("no_cpython_wrapper"):
        cost += MACHINE_CODE * sum(map(_size, reached_from(function)))
    return cost


def _size(function: Dispatcher) -> float:
    return len(function.py_func.__code__.co_code)


def warm_up_told() -> None:
    """Compile the scheduler, and report it, or load it from disk."""
    with compilation_told("its scheduler", CORE) as count, _SecondProcess(count) as second:
        warm_up(half_way=second.wait)


class _SecondProcess(events.Listener):  # type: ignore[misc]
    """A second process that compiles the second half, from the first compilation here until the block is left.

    Args:
        count: is called with the name of each function that was compiled there.
    """

    def __init__(self, count: Callable[[str], None]) -> None:
        self._count = count
        self._reader: threading.Thread | None = None
        self._process: subprocess.Popen[str] | None = None
        self._is_due = has_second_core()

    def __enter__(self) -> _SecondProcess:
        events.register("numba:compile", self)
        return self

    def __exit__(self, *error: object) -> None:
        self._is_due = False
        events.unregister("numba:compile", self)
        if self._process is not None and self._reader is not None:
            self._process.kill()
            self._reader.join()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()

    def on_start(self, event: events.Event) -> None:
        """Start it, once."""
        if self._is_due and event.data["dispatcher"].py_func.__module__.startswith(CORE):
            self._is_due = False
            command = [sys.executable, *["-O"] * sys.flags.optimize, "-m", MODULE, SECOND_HALF]
            environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            pipe, nowhere = subprocess.PIPE, subprocess.DEVNULL
            with suppress(OSError):
                self._process = subprocess.Popen(
                    command, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=nowhere
                )
                self._reader = threading.Thread(target=self._read, daemon=True)
                self._reader.start()

    def on_end(self, event: events.Event) -> None:
        """Do nothing: the process is not ended here."""

    def _read(self) -> None:
        if self._process is not None and self._process.stdout is not None:
            for line in self._process.stdout:
                self._count(line.strip())

    def wait(self) -> None:
        """Wait until it is done, if it was started."""
        self._is_due = False
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(MOST_S)


def has_second_core() -> bool:
    """Return whether this process may use two cores, and its interpreter is a Python that can be started again."""
    is_python = "python" in Path(sys.executable or "").name.lower()
    return is_python and len(os.sched_getaffinity(0)) > 1


def _end_with_parent() -> None:
    """End this process when the one that started it does: its end of the pipe is closed then."""
    while os.read(0, 1):  # a reader with a buffer would be locked while the interpreter ends
        pass
    os._exit(1)


def _name(function: Dispatcher) -> str:
    return f"{function.py_func.__module__}.{function.py_func.__qualname__}"


class _Watch(events.Listener):  # type: ignore[misc]
    """A listener that begins an announcement with the first function that is compiled, and counts functions.

    These are the functions of a package, or those that are compiled with what they call.
    """

    def __init__(self, announcement: Announcement, package: str) -> None:
        self._announcement, self._package = announcement, package
        self._costs: dict[str, float] = {}
        """The costs of all functions that are to be compiled, by name."""
        self._compiled: set[str] = set()

    def on_start(self, event: events.Event) -> None:
        """Begin, if it has not begun, and find out what is to be compiled."""
        function = event.data["dispatcher"]
        if self._package:
            self._expect(set() if self._costs else functions_of(self._package))
        elif _name(function) not in self._costs and not function.py_func.__module__.startswith("numba."):
            self._expect({each for each in reached_from(function) if not each.overloads})
        self._announcement.begin()

    def on_end(self, event: events.Event) -> None:
        """Count a function; functions that it calls and that were not compiled were loaded from disk."""
        function = event.data["dispatcher"]
        if not self._package:
            for name in {_name(each) for each in reached_from(function)} & self._costs.keys() - self._compiled:
                if name != _name(function):
                    self._announcement.expect(-1, -self._costs.pop(name))
        self.count(_name(function))

    def count(self, name: str) -> None:
        """Count a function once, however many signatures it has and processes compiled it."""
        if name not in self._compiled and name in self._costs:
            self._compiled.add(name)
            self._announcement.advance(self._costs[name])

    def _expect(self, functions: set[Dispatcher]) -> None:
        new = {_name(each): cost_of(each) for each in functions if _name(each) not in self._costs}
        self._costs |= new
        self._announcement.expect(len(new), sum(new.values()))


class _Teller(events.Listener):  # type: ignore[misc]
    """A listener that prints the names of compiled functions."""

    def on_start(self, event: events.Event) -> None:
        """Do nothing: it is not compiled yet."""

    def on_end(self, event: events.Event) -> None:
        """Print the name of a function."""
        print(_name(event.data["dispatcher"]), flush=True)


def main(arguments: list[str]) -> None:
    """Compile all, or the second half as a second process does.

    No garbage is collected here, which is an eighth of the time; a program's own collector is left as it is.
    """
    gc.disable()
    if arguments == [SECOND_HALF]:
        threading.Thread(target=_end_with_parent, daemon=True).start()
        with events.install_listener("numba:compile", _Teller()):
            warm_up_second_half()
    else:
        warm_up_told()


if __name__ == "__main__":
    main(sys.argv[1:])
