"""What the tests of the projecting kernels share."""

from typing import Any

import torch

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.projection import Projection

CAPACITY = 40
UNTOUCHED = -5


def some_rows(num_rows: int, device: str) -> torch.Tensor:
    """Rows at both ends of the arena first, the third negative, as a part of a buffer that starts at an odd place."""
    rows = torch.randint(CAPACITY, (num_rows,), dtype=torch.int32)
    rows[:3] = torch.tensor([CAPACITY - 1, 0, -1], dtype=torch.int32)[:num_rows]
    return torch.cat([torch.full((7,), -9, dtype=torch.int32), rows]).to(device)[7:]


def whole_numbers(*shape: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Small whole numbers: every dtype and precision multiplies and adds them exactly."""
    return torch.randint(-3, 4, shape).to(device, dtype)


def outputs(num_rows: int, device: str, dtype: torch.dtype = torch.int64) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and stops that hold values no kernel writes."""
    return torch.full((num_rows,), UNTOUCHED, dtype=dtype, device=device), torch.ones(
        num_rows, dtype=torch.bool, device=device
    )


def in_order(values: torch.Tensor) -> ArenaRows:
    """All of them."""
    return ArenaRows(values, torch.arange(len(values), device=values.device))


def exact_logits(h: ArenaRows, projection: Projection) -> torch.Tensor:
    """In float64 on the CPU; of negative rows, those of the arena's last row."""
    logits = h.values.cpu().double()[h.rows.cpu().long()] @ projection.weight.cpu().double().T
    return logits if projection.bias is None else logits + projection.bias.cpu().double()


def launch_arguments(num_rows: int, dtype: torch.dtype, precision: Any) -> tuple[Any, ...]:
    """Arguments of a large projection, to compile its kernels; the memory is not used."""
    span = torch.zeros(2, dtype=torch.int64)
    h = ArenaRows(torch.empty(9, 1024, dtype=dtype), torch.empty(num_rows, dtype=torch.int32), num_rows, span)
    weight, bias = (torch.empty(50_001, *more, dtype=dtype, device="meta") for more in ((1024,), ()))
    return h, Projection(weight, bias, 3, precision)
