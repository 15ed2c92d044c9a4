"""What ``make test`` leaves to ``make slow``, so that it takes minutes: most examples of a property, whose profile of
Hypothesis is another there (tests/conftest.py), and most combinations of parameters where each takes seconds."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numba
import pytest
from hypothesis import settings

IN_MAKE_TEST = 6
IN_MAKE_SLOW = 300
IN_A_NIGHT = 3000
"""For one file at a time, such as 10,000 random models: ``pytest --hypothesis-profile night --timeout 0 FILE``."""
PLENTY = 30

LONG_IN_PYTHON = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="takes seconds where nothing is compiled")
"""For what is one more of a kind, and goes nowhere in the core that the others do not."""


def examples(count: int) -> int:
    """In ``make test`` a fifth of ``count``, where each example costs much; in ``make slow`` ten times as many."""
    return max(1, count * settings().max_examples // PLENTY)


def quickly(some: Collection[Any], of: Iterable[Any]) -> list[Any]:
    """Parameters ``of`` a test, of which ``make test`` tries ``some`` alone."""
    return [
        pytest.param(*(each if isinstance(each, tuple) else [each]), marks=() if each in some else pytest.mark.slow)
        for each in of
    ]
