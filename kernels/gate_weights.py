"""Gate weights laid out for the step kernels: interleaved, so that one tile of a product has all gates of its units.

Eight units at a time: eight rows of the first gate, of the second, and so on, then the next eight units. In the
accumulator of a tensor core a thread holds neighbouring columns of each group of eight, so it has every gate of its
units in registers, and the pointwise half of a step needs no exchange. A gate count that is no power of two is cut
in sections (a tile's width must be one): the three of a GRU are a section of two and one of one. Sections lie one
after the other. Units are padded with zero rows to a multiple of 64 and the depth with zero columns to one of 128,
so that kernels read weights without masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

GROUP = 8
UNIT_MULTIPLE = 64
DEPTH_MULTIPLE = 128
TYPES = (torch.float32, torch.bfloat16, torch.float16)

# How float32 is multiplied: in full, in TF32 (10 bits of mantissa), or as three TF32 products (about 21 bits).
# Other types are multiplied as they are. Sums are always in float32.
Precision = Literal["ieee", "tf32", "tf32x3"]
PRECISIONS = ("ieee", "tf32", "tf32x3")


@dataclass(frozen=True)
class PackedWeights:
    """Weights of a gated cell, interleaved; made by an operation's ``pack_weights``, which keeps no other copy.

    ``weight_hh`` is ``[gates * padded units, states * padded hidden size]`` in the type of the cell; ``weight_ih`` is
    ``[gates * padded units, padded input size]``, or None. ``bias`` is float32, in the order of the rows of
    ``weight_hh`` (a GRU has a section more). ``sections`` says which gates each section has; ``states`` how many a step
    reads.
    """

    hidden_size: int
    input_size: int
    states: int
    sections: tuple[tuple[int, ...], ...]
    weight_hh: Tensor
    weight_ih: Tensor | None
    bias: Tensor

    @property
    def padded_units(self) -> int:
        """The number of units with the padding."""
        return padded(self.hidden_size, UNIT_MULTIPLE)

    def plain_weights(self) -> tuple[Tensor, Tensor | None]:
        """Return copies of ``weight_hh`` and ``weight_ih`` in the layout that they were packed from."""
        order = row_order(self.hidden_size, self.sections)
        hidden = unpack(self.weight_hh, order)
        hidden = hidden.view(len(hidden), self.states, -1)[..., : self.hidden_size].flatten(1)
        if self.weight_ih is None:
            return hidden, None
        return hidden, unpack(self.weight_ih, order)[:, : self.input_size]

    def plain_bias(self) -> Tensor:
        """Return a copy of the bias of each gate, ``[gates * hidden size]``, without the section that a GRU has
        more.
        """
        order = row_order(self.hidden_size, self.sections)
        return unpack(self.bias[: len(order)], order)


def padded(size: int, multiple: int) -> int:
    """``size`` rounded up."""
    return -(-size // multiple) * multiple


def row_order(hidden_size: int, sections: Sequence[Sequence[int]]) -> Tensor:
    """Return for each row of a packed weight the row it was packed from, or -1 where it is padding."""
    units = torch.arange(padded(hidden_size, UNIT_MULTIPLE)).view(-1, 1, GROUP)
    parts = []
    for section in sections:
        rows = torch.tensor(section).view(1, -1, 1) * hidden_size + units
        parts.append(torch.where(units < hidden_size, rows, -1).flatten())
    return torch.cat(parts)


def pack(weight: Tensor, order: Tensor) -> Tensor:
    """Return rows of ``weight`` in ``order``, padding as zeros."""
    order = order.to(weight.device)
    is_row = order >= 0
    packed = weight.new_zeros(len(order), *weight.shape[1:])
    packed[is_row] = weight.detach()[order[is_row]]
    return packed


def pad_depth(weight: Tensor) -> Tensor:
    """Return the last dimension of ``weight`` padded with zeros."""
    depth = weight.shape[-1]
    return torch.nn.functional.pad(weight.detach(), (0, padded(depth, DEPTH_MULTIPLE) - depth))


def unpack(packed: Tensor, order: Tensor) -> Tensor:
    """Return the rows of ``packed`` back in the order they came from, without padding rows."""
    order = order.to(packed.device)
    is_row = order >= 0
    plain = packed.new_empty((int(is_row.sum()), *packed.shape[1:]))
    plain[order[is_row]] = packed[is_row]
    return plain


def pack_gates(
    sections: tuple[tuple[int, ...], ...],
    weight_hh: Tensor,
    weight_ih: Tensor | None,
    bias: Tensor,
    *,
    states: int = 1,
) -> PackedWeights:
    """Interleave ``weight_hh`` ``[gates * hidden, states * hidden]``, ``weight_ih`` ``[gates * hidden, input]`` and
    ``bias`` ``[gates * hidden]``; raises ValueError for shapes or types that do not fit."""
    num_gates = sum(map(len, sections))
    hidden_size = weight_hh.shape[0] // num_gates
    if hidden_size == 0 or weight_hh.shape != (num_gates * hidden_size, states * hidden_size):
        raise ValueError(f"weight_hh must be [{num_gates} * hidden, {states} * hidden], got {tuple(weight_hh.shape)}")
    if weight_hh.dtype not in TYPES:
        raise ValueError(f"weights must be float32, bfloat16 or float16, got {weight_hh.dtype}")
    if weight_ih is not None and (
        weight_ih.ndim != 2 or len(weight_ih) != len(weight_hh) or weight_ih.dtype != weight_hh.dtype
    ):
        raise ValueError(f"weight_ih must be [{len(weight_hh)}, input] of {weight_hh.dtype}")
    if bias.shape != (len(weight_hh),):
        raise ValueError(f"a bias must be [{len(weight_hh)}], got {tuple(bias.shape)}")
    order = row_order(hidden_size, sections)
    by_state = weight_hh.view(len(weight_hh), states, hidden_size)
    return PackedWeights(
        hidden_size=hidden_size,
        input_size=0 if weight_ih is None else weight_ih.shape[1],
        states=states,
        sections=sections,
        weight_hh=pack(pad_depth(by_state).flatten(1), order),
        weight_ih=None if weight_ih is None else pack(pad_depth(weight_ih), order),
        bias=pack(bias.detach().float(), order),
    )


def sum_of_biases(weight: Tensor, *biases: Tensor | None) -> Tensor:
    """Return the sum in float32 of those biases that are not None, one number for each row of ``weight``."""
    total = torch.zeros(len(weight), dtype=torch.float32, device=weight.device)
    for bias in biases:
        if bias is not None:
            total = total + bias.detach().float()
    return total


def check_precision(precision: str) -> None:
    """Raise ValueError for a word that is not one of PRECISIONS."""
    if precision not in PRECISIONS:
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, got {precision!r}")
