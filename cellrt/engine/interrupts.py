"""Interrupts that come out of a C function as SystemError."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from cellrt.errors import interrupt_in

P = ParamSpec("P")
R = TypeVar("R")


def interruptible(function: Callable[P, R]) -> Callable[P, R]:
    """Has a function of a client's raise the interrupt that a C function in it has made a SystemError."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except SystemError as error:
            if (interrupt := interrupt_in(error)) is not None:
                raise interrupt from None
            raise

    return call
