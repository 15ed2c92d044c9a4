"""The two ways to a cell: of a module or function, and of files."""

from __future__ import annotations

import difflib
import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import nn

from cellrt.definition.cell import Cell
from cellrt.definition.computation import steps_of
from cellrt.definition.declaration import (
    Declaration,
    check_carry,
    check_finite,
    check_inputs,
    check_name,
    check_priority,
    check_row_wise,
    check_sizes,
    kind_of,
)
from cellrt.definition.file import read_cell
from cellrt.definition.identity import identity_of
from cellrt.definition.snapshot import HOOKS, take_snapshot
from cellrt.definition.spec import RowSpec
from cellrt.definition.trial import Trial, try_steps
from cellrt.definition.uncompiled import LEFT_OUT, has_compiled, original_of
from cellrt.errors import DefinitionError
from cellrt.numbers import as_integer

BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
"""Parameters that may be given by keyword."""
ALIKE = 0.75
"""The likeness, of 1, from which one name may be a misspelling of the other."""


def cell(
    module: Callable[..., Any],
    inputs: Mapping[str, object],
    *,
    name: str | None = None,
    max_batch: int | None = None,
    min_batch: int = 1,
    batch_sizes: Sequence[int] | None = None,
    max_batch_rows: int | None = None,
    priority: int | None = None,
    carry: Mapping[str, str] | None = None,
    finite: Sequence[str] = (),
    row_wise: bool = True,
) -> Cell:
    """Make a cell of a torch module or function.

    Args:
        module: takes tensors ``[rows, *shape]`` and returns one tensor (named "output"), a NamedTuple, a dict or a
            plain tuple (named "output0", ...) of tensors, row dimension first. Inputs are passed by name if its
            parameters have those names, else in order. Of one that ``torch.compile`` made, what it was made of. It must
            be row-wise: a row's outputs depend on that row alone. If it has a method ``steps`` (see
            ``Cell.run_steps``), runs of several steps use it, with inputs by name; with a method ``compiled_form`` a
            CPU runs it without Python (docs/compiled-forms.md). Its weights are copied, a function's too (from its
            closure, defaults and globals), with the data that a function finds there (numbers, texts, arrays, lists of
            them). It may write to its inputs in place: it gets copies of those that it writes to in trials. These run
            on meta tensors and random rows, here and when a model is registered. A write that only other values bring
            about is not seen, and must not be.
        inputs: for each input the shape without the row dimension, ``(256,)`` or ``256`` for float32 rows, or a spec
            made by ``cellrt.rows``, ``cellrt.ragged``, ``cellrt.grows``, ``cellrt.pages`` or ``cellrt.span``, or
            ``cellrt.token``.
        name: default: the class or function's name.
        max_batch: most rows of a task; default the largest of ``batch_sizes``, or 512. An engine makes none so large
            that it measures them, at registration, to take clearly longer a row.
        min_batch: fewest rows of a further task while others of the same type are submitted.
        batch_sizes: the supported numbers of rows; a task is padded to the next. Default: any up to ``max_batch``.
        max_batch_rows: the most rows of a task of a cell with pages or spans, whose nodes may have many rows;
            ``max_batch`` is then the most nodes. Default: 512, or ``max_batch`` if that is more. If a task takes
            sequences whole: as many rows as the longest has, which the module says in an attribute ``longest_span``.
            A task never has more rows than a worker's memory holds of its outputs (``arena_bytes``).
        priority: higher goes first. Default: from the type graph of the example request, later cells first.
        carry: which output each state input is carried from in chains and loops. Default: the output of its name.
        finite: outputs that must never be NaN or infinite; a request that makes one so fails.
        row_wise: False says that rows of a batch influence each other on purpose, or that the cell draws numbers.
            Registration, which refuses such a cell otherwise, then takes it. A request's results depend on other rows
            of the batch then.

    Raise DefinitionError.
    """
    was_compiled, module = has_compiled(module), original_of(module)
    name = check_name(name or str(getattr(module, "__name__", type(module).__name__)))
    if not callable(module) or isinstance(module, type):
        raise DefinitionError(f"cell {name!r}: expected a torch module or a function, got {kind_of(module)}")
    specs = check_inputs(name, inputs)
    has_spans = any(spec.has_nodes for spec in specs.values())
    longest = _longest_whole(module, specs)
    sizes = check_sizes(name, max_batch, min_batch, batch_sizes, max_batch_rows, has_spans, longest)
    check_priority(name, priority)
    check_row_wise(name, row_wise)
    by_name = _takes_names(name, module, list(specs))
    own = take_snapshot(name, module)
    if was_compiled:
        warnings.warn(f"cell {name!r}: {LEFT_OUT}", RuntimeWarning, stacklevel=2)
    trial = Trial(name, own, specs, by_name, sizes)
    carried = check_carry(name, specs, trial.outputs, carry)
    must_be_finite = check_finite(name, trial.outputs, finite)
    declaration = Declaration(name, specs, trial.outputs, carried, must_be_finite, sizes, priority, row_wise)
    made = Cell(own, by_name, declaration, identity_of(own, declaration.of_identity()), trial.written)
    if made.has_steps:
        try_steps(made)
    return made


