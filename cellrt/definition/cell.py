"""A cell: a batched computation with its weights inside, of which a graph has nodes.

A cell's type is its definition, its weights and the shapes of its rows (BatchMaker section 2.4.2). Two models that
build the same cell from the same weights batch together. A changed weight makes another type (see ``identity.py``). The
weights are copied when the cell is made, so later training does not reach it (``snapshot.py``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from cellrt.definition.compiled_form import CompiledForm, find_compiled_form
from cellrt.definition.computation import Computation
from cellrt.definition.declaration import Declaration
from cellrt.definition.file import save_cell
from cellrt.definition.form_trial import wrong_outputs
from cellrt.definition.given_inputs import fit, in_order
from cellrt.definition.identity import Identity, likeness_of
from cellrt.definition.row_wise import warn_unless_row_wise
from cellrt.definition.spec import CellInput
from cellrt.errors import DefinitionError, RequestError


class Outputs(Protocol):
    """A node's outputs, one attribute each."""

    def __getattr__(self, name: str) -> Any: ...


class GraphUnderConstruction(Protocol):
    """The interface of a graph under construction, which takes the cell's calls."""

    def call(self, cell: Cell, /, **inputs: object) -> Outputs:
        """Add a node."""


CURRENT_GRAPH: ContextVar[GraphUnderConstruction] = ContextVar("cellrt_current_graph")
"""The graph that the unfolder running in this thread or task is building."""


class Cell(Computation):
    """A cell, as made by ``cellrt.cell`` or ``cellrt.load_cell``. Calling it in an unfolder adds a node to the graph.

    Attributes:
        name: for errors, pictures and statistics.
        module: a snapshot of the module or function; nobody may write to its weights.
        inputs, outputs: row specs by name, in the order the module takes and returns them.
        carry: which output an input is carried from, from step to step of a chain or loop.
        identity: hex digest; equal identity = same cell type.
        max_batch, min_batch, batch_sizes, priority, finite: as given to ``cellrt.cell``.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        by_name: bool,
        declaration: Declaration,
        identity: Identity,
        written: Iterable[str] = (),
    ) -> None:
        super().__init__(module, by_name, declaration, written)
        self.why_no_form = ""
        """The reason why the module's compiled form is not used; empty if it is, or if there is none."""
        self.identity, self._identity = identity.digest, identity

    def __repr__(self) -> str:
        inputs = ", ".join(f"{name}: {spec}" for name, spec in self.inputs.items())
        outputs = ", ".join(f"{name}: {spec}" for name, spec in self.outputs.items())
        return f"Cell({self.name!r}, ({inputs}) -> ({outputs}), {self.identity[:8]})"

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for copies, which find a compiled form of their own: this one's constants are addresses."""
        return {name: value for name, value in vars(self).items() if name != "compiled_form"}

    def __call__(self, /, *unnamed: object, **inputs: object) -> Outputs:
        """Add a node to the graph that is being unfolded: see ``Graph.call``. Inputs go by their names alone."""
        if unnamed:
            raise RequestError(
                f"cell {self.name!r}: inputs go by name: {', '.join(f'{name}=' for name in self.inputs)}"
            )
        graph = CURRENT_GRAPH.get(None)
        if graph is None:
            raise DefinitionError(f"cell {self.name!r} was called outside an unfolder; use cell.run(...) for tensors")
        return graph.call(self, **inputs)

    def run(self, *inputs: CellInput, **named: CellInput) -> list[torch.Tensor]:
        """Run one step on tensors, here and now.

        Inputs are ``[rows, *shape]``, in order or by name. Return outputs ``[rows, *shape]`` in order.

        Raise RequestError if they do not fit the cell's specs, and whatever the cell raises.
        """
        if torch.compiler.is_compiling() or (not named and fit(self, inputs)):
            return self.run_step(*inputs)
        return self.run_step(*in_order(self, inputs, named))

    @cached_property
    def likeness(self) -> str:
        """Equal to that of cells that differ in the values of their weights alone."""
        return likeness_of(self.module, self.declaration.of_identity())

    @cached_property
    def compiled_form(self) -> CompiledForm | None:
        """The form that runs the cell on a CPU without Python, if its module has one: see ``compiled_form.py``.

        None too, with a line in the log, if on random rows it does not give what the module gives.
        """
        if self.batch_sizes or not self.by_name:
            return None
        form = find_compiled_form(self.module, self.inputs, self.outputs, self.carry)
        if form is not None and (wrong := wrong_outputs(self, form)):
            self.why_no_form = f"its module's compiled form gave other results than the module: {', '.join(wrong)}"
            logging.getLogger("cellrt").warning("cell %r runs without it: %s", self.name, self.why_no_form)
            return None
        return form

    def check_row_wise(self) -> list[str]:
        """Run the cell on a few random rows together and one by one; return the outputs that differ, with a warning
        that says beside which rows, and by which input.

        ``Engine.register`` does so for each new cell, and refuses one with such outputs unless it was made with
        ``row_wise=False``. See ``mixing_trials.py`` for what is tried, and ``row_wise.py`` for when they differ.
        """
        return warn_unless_row_wise(self, depth=2)

    def save(self, folder: str | Path) -> None:
        """Write the cell as files into a folder, so that a process without its Python class can serve it.

        ``file.py`` says what they are. Raise DefinitionError if its code cannot be exported: if it decides by the
        values of tensors or by the number of rows, or calls something that torch cannot trace.
        """
        save_cell(self, self._identity, folder)
