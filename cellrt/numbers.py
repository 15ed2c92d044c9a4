"""Numbers that users give, whatever holds them: Python's, NumPy's, or a tensor of one."""

from __future__ import annotations

import operator
from contextlib import suppress

BOOLS = ("bool", "torch.bool")


def as_integer(given: object) -> int | None:
    """Return an integer as an int; None of anything else, and of a bool, which was likely meant for something else."""
    if type(given) is int:
        return given
    if isinstance(given, bool) or str(getattr(given, "dtype", "")) in BOOLS:
        return None
    with suppress(Exception):  # whatever an object of somebody's raises: it is no integer
        return operator.index(given)  # type: ignore[arg-type]
    return None


def as_real(given: object) -> float | None:
    """Return a number as a float; None of anything else, of texts, which Python would read, and of a bool."""
    if isinstance(given, bool | str | bytes | bytearray) or str(getattr(given, "dtype", "")) in BOOLS:
        return None
    with suppress(Exception):
        return float(given)  # type: ignore[arg-type]
    return None
