"""Indices that a module looks up in a table which has no such row: which, and whether a cell's input gave them."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from cellrt.definition.spec import CellInput, RaggedRows

if TYPE_CHECKING:
    from cellrt.definition.computation import Computation

Some = TypeVar("Some", bound="Computation")


class Refused(NamedTuple):
    """An index outside of the table it was looked up in.

    Attributes:
        input: the cell's input that the index came from; empty: it is none of the inputs as they are.
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
    """Return the refused input that an error's text names, if it does. Processes send each other errors as texts."""
    found = re.search(r"\(input '(\w+)': expected tokens from 0 to (\d+), got (-?\d+)\)", text)
    return None if found is None else Refused(found[1], int(found[3]), int(found[2]) + 1)


class RefusedLookup(TorchFunctionMode):
    """A mode in which a lookup of this thread is noted if an embedding's table has no row for an index."""

    def __init__(self) -> None:
        super().__init__()
        self._error: BaseException | None = None
        self._index = self._rows = 0
        self._looked_up = torch.empty(0)
        self._inputs: dict[str, CellInput] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Call a function of torch. If an embedding raises IndexError, raise it again with the input and value to
        blame.
        """
        try:
            return func(*args, **dict(kwargs or {}))
        except IndexError as error:
            if func is torch.nn.functional.embedding:
                given = dict(zip(("input", "weight"), args)) | dict(kwargs or {})
                indices, rows = given["input"].detach(), len(given["weight"])
                outside = indices[(indices < 0) | (indices >= rows)].reshape(-1).tolist()
                self._error, self._looked_up, self._index, self._rows = error, indices, outside[0], rows
            raise

    def noting(self, computation: Some) -> Some:
        """Return a computation that notes its inputs when it is run."""
        made, run_step, run_steps = copy.copy(computation), computation.run_step, computation.run_steps

        def note(inputs: Sequence[CellInput]) -> None:
            self._inputs = dict(zip(computation.inputs, inputs))

        def noted_run_step(*inputs: CellInput) -> list[torch.Tensor]:
            note(inputs)
            return run_step(*inputs)

        def noted_run_steps(batch_sizes: list[int], *inputs: CellInput) -> list[torch.Tensor]:
            note(inputs)
            return run_steps(batch_sizes, *inputs)

        vars(made).update(run_step=noted_run_step, run_steps=noted_run_steps)
        return made

    def found(self, error: BaseException) -> Refused | None:
        """Return the index, if a lookup raised this error; and its input, if it was looked up as that had it."""
        if error is not self._error:
            return None
        for name, value in self._inputs.items():
            given = value.values if isinstance(value, RaggedRows) else value
            if isinstance(given, torch.Tensor) and _memory(given) == _memory(self._looked_up):
                return Refused(name, self._index, self._rows)
        return Refused("", self._index, self._rows)


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()
