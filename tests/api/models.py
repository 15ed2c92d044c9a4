"""Small cells of every form, which the tests of this folder share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, RowSpec, ragged, rows
from cellrt.engine.engine import Engine
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder, unfold

SIZE = 4
INTEGER = rows(dtype=torch.int64)


class Numbering:
    """A binding without an engine, that gives each cell and each kind of rows a number of its own."""

    max_nodes = 1000

    def __init__(self) -> None:
        self.types: dict[str, int] = {}
        self.kinds: dict[object, int] = {}
        self.constants: dict[object, int] = {}
        self.ports: list[tuple[int, int]] = []
        """Inputs and outputs of each cell, as ``operations`` is told."""

    def cell_type(self, made: Cell) -> int:
        if made.identity not in self.types:
            self.types[made.identity] = len(self.types)
            self.ports.append((len(made.inputs), len(made.outputs)))
        return self.types[made.identity]

    def kind(self, spec: RowSpec) -> int:
        return self.kinds.setdefault((spec.shape, spec.dtype), len(self.kinds))

    def constant_row(self, kind: int, content: bytes) -> int:
        return self.constants.setdefault((kind, content), len(self.constants))


class Recurrent(nn.Module):
    """``h' = tanh(W [x, h])``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * SIZE, SIZE)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": torch.tanh(self.linear(torch.cat([x, h], dim=1)))}


class Embedded(Recurrent):
    """The same on tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, SIZE)

    def forward(self, token: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        return super().forward(self.table(token), h)


class Attending(nn.Module):
    """A step that also reads the sum of any number of rows."""

    def forward(self, memory: RaggedRows, x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": torch.tanh(x + 0.5 * h + sum_rows(memory))}


class ChildSum(nn.Module):
    """A tree node: its children's sum and its own input."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)

    def forward(self, x: torch.Tensor, h: RaggedRows) -> dict[str, torch.Tensor]:
        return {"h": torch.tanh(self.linear(x) + sum_rows(h))}


def linear_of(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(SIZE, SIZE)


def sum_rows(values: RaggedRows) -> torch.Tensor:
    counts = values.offsets.diff()
    of_row = torch.repeat_interleave(
        torch.arange(counts.shape[0], device=counts.device), counts, output_size=values.values.shape[0]
    )
    zeros = torch.zeros((counts.shape[0], *values.values.shape[1:]), device=counts.device)
    return zeros.index_add(0, of_row, values.values)


def count_up(number: torch.Tensor, limit: torch.Tensor, step: torch.Tensor) -> dict[str, torch.Tensor]:
    """A loop's cell: counts up to a limit."""
    after = number + step
    return {"number": after, "stop": after >= limit, "half": after.to(torch.float32) / 2}


def recurrent() -> Cell:
    torch.manual_seed(1)
    return cell(Recurrent(), {"x": (SIZE,), "h": (SIZE,)})


def embedded() -> Cell:
    torch.manual_seed(2)
    return cell(Embedded(), {"token": INTEGER, "h": (SIZE,)})


def attending() -> Cell:
    return cell(Attending(), {"memory": ragged(SIZE), "x": (SIZE,), "h": (SIZE,)})


def child_sum() -> Cell:
    torch.manual_seed(3)
    return cell(ChildSum(), {"x": (SIZE,), "h": ragged(SIZE)})


def counter() -> Cell:
    return cell(count_up, {"number": INTEGER, "limit": INTEGER, "step": INTEGER})


def leaf() -> Cell:
    torch.manual_seed(4)
    linear = nn.Linear(SIZE, SIZE)

    def tree_leaf(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": linear(x)}

    return cell(tree_leaf, {"x": (SIZE,)})


def pair() -> Cell:
    torch.manual_seed(5)
    linear = nn.Linear(2 * SIZE, SIZE)

    def tree_pair(h_left: torch.Tensor, h_right: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": torch.tanh(linear(torch.cat([h_left, h_right], dim=1)))}

    return cell(tree_pair, {"h_left": (SIZE,), "h_right": (SIZE,)})


def model(function: Callable[..., Any], example: Any = None, name: str = "m", cells: tuple[Cell, ...] = ()) -> Unfolder:
    return unfold(name, example=example, cells=cells)(function)


def serve(engine: Engine, unfolder: Unfolder, *requests: Any) -> list[dict[str, torch.Tensor]]:
    """Serves requests (the example if there are none) and compares each with the nodes run one by one."""
    engine.register(unfolder, warm_up=False)
    results = []
    given = list(requests) or [unfolder.example]
    for request, future in zip(given, engine.submit_many(unfolder.name, given)):
        result = future.result(timeout=60)
        expected = run_one_by_one(unfolder, request)
        assert result.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(result[key], value, rtol=1e-5, atol=1e-5)
        results.append(result)
    return results
