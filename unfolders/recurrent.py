"""Layers of recurrent cells over the steps of a sequence, and how trained torch modules become them.

`Stack` is what `nn.LSTM` and `nn.GRU` compute: each layer runs over all steps, in one direction or in both, and a
layer reads the outputs of the one below.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import nn

from cellrt.cells._gated import GatedModule, check_layers, check_one_dtype
from cellrt.cells.gru import EmbeddingGRUCell, GRUCell, GRUInput, GRURecurrent
from cellrt.cells.lstm import EmbeddingLSTMCell, LSTMCell, LSTMInput, LSTMRecurrent
from cellrt.cells.stacked import BothInputs, Joined, JoinedCell, join
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.spec import RowSpec
from cellrt.errors import DefinitionError
from cellrt.graph.graph import Graph
from cellrt.graph.symbols import Chain, Node, Output, Steps


@dataclass(frozen=True)
class Layer:
    """One layer: a cell for each direction.

    Its output is the first output of its cells. Their inputs that are not carried read, in order: in the lowest layer
    the request; above, each direction of the layer below.

    Attributes:
        ahead: runs from the first step to the last.
        reverse: runs from the last step to the first; None: one direction.
        inputs: the input half as a cell of its own, which needs no state and so is batched over all steps of all
            requests: its first output is the input of `ahead`, its second that of `reverse`.
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
        """Adds the layer; `below` has what it reads: tensors `[steps, *shape]`, lists, or steps of chains.

        With `keep` it continues from the state of the request's session, which only one direction can.
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
        last: the last node of each direction of each layer, lowest layer first; torch's order of `h_n`.
        top: the chain of each direction of the top layer.
    """

    steps: tuple[Steps, ...]
    last: tuple[Node, ...]
    top: tuple[Chain, ...]

    def states(self, name: str) -> list[Output]:
        """The output `name` of each last node, such as torch's `h_n`: `[layers * directions, *shape]`."""
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
        """Adds the layers over `steps`: a tensor `[steps, *shape]`, a list of numbers, or a chain's steps."""
        below: tuple[Any, ...] = (steps,)
        last: list[Node] = []
        chains: tuple[Chain, ...] = ()
        for layer in self.layers:
            chains = layer(graph, below, keep=keep)
            below = tuple(getattr(chain, name) for chain, name in zip(chains, map(_first_name, layer.directions)))
            last += [chain.last for chain in chains]
        return StackRun(below, tuple(last), chains)

    def output(self, graph: Graph, run: StackRun, name: str | None = None) -> Steps:
        """An output of the top layer at every step of a run (default its first), as `output_spec` says.

        Of two directions it adds a node a step, which puts both rows side by side.
        """
        name = _first_name(self.top.ahead) if name is None else name
        sides = [getattr(chain, name) for chain in run.top]
        if len(sides) == 1:
            return sides[0]  # type: ignore[no-any-return]
        return graph.chain(self._join_of(name), left=sides[0], right=sides[1]).output

    def output_spec(self, name: str | None = None) -> RowSpec:
        """Rows of an output of the top layer (default its first), of two directions side by side."""
        name = _first_name(self.top.ahead) if name is None else name
        return self.top.ahead.outputs[name] if self.top.reverse is None else self._join_of(name).outputs["output"]

    def _join_of(self, name: str) -> Cell:
        """What puts the rows of both directions of the top layer side by side."""
        spec = self.top.ahead.outputs[name]
        if spec not in self._joins:
            raise DefinitionError(f"output {name!r} of a stack: {spec} of two directions cannot be put side by side")
        return self._joins[spec]

    @cached_property
    def _joins(self) -> dict[RowSpec, Cell]:
        specs = {spec for spec in self.top.ahead.outputs.values() if spec.shape}
        return {spec: cell(join, {"left": spec, "right": spec}) for spec in specs}

    def example(self, steps: int = 2) -> torch.Tensor:
        """Zeros that the stack can run over."""
        (spec,) = self.layers[0].reads
        return torch.zeros(steps, *spec.shape, dtype=spec.dtype)


def from_torch(
    module: nn.LSTM | nn.GRU | nn.LSTMCell | nn.GRUCell,
    *,
    embedding: nn.Embedding | None = None,
    fold: bool = True,
    split_input: bool = False,
    max_batch: int | None = None,
) -> Stack:
    """The layers of a trained torch module; its weights, of any one floating dtype, are copied.

    Args:
        module: any number of layers and directions. Requests have no batch dimension, so `batch_first` does not matter;
            dropout is off, as in evaluation mode.
        embedding: makes the lowest layer read tokens, int64 `[steps]`.
        fold: whether the embedding and the input half of the lowest layer become one table.
        split_input: whether the input half of each layer is a cell of its own (see `Layer.inputs`); with `embedding`,
            of each but the lowest.
        max_batch: most rows of a task, for all cells.

    Raises DefinitionError for another module, for `proj_size`, and for an embedding of another size.
    """
    family = next((each for each in (_LSTM, _GRU) if isinstance(module, (each.torch_cell, each.torch_layers))), None)
    if family is None:
        kind = type(module).__name__
        raise DefinitionError(f"from_torch: expected LSTM, GRU, LSTMCell or GRUCell of torch.nn, not {kind}")
    num_layers, num_directions = check_layers(module, family.torch_cell, family.torch_layers)
    check_one_dtype("from_torch", module, *([] if embedding is None else [embedding]))
    if embedding is not None and embedding.embedding_dim != module.input_size:
        raise DefinitionError(f"the module reads rows of {module.input_size}, the embedding has {embedding}")
    builder = _Builder(module, family, num_directions, max_batch)
    layers: list[Layer] = []
    for layer in range(num_layers):
        if layer == 0 and embedding is not None:
            layers.append(builder.of_tokens(embedding, fold))
        else:
            layers.append(builder.split(layer) if split_input else builder.whole(layer))
    return Stack(tuple(layers))


