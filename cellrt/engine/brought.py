"""What the requests of a bulk bring: their tensors, until they are admitted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat
from typing import Any, TypeAlias

from numpy.typing import NDArray

Externals: TypeAlias = list[tuple[int, NDArray[Any]]]
"""Kind and rows ``[requests * n, *shape]`` (see ``as_bits``) of each of the requests' tensors."""
NONE: Externals = []
"""In place of those that were forgotten; never written to."""


class Brought:
    """The tensors of some requests, which are called by their numbers.

    Args:
        parts: of all requests in one, all of one size; or of each.
        count: how many requests they are.
    """

    __slots__ = ("_count", "_parts")

    def __init__(self, parts: list[Externals], count: int) -> None:
        self._parts, self._count = parts, count

    def of(self, number: int) -> Externals:
        """Kind and rows of each tensor of a request."""
        if len(self._parts) > 1 or self._count == 1:
            return self._parts[number]
        its = range(number, number + 1)
        return [(kind, self.rows(index, its)[0]) for index, (kind, _) in enumerate(self._parts[0])]

    def kinds(self, number: int) -> list[int]:
        """The kind of each tensor of a request."""
        return [kind for kind, _ in self._parts[number if len(self._parts) > 1 else 0]]

    def counts(self, number: int) -> list[int]:
        """How many rows each tensor of a request has."""
        if len(self._parts) > 1:
            return [len(values) for _, values in self._parts[number]]
        return [len(values) // self._count for _, values in self._parts[0]]

    def counts_of(self, numbers: Sequence[int]) -> Iterable[list[int]]:
        """The same of each of some requests."""
        return map(self.counts, numbers) if len(self._parts) > 1 else repeat(self.counts(0), len(numbers))

    def rows(self, index: int, numbers: Sequence[int]) -> list[NDArray[Any]]:
        """The rows of the tensor ``index`` of some requests, ``[n, *shape]``, one behind the other."""
        parts = self._parts
        if len(parts) > 1:
            return [parts[number][index][1] for number in numbers]
        values, each = parts[0][index][1], len(parts[0][index][1]) // self._count
        if len(numbers) == self._count:
            return [values]
        if isinstance(numbers, range):
            return [values[numbers.start * each : numbers.stop * each]]
        shape = values.shape[1:]
        return [values.reshape(self._count, each, *shape)[list(numbers)].reshape(-1, *shape)]

    def forget(self, numbers: Sequence[int]) -> None:
        """Gives up the tensors of requests that were admitted; what lies in one stays until ``forget_all``."""
        if len(self._parts) > 1:
            for number in numbers:
                self._parts[number] = NONE

    def forget_all(self) -> None:
        """Gives up what is left: all were admitted, or have ended."""
        self._parts = []
