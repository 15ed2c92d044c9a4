"""Finds the weights of a layer in a torch module."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import nn

from cellrt import DefinitionError
from cellrt.cells._gated import GatedModule
from cellrt.cells._weights import check_one_dtype


class TorchLayer(NamedTuple):
    """A layer of a torch module in one direction; ``suffix`` is behind the names of its weights."""

    suffix: str
    input_size: int
    hidden_size: int
    bias: bool


def check_layers(name: str, kind: type[GatedModule], module: Any) -> tuple[int, int]:
    """Return the numbers of layers and of directions of a torch module.

    Raise DefinitionError, naming what is made of it, for one that is not of this kind or cannot be taken.
    """
    if isinstance(module, kind.torch_layers):
        if module.proj_size != 0:
            raise DefinitionError(f"{name}: a projection of the state (proj_size) is not supported: {module}")
        check_one_dtype(name, module)
        return module.num_layers, 2 if module.bidirectional else 1
    if isinstance(module, kind.torch_cell):
        return 1, 1
    expected = f"{kind.torch_cell.__name__} or {kind.torch_layers.__name__}"
    raise DefinitionError(f"{name}: expected {expected}, not {type(module).__name__}")


def find_layer(kind: type[GatedModule], module: Any, layer: int | None = None, reverse: bool = False) -> TorchLayer:
    """Return the weights of a layer in a torch module. Raise DefinitionError if it cannot be taken."""
    layers, directions = check_layers(kind.__name__, kind, module)
    if layer is None and (layers, directions) != (1, 1):
        raise DefinitionError(
            f"{kind.__name__}: expected a single layer in a single direction, or layer= (and reverse=), got {module}"
        )
    layer = 0 if layer is None else layer
    if not 0 <= layer < layers or (reverse and directions == 1):
        raise DefinitionError(f"{kind.__name__}: there is no layer {layer}{', reverse,' * reverse} in {module}")
    suffix = f"_l{layer}{'_reverse' * reverse}" if isinstance(module, nn.RNNBase) else ""
    width = getattr(module, f"weight_ih{suffix}").shape[1]
    return TorchLayer(suffix, width, module.hidden_size, bool(module.bias))
