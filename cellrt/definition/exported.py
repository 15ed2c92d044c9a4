"""A cell's code as a ``torch.export`` program for any number of rows, in which the weights are inputs."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.fx.experimental._config as symbolic_config
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.func import functional_call

from cellrt.definition.computation import Computation, call, count_rows, named_outputs
from cellrt.definition.modes import workers_modes
from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput, RaggedRows, copy_input, plain
from cellrt.definition.traced_pages import PagesAreReadError, flatten, tracing, unflatten, with_what_was_appended
from cellrt.errors import DefinitionError

EXAMPLE_ROWS, EXAMPLE_NODES = 7, 5
LEAST_VALUES = 2
"""Fewest values of a ragged input: torch makes the code special for fewer."""
ATTENTION = "cellrt.cells.cached_attention"
"""The module that implements the attention which programs of cells with pages or spans call."""


class ExportedModule(nn.Module):
    """A loaded program as a module; its weights are buffers.

    torch.export takes sizes of 0 and 1 for special, so the program is for two rows and more; fewer are filled up. That
    of a cell with pages or spans is for any number.
    """

    def __init__(self, program: ExportedProgram, weights: Mapping[str, torch.Tensor], outputs: Sequence[str]) -> None:
        super().__init__()
        self._outputs = list(outputs)
        self._program = program.graph_module
        self._weights = [f"weight{k}" for k in range(len(weights))]
        for name, value in zip(self._weights, weights.values()):
            self.register_buffer(name, value)
        user_inputs = iter(range(len(program.graph_signature.input_specs)))
        self._order: list[int | str] = []
        """The source of each input of the program: its number among weights and inputs, or the buffer of a constant."""
        for k, spec in enumerate(program.graph_signature.input_specs):
            if spec.kind is InputKind.USER_INPUT:
                self._order.append(next(user_inputs))
            else:
                self._order.append(f"constant{k}")
                self.register_buffer(f"constant{k}", program.constants[str(spec.target)])

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the weights by the names of their buffers, in the program's order; constants of the program are
        none.
        """
        return {name: getattr(self, name) for name in self._weights}

    def forward(self, *inputs: CellInput) -> dict[str, torch.Tensor]:
        """Run the program on inputs ``[rows, *shape]``; return the outputs by name."""
        given, is_small = [getattr(self, name) for name in self._weights], False
        if any(isinstance(value, PagedRows | Spans) for value in inputs):
            importlib.import_module(ATTENTION)
            given += flatten(inputs)
        else:
            is_small = _are_small(inputs)
            for value in inputs:
                given += _flat(_with_one_more(value) if is_small else value)
        rows = count_rows(inputs[0])
        results = self._program(*(getattr(self, k) if isinstance(k, str) else given[k] for k in self._order))
        return dict(zip(self._outputs, [value[:rows] for value in results] if is_small else results, strict=True))


