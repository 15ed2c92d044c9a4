"""Whether a cell is row-wise: a row's outputs depend on that row alone, whoever is batched with it.

The runtime cannot do with less, and nothing else would tell: a cell that subtracts the mean of its rows runs without
an error. So a cell is tried once, on a few random rows together and on each of them alone: rows that are alike, then
rows of opposite signs among many, as an ``if`` on the values of a batch goes the same way for rows that are alike. On
the way it is noted which inputs the cell writes to, as in the trial where it was defined (``trial.py``). A cell that
raises on all rows, which was tried on meta tensors alone where it was defined, is told too.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch

from cellrt.definition.computation import Computation, count_rows, cut
from cellrt.definition.examples import random_inputs, zero_inputs
from cellrt.definition.modes import workers_modes
from cellrt.definition.snapshot import weights_of
from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput, RaggedRows, copy_input
from cellrt.definition.trial import describe_error

TRIAL_ROWS = 3
MORE_ROWS = 17
"""Of rows of opposite signs; of these TRIAL_ROWS run alone."""
NUM_DRAWS = 3
"""An output must differ on so many draws of rows: once may be a choice between two that are as good as equal."""
TOLERANCE = 0.05
"""Of an output's largest value: several times the rounding of a matrix product in bfloat16."""
NEAR_ZERO = 1e-6
"""What rounding leaves of numbers that cancel out: the logarithm of a probability near one, say."""
HALVES = (torch.float16, torch.bfloat16)


def mixed_outputs(cell: Computation) -> list[str]:
    """The outputs of a cell that are others for rows together than for each row alone, beyond rounding.

    Floats are random normal numbers, always the same; integers and bools are zeros; a ragged input has one or two rows
    a node. A cell that raises on such rows together, takes one row only or does not lie on the CPU is not tried.
    Integer outputs of a cell in half precision are not looked at: which of two tokens is best may hang on rounding.
    """
    rows = min(TRIAL_ROWS, cell.max_batch)
    weights = weights_of(cell.module).values()
    if rows < 2 or not all(tensor.is_cpu for tensor in weights):
        return []
    dtypes = {spec.dtype for spec in (*cell.inputs.values(), *cell.outputs.values())}
    has_halves = not dtypes.union(tensor.dtype for tensor in weights).isdisjoint(HALVES)
    looked_at = {name for name, spec in cell.outputs.items() if spec.dtype.is_floating_point or not has_halves}
    generator = torch.Generator().manual_seed(0)
    more = rows if cell.has_spans else min(MORE_ROWS, cell.max_batch)
    mixed: set[str] = set()
    with torch.random.fork_rng(devices=[]):  # a cell may draw numbers: nobody else's become others by that
        for count, are_opposed in ((rows, False), (more, True)):
            suspects = looked_at - mixed
            for _ in range(NUM_DRAWS):
                suspects &= _differing(cell, count, rows, are_opposed, generator) if suspects else suspects
            mixed |= suspects
    return [name for name in cell.outputs if name in mixed]


def warn_unless_row_wise(cell: Computation, depth: int) -> list[str]:
    """``mixed_outputs``, with a RuntimeWarning if there are any that points at the caller so many calls above."""
    mixed = mixed_outputs(cell)
    if mixed:
        outputs = ", ".join(map(repr, mixed))
        why = (
            "the rows of a batch influence each other, or it raises for one row alone, so results would depend on who "
            "is batched with whom"
        )
        if not set(mixed).isdisjoint(_fickle_outputs(cell)):
            why = "equal rows give other results at each call, as where a cell counts in an attribute or draws numbers"
        warnings.warn(
            f"cell {cell.name!r}, output {outputs}: {why}. A cell must compute each row from that row "
            "alone (only a cell that is random on purpose may differ here)",
            RuntimeWarning,
            stacklevel=1 + depth,
        )
    return mixed


@workers_modes()
@torch.inference_mode(False)
@torch.enable_grad()
def _fickle_outputs(cell: Computation) -> set[str]:
    """The outputs that differ between two calls on the same rows."""
    inputs = random_inputs(cell.inputs.values(), min(TRIAL_ROWS, cell.max_batch), torch.Generator().manual_seed(0))
    try:
        with torch.random.fork_rng(devices=[]):
            one, other = _run(cell, inputs), _run(cell, inputs)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return set()
    return {name for name, a, b in zip(cell.outputs, one, other) if not is_close(a, b)}


