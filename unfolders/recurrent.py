"""Layers of recurrent cells over the steps of a sequence, and how trained torch modules become them.

``Stack`` is what ``nn.LSTM`` and ``nn.GRU`` compute: each layer runs over all steps, in one direction or in both, and a
layer reads the outputs of the one below.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

import cellrt
from cellrt import Cell, Chain, DefinitionError, Graph, Node, Output, RowSpec, Steps, cells


@dataclass(frozen=True)
class Layer:
    """One layer: a cell for each direction.

    Its output is the first output of its cells. Their inputs that are not carried read, in order: in the lowest layer
    the request; above, each direction of the layer below.

    Attributes:
        ahead: runs from the first step to the last.
        reverse: runs from the last step to the first; None: one direction.
        inputs: the input half as a cell of its own, which needs no state and so is batched over all steps of all
            requests: its first output is the input of ``ahead``, its second that of ``reverse``.
    """

    ahead: Cell
    reverse: Cell | None = None
    inputs: Cell | None = None

    def __post_init__(self) -> None:
        if self.reverse is not None and self.size != _first_output(self.reverse):
            raise DefinitionError(f"the directions {self.ahead.name!r} and {self.reverse.name!r} have other outputs")

    @property
    def directions(self) -> tuple[Cell, ...]:
        """One or two cells."""
        return (self.ahead,) if self.reverse is None else (self.ahead, self.reverse)

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells."""
        return self.directions if self.inputs is None else (self.inputs, *self.directions)

    @property
    def size(self) -> RowSpec:
        """Rows of the output of one direction."""
        return _first_output(self.ahead)

    @property
    def reads(self) -> list[RowSpec]:
        """Rows that the layer reads at each step."""
        first = self.cells[0]
        return [first.inputs[name] for name in step_inputs(first)]

    def __call__(self, graph: Graph, below: tuple[Any, ...], *, keep: bool = False) -> tuple[Chain, ...]:
        """Add the layer; ``below`` has what it reads: tensors ``[steps, *shape]``, lists, or steps of chains.

        With ``keep`` it continues from the state of the request's session, which only one direction can.
        """
        if self.inputs is None:
            sources = [below] * len(self.directions)
        else:
            halves = graph.chain(self.inputs, **dict(zip(step_inputs(self.inputs), below, strict=True)))
            sources = [(getattr(halves, name),) for name in self.inputs.outputs]
        return tuple(
            graph.chain(cell, reverse=index == 1, keep=keep, **dict(zip(step_inputs(cell), source, strict=True)))
            for index, (cell, source) in enumerate(zip(self.directions, sources))
        )


class StackRun(NamedTuple):
    """A stack in a graph.

    Attributes:
        steps: the output of the top layer at every step, one for each direction.
        last: the last node of each direction of each layer, lowest layer first; torch's order of ``h_n``.
        top: the chain of each direction of the top layer.
    """

    steps: tuple[Steps, ...]
    last: tuple[Node, ...]
    top: tuple[Chain, ...]

    def states(self, name: str) -> list[Output]:
        """Return the output ``name`` of each last node, such as torch's ``h_n``: ``[layers * directions, *shape]``."""
        return [getattr(node, name) for node in self.last]


