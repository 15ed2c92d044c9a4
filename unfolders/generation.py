"""Generation: a model whose decoder feeds its own tokens back until it stops, after a prompt or without."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cellrt.definition.cell import Cell
from cellrt.definition.spec import RowSpec
from cellrt.errors import DefinitionError, RequestError
from cellrt.graph.graph import Graph
from cellrt.graph.unfolder import Unfolder
from cellrt.unfolders.recurrent import Stack, StackRun, gather_cell
from cellrt.unfolders.sequences import as_stack

PROMPT = "prompt"


def generate(
    name: str,
    decoder: Cell,
    *,
    max_steps: int,
    prompt: Stack | Cell | nn.LSTM | nn.GRU | None = None,
    start: int | None = None,
    until: str | None = "stop",
    results: Sequence[str] = ("token",),
    example: Any = None,
) -> Unfolder:
    """A model that decodes: `engine.register(generate("g2p", decoder, max_steps=20, prompt=encoder, start=2))`.

    A request is a dict of the decoder's inputs by name, each one row; carried ones that it leaves out are zeros. With a
    prompt it has also `prompt`, the `[steps, *shape]` that the prompt's layers read; a request that is no dict is the
    prompt alone. Each result is `[steps taken, *shape]`: `token` int64 `[1 to max_steps]`, the stop token included.

    Args:
        name: the model's name.
        decoder: such as `EmbeddingLSTMDecoder`: a cell with `token` among its inputs and outputs.
        max_steps: the most steps.
        prompt: layers in one direction. The decoder starts with their last states: each of its carried inputs that is
            an output of theirs too. Of several layers it takes all, as rows `[layers, *shape]`.
        start: the token before the first. None: the request's `token`, or, with a prompt of tokens, its last one; the
            layers then read those before it.
        until: the output that ends the sequence.
        results: outputs of the decoder that are results.
        example: a request for the check at registration; default: zeros, a prompt of two steps.

    Raises DefinitionError if the prompt does not fit the decoder.
    """
    encoder = None if prompt is None else _Prompt(name, as_stack(prompt), decoder)

    def unfold(graph: Graph, request: Any) -> object:
        given = dict(request) if isinstance(request, Mapping) else {PROMPT: request}
        if start is not None:
            given.setdefault("token", graph.constant(start))
        if encoder is not None:
            if PROMPT not in given:
                raise RequestError(f"expected {PROMPT!r} in the request, got {list(given)}")
            steps = given.pop(PROMPT)
            if "token" not in given:
                steps, given["token"] = steps[:-1], steps[-1]
            given = {**encoder.states(graph, steps), **given}
        loop = graph.loop(decoder, until=until, max_steps=max_steps, **given)
        return {result: getattr(loop, result) for result in results}

    if example is None:
        example = _example(decoder, encoder)
    return Unfolder(name, unfold, example, () if encoder is None else encoder.cells)


class _Prompt:
    """The layers that read the prompt, and how their states become the decoder's."""

    def __init__(self, name: str, stack: Stack, decoder: Cell) -> None:
        self.stack = stack
        if any(layer.reverse is not None for layer in stack.layers):
            raise DefinitionError(f"generate {name!r}: a prompt must run in one direction")
        outputs, depth = stack.top.ahead.outputs, len(stack.layers)
        self._gather: dict[str, Cell | None] = {}
        for state, spec in decoder.inputs.items():
            if state not in decoder.carry or state not in outputs:
                continue
            row = outputs[state]
            expected = row if depth == 1 else RowSpec((depth, *row.shape), row.dtype)
            if spec != expected:
                raise DefinitionError(
                    f"generate {name!r}: {depth} prompt layers give {expected}, the decoder's {state!r} is {spec}"
                )
            self._gather[state] = None if depth == 1 else gather_cell(depth, row)
        if not self._gather:
            raise DefinitionError(f"generate {name!r}: the decoder carries none of the prompt's {list(outputs)}")

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells."""
        return (*self.stack.cells, *(cell for cell in self._gather.values() if cell is not None))

    def states(self, graph: Graph, steps: Any) -> dict[str, object]:
        """The decoder's first states; none (so zeros) after an empty prompt."""
        if not len(steps):
            return {}
        run: StackRun = self.stack(graph, steps)
        states: dict[str, object] = {}
        for name, gather in self._gather.items():
            layers = run.states(name)
            states[name] = (
                layers[0] if gather is None else graph.call(gather, **dict(zip(gather.inputs, layers, strict=True)))
            )
        return states


def _example(decoder: Cell, encoder: _Prompt | None) -> dict[str, Any]:
    given = {
        name: torch.zeros(spec.shape, dtype=spec.dtype)
        for name, spec in decoder.inputs.items()
        if name not in decoder.carry
    }
    if encoder is not None:
        return {PROMPT: encoder.stack.example(), **given}
    return given
