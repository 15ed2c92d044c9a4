"""cellrt: serve neural networks whose shape depends on the request, cell by cell.

Names are loaded when first used, so that ``cellrt.core`` can be imported where torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cellrt.cell_file import load_cell
    from cellrt.core.policy import BatchMakerPolicy, FirstComeFirstServed, Job, ShortestJobFirst
    from cellrt.core.processor import Limits, SchedulerSettings
    from cellrt.define import Cell, cell
    from cellrt.engine import Engine
    from cellrt.errors import (
        CancelledError,
        CellError,
        CellrtError,
        DeadlineError,
        DefinitionError,
        DeviceError,
        EngineClosedError,
        InternalError,
        OverloadError,
        RequestError,
        RequestTooLargeError,
        SessionError,
        UnknownModelError,
    )
    from cellrt.future import RequestFuture, Stream
    from cellrt.graph import Graph
    from cellrt.session import Session
    from cellrt.session_store import SessionLimits
    from cellrt.spec import RaggedRows, ragged, rows
    from cellrt.timeline import Timeline
    from cellrt.unfolder import Unfolder, unfold
    from cellrt.worker.device_executor import DeviceOptions

__version__ = "0.1.0"

_HOMES = {
    "define": ("Cell", "cell"),
    "cell_file": ("load_cell",),
    "core.policy": ("BatchMakerPolicy", "FirstComeFirstServed", "Job", "ShortestJobFirst"),
    "core.processor": ("Limits", "SchedulerSettings"),
    "engine": ("Engine",),
    "errors": (
        "CancelledError",
        "CellError",
        "CellrtError",
        "DeadlineError",
        "DefinitionError",
        "DeviceError",
        "EngineClosedError",
        "InternalError",
        "OverloadError",
        "RequestError",
        "RequestTooLargeError",
        "SessionError",
        "UnknownModelError",
    ),
    "future": ("RequestFuture", "Stream"),
    "graph": ("Graph",),
    "session": ("Session",),
    "session_store": ("SessionLimits",),
    "spec": ("RaggedRows", "ragged", "rows"),
    "timeline": ("Timeline",),
    "unfolder": ("Unfolder", "unfold"),
    "worker.device_executor": ("DeviceOptions",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BatchMakerPolicy",
    "CancelledError",
    "Cell",
    "CellError",
    "CellrtError",
    "DeadlineError",
    "DefinitionError",
    "DeviceError",
    "DeviceOptions",
    "Engine",
    "EngineClosedError",
    "FirstComeFirstServed",
    "Graph",
    "InternalError",
    "Job",
    "Limits",
    "OverloadError",
    "RaggedRows",
    "RequestError",
    "RequestFuture",
    "RequestTooLargeError",
    "SchedulerSettings",
    "Session",
    "SessionError",
    "SessionLimits",
    "ShortestJobFirst",
    "Stream",
    "Timeline",
    "Unfolder",
    "UnknownModelError",
    "cell",
    "load_cell",
    "ragged",
    "rows",
    "unfold",
]


_SHELVES = ("cells", "kernels", "unfolders")


def __getattr__(name: str) -> object:
    if name in _SHELVES:
        return importlib.import_module(f"cellrt.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cellrt' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"cellrt.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
