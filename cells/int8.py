"""Linear layers whose weights are kept as int8, with a factor for each output; rows stay float32.

    out = x (scale q)^T + bias;   scale = max |w| / 127 of an output's weights w, q = round(w / scale)

On a CPU a row has the bits that it would have with the widened weights, in any batch (``_narrow.py``).
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from cellrt import DefinitionError
from cellrt.cells._narrow import WIDTH, project_int8
from cellrt.cells._weights import is_fusable
from cellrt.cells.attention import Linear

MOST = 127


class Int8Linear(nn.Module):
    """A linear layer like ``nn.Linear`` with weights ``values`` int8 ``[panels, in_features, WIDTH]`` and float32
    ``scales``.
    """

    values: Tensor
    scales: Tensor
    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        panels = -(-out_features // WIDTH)
        self.register_buffer("values", torch.zeros(panels, in_features, WIDTH, dtype=torch.int8))
        self.register_buffer("scales", torch.zeros(panels * WIDTH))
        self.register_parameter("bias", nn.Parameter(torch.zeros(out_features)) if bias else None)

    @classmethod
    def of(cls, module: nn.Linear) -> Self:
        """Return one with the rounded weights of a layer, and its bias itself.

        Raise DefinitionError for weights that are not float32 or not finite.
        """
        weight = module.weight.detach()
        made = cls(module.in_features, module.out_features, bias=False)
        if weight.dtype is not torch.float32 or not bool(weight.isfinite().all()):
            raise DefinitionError(f"Int8Linear: expected finite float32 weights, got {weight.dtype}")
        scales = weight.abs().amax(1) / MOST
        rounded = (weight / torch.where(scales > 0, scales, 1.0)[:, None]).round_().to(torch.int8)
        made.scales[: len(scales)] = scales
        padded = rounded.new_zeros(len(made.scales), module.in_features)
        padded[: len(rounded)] = rounded
        made.values.copy_(padded.view(-1, WIDTH, module.in_features).transpose(1, 2))
        made.bias = module.bias
        return made

    @property
    def weight(self) -> Tensor:
        """The widened weights, float32 ``[out_features, in_features]``."""
        wide = self.values.transpose(1, 2).flatten(0, 1).float() * self.scales[:, None]
        return wide[: self.out_features]

    def forward(self, input: Tensor) -> Tensor:
        """``input`` float32 ``[rows, in_features]`` -> ``[rows, out_features]``."""
        if not is_fusable(input) or not len(input) or input.ndim != 2 or input.shape[1] != self.in_features:
            return linear(input, self.weight, self.bias)
        x, bias = input.contiguous(), 0 if self.bias is None else self.bias.data_ptr()
        out = x.new_empty(len(x), self.out_features)
        sizes = len(x), self.in_features, self.values.data_ptr(), self.scales.data_ptr(), bias
        project_int8(x.data_ptr(), *sizes, self.out_features, out.data_ptr())
        return out


def with_int8_weights(module: nn.Module) -> nn.Module:
    """Have a module's linear layers keep int8, in place; weights that it looks up stay as they are."""
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if type(child) is Linear:
                setattr(part, name, Int8Linear.of(child))
    return module
