"""The part that all models of trees share: checks that the cells fit, and writes the graph of one tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt import Cell, DefinitionError, Graph, Node, Output, RowSpec

_SIDES = {"left": 0, "right": 1}


@dataclass(frozen=True)
class TreeCells:
    """The cells of a model; raises DefinitionError if the output cell does not fit the others."""

    model: str
    leaf: Cell
    inner: Cell
    output: Cell | None
    every_node: bool

    def __post_init__(self) -> None:
        for cell in (self.leaf, self.inner, self.output or self.inner):
            if not isinstance(cell, Cell):
                raise DefinitionError(f"model {self.model!r}: expected a cell, got {type(cell).__name__}")
        if self.output is not None:
            for name, spec in self.output.inputs.items():
                self._check_common(self.output, name, name, spec)
        for name, (output, _) in self._of_child.items():
            self._check_common(self.inner, name, output, self.inner.inputs[name]._replace(ragged=False))
        if not self._results:
            raise DefinitionError(f"model {self.model!r}: the leaf and the inner cell have no output in common")

    def _check_common(self, reader: Cell, name: str, output: str, spec: RowSpec) -> None:
        """Raise DefinitionError unless leaf and inner cell have the output that an input reads."""
        for cell in (self.leaf, self.inner):
            if cell.outputs.get(output) != spec:
                raise DefinitionError(
                    f"model {self.model!r}: input {name!r} of cell {reader.name!r} reads {output!r}, {spec}, of other "
                    f"nodes; cell {cell.name!r} has outputs { ({k: str(v) for k, v in cell.outputs.items()}) }"
                )

    @cached_property
    def _results(self) -> list[str]:
        """Names of the results."""
        return self._common if self.output is None else list(self.output.outputs)

    @cached_property
    def _common(self) -> list[str]:
        """Outputs that leaf and inner cell have in common."""
        return [name for name, spec in self.inner.outputs.items() if self.leaf.outputs.get(name) == spec]

    @cached_property
    def _of_child(self) -> dict[str, tuple[str, int]]:
        """Inputs of the inner cell that read children: the output's name, and which child (-1: all, ragged)."""
        found: dict[str, tuple[str, int]] = {}
        for name, spec in self.inner.inputs.items():
            stem, _, suffix = name.rpartition("_")
            if spec.ragged:
                found[name] = (name, -1)
            elif stem in self.inner.outputs and (suffix in _SIDES or suffix.isdecimal()):
                found[name] = (stem, _SIDES[suffix] if suffix in _SIDES else int(suffix))
        return found

    @cached_property
    def _named_children(self) -> int:
        """The number of children that the inner cell names; 0 if it takes any number."""
        return 1 + max((child for _, child in self._of_child.values()), default=-1)

    @property
    def num_children(self) -> int:
        """Children of an inner node of an example."""
        return self._named_children or 2

    def leaf_inputs(self) -> list[str]:
        """Return the inputs of the leaf cell that a request gives."""
        return [name for name, spec in self.leaf.inputs.items() if not spec.ragged and name not in self.leaf.carry]

    def inner_inputs(self) -> list[str]:
        """Return the inputs of the inner cell that a request gives."""
        return [name for name in self.inner.inputs if name not in self._of_child]

    def zero_rows(self, cell: Cell, names: Sequence[str], count: int) -> dict[str, torch.Tensor]:
        """Return zeros for these inputs."""
        specs = {name: cell.inputs[name] for name in names}
        return {name: torch.zeros((count, *spec.shape), dtype=spec.dtype, device="cpu") for name, spec in specs.items()}

    def only_leaf_input(self) -> tuple[str, RowSpec]:
        """Return the one input of the leaf cell. Raise DefinitionError if there is another number of them."""
        names = self.leaf_inputs()
        if len(names) != 1:
            raise DefinitionError(
                f"model {self.model!r}: expected a leaf cell with one input that is not its children's or carried, "
                f"cell {self.leaf.name!r} has {names}"
            )
        return names[0], self.leaf.inputs[names[0]]

    def token_input(self) -> str:
        """Return the one input of the leaf cell, which takes tokens. Raise DefinitionError if it does not."""
        name, spec = self.only_leaf_input()
        if spec != RowSpec((), torch.int64):
            raise DefinitionError(
                f"model {self.model!r}: expected an input of int64[] for tokens, input {name!r} of cell "
                f"{self.leaf.name!r} is {spec}"
            )
        return name

    def check_inner_needs_nothing(self) -> None:
        """Raise DefinitionError if the inner cell has inputs besides its children."""
        if self.inner_inputs():
            raise DefinitionError(
                f"model {self.model!r}: inner nodes have no inputs besides their children in these requests, cell "
                f"{self.inner.name!r} has {self.inner_inputs()} (see parent_tree)"
            )

    def build(
        self, graph: Graph, parents: NDArray[np.int32], leaf_inputs: Mapping[str, Any], inner_inputs: Mapping[str, Any]
    ) -> dict[str, object]:
        """Write a tree; return the model's results. Inputs have one row a leaf (inner node) in order."""
        tree = graph.tree(parents, leaf=self.leaf, inner=self.inner, leaf_inputs=leaf_inputs, inner_inputs=inner_inputs)
        if not self.every_node:
            root: Node = tree
            if self.output is not None:
                root = graph.call(self.output, **{name: getattr(tree, name) for name in self.output.inputs})
            return {name: getattr(root, name) for name in self._results}
        if self.output is None:
            return {name: getattr(tree.nodes, name) for name in self._results}
        given = {name: getattr(tree.nodes, name) for name in self.output.inputs}
        return dict(_call_each(graph, self.output, given, parents.size))


def _call_each(graph: Graph, cell: Cell, inputs: Mapping[str, Any], count: int) -> Mapping[str, Sequence[Output]]:
    """Call a cell ``count`` times, on one output after the other of each input."""
    if not cell.carry:  # Then the nodes of a chain do not depend on each other.
        chain = graph.chain(cell, **inputs)
        return {name: getattr(chain, name) for name in cell.outputs}
    nodes = [graph.call(cell, **{name: outputs[k] for name, outputs in inputs.items()}) for k in range(count)]
    return {name: [getattr(node, name) for node in nodes] for name in cell.outputs}
