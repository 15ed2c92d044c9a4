"""Errors across processes: class, message and origin, as text; no object of one process reaches another."""

from __future__ import annotations

import traceback

from cellrt import errors
from cellrt.errors import CellrtError, InternalError

Told = tuple[str, str, str]
"""Class, message, and what was raised before in the engine's process."""
CLASSES = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, CellrtError)
}


def told(error: BaseException) -> Told:
    """An error as JSON has it."""
    cause = error.__cause__
    before = "" if cause is None else "".join(traceback.format_exception(cause)).rstrip()
    if isinstance(error, CellrtError):
        return type(error).__name__, str(error), before
    before = "".join(traceback.format_exception(error)).rstrip()
    return InternalError.__name__, f"the engine's process raised {type(error).__name__}: {error}", before


def heard(told: Told) -> CellrtError:
    """The error of the same class; what was raised before it is a note."""
    name, message, before = told
    error = CLASSES.get(name, InternalError)(message)
    if before:
        error.add_note(f"In the engine's process:\n{before}")
    return error
