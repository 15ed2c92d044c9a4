"""A bridge: a cell that makes the first states of a decoder from the last states of an encoder.

An encoder's last states have the names that torch gives the weights of its layers and directions: ``h_l0`` of the
lowest layer, ``h_l0_reverse`` of the direction that runs backwards, ``c_l1`` of the second layer, and so on. A cell
whose inputs have such names, and whose outputs have those of a decoder's states, is a bridge: ``Bridge`` or one's own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cellrt import DefinitionError

Sources = Mapping[str, Sequence[str] | Sequence[Sequence[str]]]
"""The states of the encoder that each state of a decoder is made of; of several layers, for each of them."""


class Bridge(nn.Module):
    """A decoder's states, each made of states of an encoder: side by side, through a linear layer and an activation.

    Sutskever et al. (2014) hand the states over as they are; Cho et al. (2014) h' = tanh(V h); Bahdanau et al. (2015)
    the same with the direction that runs backwards, ``Bridge({"h": ["h_l0_reverse"]}, {"h": layer}, nn.Tanh())``.

    Args:
        sources: the names of the encoder's states for each of the decoder's: ``{"h": ["h_l0", "h_l0_reverse"]}``, or
            for a decoder of several layers a list for each, ``{"h": [["h_l0"], ["h_l1"]]}``. States that are not named
            start with zeros; ``Bridge({})`` is none.
        linear: a linear layer for a decoder state, or one for each of the decoder's layers. States without one are the
            encoder's states side by side.
        activation: what follows the linear layers, such as ``nn.Tanh()``.

    Takes the named states ``[rows, size]`` in the order of ``names``; returns the decoder's by name, ``[rows, size]``,
    or of several layers ``[rows, layers, size]``. Raises DefinitionError for sources and layers that do not fit each
    other.
    """

    def __init__(
        self,
        sources: Sources,
        linear: Mapping[str, nn.Linear | Sequence[nn.Linear]] | None = None,
        activation: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.sources = {state: _by_layer(state, names) for state, names in sources.items()}
        named = (name for layers in self.sources.values() for layer in layers for name in layer)
        self.names = tuple(dict.fromkeys(named))
        """The encoder's states that are read."""
        self._several = {state: not isinstance(names[0], str) for state, names in sources.items()}
        self.linear = nn.ModuleDict()
        for state, given in (linear or {}).items():
            if state not in self.sources:
                raise DefinitionError(f"Bridge: a linear layer for {state!r}, but sources for {list(self.sources)}")
            self.linear[state] = nn.ModuleList(_layers_of(state, given, len(self.sources[state])))
        self.activation = activation

    def forward(self, *states: Tensor) -> dict[str, Tensor]:
        """Return the decoder's states."""
        given = dict(zip(self.names, states, strict=True))
        made: dict[str, Tensor] = {}
        for state, layers in self.sources.items():
            rows = [torch.cat([given[name] for name in layer], dim=-1) for layer in layers]
            if state in self.linear:
                each: Any = self.linear[state]
                rows = [layer(row) for layer, row in zip(each, rows, strict=True)]
                rows = rows if self.activation is None else [self.activation(row) for row in rows]
            made[state] = torch.stack(rows, dim=1) if self._several[state] else rows[0]
        return made


def _by_layer(state: str, names: Sequence[str] | Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the sources of a state as a list for each layer."""
    layers: list[list[str]] = []
    if not isinstance(names, str) and names and all(isinstance(name, str) for name in names):
        layers = [[str(name) for name in names]]
    elif not isinstance(names, str):
        layers = [[] if isinstance(layer, str) else [str(name) for name in layer] for layer in names]
    if not layers or not all(layers):
        raise DefinitionError(
            f"Bridge: expected for {state!r} names of the encoder's states, such as ['h_l0', 'h_l0_reverse'], or a "
            f"list of them for each layer of the decoder, got {names!r}"
        )
    return layers


def _layers_of(state: str, given: nn.Linear | Sequence[nn.Linear], count: int) -> list[nn.Module]:
    """Return the linear layers of a state, one for each of its layers; a single one serves all."""
    layers: list[nn.Module] = [given] * count if isinstance(given, nn.Linear) else list(given)
    if len(layers) != count or not all(isinstance(layer, nn.Linear) for layer in layers):
        raise DefinitionError(f"Bridge: expected for {state!r} an nn.Linear, or {count} of them, got {given!r}")
    return layers
