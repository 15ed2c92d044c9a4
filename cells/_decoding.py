"""The parts that all decoders share: recurrent layers, the projection of the top one's state, and a step's outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from cellrt import DefinitionError, RowSpec, rows
from cellrt.cells._fused import choose_rows, of_layer, project_rows, score_rows, to_read
from cellrt.cells._gated import GatedModule
from cellrt.cells._torch_layers import check_layers, find_layer
from cellrt.cells._weights import check_one_dtype
from cellrt.cells.gru import GRUCell
from cellrt.cells.lstm import LSTMCell
from cellrt.cells.output import NEVER, ProjectionArgmax

if TYPE_CHECKING:
    from cellrt.definition.fused import StepRows

LOGITS, LOGPROB = "logits", "logprob"
"""The outputs of a decoder that are there if it was made with ``return_logits`` and ``return_logprobs``."""


class Decoder(nn.Module):
    """The upper layers, the projection and the choice; a subclass has the first layer.

    The states, by name in ``states``, are ``[rows, hidden_size]`` for one layer, ``[rows, num_layers, hidden_size]``
    for several.
    """

    recurrent_cell: ClassVar[type[LSTMCell] | type[GRUCell]]
    states: ClassVar[tuple[str, ...]]

    def __init__(self, hidden_size: int, end_token: int, return_logits: bool, return_logprobs: bool) -> None:
        super().__init__()
        self.hidden_size, self.end_token = hidden_size, end_token
        self.return_logits, self.return_logprobs = return_logits, return_logprobs

    def add_top(self, num_tokens: int, num_layers: int, bias: bool) -> None:
        """Add the layers above the first, and the projection: called at the end of the constructor."""
        name, size = type(self).__name__, self.hidden_size
        if num_layers < 1:
            raise DefinitionError(f"{name}: expected num_layers of at least 1, got {num_layers}")
        if not NEVER <= self.end_token < num_tokens:
            raise DefinitionError(
                f"{name}: expected an end_token below {num_tokens}, or {NEVER} for none, got {self.end_token}"
            )
        self.num_layers = num_layers
        self._state_shape = (size,) if num_layers == 1 else (num_layers, size)
        self.others = nn.ModuleList(self.recurrent_cell(size, size, bias) for _ in range(num_layers - 1))
        self.projection = ProjectionArgmax(size, num_tokens, self.end_token)

    @property
    def returns_choice_alone(self) -> bool:
        """True if neither logits nor log-probabilities were asked for."""
        return not (self.return_logits or self.return_logprobs)

    def input_specs(self) -> dict[str, RowSpec]:
        """Return the inputs for ``cellrt.cell``, in the type of the weights: ``token`` and the states."""
        state = RowSpec(self._state_shape, self.projection.weight.dtype)
        return {"token": rows(dtype=torch.int64), **dict.fromkeys(self.states, state)}

    def scores(self, token: Tensor, **inputs: Any) -> dict[str, Tensor]:
        """Return a step without the choice: ``logits`` ``[rows, num_tokens]``, and the states after it by name.

        Raise ValueError if an input is missing.
        """
        states, top = self._advance(token, inputs)
        return {LOGITS: self.projection.logits(top), **states}

    def asked_for(self, logits: Tensor, token: Tensor) -> dict[str, Tensor]:
        """Return the outputs that a step makes of its logits: ``logits`` as they are, ``logprob`` ``[rows]`` of its
        tokens.
        """
        made = {LOGITS: logits} if self.return_logits else {}
        if self.return_logprobs:
            wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
            made[LOGPROB] = wide.gather(1, token[:, None])[:, 0] - wide.logsumexp(dim=1)
        return made

    def takes_rows(self, inputs: Mapping[str, RowSpec], outputs: Mapping[str, RowSpec]) -> bool:
        """Return whether ``advance_rows`` and ``choose_rows`` take a cell's rows, with the weights where they are."""
        return False

    def advance_rows(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> StepRows:
        """Return a step but for the choice by fused kernels, rows of arenas to rows of arenas.

        Return the rows that are projected to logits.
        """
        raise NotImplementedError

    def _advance_others(self, inputs: Mapping[str, StepRows], outputs: Mapping[str, StepRows]) -> StepRows:
        """Return the layers above the first by fused kernels; return the rows of the top one's ``h``."""
        cell: Any
        for layer, cell in enumerate(self.others, start=1):
            given = {name: of_layer(inputs[name], layer) for name in self.states}
            given["x"] = to_read(of_layer(outputs["h"], layer - 1))
            cell._fused.run(cell, given, {name: of_layer(outputs[name], layer) for name in self.states})
        return of_layer(outputs["h"], self.num_layers - 1)

    def choose_rows(self, top: StepRows, outputs: Mapping[str, StepRows]) -> None:
        """Choose greedily from rows of the top layer's state."""
        if not self.returns_choice_alone:
            self.score_rows(project_rows(self.projection.weight, self.projection.bias, top), outputs, self.end_token)
            return
        choose_rows(self.projection.weight, self.projection.bias, self.end_token, {"h": top}, outputs)

    def score_rows(self, logits: Tensor, outputs: Mapping[str, StepRows], end_token: int | None) -> None:
        """Write the outputs that a step makes of its logits, which are in order, by a fused kernel.

        With an ``end_token`` the kernel makes the greedy choice and scores that; else it scores the token already
        drawn.
        """
        if end_token is not None or not self.returns_choice_alone:
            score_rows(logits, outputs, end_token, self.return_logits, self.return_logprobs)

    def are_asked_for(self, outputs: Mapping[str, RowSpec]) -> tuple[bool, dict[str, RowSpec]]:
        """Return whether a cell's outputs have what ``asked_for`` gives; and the others."""
        weight = self.projection.weight
        asked = {LOGITS: rows(len(weight), dtype=weight.dtype)} if self.return_logits else {}
        if self.return_logprobs:
            asked[LOGPROB] = rows(dtype=torch.float32)
        others = {name: spec for name, spec in outputs.items() if name not in asked}
        return asked.items() <= outputs.items(), others

    def _advance(self, token: Tensor, inputs: Mapping[str, Any]) -> tuple[dict[str, Tensor], Tensor]:
        """Return the states after a step, and the row that is projected to logits."""
        raise NotImplementedError

    def _step(self, token: Tensor, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
        """Run one greedy step in plain torch (or kernel by kernel)."""
        states, top = self._advance(token, inputs)
        if self.returns_choice_alone:
            choice = self.projection.choose(top)
            return {"token": choice.token, "stop": choice.stop, **states}
        logits = self.projection.logits(top)
        token = logits.argmax(dim=-1)
        return {"token": token, "stop": token == self.end_token, **states, **self.asked_for(logits, token)}

    def _layers(
        self, first: Callable[..., tuple[Tensor, ...]], x: Tensor, inputs: Mapping[str, Any]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """Return the states after ``x`` has gone through all layers, and the ``h`` of the top one."""
        states = self._states_in(inputs, x)
        if self.num_layers == 1:
            states = tuple(first(x, *states))
            return dict(zip(self.states, states, strict=True)), states[0]
        made = [first(x, *(state[:, 0] for state in states))]
        for layer, cell in enumerate(self.others, start=1):
            made.append(cell(made[-1][0], *(state[:, layer] for state in states)))
        stacked = (torch.stack(parts, dim=1) for parts in zip(*made, strict=True))
        return dict(zip(self.states, stacked, strict=True)), made[-1][0]

    def _states_in(self, inputs: Mapping[str, Any], x: Tensor) -> tuple[Tensor, ...]:
        """Return the states among the inputs.

        Raise ValueError if one is missing, or of other shape or type (than ``x``).
        """
        found: list[Tensor] = []
        for name in self.states:
            if name not in inputs:
                raise ValueError(f"{type(self).__name__}: expected the states {list(self.states)}, got {list(inputs)}")
            state = inputs[name]
            if state.shape[1:] != self._state_shape or (state.dtype is not x.dtype and x.is_floating_point()):
                expected, got = self.input_specs()[name], RowSpec(tuple(state.shape[1:]), state.dtype)
                raise ValueError(f"{type(self).__name__}: expected {name} as rows of {expected}, got {got}")
            found.append(state)
        return tuple(found)

    def _take_weights(self, first: GatedModule, module: nn.Module, projection: nn.Linear) -> None:
        """Copy the weights of all layers, the first of which is given, and of the projection."""
        for layer, cell in enumerate((first, *self.others)):
            if isinstance(cell, GatedModule):
                cell.take_weights(module, find_layer(type(cell), module, layer).suffix)
        self.projection.take_weights(projection)


def check_parts(
    kind: type[Decoder], table: nn.Embedding, module: Any, projection: nn.Linear, *others: nn.Module
) -> int:
    """Return the number of layers of a decoder with the weights of torch modules.

    Raise DefinitionError, naming the decoder, unless they fit each other and have one dtype. ``others`` are further
    modules whose dtype counts.
    """
    name = kind.__name__
    for part, expected in ((table, nn.Embedding), (projection, nn.Linear)):
        if not isinstance(part, expected):
            raise DefinitionError(f"{name}: expected {expected.__name__}, got {type(part).__name__}")
    num_layers, directions = check_layers(name, kind.recurrent_cell, module)
    if directions > 1:
        raise DefinitionError(f"{name}: a decoder has a single direction, unlike {module}")
    if projection.weight.shape != (table.num_embeddings, module.hidden_size):
        raise DefinitionError(
            f"{name}: expected a projection from {module.hidden_size} to {table.num_embeddings}, got {projection}"
        )
    check_one_dtype(name, table, module, projection, *others)
    return num_layers
