"""What the tests of step kernels share: arenas that show a wrong read or write."""

from __future__ import annotations

import torch
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows
from tests.kernels.tolerances import Kind, tolerance


class Arenas:
    """Makes the arenas of one test: NaN where nobody may read, and everywhere in outputs."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self._device, self._dtype = device, dtype
        self._generator = torch.Generator().manual_seed(seed)

    def random(self, *shape: int, scale: float = 1.0) -> Tensor:
        """Normal numbers of the arenas' type."""
        return (scale * torch.randn(shape, generator=self._generator)).to(self._device, self._dtype)

    def inputs(self, num_rows: int, size: int) -> ArenaRows:
        """Rows at random places, the arena's first and last among them; all other rows are NaN."""
        arena = self.outputs(num_rows, size)
        arena.values[arena.rows.long()] = self.random(num_rows, size)
        return arena

    def outputs(self, num_rows: int, size: int, unwritten: int = 0) -> ArenaRows:
        """An arena of NaN and rows of it, the first and the last among them; ``unwritten`` of them are negative.

        Its rows are part of wider ones, so that a kernel must mind the step between rows.
        """
        arena_rows = num_rows + 3
        inner = 1 + torch.randperm(arena_rows - 2, generator=self._generator)[: max(num_rows - 2, 0)]
        ends = torch.tensor([0, arena_rows - 1])[: min(num_rows, 2)].flip(0)
        rows = torch.cat([ends, inner])[torch.randperm(num_rows, generator=self._generator)].to(torch.int32)
        rows[torch.randperm(num_rows, generator=self._generator)[:unwritten]] = -1
        values = torch.full((arena_rows, size + 16), torch.nan, dtype=self._dtype, device=self._device)
        return ArenaRows(values[:, :size], rows.to(self._device))


def in_span(most: int, first: int, arenas: dict[str, ArenaRows | None]) -> dict[str, ArenaRows | None]:
    """The same arenas, whose rows a span finds among others, which nobody may read or write; None stays."""
    count = next(len(arena.rows) for arena in arenas.values() if arena is not None)
    span, spanned = None, {}
    for name, arena in arenas.items():
        if arena is not None:
            span = torch.tensor([first, count], device=arena.rows.device) if span is None else span
            other = next(row for row in range(len(arena.values)) if row not in arena.rows.tolist())
            others = arena.rows.new_full((first + most - count,), other)
            rows = torch.cat([others[:first], arena.rows, others[first:]])
            spanned[name] = ArenaRows(arena.values, rows, most, span)
    return dict.fromkeys(arenas) | spanned


def like(arena: ArenaRows) -> ArenaRows:
    """Another arena with the same contents, and the same rows of it."""
    return ArenaRows(arena.values.clone(), arena.rows)


def assert_same(actual: ArenaRows, expected: ArenaRows, kind: Kind, depth: int, steps: int = 1) -> None:
    """The whole arenas are equal within the tolerance of ``kind``; what is NaN in one is NaN in the other.

    ``depth`` is how many products a gate's sum has; the state is that after so many steps.
    """
    absolute, relative = tolerance(kind, depth, steps)
    torch.testing.assert_close(actual.values, expected.values, atol=absolute, rtol=relative, equal_nan=True)
