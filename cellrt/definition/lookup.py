"""Indices that a module looks up in a table which has no such row: which, and whether a cell's input gave them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from cellrt.definition.spec import CellInput


class Refused(NamedTuple):
    """An index outside of the table it was looked up in.

    Attributes:
        input: of the cell, that it came from; empty: from none of them as it is.
        token, rows: the index, and how many the table has.
    """

    input: str
    token: int
    rows: int

    def __str__(self) -> str:
        if self.input:
            return f"input {self.input!r}: expected tokens from 0 to {self.rows - 1}, got {self.token}"
        return f"it looks up {self.token} in a table of {self.rows} rows"


def read_refused(text: str) -> Refused | None:
    """What an error's text says of an input, if it does: processes tell each other errors as texts."""
    found = re.search(r"\(input '(\w+)': expected tokens from 0 to (\d+), got (-?\d+)\)", text)
    return None if found is None else Refused(found[1], int(found[3]), int(found[2]) + 1)


class RefusedLookup(TorchFunctionMode):
    """While it lasts, the first lookup of this thread is noted that asks an embedding's table for a row it has not."""

    def __init__(self) -> None:
        super().__init__()
        self._looked_up: list[int] = []
        self._index = self._rows = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """See torch."""
        if func is torch.nn.functional.embedding and not self._looked_up:
            given = dict(zip(("input", "weight"), args)) | dict(kwargs or {})
            indices, rows = given["input"].detach().reshape(-1).tolist(), len(given["weight"])
            outside = [index for index in indices if not 0 <= index < rows]
            if outside:
                self._looked_up, self._index, self._rows = indices, outside[0], rows
        return func(*args, **dict(kwargs or {}))

    def found(self, inputs: Mapping[str, CellInput]) -> Refused | None:
        """The index, if there was one; ``inputs``: what the cell got, by name."""
        if not self._looked_up:
            return None
        for name, value in inputs.items():
            if isinstance(value, torch.Tensor) and _has_part(value, self._looked_up):
                return Refused(name, self._index, self._rows)
        return Refused("", self._index, self._rows)


def _has_part(value: torch.Tensor, part: list[int]) -> bool:
    """Whether integers follow each other somewhere in a tensor."""
    if value.is_floating_point() or value.is_complex():
        return False
    numbers = value.reshape(-1).tolist()
    return any(numbers[first : first + len(part)] == part for first in range(len(numbers) - len(part) + 1))
