"""A cell's trial run, where it is defined: on meta tensors, and on zeros where it cannot run there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from cellrt.definition.computation import Computation, call, named_outputs
from cellrt.definition.declaration import BatchSizes, check_output_name
from cellrt.definition.examples import zero_inputs
from cellrt.definition.spec import RowSpec, check_dtype, describe
from cellrt.errors import DefinitionError

INSTEAD: Mapping[type, str] = MappingProxyType(
    {
        nn.LSTMCell: "torch's LSTMCell takes its state as one tuple: use cellrt.cells.LSTMCell.from_torch(...), which "
        "has inputs x, h and c",
        nn.RNNBase: "torch's module takes whole sequences, a cell one step: use cellrt.unfolders.chain(name, module) "
        "for an nn.LSTM or nn.GRU",
    }
)
"""What to use instead of modules of torch that are no cells."""


def infer_outputs(
    name: str, module: Callable[..., Any], specs: Mapping[str, RowSpec], by_name: bool, sizes: BatchSizes
) -> dict[str, RowSpec]:
    """Runs a module on two numbers of rows that it takes (where there are two) and returns what its outputs are.

    Raises DefinitionError if it does not run, writes to its own tensors, or returns what is no cell's output.
    """
    found: dict[str, RowSpec] = {}
    for rows in _trial_rows(sizes):
        try:
            meta = copy.deepcopy(module).to("meta") if isinstance(module, nn.Module) else module
            before = _versions(meta)
            with torch.inference_mode():
                named = named_outputs(call(meta, specs, zero_inputs(specs.values(), rows, "meta"), by_name))
            after = _versions(meta)
        except Exception:
            before = _versions(module)
            named = _run_on_zeros(name, module, specs, by_name, rows)
            after = _versions(module)
        if before != after:
            written = sorted(key for key in before if before[key] != after.get(key))
            raise DefinitionError(
                f"cell {name!r}: writes to its own {written}; a cell has no state of its own: use carry"
            )
        for output, value in named.items():
            _check_output(name, output, value, rows)
        outputs = {output: RowSpec(tuple(value.shape[1:]), value.dtype) for output, value in named.items()}
        if found and outputs != found:
            raise DefinitionError(f"cell {name!r}: its outputs depend on the number of rows: {found} or {outputs}")
        found = outputs
    return found


def check_steps(computation: Computation) -> None:
    """Runs the steps-first form once on zeros, two rows and then one (one row twice for a cell of one row)."""
    batch_sizes = [min(2, computation.max_batch), 1]
    inputs = [
        zero_inputs([spec], batch_sizes[0] if key in computation.carry else sum(batch_sizes))[0]
        for key, spec in computation.inputs.items()
    ]
    try:
        with torch.inference_mode():
            computation.check_outputs(computation.run_steps(batch_sizes, *inputs), sum(batch_sizes))
    except Exception as error:
        raise DefinitionError(f"cell {computation.name!r}: its method steps does not run on zeros: {error}") from error


def _trial_rows(sizes: BatchSizes) -> list[int]:
    """Two numbers of rows that the cell takes, where there are two."""
    if sizes.supported:
        return sorted({sizes.supported[0], sizes.supported[-1]})
    return sorted({min(2, sizes.largest), min(3, sizes.largest)})


def _versions(module: Callable[..., Any]) -> dict[str, tuple[int, int]]:
    """Which tensors a module has and how often each was written."""
    if not isinstance(module, nn.Module):
        return {}
    tensors = (*module.named_parameters(), *module.named_buffers())
    return {key: (id(value), 0 if value.is_inference() else value._version) for key, value in tensors}


def _run_on_zeros(
    name: str, module: Callable[..., Any], specs: Mapping[str, RowSpec], by_name: bool, rows: int
) -> dict[str, torch.Tensor]:
    try:
        with torch.inference_mode():
            return named_outputs(call(module, specs, zero_inputs(specs.values(), rows), by_name))
    except Exception as error:
        described = ", ".join(f"{key}: {spec}" for key, spec in specs.items())
        hint = next((f"; {text}" for kind, text in INSTEAD.items() if isinstance(module, kind)), "")
        raise DefinitionError(f"cell {name!r} does not run on {rows} rows of ({described}): {error}{hint}") from error


def _check_output(name: str, output: object, value: torch.Tensor, rows: int) -> None:
    check_output_name(name, output)
    if value.dim() == 0 or value.shape[0] != rows:
        raise DefinitionError(
            f"cell {name!r}, output {output!r}: expected the row dimension first ({rows} rows in the trial run), "
            f"got {describe(value)}"
        )
    check_dtype(f"cell {name!r}, output {output!r}", value.dtype)
    if value.layout is not torch.strided:
        raise DefinitionError(f"cell {name!r}, output {output!r}: expected a dense tensor, got one of {value.layout}")
