"""A cell as files: a folder that a process can serve without the cell's Python class.

- ``cell.json``: what is declared of the cell, its identity, the format's version, a checksum of each other file, and a
  digest of all that;
- ``program.pt2``: a ``torch.export`` program for any number of rows, in which the weights are inputs;
- ``weights.safetensors``: the weights, by their names in the module.

A loaded cell has the identity of the saved one, so both batch together. It has no steps-first form: its runs go step by
step. Every field is checked as where a cell is defined. The identity is computed again from the weights and fields that
were read. So a folder cannot pose as another cell and serve that cell's requests. Of the program it says
nothing: a program is code, so load only files that you trust.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from cellrt.definition.computation import Computation
from cellrt.definition.declaration import (
    Declaration,
    check_carry,
    check_finite,
    check_inputs,
    check_name,
    check_output_name,
    check_priority,
    check_row_wise,
    check_sizes,
)
from cellrt.definition.exported import ExportedModule, export
from cellrt.definition.identity import Identity, identity_with
from cellrt.definition.snapshot import weights_of
from cellrt.definition.spec import DTYPE_NAMES, RowSpec, as_spec
from cellrt.errors import DefinitionError

FORMAT_VERSION = 2
DESCRIPTION, PROGRAM, WEIGHTS = "cell.json", "program.pt2", "weights.safetensors"
FIELDS = frozenset(
    {
        *("version", "name", "inputs", "outputs", "carry", "finite", "max_batch", "min_batch", "batch_sizes"),
        *("priority", "definition", "identity", "weights", "sha256"),
    }
)
"""The fields of a description, beside its digest. A cell that is not row-wise has one more."""
NOT_ROW_WISE, MAX_BATCH_ROWS = "row_wise", "max_batch_rows"
"""The fields that only some cells have, as only specs of pages and spans have some parts."""
OF_NODES = ("page_size", "appends", "page_dim", "span")


def save_cell(cell: Computation, identity: Identity, folder: str | Path) -> None:
    """Write a cell into a folder, which is made if there is none; a cell that is there already is replaced.

    Raise DefinitionError if its code cannot be exported: it decides by the values of tensors or by the number of rows,
    or calls something that torch cannot trace. Raise it also if safetensors has no form for a weight.
    """
    from safetensors.torch import save  # here: a bare machine with a GPU need not have it

    module = copy.deepcopy(cell.module)
    weights = {name: value.detach() for name, value in _weights_of(module).items()}
    program = export(cell, module, weights)
    try:
        saved = save({name: value.contiguous().clone() for name, value in weights.items()})
    except Exception as error:
        raise DefinitionError(f"cell {cell.name!r}: a weight cannot be saved: {error!r}") from error
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    torch.export.save(program, folder / PROGRAM)
    (folder / WEIGHTS).write_bytes(saved)
    description = {
        "version": FORMAT_VERSION,
        "name": cell.name,
        "inputs": {name: _spec_to_json(spec) for name, spec in cell.inputs.items()},
        "outputs": {name: _spec_to_json(spec) for name, spec in cell.outputs.items()},
        "carry": cell.carry,
        "finite": list(cell.finite),
        "max_batch": cell.max_batch,
        "min_batch": cell.min_batch,
        "batch_sizes": list(cell.batch_sizes),
        "priority": cell.priority,
        "definition": identity.definition,
        "identity": identity.digest,
        "weights": list(weights),
        "sha256": {name: _checksum(folder / name) for name in (PROGRAM, WEIGHTS)},
    }
    if not cell.declaration.row_wise:
        description[NOT_ROW_WISE] = False
    if cell.has_spans:
        description[MAX_BATCH_ROWS] = cell.declaration.sizes.largest_rows
    new = folder / f"{DESCRIPTION}.new"
    new.write_text(json.dumps({**description, "digest": _digest_of(description)}, indent=2) + "\n")
    os.replace(new, folder / DESCRIPTION)


def read_cell(folder: str | Path) -> tuple[ExportedModule, bool, Declaration, Identity]:
    """Return what ``save_cell`` wrote: the module, whether inputs go by name, the declaration and the identity.

    Raise DefinitionError if a file is missing, was changed, was written by another version, or has wrong contents.
    """
    folder = Path(folder)
    description = _read_description(folder)
    try:
        if description.keys() - {NOT_ROW_WISE, MAX_BATCH_ROWS} != FIELDS:
            raise ValueError(f"expected the fields {sorted(FIELDS)}, got {sorted(description)}")
        _check_files(folder, description["sha256"])
        declaration = _declaration_of(description)
        module, weights = _read_module(folder, description["weights"], declaration)
        identity = identity_with(_hex(description["definition"]), weights.values(), declaration.of_identity())
        if identity.digest != description["identity"]:
            raise ValueError(f"its identity is {identity.digest}, not {description['identity']!r}")
        _try_out(Computation(module, False, declaration))
    except Exception as error:
        reason = str(error) if isinstance(error, DefinitionError) else f"{type(error).__name__}: {error}"
        raise DefinitionError(f"{folder} has no cell that can be loaded: {reason}") from error
    return module, False, declaration, identity


def _read_description(folder: Path) -> dict[str, Any]:
    """Return the fields of ``cell.json``, as they were written."""
    try:
        description = json.loads((folder / DESCRIPTION).read_text())
        version = description["version"]
    except Exception as error:
        raise DefinitionError(f"{folder} has no readable {DESCRIPTION}: {error}") from error
    if version != FORMAT_VERSION:
        raise DefinitionError(
            f"{folder} was written in format {version}; this version of cellrt reads {FORMAT_VERSION}"
        )
    if description.pop("digest", None) != _digest_of(description):
        raise DefinitionError(f"{folder} has no cell that can be loaded: {DESCRIPTION} is not what was saved")
    return dict(description)


def _check_files(folder: Path, checksums: Mapping[str, str]) -> None:
    if set(checksums) != {PROGRAM, WEIGHTS}:
        raise ValueError(f"expected checksums of {PROGRAM} and {WEIGHTS}, got {checksums!r}")
    for name, checksum in checksums.items():
        if _checksum(folder / name) != checksum:
            raise ValueError(f"{name} is not the file that was saved")


def _declaration_of(description: Mapping[str, Any]) -> Declaration:
    """Return the declaration that a description holds, with the checks of ``cellrt.cell``."""
    name = check_name(description["name"])
    inputs = check_inputs(name, {key: _spec_from_json(key, spec) for key, spec in description["inputs"].items()})
    outputs = {key: _spec_from_json(key, spec) for key, spec in description["outputs"].items()}
    for key, spec in outputs.items():
        check_output_name(name, key)
        if spec.ragged:
            raise ValueError(f"output {key!r} is ragged")
    sizes = [description[key] for key in ("max_batch", "min_batch", "batch_sizes")]
    most_rows, has_spans = description.get(MAX_BATCH_ROWS), any(spec.has_nodes for spec in inputs.values())
    lists = {key: description[key] for key in ("carry", "finite", "batch_sizes")}
    if [type(value) for value in lists.values()] != [dict, list, list]:
        raise ValueError(f"expected a dict and two lists, got {lists!r}")
    return Declaration(
        name,
        inputs,
        outputs,
        check_carry(name, inputs, outputs, description["carry"]),
        check_finite(name, outputs, description["finite"]),
        check_sizes(name, sizes[0], sizes[1], sizes[2], most_rows, has_spans),
        check_priority(name, description["priority"]),
        check_row_wise(name, description.get(NOT_ROW_WISE, True)),
    )


def _read_module(
    folder: Path, names: list[str], declaration: Declaration
) -> tuple[ExportedModule, dict[str, torch.Tensor]]:
    """Return the program with its weights, and these in the program's order."""
    from safetensors.torch import load_file

    saved = load_file(folder / WEIGHTS)
    if sorted(names) != sorted(saved):
        raise ValueError(f"{WEIGHTS} has {sorted(saved)}, not {names!r}")
    weights = {name: saved[name] for name in names}
    return ExportedModule(torch.export.load(folder / PROGRAM), weights, list(declaration.outputs)), weights


