"""Errors between processes: class, message and cause as text, since no object of one process reaches another."""

from __future__ import annotations

import traceback

from cellrt import errors
from cellrt.errors import CellrtError, InternalError

EncodedError = tuple[str, str, str]
"""The class, the message, and the traceback of the cause in the engine's process."""
CLASSES = {
    name: value for name, value in vars(errors).items() if isinstance(value, type) and issubclass(value, CellrtError)
}


def encode_error(error: BaseException) -> EncodedError:
    """Return an error as JSON has it."""
    cause = error.__cause__
    before = "" if cause is None else "".join(traceback.format_exception(cause)).rstrip()
    if isinstance(error, CellrtError):
        return type(error).__name__, str(error), before
    before = "".join(traceback.format_exception(error)).rstrip()
    return InternalError.__name__, f"the engine's process raised {type(error).__name__}: {error}", before


def decode_error(encoded: EncodedError) -> CellrtError:
    """Return the error of the same class; its cause in the other process is a note."""
    name, message, before = encoded
    error = CLASSES.get(name, InternalError)(message)
    if before:
        error.add_note(f"In the engine's process:\n{before}")
    return error
