"""Every error a user of cellrt can meet, by who is to blame.

The hierarchy is flat on purpose: one class per cause, each with the HTTP status a server should answer with.
"""

from __future__ import annotations


class CellrtError(Exception):
    """Base of all errors raised by cellrt."""

    http_status = 500


class DefinitionError(CellrtError):
    """A cell, model or engine is defined wrongly: raised where it is defined or registered."""

    http_status = 500


class RequestError(CellrtError):
    """One request, or the graph its unfolder built, is wrong. No other request is affected."""

    http_status = 400


class RequestTooLargeError(RequestError):
    """A request would not fit in the engine even if it were alone there."""

    http_status = 413


class UnknownModelError(RequestError):
    """No model of that name is registered in this engine."""

    http_status = 404


class CellError(CellrtError):
    """A cell raised, returned a wrong shape, or a non-finite value where it promises finite ones."""

    http_status = 500


class OverloadError(CellrtError):
    """The engine's queue is full: try again later."""

    http_status = 429


class CancelledError(CellrtError):
    """The request was cancelled by its client."""

    http_status = 499


class DeadlineError(CellrtError):
    """The request's deadline passed before its last cell was done."""

    http_status = 504


class SessionError(CellrtError):
    """A session has expired, was closed, or lost its state; or what was given is not a state of it."""

    http_status = 410


class DeviceError(CellrtError):
    """The worker that held the request's state died."""

    http_status = 503


class EngineClosedError(CellrtError):
    """The engine is closed, closing, or has no worker left."""

    http_status = 503


class InternalError(CellrtError):
    """A rule of the runtime is broken: a bug in cellrt. The message carries the story of the request."""

    http_status = 500