def step_inputs(cell: Cell) -> list[str]:
    """The inputs that are not carried from step to step."""
    return [name for name in cell.inputs if name not in cell.carry]


class _Family(NamedTuple):
    """The classes of an LSTM or of a GRU."""

    torch_cell: type[nn.Module]
    torch_layers: type[nn.RNNBase]
    whole: type[LSTMCell] | type[GRUCell]
    half: type[LSTMInput] | type[GRUInput]
    recurrent: type[LSTMRecurrent] | type[GRURecurrent]
    of_tokens: type[EmbeddingLSTMCell] | type[EmbeddingGRUCell]
    states: tuple[str, ...]


_LSTM = _Family(nn.LSTMCell, nn.LSTM, LSTMCell, LSTMInput, LSTMRecurrent, EmbeddingLSTMCell, ("h", "c"))
_GRU = _Family(nn.GRUCell, nn.GRU, GRUCell, GRUInput, GRURecurrent, EmbeddingGRUCell, ("h",))


class _Builder:
    """Makes the cells of the layers of one torch module."""

    def __init__(self, module: Any, family: _Family, num_directions: int, max_batch: int | None) -> None:
        self.module, self.family, self.max_batch = module, family, max_batch
        self.num_directions = num_directions
        self.size, self.bias = module.hidden_size, bool(module.bias)
        self.dtype = next(module.parameters()).dtype
        self.states = {name: RowSpec((self.size,), self.dtype) for name in family.states}

    def of_tokens(self, embedding: nn.Embedding, fold: bool) -> Layer:
        """The lowest layer, on tokens."""
        made: list[Cell] = []
        for direction in range(self.num_directions):
            rows, width = embedding.weight.shape
            part = self.family.of_tokens(rows, width, self.size, self.bias, fold=fold)
            part.take_embedding(embedding)
            self._take(part, 0, direction)
            made.append(self._cell(part, {"token": RowSpec((), torch.int64), **self.states}))
        return Layer(*made)

    def whole(self, layer: int) -> Layer:
        """A layer of whole cells."""
        reads = self._reads(layer)
        made: list[Cell] = []
        for direction in range(self.num_directions):
            part = self.family.whole(self._width(layer), self.size, self.bias)
            self._take(part, layer, direction)
            made.append(self._cell(JoinedCell(part) if len(reads) > 1 else part, {**reads, **self.states}))
        return Layer(*made)

    def split(self, layer: int) -> Layer:
        """A layer with its input half apart."""
        halves: list[Any] = []
        made: list[Cell] = []
        gates = RowSpec((self.family.half.gates * self.size,), self.dtype)
        for direction in range(self.num_directions):
            halves.append(self._take(self.family.half(self._width(layer), self.size, self.bias), layer, direction))
            part = self._take(self.family.recurrent(self.size, self.bias), layer, direction)
            made.append(self._cell(part, {"gates": gates, **self.states}))
        half, reads = halves[0] if len(halves) == 1 else BothInputs(*halves), self._reads(layer)
        inputs = self._cell(Joined(half) if len(reads) > 1 else half, reads)
        return Layer(made[0], made[1] if len(made) > 1 else None, inputs)

    def _width(self, layer: int) -> int:
        return int(self.module.input_size) if layer == 0 else self.num_directions * self.size

    def _reads(self, layer: int) -> dict[str, RowSpec]:
        if layer > 0 and self.num_directions == 2:
            return dict.fromkeys(("left", "right"), RowSpec((self.size,), self.dtype))
        return {"x": RowSpec((self._width(layer),), self.dtype)}

    def _take(self, part: GatedModule, layer: int, direction: int) -> GatedModule:
        is_cell = isinstance(self.module, nn.RNNCellBase)
        part.take_weights(self.module, "" if is_cell else f"_l{layer}" + ("_reverse" if direction else ""))
        return part

    def _cell(self, module: nn.Module, inputs: dict[str, RowSpec]) -> Cell:
        return cell(module, inputs, max_batch=self.max_batch)


def _first_name(cell: Cell) -> str:
    return next(iter(cell.outputs))


def _first_output(cell: Cell) -> RowSpec:
    return cell.outputs[_first_name(cell)]


def _text(specs: list[RowSpec]) -> str:
    return " and ".join(map(str, specs)) or "nothing"
