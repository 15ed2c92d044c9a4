"""Checks of what an engine is made with."""

from __future__ import annotations

from collections.abc import Sequence

from cellrt.errors import DefinitionError

LONGEST_S = 1e9
"""The longest time that may be given."""


def check_numbers(**values: object) -> None:
    """Raises DefinitionError unless all options are positive integers."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise DefinitionError(f"{name}: expected a positive integer, got {value!r}")


def check_period(name: str, value: object) -> None:
    """Raises DefinitionError unless an option is a number of seconds above 0, or None."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and not (is_number and 0 < value <= LONGEST_S):  # type: ignore[operator]
        raise DefinitionError(
            f"{name}: expected seconds, more than 0 and at most {LONGEST_S:g}, or None, got {value!r:.80}"
        )


def check_instance(name: str, value: object, expected: type) -> None:
    """Raises DefinitionError unless an option is None or of a type."""
    if value is not None and not isinstance(value, expected):
        raise DefinitionError(f"{name}: expected a {expected.__name__}, got {value!r}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises DefinitionError unless an option is one of some words."""
    if value not in choices:
        raise DefinitionError(f"{name}: expected one of {', '.join(map(repr, choices))}, got {value!r}")


def check_workers(workers: object) -> None:
    """Raises DefinitionError unless it is None, a number of CPU workers or a list of devices."""
    if workers is None:
        return
    if isinstance(workers, Sequence) and not isinstance(workers, str):
        if workers and all(isinstance(name, str) for name in workers):
            return
    elif isinstance(workers, int) and not isinstance(workers, bool) and workers > 0:
        return
    raise DefinitionError(
        f"workers: expected a positive number of CPU workers, or a list of devices such as ['cuda:0'], got {workers!r}"
    )
