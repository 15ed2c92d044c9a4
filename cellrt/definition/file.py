"""A cell as files: a folder that a process can serve without the cell's Python class.

- ``cell.json``: what the cell is (names, row specs, limits, identity), the format's version, and a checksum of each
  other file;
- ``program.pt2``: a ``torch.export`` program for any number of rows, in which the weights are inputs;
- ``weights.safetensors``: the weights, by their names in the module.

A loaded cell has the identity of the saved one, so both batch together. It has no steps-first form: its runs go step
by step.
Load only files from whom you trust: a program is code.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import InputKind
from torch.func import functional_call

from cellrt.definition.computation import Computation, call, named_outputs
from cellrt.definition.declaration import BatchSizes, Declaration
from cellrt.definition.snapshot import weights_of
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec, as_spec, copy_input
from cellrt.errors import DefinitionError

FORMAT_VERSION = 1
DESCRIPTION, PROGRAM, WEIGHTS = "cell.json", "program.pt2", "weights.safetensors"


def save_cell(cell: Computation, identity: str, folder: str | Path) -> None:
    """Writes a cell into a folder, which is made if there is none; a cell that is there already is replaced.

    Raises DefinitionError if its code cannot be exported: if it decides by the values of tensors or by the number of
    rows, or calls something that torch cannot trace.
    """
    module = copy.deepcopy(cell.module)
    weights = {key: value.detach() for key, value in weights_of(module).items()}
    program = _export(cell, module, weights)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, folder / PROGRAM)
    save_file({key: value.contiguous().clone() for key, value in weights.items()}, folder / WEIGHTS)
    description = {
        "version": FORMAT_VERSION,
        "name": cell.name,
        "identity": identity,
        "inputs": {name: _spec_to_json(spec) for name, spec in cell.inputs.items()},
        "outputs": {name: _spec_to_json(spec) for name, spec in cell.outputs.items()},
        "carry": cell.carry,
        "finite": list(cell.finite),
        "max_batch": cell.max_batch,
        "min_batch": cell.min_batch,
        "batch_sizes": list(cell.batch_sizes),
        "priority": cell.priority,
        "weights": list(weights),
        "sha256": {name: _checksum(folder / name) for name in (PROGRAM, WEIGHTS)},
    }
    new = folder / f"{DESCRIPTION}.new"
    new.write_text(json.dumps(description, indent=2) + "\n")
    os.replace(new, folder / DESCRIPTION)


def read_cell(folder: str | Path) -> tuple[ExportedModule, bool, Declaration, str]:
    """What ``save_cell`` wrote: the module, whether it takes its inputs by name, the declaration and the identity.

    Raises DefinitionError if a file is missing, was changed, or was written by a newer version.
    """
    folder = Path(folder)
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
        version = description["version"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DefinitionError(f"{folder} has no readable {DESCRIPTION}: {error}") from error
    if version != FORMAT_VERSION:
        raise DefinitionError(
            f"{folder} was written in format {version}; this version of cellrt reads {FORMAT_VERSION}"
        )
    try:
        for name, checksum in description["sha256"].items():
            if _checksum(folder / name) != checksum:
                raise ValueError(f"{name} is not the file that was saved")
        program = torch.export.load(folder / PROGRAM)
        weights = load_file(folder / WEIGHTS)
        outputs = {name: _spec_from_json(spec) for name, spec in description["outputs"].items()}
        module = ExportedModule(program, {key: weights[key] for key in description["weights"]}, list(outputs))
        declaration = Declaration(
            name=description["name"],
            inputs={name: _spec_from_json(spec) for name, spec in description["inputs"].items()},
            outputs=outputs,
            carry=description["carry"],
            finite=tuple(description["finite"]),
            sizes=BatchSizes(description["max_batch"], description["min_batch"], tuple(description["batch_sizes"])),
            priority=description["priority"],
        )
        return module, False, declaration, description["identity"]
    except Exception as error:
        raise DefinitionError(f"{folder} has no cell that can be loaded: {type(error).__name__}: {error}") from error


class ExportedModule(nn.Module):
    """A loaded program as a module; its weights are buffers.

    torch.export takes sizes of 0 and 1 for special, so the program is for two rows and more; fewer are filled up.
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
        """For each input of the program: its number among weights and inputs, or the buffer of a constant."""
        for k, spec in enumerate(program.graph_signature.input_specs):
            if spec.kind is InputKind.USER_INPUT:
                self._order.append(next(user_inputs))
            else:
                self._order.append(f"constant{k}")
                self.register_buffer(f"constant{k}", program.constants[str(spec.target)])

    def forward(self, *inputs: CellInput) -> dict[str, torch.Tensor]:
        """Runs the program on inputs ``[rows, *shape]``; returns the outputs by name."""
        rows, is_small = _count_rows(inputs)
        given = [getattr(self, name) for name in self._weights]
        for value in inputs:
            given += _flat(_with_one_more(value) if is_small else value)
        results = self._program(*(getattr(self, k) if isinstance(k, str) else given[k] for k in self._order))
        return dict(zip(self._outputs, [value[:rows] for value in results] if is_small else results, strict=True))


