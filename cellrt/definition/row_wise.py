"""Checks that a cell is row-wise: that each row's outputs depend on that row alone, whatever it is batched with.

The runtime needs this, and nothing else would show a violation: a cell that subtracts the mean of its rows, or uses one
scale for all of them, runs without an error. So a cell is tried once, on a few random rows together and on some of them
alone (``mixing_trials.py``). The trial also notes which inputs the cell writes to, as does the trial at the cell's
definition (``trial.py``). A cell that raises on all rows is reported, too, if only meta tensors were tried before.

A difference by rounding is no influence. A row is judged by its own largest value, not by its neighbours'. It is also
judged by what the cell makes of inputs that differ in their last places. A cell that amplifies these, as a sine of
large numbers does, may differ by more.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from cellrt.definition.computation import Computation, count_rows, cut
from cellrt.definition.examples import random_inputs, zero_inputs
from cellrt.definition.mixing_trials import (
    HALVES,
    MIXING_TRIALS,
    MixingTrial,
    draw,
    lone_row_of,
    most_rows,
    nudged,
    repeated,
)
from cellrt.definition.modes import workers_modes
from cellrt.definition.snapshot import weights_of
from cellrt.definition.spec import CellInput, copy_input
from cellrt.definition.trial import describe_error
from cellrt.errors import DefinitionError

TRIAL_ROWS = 3
NUM_DRAWS = 3
"""The number of draws of rows on which an output must differ: once may be a choice between two equal values."""
TOLERANCE = 0.05
"""The tolerance, as a part of a row's largest value, for the precision of bfloat16: several roundings of a product."""
FINE_TOLERANCE = 0.002
"""The tolerance where numbers have the precision of float32."""
NEAR_ZERO = 1e-6
"""The error that rounding leaves in numbers that cancel out, such as the logarithm of a probability near one."""
NUM_NUDGES, NUDGES_WORTH = 4, 16
"""The number of trials with changed last places, and the factor by which their differences still count as rounding."""
QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized", "torch.nn.quantized")
MIXING = "the rows of a batch influence each other: "
FICKLE = "equal rows give other results at each call, as where a cell counts in an attribute or draws numbers"
ON_PURPOSE = "If it is so on purpose, say it: cellrt.cell(..., row_wise=False)"


class _Difference(NamedTuple):
    """A row whose output differs between running together with others and running alone."""

    row: int
    together: float
    alone: float | None


def influences_of(cell: Computation) -> dict[str, str]:
    """Return the outputs of a cell that are others for rows together than for each row alone, beyond rounding, and how
    so.

    A cell that raises on such rows together, takes one row only or does not lie on the CPU is not tried. Integer
    outputs of a cell in half precision are not looked at: which of two tokens is best may hang on rounding.
    """
    weights = weights_of(cell.module).values()
    if cell.max_batch < 2 or not all(tensor.is_cpu for tensor in weights):
        return {}
    dtypes = {spec.dtype for spec in (*cell.inputs.values(), *cell.outputs.values())}
    has_halves = not dtypes.union(tensor.dtype for tensor in weights).isdisjoint(HALVES)
    looked_at = {name for name, spec in cell.outputs.items() if spec.dtype.is_floating_point or not has_halves}
    generator, specs = torch.Generator().manual_seed(0), list(cell.inputs.values())
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):  # what is drawn changes nobody else's numbers
        has_ones = _raised_by(cell, draw(MIXING_TRIALS[0], specs, min(2, cell.max_batch), True, generator)) is None
        found = dict.fromkeys(looked_at & _fickle_outputs(cell, has_halves), FICKLE)
        for trial in MIXING_TRIALS:
            rows, differing = most_rows(trial, specs, cell.max_batch), dict.fromkeys(looked_at - found.keys())
            inputs: list[CellInput] = []
            for _ in range(NUM_DRAWS):
                if differing:
                    inputs = draw(trial, specs, rows, has_ones, generator)
                    some = [row for row in range(min(trial.alone, rows)) if _counts(cell, trial, inputs, row)]
                    now = _differences(cell, inputs, some, has_halves, generator) if some else {}
                    differing = {name: now[name] for name in differing if name in now}
            for name, difference in differing.items():
                assert difference is not None
                found[name] = MIXING + _influence(cell, name, trial, inputs, difference, has_halves, generator)
    return {name: found[name] for name in cell.outputs if name in found}