class Exportable(nn.Module):
    """A cell's callable as a function of its weights and of flat inputs, of which it copies those in ``written``.

    It does not own the weights, of which there may be more than it has names.
    """

    def __init__(
        self, cell: Computation, module: Callable[..., Any], weights: Iterable[str], written: Iterable[str]
    ) -> None:
        super().__init__()
        self._call = (module,)
        self._cell, self._names, self._written = cell, list(weights), set(written)

    def forward(self, weights: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Run the cell; ``inputs`` as ``flatten`` makes them."""
        specs = self._cell.inputs
        given = unflatten(specs, inputs)
        given = [copy_input(value) if name in self._written else value for name, value in zip(specs, given)]

        def run(*args: CellInput, **kwargs: CellInput) -> object:
            module = self._call[0]
            if not isinstance(module, nn.Module):
                return module(*args, **kwargs)
            return functional_call(module, dict(zip(self._names, weights)), args, kwargs)

        named = named_outputs(call(run, specs, given, self._cell.by_name))
        return with_what_was_appended(given, [named[name] for name in self._cell.outputs])


def export(cell: Computation, module: Callable[..., Any], weights: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Return the program of a cell's module, which takes these weights of it and then the cell's inputs.

    It has a number of values of its own for each ragged input; if the code needs them equal, one for all. Raise
    DefinitionError if torch cannot export the code.
    """
    if sum(spec.ragged for spec in cell.inputs.values()) > 1:
        with contextlib.suppress(DefinitionError):
            return _export_pure(cell, module, weights, are_equal=False)
    return _export_pure(cell, module, weights, are_equal=True)


def _export_pure(
    cell: Computation, module: Callable[..., Any], weights: Mapping[str, torch.Tensor], are_equal: bool
) -> ExportedProgram:
    """Export a program that writes to no input: with copies of those that the cell was seen to write to, or of all."""
    plain_inputs = {name for name, spec in cell.inputs.items() if not spec.has_nodes}
    for written in (cell.written & plain_inputs, plain_inputs):
        program = _export_once(cell, module, weights, are_equal, written)
        if not program.graph_signature.user_inputs_to_mutate:
            return program
    raise DefinitionError(f"cell {cell.name!r} cannot be exported: it writes to its own tensors")


@workers_modes()
@torch.inference_mode(False)  # the caller may be in it: a program cannot write to memory that is made there
@torch.no_grad()
def _export_once(
    cell: Computation,
    module: Callable[..., Any],
    weights: Mapping[str, torch.Tensor],
    are_equal: bool,
    written: Iterable[str],
) -> ExportedProgram:
    if cell.has_spans:
        inputs, sizes = example_of(cell, Dim("rows", min=1), are_equal)
    else:
        inputs, sizes = _plain_example(cell, are_equal)
    is_general = symbolic_config.patch(backed_size_oblivious=cell.has_spans)  # type: ignore[attr-defined]
    try:
        with is_general, tracing():
            program = torch.export.export(
                Exportable(cell, module, weights, written),
                (list(weights.values()), inputs),
                dynamic_shapes=([None] * len(weights), sizes),
                strict=False,
            )
    except PagesAreReadError as error:
        raise DefinitionError(f"cell {cell.name!r} cannot be exported: {error}") from error
    except Exception as error:
        raise DefinitionError(
            f"cell {cell.name!r} cannot be exported for any number of rows (its code may ask for x.shape[0], but "
            f"not len(x), and not decide by values): {type(error).__name__}: {error}"
        ) from error
    program.example_inputs = None  # they hold the weights
    return program


def _plain_example(cell: Computation, are_equal: bool) -> tuple[list[torch.Tensor], list[dict[int, Any]]]:
    """Return an example as ``example_of`` does, of a program for two rows and more."""
    rows = Dim("rows", min=2, max=max(4, cell.max_batch + 1))
    shared = Dim("values", min=2)
    inputs: list[torch.Tensor] = []
    sizes: list[dict[int, Any]] = []
    for k, (spec, value) in enumerate(zip(cell.inputs.values(), cell.example_inputs(3))):
        inputs += _flat(value)
        values = shared if are_equal else Dim(f"values{k}", min=2)
        sizes += [{0: values}, {0: rows + 1}] if spec.ragged else [{0: rows}]
    return inputs, sizes


def example_of(cell: Computation, rows: Any, has_equal_values: bool) -> tuple[list[torch.Tensor], list[dict[int, Any]]]:
    """Return zeros for the inputs, and what their sizes are: sizes that may differ do differ, and none is 0 or 1."""
    inputs: list[torch.Tensor] = []
    sizes: list[dict[int, Any]] = []
    nodes = Dim("nodes", min=1)
    of_nodes = [torch.tensor([0, 1, 2, 4, 5, 7]), torch.tensor([0, 1, 2, 2, 3, 4, 4]), torch.ones(EXAMPLE_ROWS) > 0]
    for k, spec in enumerate(cell.inputs.values()):
        count = EXAMPLE_ROWS
        if spec.ragged:
            number = 0 if has_equal_values else k
            count = 2 * EXAMPLE_ROWS + 1 + 2 * number
            inputs.append(torch.zeros(count, *spec.shape, dtype=spec.dtype))
            inputs.append(torch.tensor([*range(0, 2 * EXAMPLE_ROWS, 2), count]))
            sizes += [{0: Dim(f"values{number}", min=LEAST_VALUES)}, {0: rows + 1}]
        elif spec.page_size:
            pages, width = 12 + 2 * k, 25 + 2 * k
            inputs.append(torch.zeros(pages, *spec.stored.shape, dtype=spec.dtype))
            inputs += [
                torch.zeros(shape, dtype=torch.int32) for shape in ((EXAMPLE_NODES, width), EXAMPLE_NODES, count)
            ]
            sizes += [{0: Dim(f"pages{k}", min=1)}, {0: nodes, 1: Dim(f"width{k}", min=1)}, {0: nodes}, {0: rows}]
        else:
            shape, dtype = ((), torch.int32) if spec.span else (spec.shape, spec.dtype)
            inputs.append(torch.zeros(count, *shape, dtype=dtype))
            sizes.append({0: rows})
    if cell.has_spans:
        inputs += [value if value.dtype == torch.bool else value.to(torch.int32) for value in of_nodes]
        sizes += [{0: nodes + 1}, {0: rows}, {0: rows}]
    return inputs, sizes


def _flat(value: CellInput) -> list[torch.Tensor]:
    value = plain(value)
    return list(value) if isinstance(value, RaggedRows) else [value]


def _are_small(inputs: Sequence[CellInput]) -> bool:
    """Return whether a dimension is smaller than what the program is for."""
    flat = [value.values if isinstance(value, RaggedRows) else value for value in map(plain, inputs)]
    return count_rows(inputs[0]) < 2 or any(value.shape[0] < 2 for value in flat)


def _with_one_more(value: CellInput) -> CellInput:
    """Return one more row (a copy of the first), or one more node with two rows of zeros."""
    value = plain(value)
    if not isinstance(value, RaggedRows):
        return torch.cat([value, value[:1]])
    zeros = value.values.new_zeros((2, *value.values.shape[1:]))
    return RaggedRows(torch.cat([value.values, zeros]), torch.cat([value.offsets, value.offsets[-1:] + 2]))
