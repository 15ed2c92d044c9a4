"""Defining cells: what may be one, what is inferred, what makes two of them equal, and every misuse."""

from __future__ import annotations

import copy
import functools
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from cellrt.cells import EmbeddingGRUCell, EmbeddingGRUDecoder, EmbeddingLSTMCell, LSTMCell
from cellrt.definition.define import Cell, cell
from cellrt.definition.spec import RaggedRows, RowSpec, ragged, rows
from cellrt.errors import CellError, DefinitionError
from tests.api.models import INTEGER, SIZE, Recurrent, child_sum, recurrent

ROOT = Path(__file__).parents[2]


class Pair(NamedTuple):
    total: torch.Tensor
    is_positive: torch.Tensor


def linear_of(seed: int) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(SIZE, SIZE)


def test_outputs_are_inferred_whatever_their_form() -> None:
    specs = {"x": (3,)}
    expected = {"total": RowSpec(()), "is_positive": RowSpec((3,), torch.bool)}
    assert cell(lambda x: Pair(x.sum(1), x > 0), specs).outputs == expected
    assert cell(lambda x: {"total": x.sum(1), "is_positive": x > 0}, specs).outputs == expected
    assert list(cell(lambda x: (x.sum(1), x > 0), specs).outputs.values()) == list(expected.values())
    assert cell(lambda x: x[:, :2].bfloat16(), specs).outputs == {"output": RowSpec((2,), torch.bfloat16)}
    assert cell(nn.Linear(3, 5), {"input": (3,)}).outputs == {"output": RowSpec((5,))}
    assert cell(nn.Embedding(9, 2), {"token": INTEGER}).outputs == {"output": RowSpec((2,))}


def test_inputs_go_by_name_or_in_order() -> None:
    minus = cell(lambda a, b: a - b, {"b": (), "a": ()})
    by_order = cell(lambda *given: given[0] - given[1], {"b": (), "a": ()})
    one, two = torch.ones(1), torch.full((1,), 2.0)
    assert minus.run(one, two)[0] == 1
    assert by_order.run(one, two)[0] == -1
    assert child_sum().run(torch.zeros(2, SIZE), RaggedRows(torch.ones(3, SIZE), torch.tensor([0, 0, 3])))[0].shape == (
        2,
        SIZE,
    )


def test_what_runs_only_on_real_tensors() -> None:
    def looks_at_values(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum().item() + 1)

    assert cell(looks_at_values, {"x": (2,)}).outputs == {"output": RowSpec((2,))}


def test_modules_of_torch() -> None:
    lstm = nn.LSTMCell(SIZE, SIZE)
    made = cell(
        lambda x, h, c: Pair(*lstm(x, (h, c))),
        {"x": (SIZE,), "h": (SIZE,), "c": (SIZE,)},
        carry={"h": "total", "c": "is_positive"},
    )
    x, h, c = torch.randn(3, 2, SIZE)
    for value, expected in zip(made.run(x, h, c), lstm(x, (h, c))):
        torch.testing.assert_close(value, expected)
    gru = cell(nn.GRUCell(SIZE, SIZE), {"input": (SIZE,), "hx": (SIZE,)}, carry={"hx": "output"})
    assert gru.carry == {"hx": "output"} and gru.name == "GRUCell"


def test_limits_and_names() -> None:
    made = cell(nn.Linear(3, 3), {"input": (3,)}, name="mine", min_batch=2, batch_sizes=[8, 1, 4, 4], priority=5)
    assert (made.name, made.max_batch, made.min_batch, made.batch_sizes, made.priority) == ("mine", 8, 2, (1, 4, 8), 5)
    assert cell(nn.Linear(3, 3), {"input": (3,)}).max_batch == 512
    assert cell(nn.Linear(3, 3), {"input": (3,)}, max_batch=8, batch_sizes=[1, 8]).max_batch == 8
    assert "mine" in repr(made) and "float32[3]" in repr(made)