def refuse_unless_row_wise(cell: Computation) -> None:
    """Raise DefinitionError if rows of a cell influence each other, unless it is said that they do."""
    if cell.declaration.row_wise and (found := influences_of(cell)):
        raise DefinitionError(_told_of(cell, found))


def warn_unless_row_wise(cell: Computation, depth: int) -> list[str]:
    """Return the outputs that others influence, with a RuntimeWarning if there are any that points at the caller so
    many calls above.
    """
    found = influences_of(cell)
    if found:
        warnings.warn(_told_of(cell, found), RuntimeWarning, stacklevel=1 + depth)
    return list(found)


def _told_of(cell: Computation, found: Mapping[str, str]) -> str:
    """Return the message about influences between rows."""
    what = FICKLE if FICKLE in found.values() else next(iter(found.values()))
    return (
        f"cell {cell.name!r}, output {', '.join(map(repr, found))}: {what}. A cell must compute each row from that row "
        f"alone, or a result depends on what it is batched with{_hint(cell.module)}. {ON_PURPOSE}"
    )


def _hint(module: object) -> str:
    """Return advice about parts of a module that are known to mix rows; empty if there is none."""
    parts = module.modules() if isinstance(module, nn.Module) else ()
    if any(type(part).__module__.startswith(QUANTIZED) for part in parts):
        return (
            "; its quantized parts take one scale for a whole batch: give the module that it was made of, or quantize "
            "its weights alone"
        )
    return ""


def warn_if_it_raises(cell: Computation, depth: int) -> bool:
    """Return whether the cell raises on a few random rows; a RuntimeWarning that points at the caller this many calls
    above.

    No more than that: these may be no rows of this cell. One that lies on a device is not tried.
    """
    weights = list(weights_of(cell.module).values())
    if not all(tensor.is_cpu or tensor.is_meta for tensor in weights):
        return False
    rows = min(TRIAL_ROWS, cell.max_batch)
    raised = _raised_by(cell, random_inputs(cell.inputs.values(), rows, torch.Generator().manual_seed(0)))
    if raised is None:
        return False
    on_zeros = _raised_by(cell, zero_inputs(cell.inputs.values(), rows))
    given = {spec.dtype for spec in cell.inputs.values() if spec.dtype.is_floating_point}
    floats = {tensor.dtype for tensor in weights if tensor.is_floating_point()}
    others = {str(dtype).removeprefix("torch.") for dtype in floats - given} if given else set()
    hint = ""
    if any(tensor.is_meta for tensor in weights):
        hint = "; its weights are on device meta, and so have no values"
    elif others and on_zeros is not None:
        hint = f"; it has weights of {' and '.join(sorted(others))}, and no input of that dtype"
    described = ", ".join(f"{name}: {spec}" for name, spec in cell.inputs.items())
    warnings.warn(
        f"cell {cell.name!r} raised on random rows of ({described}){'' if on_zeros is None else ', and on zeros'}: "
        f"{describe_error(raised)}{hint}. Requests whose rows make it raise end with CellError",
        RuntimeWarning,
        stacklevel=1 + depth,
    )
    return True


def is_close(together: torch.Tensor, alone: torch.Tensor) -> bool:
    """Return whether two outputs are equal but for rounding, judged by the largest of all; NaN is equal to NaN."""
    if not together.is_floating_point():
        return torch.equal(together, alone)
    together, alone = together.double(), alone.double()
    largest = torch.cat([together, alone]).nan_to_num(0.0, 0.0, 0.0).abs().amax() if together.numel() else 0.0
    tolerance = max(TOLERANCE * float(largest), NEAR_ZERO)
    return torch.allclose(together, alone, rtol=0.0, atol=tolerance, equal_nan=True)


