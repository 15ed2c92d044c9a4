"""cellrt: serve neural networks whose shape depends on the request, cell by cell.

Names are loaded when first used, so that ``cellrt.core`` can be imported where torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cellrt.core.scheduling.policy import Policy
    from cellrt.core.state.settings import Limits, SchedulerSettings
    from cellrt.definition.cell import Cell
    from cellrt.definition.define import cell, load_cell
    from cellrt.definition.spans import PagedRows, Spans
    from cellrt.definition.spec import RaggedRows, RowSpec, as_spec, grows, pages, ragged, rows, span, token
    from cellrt.engine.engine import Engine
    from cellrt.engine.future import RequestFuture
    from cellrt.engine.futures import Futures
    from cellrt.engine.session import Session
    from cellrt.engine.session_limits import SessionLimits
    from cellrt.engine.stream import Stream
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
        http_status,
    )
    from cellrt.graph.graph import Graph
    from cellrt.graph.loops import LoopBody
    from cellrt.graph.symbols import Chain, Dag, GrowingState, Loop, LoopOfCells, Node, Output, State, Steps, Tree
    from cellrt.graph.unfolder import Unfolder, unfold
    from cellrt.language.model import LanguageModel, load
    from cellrt.process.client import Client, connect
    from cellrt.process.engine_process import EngineProcess
    from cellrt.process.remote_session import RemoteSession
    from cellrt.view.timeline import Timeline
    from cellrt.worker.device.executor import DeviceOptions

__version__ = "0.1.0"

_HOMES = {
    "definition.cell": ("Cell",),
    "definition.define": ("cell", "load_cell"),
    "core.scheduling.policy": ("Policy",),
    "core.state.settings": ("Limits", "SchedulerSettings"),
    "engine.engine": ("Engine",),
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
        "http_status",
    ),
    "engine.future": ("RequestFuture",),
    "engine.futures": ("Futures",),
    "engine.stream": ("Stream",),
    "graph.graph": ("Graph",),
    "graph.loops": ("LoopBody",),
    "graph.symbols": (
        "Chain",
        "Dag",
        "GrowingState",
        "Loop",
        "LoopOfCells",
        "Node",
        "Output",
        "State",
        "Steps",
        "Tree",
    ),
    "engine.session": ("Session",),
    "engine.session_limits": ("SessionLimits",),
    "language.model": ("LanguageModel", "load"),
    "process.client": ("Client", "connect"),
    "process.engine_process": ("EngineProcess",),
    "process.remote_session": ("RemoteSession",),
    "definition.spans": ("PagedRows", "Spans"),
    "definition.spec": ("RaggedRows", "RowSpec", "as_spec", "grows", "pages", "ragged", "rows", "span", "token"),
    "view.timeline": ("Timeline",),
    "graph.unfolder": ("Unfolder", "unfold"),
    "worker.device.executor": ("DeviceOptions",),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "CancelledError",
    "Cell",
    "CellError",
    "CellrtError",
    "Chain",
    "Client",
    "Dag",
    "DeadlineError",
    "DefinitionError",
    "DeviceError",
    "DeviceOptions",
    "Engine",
    "EngineClosedError",
    "EngineProcess",
    "Futures",
    "Graph",
    "GrowingState",
    "InternalError",
    "LanguageModel",
    "Limits",
    "Loop",
    "LoopBody",
    "LoopOfCells",
    "Node",
    "Output",
    "OverloadError",
    "PagedRows",
    "Policy",
    "RaggedRows",
    "RemoteSession",
    "RequestError",
    "RequestFuture",
    "RequestTooLargeError",
    "RowSpec",
    "SchedulerSettings",
    "Session",
    "SessionError",
    "SessionLimits",
    "Spans",
    "State",
    "Steps",
    "Stream",
    "Timeline",
    "Tree",
    "Unfolder",
    "UnknownModelError",
    "as_spec",
    "cell",
    "connect",
    "grows",
    "http_status",
    "load",
    "load_cell",
    "pages",
    "ragged",
    "rows",
    "span",
    "token",
    "unfold",
]


_SHELVES = ("cells", "kernels", "unfolders")


def __dir__() -> list[str]:
    return sorted([*__all__, *_SHELVES, "__version__"])


def __getattr__(name: str) -> object:
    if name in _SHELVES:
        return importlib.import_module(f"cellrt.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'cellrt' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"cellrt.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value