def test_a_cell_for_certain_numbers_of_rows() -> None:
    def takes_four_or_eight(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] not in (4, 8):
            raise ValueError(f"{x.shape[0]} rows")
        return x

    assert cell(takes_four_or_eight, {"x": (2,)}, batch_sizes=[4, 8]).outputs == {"output": RowSpec((2,))}
    with pytest.raises(DefinitionError, match="does not run on 2 rows of \\(x: float32\\[2\\]\\): 2 rows"):
        cell(takes_four_or_eight, {"x": (2,)})


def test_weights_are_frozen() -> None:
    module, x, h = Recurrent(), torch.randn(2, SIZE), torch.randn(2, SIZE)
    captured, default = linear_of(1), torch.ones(SIZE)

    def function(x: torch.Tensor, scale: torch.Tensor = default) -> torch.Tensor:
        return captured(x) * scale

    made = cell(module, {"x": (SIZE,), "h": (SIZE,)})
    of_function = cell(function, {"x": (SIZE,)})
    of_method = cell(module.forward, {"x": (SIZE,), "h": (SIZE,)})
    of_partial = cell(functools.partial(torch.add, default), {"x": (SIZE,)})
    before = [made.run(x, h)[0], of_function.run(x)[0], of_method.run(x, h)[0], of_partial.run(x)[0]]
    with torch.no_grad():
        for parameter in (*module.parameters(), *captured.parameters(), default):
            parameter.add_(1)
    after = [made.run(x, h)[0], of_function.run(x)[0], of_method.run(x, h)[0], of_partial.run(x)[0]]
    for one, two in zip(before, after):
        torch.testing.assert_close(one, two, rtol=0, atol=0)
    assert not any(parameter.requires_grad for parameter in made.module.parameters())
    assert module.training and not made.module.training


SHARED = torch.ones(SIZE)


def test_tensors_of_a_functions_globals_are_frozen() -> None:
    made = cell(lambda x: x + SHARED, {"x": (SIZE,)})
    SHARED.zero_()
    assert made.run(torch.zeros(1, SIZE))[0].tolist() == [[1.0] * SIZE]
    SHARED.fill_(1)


class Flagged(nn.Module):
    """A module whose behaviour hangs on attributes that are no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear_of(0)
        self.activation = "tanh"
        self._scale = 1.0
        self.options = {"sizes": [1, 2], "kind": {"b", "a"}}
        self.function = torch.tanh
        self.table = torch.arange(SIZE).float()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x)) * self._scale + self.table


def identity(module: Any, **options: Any) -> str:
    return cell(module, {"x": (SIZE,)}, **options).identity


def flagged(**changes: Any) -> str:
    module = Flagged()
    for name, value in changes.items():
        setattr(module, name, value)
    return identity(module)


def test_equal_weights_and_definition_are_one_type() -> None:
    assert flagged() == flagged()
    assert flagged(activation="".join(["ta", "nh"]), options={"sizes": [1, 2], "kind": {"a", "b"}}) == flagged()
    assert identity(linear_of(1), carry={}) == identity(copy.deepcopy(linear_of(1)), carry={})


@pytest.mark.parametrize(
    "change",
    [
        {"activation": "relu"},
        {"_scale": 2.0},
        {"_scale": 1},
        {"options": {"sizes": [1, 3], "kind": {"b", "a"}}},
        {"function": torch.relu},
        {"table": torch.ones(SIZE)},
        {"linear": linear_of(1)},
        {"linear": nn.Identity()},
        {"extra": None},
        {"forward": lambda x: x},
    ],
)
def test_any_change_of_a_module_is_another_type(change: dict[str, Any]) -> None:
    assert flagged(**change) != flagged()


def test_a_single_bit_of_a_weight_is_another_type() -> None:
    changed = linear_of(1)
    with torch.no_grad():
        changed.weight[0, 0] = torch.nextafter(changed.weight[0, 0], torch.tensor(10.0))
    assert identity(changed) != identity(linear_of(1))


def test_hooks_count() -> None:
    hooked = linear_of(1)
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    assert identity(hooked) != identity(linear_of(1))


def test_code_of_functions_counts() -> None:
    def scaled(factor: float) -> Any:
        return lambda x: x * factor

    assert identity(lambda x: x + 1) == identity(lambda x: x + 1)
    assert identity(lambda x: x + 1) != identity(lambda x: x + 2)
    assert identity(lambda x: x + 1) != identity(lambda x: x - 1)
    assert identity(lambda x: torch.relu(x)) != identity(lambda x: torch.tanh(x))
    assert identity(scaled(2.0)) == identity(scaled(2.0)) != identity(scaled(3.0))
    assert identity(scaled(torch.ones(1))) == identity(scaled(torch.ones(1))) != identity(scaled(torch.zeros(1)))
    assert identity(functools.partial(torch.add, torch.ones(1))) != identity(
        functools.partial(torch.add, torch.zeros(1))
    )


HELPER_MODULE = """
import torch
from torch import nn
def helper(x): return x {operator} 1
class Base(nn.Module):
    def forward(self, x): return helper(x)
