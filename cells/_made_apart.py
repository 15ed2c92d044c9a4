"""Modules that are made to be given weights: they draw nothing that is others', and lie on no default device.

``LSTMCell(16, 32)`` draws its weights from torch's generator, as any module does. ``LSTMCell.from_torch(...)`` copies
all of them: it draws nothing from that, and makes nothing on a default device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from cellrt import DefinitionError

Given = ParamSpec("Given")
Made = TypeVar("Made")

DRAWS = frozenset(
    (
        *(torch.rand, torch.randn, torch.randint, torch.normal, torch.Tensor.uniform_, torch.Tensor.normal_),
        *(nn.init.uniform_, nn.init.normal_, nn.init.trunc_normal_, nn.init.xavier_uniform_, nn.init.xavier_normal_),
        *(nn.init.kaiming_uniform_, nn.init.kaiming_normal_, nn.init.orthogonal_),
    )
)
"""The functions that modules call for their first weights."""


class _DrawingApart(TorchFunctionMode):
    """A mode in which this thread draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._generator = torch.Generator()

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func in DRAWS:
            given["generator"] = self._generator
        return func(*args, **given)


@contextmanager
def made_apart() -> Iterator[None]:
    """Make modules inside the context on the CPU, and draw nothing from torch's generator."""
    with torch.device("cpu"), _DrawingApart():
        yield


def making_apart(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """Have a function that copies the weights of torch's layers run inside ``made_apart``.

    It raises DefinitionError for a layer that computes something else than torch's own: its weights do not say what.
    The context manager itself would do as a decorator, but it is an object that cells of a class with such a method
    would be told from each other by.
    """

    @functools.wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        for given in (*args, *kwargs.values()):
            if isinstance(given, nn.Module):
                refuse_changed(given)
        with made_apart():
            return function(*args, **kwargs)

    return call


def refuse_changed(module: nn.Module) -> None:
    """Raise DefinitionError for a layer of torch's that has a ``forward`` of its own, or hooks."""
    kind = next(base for base in type(module).__mro__ if base.__module__.partition(".")[0] in ("torch", "cellrt"))
    if kind is nn.Module or kind.__module__.startswith("cellrt."):
        return
    changed = [name for name in ("forward", "__call__") if getattr(type(module), name) is not getattr(kind, name)]
    changed += ["forward"] * ("forward" in vars(module))
    changed += ["hooks"] * bool(module._forward_hooks or module._forward_pre_hooks)
    if changed:
        raise DefinitionError(
            f"{type(module).__name__} has {' and '.join(changed)} of its own, which a copy of its weights leaves out: "
            f"expected {kind.__name__} as torch has it; give the module itself to cellrt.cell"
        )
