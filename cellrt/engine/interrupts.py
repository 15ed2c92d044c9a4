"""Interrupts that a C function turns into SystemError."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from cellrt.errors import interrupt_in

P = ParamSpec("P")
R = TypeVar("R")


def interruptible(function: Callable[P, R]) -> Callable[P, R]:
    """Have a client's function raise the interrupt that a C function in it has turned into a SystemError."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except SystemError as error:
            if (interrupt := interrupt_in(error)) is not None:
                raise interrupt from None
            raise

    return call
