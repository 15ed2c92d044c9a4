"""The cases that the tuner runs: a step as it is used, on random rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from cellrt.kernels import gru_step, lstm_step, tree_lstm_step
from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.gate_weights import PackedWeights, Precision
from cellrt.kernels.tiles import Tile

OPERATIONS = ("lstm_step", "gru_step", "tree_lstm_step")
Launch = Callable[[Tile | None], None]


class Use(NamedTuple):
    """A use of a step: its type and size, and whether it multiplies inputs, too, as many as its state has."""

    operation: str
    dtype: torch.dtype
    precision: Precision
    hidden: int
    has_inputs: bool


class Case:
    """One operation on random rows: ``launch(tile)`` writes ``outputs``; a tile of None is the reference."""

    def __init__(self, use: Use, rows: int, device: str = "cuda") -> None:
        self._generator = torch.Generator(device).manual_seed(0)
        self._rows, self._like = rows, torch.empty(0, dtype=use.dtype, device=device)
        self._hidden, self._has_inputs, self._precision = use.hidden, use.has_inputs, use.precision
        self.outputs: list[ArenaRows] = []
        self.weights, self.launch = getattr(self, f"_{use.operation}")()

    def error(self, tile: Tile) -> float:
        """Return the largest difference between the results with ``tile`` and the reference."""
        self.launch(None)
        expected = [arena.values.clone() for arena in self.outputs]
        for arena in self.outputs:
            arena.values.fill_(torch.nan)
        self.launch(tile)
        differences = [(arena.values - values).abs() for arena, values in zip(self.outputs, expected)]
        return float(torch.stack(differences).nan_to_num(torch.inf).max())

    def _random(self, *shape: int) -> torch.Tensor:
        numbers: torch.Tensor = torch.randn(shape, generator=self._generator, device=self._like.device)
        numbers = numbers / shape[-1] ** 0.5
        return numbers.to(self._like.dtype)

    def _inputs(self, width: int) -> ArenaRows:
        order = torch.randperm(self._rows, generator=self._generator, device=self._like.device)
        return ArenaRows(self._random(self._rows, width), order.to(torch.int32))

    def _output(self) -> ArenaRows:
        self.outputs.append(self._inputs(self._hidden))
        return self.outputs[-1]

    def _half(self, gates: int) -> tuple[torch.Tensor | None, dict[str, ArenaRows]]:
        """Return the input half as it is used: a weight and rows ``x``, or ``gates`` that were computed before."""
        if self._has_inputs:
            return self._random(gates * self._hidden, self._hidden), {"x": self._inputs(self._hidden)}
        return None, {"gates": self._inputs(gates * self._hidden)}

    def _lstm_step(self) -> tuple[PackedWeights, Launch]:
        hidden = self._hidden
        weight, bias = self._random(4 * hidden, hidden), self._random(4 * hidden)
        weight_ih, given = self._half(4)
        weights = lstm_step.pack_weights(weight, bias, weight_ih)
        given |= {"h": self._inputs(hidden), "c": self._inputs(hidden)}
        given |= {"h_out": self._output(), "c_out": self._output()}

        def launch(tile: Tile | None) -> None:
            if tile is None:
                lstm_step.reference.lstm_step(weight, bias, weight_ih=weight_ih, **given)
            else:
                lstm_step.lstm_step(weights, precision=self._precision, tile=tile, **given)

        return weights, launch

    def _gru_step(self) -> tuple[PackedWeights, Launch]:
        hidden = self._hidden
        weight, bias = self._random(3 * hidden, hidden), self._random(3 * hidden)
        weight_ih, given = self._half(3)
        weights = gru_step.pack_weights(weight, bias, weight_ih)
        given |= {"h": self._inputs(hidden), "h_out": self._output()}

        def launch(tile: Tile | None) -> None:
            if tile is None:
                gru_step.reference.gru_step(weight, bias, torch.zeros_like(bias), weight_ih=weight_ih, **given)
            else:
                gru_step.gru_step(weights, precision=self._precision, tile=tile, **given)

        return weights, launch

    def _tree_lstm_step(self) -> tuple[PackedWeights, Launch]:
        hidden = self._hidden
        weight, bias = self._random(5 * hidden, 2 * hidden), self._random(5 * hidden)
        weight_ih, given = self._half(5) if self._has_inputs else (None, {})
        weights = tree_lstm_step.pack_weights(weight, bias, weight_ih)
        given |= {name: self._inputs(hidden) for name in ("h_left", "h_right", "c_left", "c_right")}
        given |= {"h_out": self._output(), "c_out": self._output()}

        def launch(tile: Tile | None) -> None:
            if tile is None:
                tree_lstm_step.reference.tree_lstm_step(weight, bias, weight_ih=weight_ih, **given)
            else:
                tree_lstm_step.tree_lstm_step(weights, precision=self._precision, tile=tile, **given)

        return weights, launch
