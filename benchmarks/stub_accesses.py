"""The bytes that an operation of torch reads and writes; ``stub_cuda.py`` asks for those of each operation."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Ranges = tuple[NDArray[np.int64], NDArray[np.int64]]
"""First and end addresses, in order and disjoint."""


def returns_of(function: Any) -> Any:
    """Return the schemas of what an operation returns."""
    return function._schema.returns


def written_by(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return the arguments that are written in place."""
    found = []
    for number, argument in enumerate(function._schema.arguments):
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
            found.append(value)
    return found


def accesses_of(
    function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], written: list[torch.Tensor], made: list[torch.Tensor]
) -> tuple[list[tuple[int, Ranges]], list[tuple[int, Ranges]]]:
    """Return the bytes that an operation reads and writes; where rows are named by number, only those rows."""
    given = [v for v in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(v, torch.Tensor)]
    aten = torch.ops.aten
    some: dict[int, torch.Tensor] = {}
    if function.overloadpacket in (aten.index_select, aten.index_copy_) and args[1] == 0:
        some[id(args[0])] = args[2]
    elif function.overloadpacket in (aten.index, aten.index_put_):
        rows = args[1][0]  # what others name lies within them
        some.update({id(args[0]): rows} if rows is not None and rows.dtype in (torch.int32, torch.int64) else {})
    is_new = function.overloadpacket in (aten.empty, aten.zeros, aten.empty_strided)
    reads = [] if is_new else [value for value in given if all(value is not other for other in written)]
    writes = [*written, *(value for value in made if all(value is not other for other in written))]
    return (
        [(value.untyped_storage().data_ptr(), _ranges(value, some.get(id(value)))) for value in reads],
        [(value.untyped_storage().data_ptr(), _ranges(value, some.get(id(value)))) for value in writes],
    )


def _ranges(value: torch.Tensor, rows: torch.Tensor | None) -> Ranges:
    """Return the bytes of a tensor, or of some of its rows."""
    first, size = value.data_ptr(), value.element_size()
    if rows is not None and value.is_contiguous():
        row_bytes = size * value.stride(0)
        numbers = np.unique(rows.numpy().astype(np.int64))
        return first + numbers * row_bytes, first + (numbers + 1) * row_bytes
    span = 1 + sum((n - 1) * s for n, s in zip(value.shape, value.stride())) if value.numel() else 0
    return np.array([first]), np.array([first + size * span])


def overlap(one: Ranges, other: Ranges) -> bool:
    """Return whether they have a byte in common."""
    return bool((np.searchsorted(one[0], other[1]) > np.searchsorted(one[1], other[0], side="right")).any())
