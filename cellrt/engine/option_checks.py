"""Checks of an engine's options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from cellrt.errors import DefinitionError
from cellrt.numbers import as_integer, as_real

LONGEST_S = 1e9
"""The longest time that may be given, in seconds."""

USUAL_PRIORITY = 1
"""The priority of requests whose clients name none."""
HandIn: TypeAlias = Callable[[str, Any, bool], Any]
"""Hand in a request of the model of a name in a fraction of the time, and return its future; or None if it is not as
plain as that. The last argument: whether it may wait for a place."""


def not_plain(_: str, __: object, ___: bool) -> None:
    """Return None: a HandIn where Python hands in all requests."""


def check_numbers(**values: object) -> tuple[int, ...]:
    """Return options as ints, in order. Raise DefinitionError unless all are positive integers."""
    numbers: list[int] = []
    for name, value in values.items():
        number = as_integer(value)
        if number is None or number < 1:
            raise DefinitionError(f"{name}: expected a positive integer, got {value!r}")
        numbers.append(number)
    return tuple(numbers)


def check_number_or_none(name: str, value: object) -> int | None:
    """Return an option as an int, or None. Raise DefinitionError for anything else."""
    return None if value is None else check_numbers(**{name: value})[0]


def check_period(name: str, value: object) -> float | None:
    """Return an option that is a number of seconds above 0, or None. Raise DefinitionError for anything else."""
    seconds = as_real(value)
    if value is not None and not (seconds is not None and 0 < seconds <= LONGEST_S):
        raise DefinitionError(
            f"{name}: expected seconds, more than 0 and at most {LONGEST_S:g}, or None, got {value!r:.80}"
        )
    return seconds


def check_instance(name: str, value: object, expected: type) -> None:
    """Raise DefinitionError unless an option is None or of a type."""
    if value is not None and not isinstance(value, expected):
        raise DefinitionError(f"{name}: expected a {expected.__name__}, got {value!r}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raise DefinitionError unless an option is one of some words."""
    if value not in choices:
        raise DefinitionError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_workers(workers: object) -> int | Sequence[str] | None:
    """Return a number of CPU workers, a list of devices, or None. Raise DefinitionError for anything else."""
    if workers is None:
        return None
    if isinstance(workers, Sequence) and not isinstance(workers, str):
        if workers and all(isinstance(name, str) for name in workers):
            return workers
    elif (number := as_integer(workers)) is not None and number > 0:
        return number
    raise DefinitionError(
        f"workers: expected a positive number of CPU workers, or a list of devices such as ['cuda:0'], got {workers!r}"
    )
