"""Rows of an arena named by index: how the step kernels take their inputs and outputs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

INDEX_TYPES = (torch.int32, torch.int64)


class ArenaRows(NamedTuple):
    """Row ``rows[k]`` of ``values``, for each k.

    ``values`` is ``[arena rows, size]``, its rows contiguous (the step between rows is free, a multiple of 16 bytes is
    fastest). ``rows`` is int32 or int64 ``[num_rows]``, contiguous, on the device of ``values``. As an input, each must
    be inside the arena: a kernel cannot check it. As an output, a negative row is not written, and no row may be
    named twice.

    With ``span``, int64 ``[2]`` on the same device, only ``span[1]`` of them from ``rows[span[0]]`` on are meant: at
    most ``most``, which the host knows. So one captured launch serves any number of rows. What is behind is not read.
    """

    values: Tensor
    rows: Tensor
    most: int = 0
    span: Tensor | None = None

    @property
    def most_rows(self) -> int:
        """The number of rows there are, or may be, as far as the host knows."""
        return len(self.rows) if self.span is None else self.most

    def arguments(self) -> tuple[Tensor, Tensor, int]:
        """Return the arguments of a kernel: values, rows and the step between the arena's rows."""
        return self.values, self.rows, self.values.stride(0)

    def gather(self) -> Tensor:
        """Return the rows in order, ``[num_rows, size]``, in float32."""
        return self.values[self.rows.long()].float()

    def scatter(self, result: Tensor) -> None:
        """Write ``result`` ``[num_rows, size]``, rounded to the arena's type, to the rows that are not negative."""
        is_kept = self.rows >= 0
        self.values[self.rows[is_kept].long()] = result[is_kept].to(self.values.dtype)


def on_host(arena: ArenaRows, like: ArenaRows) -> ArenaRows:
    """Return rows without a span, for code that runs on the host: as many as ``like`` has. Wait for the device."""
    if arena.span is None or like.span is None:
        return arena
    first, count = int(arena.span[0]), int(like.span[1])
    return ArenaRows(arena.values, arena.rows[first : first + count])


def all_on_host(like: ArenaRows, **arenas: ArenaRows | None) -> dict[str, ArenaRows | None]:
    """Return several rows as ``on_host`` does, by name; None stays."""
    return {name: None if arena is None else on_host(arena, like) for name, arena in arenas.items()}


def check_numbers(
    name: str, arena: ArenaRows, dtypes: tuple[torch.dtype, ...], like: ArenaRows, device: torch.device
) -> None:
    """Check an arena of one number a row, ``[arena rows]``, of one of these types; the rest is as in ``check_rows``."""
    values = arena.values
    if values.ndim != 1 or values.dtype not in dtypes or not values.is_contiguous() or values.device != device:
        wanted = " or ".join(map(str, dtypes))
        raise ValueError(
            f"{name} must be contiguous {wanted} of one number a row on {device}, got {values.dtype} "
            f"{tuple(values.shape)} on {values.device}"
        )
    _check_index(name, arena, like, device)


def check_rows(name: str, arena: ArenaRows | None, like: ArenaRows, size: int, weight: Tensor) -> None:
    """Check shape, type, device and layout of ``arena`` (None passes). Raise ValueError.

    ``weight`` is a tensor of the type and on the device that it must have. It must name as many rows as ``like``, and
    have a span exactly if that has one.
    """
    if arena is None:
        return
    values = arena.values
    if values.ndim != 2 or values.shape[1] != size or (size > 1 and values.stride(1) != 1):
        raise ValueError(f"{name} must be rows of {size} contiguous numbers, got {tuple(values.shape)}")
    if values.dtype != weight.dtype or values.device != weight.device:
        raise ValueError(
            f"{name} must be {weight.dtype} on {weight.device} as the weights are, got {values.dtype} on "
            f"{values.device}"
        )
    _check_index(name, arena, like, weight.device)


def _check_index(name: str, arena: ArenaRows, like: ArenaRows, device: torch.device) -> None:
    rows, span = arena.rows, arena.span
    if rows.dtype not in INDEX_TYPES or rows.device != device or not rows.is_contiguous():
        raise ValueError(f"the rows of {name} must be contiguous int32 or int64 on {device}")
    if rows.ndim != 1 or (span is None) != (like.span is None) or arena.most_rows != like.most_rows:
        raise ValueError(f"{name} must name {like.most_rows} rows, got {arena.most_rows} of {tuple(rows.shape)}")
    if span is not None and (span.dtype != torch.int64 or span.shape != (2,) or span.device != device):
        raise ValueError(f"the span of {name} must be int64 [2] on {device}")