class _Exportable(nn.Module):
    """A cell's callable as a function of its weights and of flat inputs, of which it copies those in ``written``.

    It does not own the weights.
    """

    def __init__(
        self, cell: Computation, module: Callable[..., Any], weights: Iterable[str], written: Iterable[str]
    ) -> None:
        super().__init__()
        self._call = (module,)
        self._cell, self._names, self._written = cell, list(weights), set(written)

    def forward(self, weights: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        """Runs the cell; ragged inputs are two of ``inputs`` each."""
        flat = iter(inputs)
        specs = self._cell.inputs
        given = [RaggedRows(next(flat), next(flat)) if spec.ragged else next(flat) for spec in specs.values()]
        given = [copy_input(value) if name in self._written else value for name, value in zip(specs, given)]

        def run(*args: CellInput, **kwargs: CellInput) -> object:
            module = self._call[0]
            if not isinstance(module, nn.Module):
                return module(*args, **kwargs)
            return functional_call(module, dict(zip(self._names, weights, strict=True)), args, kwargs)

        named = named_outputs(call(run, specs, given, self._cell.by_name))
        return [named[name] for name in self._cell.outputs]


def _export(cell: Computation, module: Callable[..., Any], weights: Mapping[str, torch.Tensor]) -> ExportedProgram:
    """Exports with a number of values of its own for each ragged input; if the code needs them equal, with one."""
    if sum(spec.ragged for spec in cell.inputs.values()) > 1:
        with contextlib.suppress(DefinitionError):
            return _export_pure(cell, module, weights, are_equal=False)
    return _export_pure(cell, module, weights, are_equal=True)


def _export_pure(
    cell: Computation, module: Callable[..., Any], weights: Mapping[str, torch.Tensor], are_equal: bool
) -> ExportedProgram:
    """Exports a program that writes to no input: with copies of those that the cell was seen to write to, or of all."""
    for written in (cell.written, set(cell.inputs)):
        program = _export_once(cell, module, weights, are_equal, written)
        if not program.graph_signature.user_inputs_to_mutate:
            return program
    raise DefinitionError(f"cell {cell.name!r} cannot be exported: it writes to its own tensors")


def _export_once(
    cell: Computation,
    module: Callable[..., Any],
    weights: Mapping[str, torch.Tensor],
    are_equal: bool,
    written: Iterable[str],
) -> ExportedProgram:
    rows = Dim("rows", min=2, max=max(4, cell.max_batch + 1))
    shared = Dim("values", min=2)
    inputs: list[torch.Tensor] = []
    sizes: list[dict[int, Any]] = []
    for k, (spec, value) in enumerate(zip(cell.inputs.values(), cell.example_inputs(3))):
        inputs += _flat(value)
        values = shared if are_equal else Dim(f"values{k}", min=2)
        sizes += [{0: values}, {0: rows + 1}] if spec.ragged else [{0: rows}]
    try:
        program = torch.export.export(
            _Exportable(cell, module, weights, written),
            (list(weights.values()), inputs),
            dynamic_shapes=([None] * len(weights), sizes),
            strict=False,
        )
    except Exception as error:
        raise DefinitionError(
            f"cell {cell.name!r} cannot be exported for any number of rows (its code may ask for x.shape[0], but "
            f"not len(x), and not decide by values): {type(error).__name__}: {error}"
        ) from error
    program.example_inputs = None  # they hold the weights
    return program


def _flat(value: CellInput) -> list[torch.Tensor]:
    return list(value) if isinstance(value, RaggedRows) else [value]


def _count_rows(inputs: Sequence[CellInput]) -> tuple[int, bool]:
    """The number of rows, and whether a dimension is smaller than what the program is for."""
    rows, is_small = 0, False
    for value in inputs:
        if isinstance(value, RaggedRows):
            rows = value.offsets.shape[0] - 1
            is_small = is_small or value.values.shape[0] < 2
        else:
            rows = value.shape[0]
    return rows, is_small or rows < 2


def _with_one_more(value: CellInput) -> CellInput:
    """One more row (a copy of the first), or one more node with two rows of zeros."""
    if not isinstance(value, RaggedRows):
        return torch.cat([value, value[:1]])
    zeros = value.values.new_zeros((2, *value.values.shape[1:]))
    return RaggedRows(torch.cat([value.values, zeros]), torch.cat([value.offsets, value.offsets[-1:] + 2]))


def _spec_to_json(spec: RowSpec) -> dict[str, Any]:
    return {"shape": list(spec.shape), "dtype": str(spec.dtype).removeprefix("torch."), "ragged": spec.ragged}


def _spec_from_json(value: dict[str, Any]) -> RowSpec:
    return as_spec("loaded", RowSpec(tuple(value["shape"]), getattr(torch, value["dtype"]), value["ragged"]))


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
