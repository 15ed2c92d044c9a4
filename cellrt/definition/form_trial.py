"""Tries a hand-written compiled form against its module, on a few random rows, before it serves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from cellrt.definition.compiled_form import CompiledForm
from cellrt.definition.computation import Computation, count_rows
from cellrt.definition.examples import random_inputs, random_nodes
from cellrt.definition.modes import workers_modes
from cellrt.definition.row_wise import is_close
from cellrt.definition.spans import PagedRows
from cellrt.definition.spec import CellInput, copy_input

TRIED_ROWS = (1, 5, 17)
"""One alone, fewer than go through a kernel together, and more."""
TRIED_NODES = ((1, 1, 0), (2, 3, 5))
"""The trials of a cell with pages or spans: nodes, rows of each, and rows before them."""


@workers_modes()
def wrong_outputs(cell: Computation, form: CompiledForm) -> list[str]:
    """Return the outputs, and the inputs with pages, of which a form makes something else than the module.

    That is beyond rounding. Integers may differ once: which of two is larger may hang on rounding. Rows that the form
    refuses, or on which the module raises or is not of one mind, say nothing.
    """
    generator = torch.Generator().manual_seed(0)
    differing = Counter[str]()
    # With gradients on, ready-made cells take their plain form. A module may draw numbers: nobody else's become others.
    with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices=[]):
        for inputs in _tried(cell, generator):
            try:
                expected = _of_module(cell, inputs)
            except Exception:  # random rows may be no inputs of this cell
                continue
            made = _of_form(cell, form, inputs)
            wrong = [name for name in made if not is_close(made[name], expected[name])]
            if wrong and _is_fickle(cell, inputs, expected):
                continue
            for name in wrong:
                differing[name] += 2 if made[name].is_floating_point() else 1
    return [name for name, count in differing.items() if count > 1]


def _tried(cell: Computation, generator: torch.Generator) -> Iterator[Sequence[CellInput]]:
    specs = cell.inputs.values()
    if not cell.has_spans:
        for rows in TRIED_ROWS:
            if rows <= cell.max_batch:
                yield random_inputs(specs, rows, generator)
        return
    for nodes, rows, before in TRIED_NODES:
        if nodes <= cell.max_batch and nodes * rows <= (cell.max_batch_rows or nodes * rows):
            yield random_nodes(specs, nodes, rows, before, generator)


def _of_module(cell: Computation, inputs: Sequence[CellInput]) -> dict[str, torch.Tensor]:
    """Return the outputs by name, and what lies in pages after that by the names of inputs."""
    copies = [copy_input(value) for value in inputs]
    outputs = [value.detach() for value in cell.run_step(*copies)]
    return dict(zip(cell.outputs, outputs, strict=True)) | _pages(cell, copies)


def _of_form(cell: Computation, form: CompiledForm, inputs: Sequence[CellInput]) -> dict[str, torch.Tensor]:
    copies = [copy_input(value) for value in inputs]
    made = form.run(count_rows(copies[0]), dict(zip(cell.inputs, copies)))
    return {} if made is None else made | _pages(cell, copies)


def _pages(cell: Computation, inputs: Sequence[CellInput]) -> dict[str, torch.Tensor]:
    return {f"pages of {name}": value.pages for name, value in zip(cell.inputs, inputs) if isinstance(value, PagedRows)}


def _is_fickle(cell: Computation, inputs: Sequence[CellInput], before: dict[str, torch.Tensor]) -> bool:
    """Return whether the module makes something else of the same rows at another call."""
    again = _of_module(cell, inputs)
    return not all(is_close(again[name], value) for name, value in before.items())