@dataclass(frozen=True)
class Stack:
    """Layers of cells, lowest first. Raises DefinitionError if they do not fit each other."""

    layers: tuple[Layer, ...]

    def __post_init__(self) -> None:
        if not self.layers:
            raise DefinitionError("a stack needs a layer")
        for below, above in pairwise(self.layers):
            expected = [below.size] * len(below.directions)
            if above.reads != expected:
                raise DefinitionError(
                    f"a layer of {above.ahead.name!r} reads {_text(above.reads)}; below it are {_text(expected)}"
                )

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells."""
        return tuple(cell for layer in self.layers for cell in layer.cells)

    @property
    def top(self) -> Layer:
        """The last layer."""
        return self.layers[-1]

    def __call__(self, graph: Graph, steps: Any, *, keep: bool = False) -> StackRun:
        """Add the layers over ``steps``: a tensor ``[steps, *shape]``, a list of numbers, or a chain's steps."""
        below: tuple[Any, ...] = (steps,)
        last: list[Node] = []
        chains: tuple[Chain, ...] = ()
        for layer in self.layers:
            chains = layer(graph, below, keep=keep)
            below = tuple(getattr(chain, name) for chain, name in zip(chains, map(_first_name, layer.directions)))
            last += [chain.last for chain in chains]
        return StackRun(below, tuple(last), chains)

    def output(self, graph: Graph, run: StackRun, name: str | None = None) -> Steps:
        """Return an output of the top layer at every step of a run (default its first), as ``output_spec`` says.

        Of two directions it adds a node a step, which puts both rows side by side.
        """
        name = _first_name(self.top.ahead) if name is None else name
        sides = [getattr(chain, name) for chain in run.top]
        if len(sides) == 1:
            return sides[0]  # type: ignore[no-any-return]
        return graph.chain(self._join_of(name), left=sides[0], right=sides[1]).output

    def output_spec(self, name: str | None = None) -> RowSpec:
        """Return rows of an output of the top layer (default its first), of two directions side by side."""
        name = _first_name(self.top.ahead) if name is None else name
        return self.top.ahead.outputs[name] if self.top.reverse is None else self._join_of(name).outputs["output"]

    def _join_of(self, name: str) -> Cell:
        """Return the cell that puts the rows of both directions of the top layer side by side."""
        spec = self.top.ahead.outputs[name]
        if spec not in self._joins:
            raise DefinitionError(f"output {name!r} of a stack: {spec} of two directions cannot be put side by side")
        return self._joins[spec]

    @cached_property
    def _joins(self) -> dict[RowSpec, Cell]:
        specs = {spec for spec in self.top.ahead.outputs.values() if spec.shape}
        return {spec: cellrt.cell(cells.Joined(nn.Identity()), {"left": spec, "right": spec}) for spec in specs}

    def example(self, steps: int = 2) -> torch.Tensor:
        """Return zeros that the stack can run over."""
        (spec,) = self.layers[0].reads
        return torch.zeros(steps, *spec.shape, dtype=spec.dtype, device="cpu")


def from_torch(
    module: nn.LSTM | nn.GRU | nn.LSTMCell | nn.GRUCell,
    *,
    embedding: nn.Embedding | None = None,
    fold: bool = True,
    split_input: bool = False,
    max_batch: int | None = None,
) -> Stack:
    """Return the layers of a trained torch module; its weights, of any one floating dtype, are copied.

    Args:
        module: any number of layers and directions. Requests have no batch dimension, so ``batch_first`` does not
            matter; dropout is off, as in evaluation mode.
        embedding: makes the lowest layer read tokens, int64 ``[steps]``.
        fold: whether the embedding and the input half of the lowest layer become one table.
        split_input: whether the input half of each layer is a cell of its own (see ``Layer.inputs``); with
            ``embedding``, of each but the lowest.
        max_batch: most rows of a task, for all cells.

    Raise DefinitionError for another module, for ``proj_size``, and for an embedding of another size.
    """
    kinds = next((each for each in (_LSTM, _GRU) if isinstance(module, each.torch)), None)
    if kinds is None:
        kind = type(module).__name__
        raise DefinitionError(f"from_torch: expected LSTM, GRU, LSTMCell or GRUCell of torch.nn, not {kind}")
    builder = _Builder(module, kinds, max_batch)
    layers: list[Layer] = []
    for layer in range(getattr(module, "num_layers", 1)):
        if layer == 0 and embedding is not None:
            layers.append(builder.of_tokens(embedding, fold))
        else:
            layers.append(builder.split(layer) if split_input else builder.whole(layer))
    return Stack(tuple(layers))


