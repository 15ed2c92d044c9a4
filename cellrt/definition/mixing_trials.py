"""Trials that tell whether a cell mixes rows: rows beside others that are alike, of opposite signs, or of other scales.

A cell that mixes rows may treat equal rows equally. An ``if`` on a batch then goes the same way, and one scale for a
batch, as in dynamic quantization, is nearly the scale of each row. So rows are also tried beside others that are much
larger, much smaller or zeros, and in batches of several sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from cellrt.definition.examples import NUM_PAGES, random_inputs
from cellrt.definition.spans import PagedRows, Spans
from cellrt.definition.spec import CellInput, RaggedRows, RowSpec

LARGE, SMALL = 1000.0, 0.001
MODERATE = 100.0
"""The largest scale of halves, so that float16 does not run over."""
HALVES = (torch.float16, torch.bfloat16)
NUDGES = (-2, 3)
"""The units in the last place by which a number is moved: from the first to below the second."""


class MixingTrial(NamedTuple):
    """A batch of rows that a cell is tried with, some of which run alone, too.

    Attributes:
        rows: the number of rows, if the cell takes this many.
        alone: the number of rows, from the first on, that run alone, too.
        beside: a text that compares the other rows with the first, for errors.
        scales: the factors of the rows, which repeat.
        are_opposed: whether the first row is negative everywhere, and the second positive and larger.
    """

    rows: int
    alone: int
    beside: str
    scales: tuple[float, ...] = (1.0,)
    are_opposed: bool = False


MIXING_TRIALS = (
    MixingTrial(3, 3, "like it"),
    MixingTrial(17, 3, "of the opposite sign", are_opposed=True),
    MixingTrial(17, 4, "1000 times as large or as small, or zeros", (1.0, LARGE, SMALL, 0.0, 10.0, 0.1)),
    MixingTrial(2, 1, "1000 times as large", (1.0, LARGE)),
    MixingTrial(5, 2, "1000 times as small, or zeros", (1.0, 0.0, SMALL, SMALL)),
)


def draw(
    trial: MixingTrial, specs: Sequence[RowSpec], rows: int, has_ones: bool, generator: torch.Generator
) -> list[CellInput]:
    """Return ``rows`` rows for each spec: random normal numbers, scaled; integers and bools are zeros, or zeros and
    ones.
    """
    inputs = random_inputs(specs, rows, generator)
    if trial.are_opposed:
        inputs = [_opposed(value) for value in inputs]
    scales = torch.tensor([trial.scales[row % len(trial.scales)] for row in range(rows)], device="cpu")
    inputs = [_scaled(value, scales) for value in inputs]
    return [_with_ones(value) for value in inputs] if has_ones else inputs


def most_rows(trial: MixingTrial, specs: Sequence[RowSpec], max_batch: int) -> int:
    """Return the number of rows that a cell is tried with.

    A cell with pages gets no more rows than there are pages of their own.
    """
    return min(trial.rows, max_batch, NUM_PAGES if any(spec.has_nodes for spec in specs) else trial.rows)


def row_of(value: CellInput, row: int) -> CellInput:
    """Return one row of an input, or one node of a ragged one."""
    if isinstance(value, PagedRows | Spans):
        return value.take([row])
    if not isinstance(value, RaggedRows):
        return value[row : row + 1]
    first, end = value.offsets[row : row + 2].tolist()
    return RaggedRows(value.values[first:end], torch.tensor([0, end - first], device=value.offsets.device))


def lone_row_of(value: CellInput, row: int) -> CellInput:
    """Return one row as ``row_of`` does, with zeros in the pages of other nodes."""
    made = row_of(value, row)
    if not isinstance(made, PagedRows):
        return made
    own = torch.zeros(len(made.pages), dtype=torch.bool, device="cpu")
    own[made.tables[0].long()] = True
    return made._replace(pages=made.pages * own.view(-1, *[1] * (made.pages.dim() - 1)))


def repeated(value: CellInput, row: int, count: int) -> CellInput:
    """Return one row of an input ``count`` times; spans stay as they are."""
    if isinstance(value, Spans):
        return value
    if isinstance(value, PagedRows):
        return value._replace(pages=value.pages[value.tables[row, :1]].expand_as(value.pages).clone())
    one = row_of(value, row)
    if isinstance(one, RaggedRows):
        offsets = one.offsets[1] * torch.arange(count + 1, device=one.offsets.device)
        return RaggedRows(one.values.repeat(count, *[1] * (one.values.dim() - 1)), offsets)
    assert isinstance(one, torch.Tensor)
    return one.repeat(count, *[1] * (one.dim() - 1))


def nudged(value: CellInput, generator: torch.Generator) -> CellInput:
    """Return an input with each number moved by a few units in its last place."""
    if isinstance(value, Spans):
        return value
    if isinstance(value, PagedRows):
        return value._replace(pages=_nudged(value.pages, generator))
    if isinstance(value, RaggedRows):
        return RaggedRows(_nudged(value.values, generator), value.offsets)
    return _nudged(value, generator)


def _nudged(values: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    if not values.is_floating_point():
        return values
    units = torch.randint(*NUDGES, values.shape, generator=generator, device="cpu")
    moved = values.double() * (1 + torch.finfo(values.dtype).eps * units)
    return moved.to(values.dtype)


def _scaled(value: CellInput, scales: torch.Tensor) -> CellInput:
    """Return an input whose rows, or the rows of whose nodes, are multiplied."""
    if isinstance(value, Spans):
        return value
    if isinstance(value, PagedRows):
        of_page = torch.ones(len(value.pages), device="cpu")
        of_page[value.tables[:, 0].long()] = scales
        return value._replace(pages=_multiplied(value.pages, of_page))
    if isinstance(value, RaggedRows):
        return RaggedRows(_multiplied(value.values, scales.repeat_interleave(value.offsets.diff())), value.offsets)
    return _multiplied(value, scales)


def _multiplied(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    if not rows.is_floating_point():
        return rows
    scales = scales.clamp(max=MODERATE) if rows.dtype in HALVES else scales
    return rows * scales.to(rows.dtype).view(-1, *[1] * (rows.dim() - 1))


def _opposed(value: CellInput) -> CellInput:
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


def _with_ones(value: CellInput) -> CellInput:
    """Return integers and bools that are one in every other row."""
    if isinstance(value, PagedRows | Spans):
        return value
    rows = value.values if isinstance(value, RaggedRows) else value
    if rows.is_floating_point():
        return value
    places = torch.arange(len(rows), device="cpu").view(-1, *[1] * (rows.dim() - 1))
    ones = (places % 2).expand(rows.shape).to(rows.dtype)
    return RaggedRows(ones, value.offsets) if isinstance(value, RaggedRows) else ones