def load_cell(folder: str | Path) -> Cell:
    """Read a cell that ``Cell.save`` wrote. Load only files that you trust: a program is code.

    Raise DefinitionError if a file is missing, was changed, was written by another version, or says what cannot be.
    """
    return Cell(*read_cell(folder))


def _longest_whole(module: object, specs: Mapping[str, RowSpec]) -> int:
    """Return how many rows a node has at most that a task takes whole, of a module that says so; else 0."""
    longest = as_integer(getattr(module, "longest_span", 0)) or 0
    return longest if any(spec.span == "whole" for spec in specs.values()) else 0


def _takes_names(name: str, module: Callable[..., Any], inputs: list[str]) -> bool:
    """Return whether inputs of these names are passed by name; else they go in order.

    Raise DefinitionError if one of them would so be taken for another, or if the module's ``steps`` has other names.
    """
    steps = _parameters_of(steps_of(module))
    if steps and inspect.Parameter.VAR_KEYWORD not in steps.values() and not set(inputs) <= steps.keys():
        names = list(steps)[1:]
        raise DefinitionError(f"cell {name!r}: its method steps takes inputs by name: expected {names}, got {inputs}")
    function = module.forward if isinstance(module, nn.Module) else module
    parameters = _parameters_of(function)
    names = [key for key, kind in parameters.items() if kind in BY_NAME]
    if set(inputs) <= set(names) or _takes_any_name(function, inputs):
        return not (_is_to_take_order(module, function) and _are_in_order(function, inputs))
    for place, key in enumerate(inputs):
        meant = _meant(key, names, inputs, list(parameters)[place : place + 1])
        if meant is not None:
            raise DefinitionError(
                f"cell {name!r}, input {key!r}: the module's parameters are {names}; is {meant!r} meant?"
            )
        if key in names and list(parameters).index(key) != place:
            raise DefinitionError(
                f"cell {name!r}, input {key!r}: expected all inputs by the names of the module's parameters {names}, "
                f"or each in its place, got {inputs}"
            )
    return False


def _meant(key: str, names: list[str], inputs: list[str], taken: list[str]) -> str | None:
    """Return the parameter that an input's name is a slip of the pen for, if it would be ``taken`` for one less
    alike.
    """
    if key in names or not set(inputs) & set(names):
        return None
    alike = {other: difflib.SequenceMatcher(None, key, other).ratio() for other in names if other not in inputs}
    best = max(alike, key=alike.__getitem__, default=None)
    if best is None or alike[best] < ALIKE or any(alike.get(other, 0.0) >= alike[best] for other in taken):
        return None
    return best


def _is_to_take_order(module: Callable[..., Any], function: Callable[..., Any]) -> bool:
    """Return whether inputs go in order where they can, as hooks expect and what passes on all it gets
    (``torch.vmap``).
    """
    if isinstance(module, nn.Module) and any(vars(module)[hooks] for hooks in HOOKS):
        return True
    try:
        own = inspect.signature(function, follow_wrapped=False).parameters.values()
    except (TypeError, ValueError):
        return False
    kinds = {parameter.kind for parameter in own}
    return inspect.Parameter.VAR_POSITIONAL in kinds and kinds.isdisjoint(BY_NAME)


def _are_in_order(function: Callable[..., Any], inputs: list[str]) -> bool:
    """Return whether inputs that have the names of parameters stand in their order, too, and none is for keywords
    alone.
    """
    first = list(_parameters_of(function).items())[: len(inputs)]
    return first == [(key, inspect.Parameter.POSITIONAL_OR_KEYWORD) for key in inputs]


def _takes_any_name(function: Callable[..., Any], inputs: list[str]) -> bool:
    """Return whether ``**`` takes those of the inputs that are no parameters as in ``forward(self, x, **others)``."""
    kinds = _parameters_of(function).values()
    if inspect.Parameter.VAR_KEYWORD not in kinds or inspect.Parameter.VAR_POSITIONAL in kinds:
        return False
    with suppress(TypeError):  # a parameter is none of them: they go in order
        inspect.signature(function).bind(**dict.fromkeys(inputs))
        return True
    return False


def _parameters_of(function: Callable[..., Any] | None) -> dict[str, Any]:
    """Return the kinds of a function's parameters by name; none if they cannot be told."""
    try:
        parameters = inspect.signature(function).parameters if function is not None else {}
    except (TypeError, ValueError):
        return {}
    return {key: parameter.kind for key, parameter in parameters.items()}
