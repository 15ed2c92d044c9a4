"""Every way to define a cell wrongly is told."""

from __future__ import annotations

import functools
import threading
from typing import Any

import pytest
import torch
from torch import nn

from cellrt.cells import GRUCell
from cellrt.definition.define import cell
from cellrt.definition.spec import ragged, rows
from cellrt.errors import DefinitionError
from tests.api.models import INTEGER, SIZE, Recurrent


class BadSteps(Recurrent):
    def steps(self, batch_sizes: list[int], x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": h}


class ExitingSteps(Recurrent):
    def steps(self, batch_sizes: list[int], x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        raise SystemExit(3)


def leave(x: torch.Tensor) -> torch.Tensor:
    raise SystemExit(3)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


ONE = {"x": (2,)}
IDENTITY = nn.Identity()
MISUSES: dict[str, tuple[Any, str]] = {
    "no callable": (lambda: cell(3, ONE), "cell 'int': expected a torch module or a function, got int"),
    "a class": (lambda: cell(nn.Identity, ONE), "expected a torch module or a function, got the class Identity"),
    "no inputs": (lambda: cell(IDENTITY, {}), "cell 'Identity' has no inputs"),
    "inputs as a list": (lambda: cell(IDENTITY, [(2,)]), "expected inputs as a dict of shapes or specs, got list"),
    "a bad shape": (lambda: cell(IDENTITY, {"x": "2"}), "cell 'Identity', input 'x': expected a shape .* got '2'"),
    "a fraction as shape": (lambda: cell(IDENTITY, {"x": 2.0}), "input 'x': expected a shape .* got 2.0"),
    "a bool as shape": (lambda: cell(IDENTITY, {"x": True}), "input 'x': expected a shape .* got True"),
    "no number of rows": (lambda: cell(IDENTITY, {"x": 0}), r"input 'x': expected extents of at least 1, got \(0,\)"),
    "inputs of a ready-made cell by other names": (
        lambda: cell(GRUCell(8, 16), {"input": (8,), "state": (16,)}),
        r"cell 'GRUCell': its method steps takes inputs by name: expected \['x', 'h'\], got \['input', 'state'\]",
    ),
    "inputs that would be taken for each other": (
        lambda: cell(nn.GRUCell(8, 8), {"hx": (8,), "x": (8,)}),
        r"cell 'GRUCell', input 'hx': expected all inputs by the names of the module's parameters \['input', 'hx'\], "
        r"or each in its place, got \['hx', 'x'\]",
    ),
    "an input by a name like another parameter's": (
        lambda: cell(lambda x, scale=None, shift=None: x, {"x": (1,), "shfit": (1,)}, name="f"),
        r"cell 'f', input 'shfit': the module's parameters are \['x', 'scale', 'shift'\]; is 'shift' meant\?",
    ),
    "batch sizes that are no list": (
        lambda: cell(IDENTITY, ONE, batch_sizes=4),
        "expected batch_sizes as a list, got int",
    ),
    "a carry that is no dict": (
        lambda: cell(IDENTITY, ONE, carry=["x"]),
        "expected carry as a dict from input to output, got list",
    ),
    "a finite that is no list": (
        lambda: cell(IDENTITY, ONE, finite=3),
        "expected finite as a list of outputs, got int",
    ),
    "a name that is no text": (lambda: cell(IDENTITY, ONE, name=3), "cell 3: expected a name, got int"),
    "a bool as batch size": (lambda: cell(IDENTITY, ONE, max_batch=True), "from 1 to 65536, got True"),
    "a large priority": (lambda: cell(IDENTITY, ONE, priority=1 << 31), "expected a priority from"),
    "an empty extent": (lambda: cell(IDENTITY, {"x": (0,)}), r"input 'x': expected extents of at least 1, got \(0,\)"),
    "a dtype as extent": (
        lambda: rows(torch.int64),
        "rows: .*, got torch.int64; a dtype goes by .*: dtype=torch.int64",
    ),  # type: ignore[arg-type]
    "a text as extent": (lambda: ragged("a"), "ragged: expected extents .*, got 'a'"),  # type: ignore[arg-type]
    "a negative extent": (lambda: rows(4, -1), "rows: expected extents .*, got -1"),
    "a dtype as shape": (
        lambda: cell(IDENTITY, {"x": torch.int64}),
        r"expected a shape .*, got torch.int64; a dtype goes as cellrt.rows\(..., dtype=torch.int64\)",
    ),
    "a batch of one as shape": (
        lambda: cell(nn.GRUCell(8, 16), {"input": (1, 8), "hx": (1, 16)}),
        r"a shape is that of one row, without the batch's dimension: is \(8,\) meant for 'input'\?",
    ),
    "a bad dtype": (
        lambda: cell(IDENTITY, {"x": rows(2, dtype="int64")}),
        "input 'x': expected a torch dtype, got 'int64'",
    ),
    "complex numbers": (
        lambda: cell(IDENTITY, {"x": rows(2, dtype=torch.complex64)}),
        r"input 'x': expected rows of float16, .*bfloat16, got complex64; give a complex row as one of floats",
    ),
    "wide unsigned integers": (
        lambda: cell(IDENTITY, {"x": ragged(2, dtype=torch.uint32)}),
        "input 'x': expected rows of .*, got uint32$",
    ),
    "an output of complex numbers": (
        lambda: cell(torch.view_as_complex, ONE),
        "cell 'view_as_complex', output 'output': expected rows of .*, got complex64",
    ),
    "a sparse output": (
        lambda: cell(lambda x: x.to_sparse(), ONE),
        "output 'output': expected a dense tensor, got one of torch.sparse_coo",
    ),
    "a fractional extent": (
        lambda: cell(IDENTITY, {"x": rows(2.5)}),
        "rows: expected extents of a row as integers of at",
    ),
    "an input with no name": (lambda: cell(IDENTITY, {"a b": (2,)}), "'a b' cannot be the name of an input"),
    "an input of a builder's name": (
        lambda: cell(IDENTITY, {"until": (2,)}),
        "'until' cannot be the name of an input: graph.chain and graph.loop have an argument of that name$",
    ),
    "unknown carry": (
        lambda: cell(IDENTITY, ONE, carry={"y": "output"}),
        r"carry 'y' from 'output': inputs are \['x'\]",
    ),
    "carry from nothing": (lambda: cell(IDENTITY, ONE, carry={"x": "y"}), r"outputs are \['output'\]"),
    "carry of another shape": (
        lambda: cell(lambda x: x.sum(1), ONE, carry={"x": "output"}),
        r"carry 'x' from 'output': expected float32\[2\], got float32\[\]",
    ),
    "finite of nothing": (lambda: cell(IDENTITY, ONE, finite=["y"]), "finite='y' is not a floating-point output"),
    "finite integers": (
        lambda: cell(IDENTITY, {"x": INTEGER}, finite="output"),
        "finite='output' is not a floating-point output",
    ),
    "no rows first": (
        lambda: cell(lambda x: x.T, ONE),
        r"output 'output': expected the row dimension first \(. rows in the trial run\), got float32\[2, ",
    ),
    "an empty output": (
        lambda: cell(lambda x: {"y": x, "z": x[:, :0]}, ONE),
        r"output 'z': expected extents of at least 1, got float32\[., 0\]; leave it out",
    ),
    "no row dimension": (lambda: cell(lambda x: x.sum(), ONE), "expected the row dimension first"),
    "rows of a ragged input": (lambda: cell(lambda x: x.values, {"x": ragged(2)}), "expected the row dimension first"),
    "outputs that depend on the rows": (
        lambda: cell(lambda x: x @ x.T, ONE),
        "its outputs depend on the number of rows",
    ),
    "no tensors": (lambda: cell(lambda x: "x", ONE), "does not run .*: a cell must return tensors, got str"),
    "a list of other things": (lambda: cell(lambda x: {"x": 1}, ONE), "a cell must return tensors, got {'x': 'int'}"),
    "no outputs": (lambda: cell(lambda x: {}, ONE), "a cell must return tensors"),
    "an output with no name": (
        lambda: cell(lambda x: {"a b": x}, ONE),
        "'a b' cannot be the name of an output: .* underscore",
    ),
    "an output of a handle's name": (
        lambda: cell(lambda x: {"last": x}, ONE),
        "'last' cannot be the name of an output: of what graph.chain and graph.loop return, .last is the last step$",
    ),
    "raising": (
        lambda: cell(nn.Linear(3, 3), ONE),
        r"cell 'Linear' does not run on 2 rows of \(x: float32\[2\]\): RuntimeError: mat1 and mat2",
    ),
    "an LSTM cell of torch": (
        lambda: cell(nn.LSTMCell(2, 3), {"input": (2,), "hx": (3,)}),
        r"takes its state as one tuple: use cellrt\.cells\.LSTMCell\.from_torch\(\.\.\.\)",
    ),
    "a whole LSTM": (lambda: cell(nn.LSTM(2, 3), {"input": (2,)}), r"use cellrt\.unfolders\.chain\(name, module\)"),
    "too few arguments": (lambda: cell(lambda x, y: x, ONE), "does not run .*missing 1 required positional argument"),
    "no rows": (lambda: cell(IDENTITY, ONE, max_batch=0), "expected batch sizes from 1 to 65536, got 0"),
    "too many rows": (lambda: cell(IDENTITY, ONE, max_batch=65_537), "expected batch sizes from 1 to 65536, got 65537"),
    "half a row": (lambda: cell(IDENTITY, ONE, max_batch=1.5), "expected batch sizes from 1 to 65536, got 1.5"),
    "a negative size": (lambda: cell(IDENTITY, ONE, batch_sizes=[-1, 2]), "from 1 to 65536, got -1"),
    "two largest sizes": (
        lambda: cell(IDENTITY, ONE, max_batch=8, batch_sizes=[1, 4]),
        r"max_batch=8 is not the largest of batch_sizes=\[1, 4\]; leave it out",
    ),
    "more at least than at most": (
        lambda: cell(IDENTITY, ONE, max_batch=2, min_batch=3),
        "min_batch=3 is more than the 2 rows",
    ),
    "a fractional priority": (lambda: cell(IDENTITY, ONE, priority=0.5), "expected an integer as priority, got 0.5"),
    "wrong steps": (lambda: cell(BadSteps(), {"x": (SIZE,), "h": (SIZE,)}), "its method steps does not run on zeros"),
    "leaving": (lambda: cell(leave, ONE), r"cell 'leave' does not run on 2 rows of \(x: float32\[2\]\): SystemExit: 3"),
    "leaving in steps": (
        lambda: cell(ExitingSteps(), {"x": (SIZE,), "h": (SIZE,)}),
        "its method steps does not run on zeros: SystemExit: 3",
    ),
    "own state": (lambda: cell(Counting(), ONE), r"writes to its own \['count'\]; a cell has no state of its own"),
    "a scripted module": (
        lambda: cell(torch.jit.trace(IDENTITY, torch.zeros(1)), ONE),
        "cannot be copied: a part is scripted .*: give the module that it was made of",
    ),
    "a scripted part": (
        lambda: cell(nn.Sequential(torch.jit.trace(nn.Linear(2, 2), torch.zeros(1, 2))), ONE),
        "cannot be copied: a part is scripted",
    ),
    "a module without weights yet": (lambda: cell(nn.LazyLinear(3), ONE), "cannot be copied: .*uninitialized"),
    "what cannot be copied": (
        lambda: cell(functools.partial(lambda lock, x: x, threading.Lock()), ONE),
        "cannot be copied: cannot pickle '_thread.lock'",
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_misuses(misuse: str) -> None:
    make, message = MISUSES[misuse]
    with pytest.raises(DefinitionError, match=message):
        make()
