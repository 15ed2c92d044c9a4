"""Threads that end before the interpreter does.

A daemon thread that comes back from torch or compiled code while the interpreter finalizes is unwound by Python (up to
3.13) through C++ frames that refuse it, and the whole process aborts. A thread that is no daemon would keep a program
alive that has ended. So these are daemons, and at exit they are told to end and waited for.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

EXIT_WAIT_S = 10.0
"""The most seconds that the exit waits for all threads together.

It is longer than a task, beside other work too, and short enough for a program that waits for the exit.
"""


class ServiceThread(threading.Thread):
    """A thread that serves as long as the program runs.

    Args:
        target: the function that it runs.
        name: the thread's name.
        stop: called at exit by the main thread, once all other threads that are no daemons have ended: tells this one,
            and others that depend on it, to end soon. It returns at once. None: another thread's ``stop`` does.
    """

    def __init__(self, target: Callable[[], None], name: str, stop: Callable[[], None] | None = None) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self.stop = stop


def _end_all() -> None:
    """Tell the service threads of this process to end, and wait for them. Those of a forked process do not exist."""
    threads = [thread for thread in threading.enumerate() if isinstance(thread, ServiceThread)]
    end_s = time.monotonic() + EXIT_WAIT_S
    try:
        for thread in threads:
            if thread.stop is not None:
                thread.stop()
        for thread in threads:
            thread.join(max(0.0, end_s - time.monotonic()))
    finally:
        if any(thread.is_alive() for thread in threads):
            logging.getLogger("cellrt").disabled = True  # torch is taken down under them: what they say means nothing
            _pause_instead_of_aborting()


def _pause_instead_of_aborting() -> None:
    """Have C++ stop a thread that Python tries to unwind, where it would abort the process.

    This is for threads inside a call that takes too long: nothing of the process is needed any more but its exit
    status.
    """
    if sys.version_info >= (3, 14) or os.name != "posix":  # there Python itself stops such threads, or ends them
        return
    with suppress(OSError, AttributeError):
        libraries = ctypes.CDLL(None), ctypes.CDLL("libstdc++.so.6")
        libraries[1]["_ZSt13set_terminatePFvvE"](libraries[0].pause)


# Objects that end by ``weakref.finalize``, such as torch's operators, end in a hook of its own. Hooks run last to
# first, so that one is registered before this one: the threads end first.
weakref.finalize(ServiceThread, _end_all).detach()
atexit.register(_end_all)
