"""The event logs of engines, which ``native/crash_log.c`` writes to standard error when the process crashes.

A fault in compiled code ends the process by a signal, and Python's ``faulthandler`` shows nothing of the scheduler.
"""

from __future__ import annotations

import weakref

from cellrt.core.processor import Processor
from cellrt.core.state.event_log import NAMES
from cellrt.core.state.tables import EVENT

try:
    from cellrt.native import _crash_log
except ImportError:
    _crash_log = None  # type: ignore[assignment]

_LAYOUT = *(EVENT.fields[name][1] for name in EVENT.names or ()), EVENT.itemsize  # type: ignore[index]
"""The offsets of an event's fields, and its size."""


def watch_events(processor: Processor) -> None:
    """Have the events of an engine written if the process crashes, once ``write_at_a_crash`` was called."""
    if _crash_log is None or _crash_log.layout() != _LAYOUT:
        return
    for what, text in NAMES.items():
        _crash_log.name(what, text)
    events, count = processor.tables.events, processor.tables.settings["num_events"]
    number = _crash_log.watch(events.ctypes.data, events.size, count.ctypes.data)
    weakref.finalize(processor, _crash_log.forget, number).atexit = False


def write_at_a_crash() -> None:
    """Have the last events of this process's engines written to standard error if a signal ends it.

    Other handlers of these signals, such as ``faulthandler``, are called afterwards. Where the extension was not built
    nothing is done.
    """
    if _crash_log is not None:
        _crash_log.install()