def step_inputs(cell: Cell) -> list[str]:
    """Return the inputs that are not carried from step to step."""
    return [name for name in cell.inputs if name not in cell.carry]


class _Kinds(NamedTuple):
    """The cells of an LSTM or of a GRU."""

    torch: tuple[type[nn.Module], ...]
    whole: type[cells.LSTMCell] | type[cells.GRUCell]
    half: type[cells.LSTMInput] | type[cells.GRUInput]
    recurrent: type[cells.LSTMRecurrent] | type[cells.GRURecurrent]
    of_tokens: type[cells.EmbeddingLSTMCell] | type[cells.EmbeddingGRUCell]


_LSTM = _Kinds((nn.LSTMCell, nn.LSTM), cells.LSTMCell, cells.LSTMInput, cells.LSTMRecurrent, cells.EmbeddingLSTMCell)
_GRU = _Kinds((nn.GRUCell, nn.GRU), cells.GRUCell, cells.GRUInput, cells.GRURecurrent, cells.EmbeddingGRUCell)


class _Builder:
    """Makes the cells of the layers of one torch module."""

    def __init__(self, module: Any, kinds: _Kinds, max_batch: int | None) -> None:
        self.module, self.kinds, self.max_batch = module, kinds, max_batch
        self.directions = (False, True) if getattr(module, "bidirectional", False) else (False,)
        """The directions; each says whether it runs backwards."""
        self.state = cellrt.rows(module.hidden_size, dtype=next(module.parameters()).dtype)

    def of_tokens(self, embedding: nn.Embedding, fold: bool) -> Layer:
        """Return the lowest layer, on tokens."""
        made = self.kinds.of_tokens
        parts = [
            made.from_torch(embedding, self.module, fold=fold, layer=0, reverse=reverse) for reverse in self.directions
        ]
        return Layer(*(self._step(part, {"token": cellrt.rows(dtype=torch.int64)}) for part in parts))

    def whole(self, layer: int) -> Layer:
        """Return a layer of whole cells."""
        parts, reads = self._parts(self.kinds.whole, layer), self._reads(layer)
        return Layer(*(self._step(cells.JoinedCell(part) if len(reads) > 1 else part, reads) for part in parts))

    def split(self, layer: int) -> Layer:
        """Return a layer with its input half apart."""
        halves, reads = self._parts(self.kinds.half, layer), self._reads(layer)
        half = halves[0] if len(halves) == 1 else cells.BothInputs(*halves)
        inputs = cellrt.cell(cells.Joined(half) if len(reads) > 1 else half, reads, max_batch=self.max_batch)
        gates = next(iter(inputs.outputs.values()))
        made = [self._step(part, {"gates": gates}) for part in self._parts(self.kinds.recurrent, layer)]
        return Layer(made[0], made[1] if len(made) > 1 else None, inputs)

    def _parts(self, kind: Any, layer: int) -> list[Any]:
        """Return the modules of a layer, one for each direction."""
        return [kind.from_torch(self.module, layer=layer, reverse=reverse) for reverse in self.directions]

    def _reads(self, layer: int) -> dict[str, RowSpec]:
        if layer == 0:
            return {"x": self.state._replace(shape=(self.module.input_size,))}
        return dict.fromkeys(("left", "right") if len(self.directions) == 2 else ("x",), self.state)

    def _step(self, part: nn.Module, given: dict[str, RowSpec]) -> Cell:
        """Return a cell of a module that takes what is ``given`` and its states."""
        states = dict.fromkeys(self.kinds.whole.states, self.state)
        return cellrt.cell(part, {**given, **states}, max_batch=self.max_batch)


def _first_name(cell: Cell) -> str:
    return next(iter(cell.outputs))


def _first_output(cell: Cell) -> RowSpec:
    return cell.outputs[_first_name(cell)]


def _text(specs: list[RowSpec]) -> str:
    return " and ".join(map(str, specs)) or "nothing"
