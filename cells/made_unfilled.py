"""Modules that are made to be given all of their weights: nothing is drawn, and no memory is touched for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from cellrt.cells._made_apart import DRAWS


class _DrawingNothing(TorchFunctionMode):
    """While it lasts, this thread leaves alone what it is to draw into."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func not in DRAWS:
            return func(*args, **given)
        into = given["tensor"] if "tensor" in given else args[0]
        return into if isinstance(into, torch.Tensor) else torch.empty(*args, **given)


@contextmanager
def unfilled() -> Iterator[None]:
    """Modules that are made inside lie on the CPU, and their weights are whatever is there."""
    with torch.device("cpu"), _DrawingNothing():
        yield