def warn_if_it_raises(cell: Computation, depth: int) -> bool:
    """Whether the cell raises on a few random rows; a RuntimeWarning that points at the caller so many calls above.

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


@workers_modes()
@torch.inference_mode(False)
@torch.enable_grad()
def _raised_by(cell: Computation, inputs: Sequence[CellInput]) -> BaseException | None:
    """What the cell raises on these rows, if it does."""
    try:
        with torch.random.fork_rng(devices=[]):
            _run(cell, inputs)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return error
    return None


@workers_modes()
@torch.inference_mode(False)
@torch.enable_grad()
def _differing(
    cell: Computation, count: int, alone_too: int, are_opposed: bool, generator: torch.Generator
) -> set[str]:
    """The outputs that differ on one draw of ``count`` rows, of which the first run alone, too; all if one of them
    alone makes it raise, none if all together do.

    Outside inference, where the ready-made cells take their plain form: there is nothing to compile for it. No weight
    of a cell asks for gradients, so there are none.
    """
    inputs = random_inputs(cell.inputs.values(), count, generator)
    if are_opposed:
        inputs = [_opposed(value) for value in inputs]
    try:
        together = _run(cell, inputs)
    except KeyboardInterrupt:
        raise
    except BaseException:
        return set()
    try:
        alone = [_run(cell, [row_of(value, row) for value in inputs]) for row in range(alone_too)]
    except KeyboardInterrupt:
        raise
    except BaseException:  # as a norm over the batch does, which has no variance of one row
        return set(cell.outputs)
    joined = [torch.cat(values) for values in zip(*alone)]
    return {name for name, a, b in zip(cell.outputs, together, joined) if not is_close(a[: len(b)], b)}


def _opposed(value: CellInput) -> CellInput:
    """The same with a first row that is negative everywhere, and a second that is positive and outweighs it."""
    if isinstance(value, PagedRows | Spans):
        return value
    if isinstance(value, RaggedRows):
        of_node = torch.repeat_interleave(value.offsets.diff())
        return RaggedRows(_opposed_rows(value.values, of_node), value.offsets)
    return _opposed_rows(value, torch.arange(len(value)))


def _opposed_rows(rows: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    if not rows.is_floating_point():
        return rows
    numbers = numbers.view(-1, *[1] * (rows.dim() - 1))
    large = rows.abs() + 1
    return torch.where(numbers == 0, -large, torch.where(numbers == 1, 3 * large, rows))


def _run(cell: Computation, inputs: Sequence[CellInput]) -> list[torch.Tensor]:
    """The outputs for these rows, which stay as they are; notes which inputs the cell writes to."""
    rows = count_rows(inputs[0])
    padded = cell.padded([copy_input(value) for value in inputs])
    outputs = cut(cell.run_watched(padded), count_rows(padded[0]), rows)
    cell.check_outputs(outputs, rows)
    return outputs


def is_close(together: torch.Tensor, alone: torch.Tensor) -> bool:
    """Whether they are equal but for rounding; NaN is equal to NaN."""
    if not together.is_floating_point():
        return torch.equal(together, alone)
    together, alone = together.double(), alone.double()
    largest = torch.cat([together, alone]).nan_to_num(0.0, 0.0, 0.0).abs().amax() if together.numel() else 0.0
    tolerance = max(TOLERANCE * float(largest), NEAR_ZERO)
    return torch.allclose(together, alone, rtol=0.0, atol=tolerance, equal_nan=True)


def row_of(value: CellInput, row: int) -> CellInput:
    """One row of an input, or one node of a ragged one."""
    if isinstance(value, PagedRows | Spans):
        return value.take([row])
    if not isinstance(value, RaggedRows):
        return value[row : row + 1]
    first, end = value.offsets[row : row + 2].tolist()
    return RaggedRows(value.values[first:end], torch.tensor([0, end - first], device=value.offsets.device))
