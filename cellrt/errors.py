"""Every error a user of cellrt can meet, by who is to blame.

The hierarchy is flat on purpose: one class per cause. ``http_status`` has the status that a server answers with.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Mapping
from types import MappingProxyType


class CellrtError(Exception):
    """Base of all errors raised by cellrt."""


class DefinitionError(CellrtError):
    """A cell, model or engine is defined wrongly: raised where it is defined or registered."""


class RequestError(CellrtError):
    """One request, or the graph its unfolder built, is wrong. No other request is affected."""


class RequestTooLargeError(RequestError):
    """A request, or a batch of them, would not fit in the engine even if it were alone there."""


class UnknownModelError(RequestError):
    """No model of that name is registered in this engine."""


class CellError(CellrtError):
    """A cell raised, returned a wrong shape, or a non-finite value where it promises finite ones."""


class OverloadError(CellrtError):
    """A queue is full: try again later."""


class CancelledError(CellrtError, concurrent.futures.CancelledError, asyncio.CancelledError):
    """The request was cancelled by its client. Also what ``concurrent.futures`` and ``asyncio`` call so."""


class DeadlineError(CellrtError):
    """The request's deadline passed before its last cell was done."""


class SessionError(CellrtError):
    """A session has expired, was closed, or lost its state; or what was given is not a state of it."""


class DeviceError(CellrtError):
    """The worker that held the request's state died."""


class EngineClosedError(CellrtError):
    """The engine is closed, closing, or has no worker left."""


class InternalError(CellrtError):
    """A rule of the runtime is broken: a bug in cellrt. The message carries the event log of the request."""


_HTTP_STATUS: Mapping[type[CellrtError], int] = MappingProxyType(
    {
        CellrtError: 500,
        DefinitionError: 500,
        RequestError: 400,
        RequestTooLargeError: 413,
        UnknownModelError: 404,
        CellError: 500,
        OverloadError: 429,
        CancelledError: 499,
        DeadlineError: 504,
        SessionError: 410,
        DeviceError: 503,
        EngineClosedError: 503,
        InternalError: 500,
    }
)


def http_status(error: BaseException) -> int:
    """Return the HTTP status of an error, by its class or the nearest base class; 500 for errors that are not ours."""
    return next((_HTTP_STATUS[kind] for kind in type(error).__mro__ if kind in _HTTP_STATUS), 500)


def interrupt_in(error: SystemError) -> BaseException | None:
    """Return the exception of a signal's handler, such as KeyboardInterrupt, that a SystemError hides; None if none.

    Python makes such an error ("... returned a result with an exception set") if a C function lets an exception pass.
    """
    cause = error.__cause__
    return None if cause is None or isinstance(cause, Exception) else cause
