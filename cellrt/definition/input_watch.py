"""Finds out which inputs a cell writes to in place, by looking at them from outside."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput, RaggedRows


class InputWatch:
    """Watches inputs from when it is made. They must be no inference tensors, which keep no version.

    A write shows by the tensor's version or, if it went past torch (through NumPy, or ``.data``), by the contents of a
    tensor that has some. A change of the tensor's own shape or strides counts too.
    """

    def __init__(self, inputs: Mapping[str, CellInput]) -> None:
        self._inputs = {name: _parts(value) for name, value in inputs.items()}
        self._before = {name: [_state(part) for part in parts] for name, parts in self._inputs.items()}

    def written(self) -> set[str]:
        """Return the inputs that were written to since."""
        return {name for name, parts in self._inputs.items() if any(map(_is_other, parts, self._before[name]))}


State = tuple[int, torch.Size, tuple[int, ...], torch.Tensor]


def _parts(value: CellInput) -> tuple[torch.Tensor, ...]:
    """Return the tensors of an input that a cell must not write to; pages are there to be appended to."""
    if isinstance(value, PagedRows):
        return tuple(value[1:-1])
    return tuple(value) if isinstance(value, RaggedRows | Spans) else (value,)


def _state(tensor: torch.Tensor) -> State:
    return tensor._version, tensor.shape, tensor.stride(), tensor.clone()


def _is_other(tensor: torch.Tensor, before: State) -> bool:
    version, shape, strides, values = before
    if (tensor._version, tensor.shape, tensor.stride()) != (version, shape, strides):
        return True
    return not tensor.is_meta and not torch.equal(tensor.view(torch.uint8), values.view(torch.uint8))