def _fickle_outputs(cell: Computation, has_halves: bool) -> set[str]:
    """Return the outputs that differ between two calls on the same rows."""
    inputs = random_inputs(cell.inputs.values(), min(TRIAL_ROWS, cell.max_batch), torch.Generator().manual_seed(0))
    one = _outputs(cell, inputs)
    torch.rand(())  # each call gives the generator back as it was: the other draws other numbers
    other = _outputs(cell, inputs)
    if one is None or other is None:
        return set()
    tolerance = TOLERANCE if has_halves else FINE_TOLERANCE
    return {
        name for name, a, b in zip(cell.outputs, one, other) if (_distances(a, b) > _rounding(a, b, tolerance)).any()
    }


def _raised_by(cell: Computation, inputs: Sequence[CellInput]) -> BaseException | None:
    """Return the error that the cell raises on these rows, or None."""
    try:
        with workers_modes(), torch.random.fork_rng(devices=[]):
            _run(cell, inputs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
    return None


def _counts(cell: Computation, trial: MixingTrial, inputs: Sequence[CellInput], row: int) -> bool:
    """Return whether a row is one of this cell's: zeros, or numbers so large or small, may be none, and then make it
    raise.
    """
    if trial.scales == (1.0,):
        return True
    return _outputs(cell, [lone_row_of(value, row) for value in inputs]) is not None


def _differences(
    cell: Computation, inputs: Sequence[CellInput], rows: Sequence[int], has_halves: bool, generator: torch.Generator
) -> dict[str, _Difference]:
    """Return the outputs that differ on a draw of rows, of which these run alone, too.

    Return all if a row alone makes the cell raise, as a norm over the batch does, which has no variance of one row.
    Return none if all rows together do.
    """
    together = _outputs(cell, inputs)
    if together is None:
        return {}
    alone = _alone(cell, inputs, rows)
    if alone is None:
        return dict.fromkeys(cell.outputs, _Difference(rows[0], 0.0, None))
    together = [value[list(rows)] for value in together]
    differing = {
        name: (a, b)
        for name, a, b in zip(cell.outputs, together, alone)
        if (_distances(a, b) > _rounding(a, b, FINE_TOLERANCE)).any()
    }
    if not differing:
        return {}
    tolerance = TOLERANCE if has_halves or _computes_in_halves(cell, inputs) else FINE_TOLERANCE
    worth = dict(zip(cell.outputs, _worth_of_nudges(cell, inputs, rows, alone, generator)))
    found: dict[str, _Difference] = {}
    for name, (a, b) in differing.items():
        beyond = _distances(a, b) - torch.maximum(_rounding(a, b, tolerance), worth[name])
        if (beyond > 0).any():
            found[name] = _most_different(rows[int(beyond.nan_to_num(-1.0).argmax())], rows, a, b)
    return found


def _most_different(row: int, rows: Sequence[int], together: torch.Tensor, alone: torch.Tensor) -> _Difference:
    """Return the numbers of a row that differ most."""
    at = rows.index(row)
    a, b = together[at].flatten(), alone[at].flatten()
    place = int(_distances(a, b).argmax())
    return _Difference(row, float(a[place]), float(b[place]))


def _influence(
    cell: Computation,
    name: str,
    trial: MixingTrial,
    inputs: list[CellInput],
    difference: _Difference,
    has_halves: bool,
    generator: torch.Generator,
) -> str:
    """Return a text that says what made a difference: the number of rows, or an input in which they differ."""
    row, count = difference.row, count_rows(inputs[0])
    if difference.alone is None:
        return f"it raises for one row alone, and not for {count}"

    def differs(varied: str | None) -> bool:
        given = [
            value if key == varied else repeated(value, row, count)
            for key, value in zip(cell.inputs, inputs, strict=True)
        ]
        return name in _differences(cell, given, [row], has_halves, generator)

    beside, of = f"rows {trial.beside}", ""
    if differs(None):
        beside = f"{count - 1} rows equal to it"
    elif responsible := [key for key in cell.inputs if differs(key)]:
        of = f" in {' or '.join(map(repr, responsible))}"
    return f"a row gives {difference.alone:.6g} alone and {difference.together:.6g} beside {beside}{of}"


def _distances(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the distance of two outputs for each row; infinity for unequal integers, or if one of two is NaN."""
    if not first.is_floating_point():
        apart = torch.where(first == second, 0.0, torch.inf)
    else:
        first, second = first.double(), second.double()
        are_same = (first == second) | (first.isnan() & second.isnan())
        apart = torch.where(are_same, 0.0, (first - second).abs().nan_to_num(torch.inf, torch.inf))
    return apart.double().flatten(1).amax(1) if apart.dim() > 1 else apart.double()


def _rounding(first: torch.Tensor, second: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Return the most that each row of an output may differ by: a part of its own largest value."""
    if not first.is_floating_point():
        return torch.zeros(len(first), dtype=torch.float64)
    both = torch.stack([first.double(), second.double()], 1).nan_to_num(0.0, 0.0, 0.0).abs()
    return (tolerance * both.flatten(1).amax(1)).clamp(min=NEAR_ZERO)


def _worth_of_nudges(
    cell: Computation,
    inputs: Sequence[CellInput],
    rows: Sequence[int],
    alone: list[torch.Tensor],
    generator: torch.Generator,
) -> list[torch.Tensor]:
    """Return how much nudged inputs may change each output of rows that run alone.

    Inputs are nudged in their last places; the largest change counts ``NUDGES_WORTH`` times.
    """
    worth = [torch.zeros(len(rows), dtype=torch.float64) for _ in alone]
    for _ in range(NUM_NUDGES):
        moved = _alone(cell, [nudged(value, generator) for value in inputs], rows)
        if moved is not None:
            worth = [torch.maximum(most, NUDGES_WORTH * _distances(*pair)) for most, *pair in zip(worth, alone, moved)]
    return worth


class _DtypesSeen(TorchFunctionMode):
    """Notes whether halves are computed inside."""

    def __init__(self) -> None:
        super().__init__()
        self.has_halves = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        self.has_halves |= isinstance(made, torch.Tensor) and made.dtype in HALVES
        return made


def _computes_in_halves(cell: Computation, inputs: Sequence[CellInput]) -> bool:
    """Return whether a cell of other rows computes in half precision inside, as under autocast or by torch's
    setting.
    """
    if torch.get_float32_matmul_precision() != "highest":
        return True
    seen = _DtypesSeen()
    _outputs(cell, inputs, seen)
    return bool(seen.has_halves)


def _alone(cell: Computation, inputs: Sequence[CellInput], rows: Sequence[int]) -> list[torch.Tensor] | None:
    """Return the outputs of rows that run one by one; None if one of them makes the cell raise."""
    made = []
    for row in rows:
        outputs = _outputs(cell, [lone_row_of(value, row) for value in inputs])
        if outputs is None:
            return None
        made.append(outputs)
    return [torch.cat(values) for values in zip(*made)]


def _outputs(
    cell: Computation, inputs: Sequence[CellInput], watch: _DtypesSeen | None = None
) -> list[torch.Tensor] | None:
    """Return the outputs for these rows; None if the cell raises. ``watch``: a mode that they are computed in."""
    try:
        with workers_modes(), watch or nullcontext():
            return _run(cell, inputs)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return None


@torch.inference_mode(False)
@torch.enable_grad()
def _run(cell: Computation, inputs: Sequence[CellInput]) -> list[torch.Tensor]:
    """Return the outputs for these rows, which stay as they are; note which inputs the cell writes to.

    Outside inference, where the ready-made cells take their plain form: there is nothing to compile for it. No weight
    of a cell asks for gradients, so there are none.
    """
    rows = count_rows(inputs[0])
    padded = cell.padded([copy_input(value) for value in inputs])
    outputs = cut(cell.run_watched(padded), count_rows(padded[0]), rows)
    cell.check_outputs(outputs, rows)
    return outputs
