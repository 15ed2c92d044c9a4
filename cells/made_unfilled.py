"""Modules that are made to be given all of their weights: nothing is drawn, and no memory is touched for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cellrt.cells._made_apart import DRAWS

MAKES = frozenset((torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn))
"""The functions that modules call to make their weights."""


class _Unfilled(TorchFunctionMode):
    """A mode in which this thread leaves new weights unfilled, and makes them on one device."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in MAKES:
            return torch.empty(*args, **{**given, "device": self._device})
        if func in DRAWS:
            return given["tensor"] if "tensor" in given else args[0]
        return func(*args, **given)


@contextmanager
def unfilled(*, has_values: bool = True) -> Iterator[None]:
    """Make modules inside the context on the CPU, with weights left uninitialised.

    Without ``has_values`` weights have shapes alone, on the device "meta"; what is computed is not.
    """
    with torch.device("cpu"), _Unfilled("cpu" if has_values else "meta"):
        yield
