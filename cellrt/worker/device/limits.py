"""The numbers that a cell takes as an integer input, found by watching it run on its example.

On a CPU a token outside an embedding is an error of one row. On a GPU it is an assertion in a kernel, which loses the
device with every request on it. So such inputs are checked before a cell reads them there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cellrt.definition.cell import Cell
from cellrt.definition.spec import CellInput, RaggedRows

_ATEN = torch.ops.aten
_INTEGERS = (torch.int64, torch.int32)


class Limits(NamedTuple):
    """The range of an input's values: from ``first`` up to, but without, ``end``."""

    first: int
    end: int

    def are_left_by(self, values: torch.Tensor) -> torch.Tensor:
        """Return whether a value is outside, for each row of values ``[rows, *shape]``: bool ``[rows]``."""
        is_outside = (values < self.first) | (values >= self.end)
        return is_outside.reshape(len(values), -1).any(1) if values.dim() > 1 else is_outside


def find_limits(cell: Cell) -> Mapping[str, Limits]:
    """Return the limits of those integer inputs that a cell on the CPU was seen to index a tensor with, unchanged.

    None are found for indices that it computes from an input, nor for a cell that does not run on zeros.
    """
    if not any(spec.dtype in _INTEGERS and not spec.has_nodes for spec in cell.inputs.values()):
        return {}
    inputs = cell.example_inputs(cell.batch_sizes[0] if cell.batch_sizes else min(2, cell.max_batch))
    watch = _Watch(dict(zip(cell.inputs, inputs)))
    try:
        # With gradients on, where ready-made cells take their plain form.
        with torch.inference_mode(False), torch.enable_grad(), watch:
            cell.run_step(*inputs)
    except KeyboardInterrupt:
        raise
    except BaseException:  # a cell may refuse zeros
        pass
    return watch.found


class _Watch(TorchDispatchMode):
    """A mode that records the sizes of tensors that are indexed with one of the inputs."""

    def __init__(self, inputs: Mapping[str, CellInput]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, Limits] = {}
        self._names: dict[int, str] = {}
        for name, given in inputs.items():
            value = given.values if isinstance(given, RaggedRows) else given
            if isinstance(value, torch.Tensor) and value.dtype in _INTEGERS:
                self._names[value.untyped_storage().data_ptr()] = name

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        packet = function.overloadpacket
        if packet in (_ATEN.embedding, _ATEN._embedding_bag, _ATEN._embedding_bag_forward_only):
            self._note(args[1], 0, len(args[0]))
        elif packet in (_ATEN.index_select, _ATEN.gather):
            self._note(args[2], 0, args[0].shape[args[1]])
        elif packet is _ATEN.index:
            for size, index in zip(args[0].shape, args[1]):
                if index is not None:
                    self._note(index, -size, size)
        return function(*args, **(kwargs or {}))

    def _note(self, index: torch.Tensor, first: int, end: int) -> None:
        name = self._names.get(index.untyped_storage().data_ptr())
        if name is not None and index.dtype in _INTEGERS:
            before = self.found.get(name, Limits(first, end))
            self.found[name] = Limits(max(first, before.first), min(end, before.end))
