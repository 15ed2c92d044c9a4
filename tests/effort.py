"""How many examples a property is tried with where each costs much: few in ``make test``, ten times as many in ``make
slow``, whose profile of Hypothesis is another (tests/conftest.py)."""

from __future__ import annotations

from hypothesis import settings

IN_MAKE_TEST = 30


def examples(count: int) -> int:
    """``count`` where the profile's own number is ``IN_MAKE_TEST``, and as much more where that is more."""
    return max(1, count * settings().max_examples // IN_MAKE_TEST)