@torch.inference_mode()
def _try_out(loaded: Computation) -> None:
    """Run the loaded cell once on zeros. Raise CellError if the program returns other outputs than are declared."""
    rows = loaded.batch_sizes[0] if loaded.batch_sizes else min(2, loaded.max_batch)
    loaded.check_outputs(loaded.run_step(*loaded.example_inputs(rows)), rows)


def _weights_of(module: Callable[..., Any]) -> dict[str, torch.Tensor]:
    """Return a cell's weights; of a loaded cell, those it was loaded with."""
    return module.weights() if isinstance(module, ExportedModule) else weights_of(module)


def _spec_to_json(spec: RowSpec) -> dict[str, Any]:
    written = {"shape": list(spec.shape), "dtype": str(spec.dtype).removeprefix("torch."), "ragged": spec.ragged}
    return {**written, **({name: getattr(spec, name) for name in OF_NODES} if spec.has_nodes else {})}


def _spec_from_json(name: str, value: Mapping[str, Any]) -> RowSpec:
    of_nodes = {key: value[key] for key in OF_NODES if key in value}
    is_span = of_nodes.get("span", "") in ("", "partial", "whole")
    if not is_span or not isinstance(of_nodes.get("appends", False), bool):
        raise ValueError(f"{name!r}: expected what is said of pages and spans, got {value!r}")
    if set(value) - {*OF_NODES} != {"shape", "dtype", "ragged"} or not isinstance(value["ragged"], bool):
        raise ValueError(f"{name!r}: expected shape, dtype and ragged, got {value!r}")
    if value["dtype"] not in list(DTYPE_NAMES):
        raise ValueError(f"{name!r}: expected a dtype of {', '.join(DTYPE_NAMES)}, got {value['dtype']!r}")
    return as_spec(name, RowSpec(tuple(value["shape"]), DTYPE_NAMES[value["dtype"]], value["ragged"], **of_nodes))


def _hex(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch("[0-9a-f]{64}", value):
        raise ValueError(f"expected a digest of 64 hexadecimal digits, got {value!r}")
    return value


def _digest_of(description: Mapping[str, Any]) -> str:
    """Return the digest of the other fields, in their order, as JSON without line breaks."""
    return hashlib.sha256(json.dumps(description).encode()).hexdigest()


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
