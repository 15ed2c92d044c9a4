"""The parts of all operations that project a hidden state to a vocabulary: arguments, tiles, and logits in plain
torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows, check_numbers, check_rows
from cellrt.kernels.gate_weights import PRECISIONS, TYPES, Precision

TOKEN_TYPES = (torch.int32, torch.int64)


class Projection(NamedTuple):
    """``weight`` is ``[vocabulary, hidden]``, contiguous, and ``bias`` ``[vocabulary]`` of the same dtype, or None.

    ``stop_token`` ends a sequence; None if there is none. ``precision`` is how float32 is multiplied (sums are float32
    for all types).
    """

    weight: Tensor
    bias: Tensor | None = None
    stop_token: int | None = None
    precision: Precision = "tf32"


class ProjectionTile(NamedTuple):
    """A program computes the logits of this many rows and tokens, ``depth`` of the product at a time."""

    rows: int
    tokens: int
    depth: int
    warps: int
    stages: int


def choose_tile(num_rows: int, projection: Projection) -> ProjectionTile:
    """Return a tile that keeps the sums in registers (64 a thread at most) and three or four stages in shared memory.

    Not tuned on a device. With few rows the weights are read once and nothing else counts, so a tile has few rows and
    many tokens. float32 in full has no tensor cores: its smaller tile leaves room for what is multiplied. (With 16
    rows it spilled on sm_100.)
    """
    least = 1 << max(0, num_rows - 1).bit_length()
    if projection.weight.dtype != torch.float32:
        rows = min(128, max(16, least))
        return ProjectionTile(rows, 128, 64, 8 if rows == 128 else 4, 3)
    if projection.precision == "ieee":
        return ProjectionTile(32, 64, 32, 4, 3)
    return ProjectionTile(min(64, max(16, least)), 128, 32, 4 if least <= 32 else 8, 3)


def check_projection(h: ArenaRows, projection: Projection, token: ArenaRows, stop: ArenaRows) -> None:
    """Check types, shapes, devices and layout. Raise ValueError."""
    check_weights(h, projection)
    weight, stop_token = projection.weight, projection.stop_token
    check_numbers("token", token, TOKEN_TYPES, h, weight.device)
    check_numbers("stop", stop, (torch.bool,), h, weight.device)
    if stop_token is not None and not 0 <= stop_token < len(weight):
        raise ValueError(f"the stop token {stop_token} is not in the vocabulary of {len(weight)}")


def check_weights(h: ArenaRows, projection: Projection) -> None:
    """Check types, shapes, devices and layout of the weights and of h. Raise ValueError."""
    weight, bias, _, precision = projection
    if weight.ndim != 2 or 0 in weight.shape or not weight.is_contiguous() or weight.dtype not in TYPES:
        raise ValueError(
            f"weight must be contiguous [vocabulary, hidden] of float32, bfloat16 or float16, got {weight.dtype} "
            f"{tuple(weight.shape)}"
        )
    vocabulary, hidden = weight.shape
    if bias is not None and (bias.shape != (vocabulary,) or bias.dtype != weight.dtype or not bias.is_contiguous()):
        raise ValueError(f"bias must be {weight.dtype} [{vocabulary}], got {bias.dtype} {tuple(bias.shape)}")
    if h.values.dtype != weight.dtype:
        raise ValueError(f"arena and weight must have the same dtype, got {h.values.dtype} and {weight.dtype}")
    check_rows("h", h, h, hidden, weight)
    if bias is not None and bias.device != weight.device:
        raise ValueError(f"bias must be on {weight.device} as the weight is")
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")


def plain_logits(h: Tensor, projection: Projection) -> Tensor:
    """Return the logits ``[rows, vocabulary]`` of hidden states ``[rows, hidden]`` in float32, whatever the
    precision.
    """
    logits = h.float() @ projection.weight.float().T
    return logits if projection.bias is None else logits + projection.bias.float()


def put_tokens(is_row: Tensor, chosen: Tensor, stop_token: int | None, token: ArenaRows, stop: ArenaRows) -> None:
    """Write the chosen tokens, and whether each is the stop token, where ``is_row`` is true."""
    stops = chosen == (-1 if stop_token is None else stop_token)
    for made, values in ((token, chosen), (stop, stops)):
        rows = made.rows[is_row]
        made.values[rows[rows >= 0].long()] = values[rows >= 0].to(made.values.dtype)