class Derived(Base):
    pass
function = lambda x: helper(x)
"""


def test_code_that_is_used_from_elsewhere_counts() -> None:
    made = []
    for operator in ("+", "+", "-"):
        space: dict[str, Any] = {"__name__": f"somewhere{len(made)}"}
        exec(HELPER_MODULE.format(operator=operator), space)
        made.append((identity(space["Derived"]()), identity(space["function"])))
    assert made[0] == made[1]
    assert made[0][0] != made[2][0] and made[0][1] != made[2][1]


def test_specs_and_use_count() -> None:
    plain = identity(torch.tanh)
    assert plain == identity(torch.tanh, priority=3, min_batch=4, name="other")
    assert plain != identity(torch.tanh, max_batch=8)
    assert plain != identity(torch.tanh, finite=["output"])
    assert plain != identity(torch.tanh, carry={"x": "output"})
    assert plain != cell(torch.tanh, {"x": (SIZE + 1,)}).identity
    assert plain != cell(torch.tanh, {"x": rows(SIZE, dtype=torch.float64)}).identity


def test_what_cannot_be_compared_is_like_no_other() -> None:
    def holding(something: object) -> Any:
        module = linear_of(1)
        module.something = something  # type: ignore[assignment]
        return identity(module)

    class Opaque:
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise TypeError("cannot be pickled")

        def __deepcopy__(self, memo: Any) -> Any:
            return self

    opaque = Opaque()
    assert holding(opaque) != holding(opaque)
    looped: list[Any] = []
    looped.append(looped)
    assert holding(looped) == holding(copy.deepcopy(looped)) != holding([[]])


SCRIPT = """
import sys
import torch
from torch import nn
from cellrt.definition.define import cell
from cellrt.cells import EmbeddingGRUDecoder, LSTMCell
from cellrt.definition.spec import rows
from tests.api.models import attending, child_sum, counter, embedded, leaf, recurrent
torch.manual_seed(0)
size = {"h": (16,), "c": (16,)}
made = [attending(), child_sum(), counter(), embedded(), leaf(), recurrent()]
made.append(cell(LSTMCell(8, 16), {"x": (8,), **size}))
made.append(cell(EmbeddingGRUDecoder(9, 8, 16, 1), {"token": rows(dtype=torch.int64), "h": (16,)}))
made.append(cell(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), {"src": (5, 8)}))
print(*[each.identity for each in made])
"""


def test_identity_is_the_same_in_every_process(capsys: pytest.CaptureFixture[str]) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        env={**os.environ, "PYTHONHASHSEED": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    exec(SCRIPT, {"__name__": "another"})
    here = capsys.readouterr().out.split()
    assert finished.stdout.split() == here and len(set(here)) == 9
    assert here[5] == recurrent().identity


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (EmbeddingGRUCell(20, 4, 8), {"token": INTEGER, "h": (8,)}),
        (EmbeddingGRUDecoder(20, 4, 8, 1), {"token": INTEGER, "h": (8,)}),
        (EmbeddingLSTMCell(20, 4, 8), {"token": INTEGER, "h": (8,), "c": (8,)}),
        (LSTMCell(4, 8), {"x": (4,), "h": (8,), "c": (8,)}),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_caches_inside_a_module_do_not_matter(module: nn.Module, inputs: dict[str, Any]) -> None:
    before = cell(module, inputs)
    with torch.inference_mode():
        example = before.example_inputs(3)
        module.eval()(*example)
        before.run(*example)
    after = cell(module, inputs)
    again = cell(before.module, inputs)
    assert before.identity == after.identity == again.identity
    assert before.has_steps
    for one, two in zip(before.run(*example), after.run(*example)):
        torch.testing.assert_close(one, two)


class BadSteps(Recurrent):
    def steps(self, batch_sizes: list[int], x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": h}


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
    "a number as shape": (lambda: cell(IDENTITY, {"x": 2}), "input 'x': expected a shape .* got 2"),
    "an empty extent": (lambda: cell(IDENTITY, {"x": (0,)}), r"input 'x': expected extents of at least 1, got \(0,\)"),
    "a bad dtype": (
        lambda: cell(IDENTITY, {"x": rows(2, dtype="int64")}),
        "input 'x': expected a torch dtype, got 'int64'",
    ),
    "a fractional extent": (lambda: cell(IDENTITY, {"x": rows(2.5)}), "input 'x': expected a shape"),
    "an input with no name": (lambda: cell(IDENTITY, {"a b": (2,)}), "'a b' cannot be the name of an input"),
    "an input of a builder's name": (lambda: cell(IDENTITY, {"until": (2,)}), "'until' cannot be the name of an input"),
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
    "no row dimension": (lambda: cell(lambda x: x.sum(), ONE), "expected the row dimension first"),
    "rows of a ragged input": (lambda: cell(lambda x: x.values, {"x": ragged(2)}), "expected the row dimension first"),
    "outputs that depend on the rows": (
        lambda: cell(lambda x: x @ x.T, ONE),
        "its outputs depend on the number of rows",
    ),
    "no tensors": (lambda: cell(lambda x: "x", ONE), "does not run .*: a cell must return tensors, got str"),
    "a list of other things": (lambda: cell(lambda x: {"x": 1}, ONE), "a cell must return tensors, got {'x': 'int'}"),
    "no outputs": (lambda: cell(lambda x: {}, ONE), "a cell must return tensors"),
    "an output with no name": (lambda: cell(lambda x: {"a b": x}, ONE), "'a b' cannot be the name of an output"),
    "an output of a handle's name": (
        lambda: cell(lambda x: {"last": x}, ONE),
        "'last' cannot be the name of an output",
    ),
    "raising": (
        lambda: cell(nn.Linear(3, 3), ONE),
        r"cell 'Linear' does not run on 2 rows of \(x: float32\[2\]\): mat1 and mat2",
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
    "own state": (lambda: cell(Counting(), ONE), r"writes to its own \['count'\]; a cell has no state of its own"),
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


def test_outputs_that_change_later() -> None:
    def fickle(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x} if x.shape[0] < 9 else {"z": x}

    made: Cell = cell(fickle, {"x": (2,)})
    with pytest.raises(CellError, match=r"expected outputs \['y'\], got \['z'\]"):
        made.run(torch.zeros(9, 2))
    with pytest.raises(CellError, match=r"output 'y': expected 3 rows of float32\[2\], got float32\[\]"):
        made.check_outputs([torch.zeros(())], 3)
