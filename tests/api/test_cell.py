"""Defining cells: what may be one, what is inferred, and every misuse."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cellrt.cells import GRUCell
from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, RowSpec, ragged, rows, token
from cellrt.errors import CellError, DefinitionError
from tests.api.models import INTEGER, SIZE, Recurrent, child_sum, linear_of


class Pair(NamedTuple):
    total: torch.Tensor
    is_positive: torch.Tensor


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


def test_inputs_in_order_may_have_any_names_in_their_places() -> None:
    gru = nn.GRUCell(SIZE, SIZE)
    x, h = torch.randn(2, 3, SIZE)
    for names in (["x", "state"], ["x", "hx"], ["input", "hx"]):
        made = cell(gru, dict.fromkeys(names, (SIZE,)), carry={names[1]: "output"})
        torch.testing.assert_close(made.run(x, h)[0], gru(x, h))


def test_inputs_that_are_no_parameters_go_by_name_where_any_name_is_taken() -> None:
    def weighted(x: torch.Tensor, scale: float = 2.0, **others: torch.Tensor) -> torch.Tensor:
        return scale * x - others["y"]

    def of_first(first: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        return 3 * first

    one, two = torch.ones(1), torch.full((1,), 2.0)
    for inputs, given in ((["x", "y"], (one, two)), (["y", "x"], (two, one))):
        assert cell(weighted, dict.fromkeys(inputs, ())).run(*given)[0] == 0
    assert cell(of_first, {"x": ()}).run(two)[0] == 6, "its parameter has another name"


def test_short_forms_of_specs() -> None:
    made = cell(lambda token, x: x + token[:, None], {"token": token, "x": SIZE})
    assert made.inputs == {"token": RowSpec((), torch.int64), "x": RowSpec((SIZE,))}


def test_a_spec_is_short_where_it_is_shown() -> None:
    assert repr([rows(3, dtype=torch.int8), ragged(2)]) == "[RowSpec(int8[3]), RowSpec(ragged float32[2])]"


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
    with pytest.raises(DefinitionError, match="does not run on 2 rows of \\(x: float32\\[2\\]\\): ValueError: 2 rows"):
        cell(takes_four_or_eight, {"x": (2,)})


def test_modules_given_to_a_partial_function_are_in_evaluation_mode() -> None:
    made = cell(functools.partial(lambda module, x: module(x), nn.Dropout(0.5)), {"x": (SIZE,)})
    assert made.run(torch.ones(9, SIZE))[0].eq(1).all()


def test_a_cell_has_weights_of_its_own() -> None:
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


def test_a_cell_has_its_own_tensors_of_a_functions_globals() -> None:
    made = cell(lambda x: x + SHARED, {"x": (SIZE,)})
    SHARED.zero_()
    assert made.run(torch.zeros(1, SIZE))[0].tolist() == [[1.0] * SIZE]
    SHARED.fill_(1)


class BadSteps(Recurrent):
    def steps(self, batch_sizes: list[int], x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"h": h}


class ExitingSteps(Recurrent):
    def steps(self, batch_sizes: list[int], x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
        raise SystemExit(3)


def leave(x: torch.Tensor) -> torch.Tensor:
    raise SystemExit(3)


def is_interrupted(x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x + self.count


@pytest.mark.parametrize("wrap", [torch.vmap, lambda made: functools.wraps(made)(lambda *args: made(*args))])
def test_a_function_that_passes_on_what_it_gets_takes_inputs_in_order(wrap: Callable[..., Any]) -> None:
    def less(x: Tensor, y: Tensor) -> Tensor:
        return x - y

    made = cell(wrap(less), {"x": (2,), "y": (2,)})
    assert torch.equal(made.run(torch.full((3, 2), 5.0), torch.ones(3, 2))[0], torch.full((3, 2), 4.0))


def test_hooks_get_inputs_as_torch_gives_them() -> None:
    module = nn.Identity()
    module.register_forward_pre_hook(lambda _, args: tuple(2 * value for value in args))
    assert torch.equal(cell(module, {"input": (2,)}).run(torch.ones(1, 2))[0], torch.full((1, 2), 2.0))


class KeywordOnly(nn.Module):
    @torch.no_grad()
    def forward(self, x: Tensor, *, state_h: Tensor, state_c: Tensor) -> Tensor:
        return x + state_h - state_c


def test_inputs_are_taken_by_keyword_where_that_is_the_only_way() -> None:
    made = cell(KeywordOnly(), {"x": (2,), "state_h": (2,), "state_c": (2,)})
    assert torch.equal(made.run(*[torch.full((1, 2), float(k)) for k in (1, 2, 5)])[0], torch.full((1, 2), -2.0))


def test_names_as_alike_to_the_parameter_in_their_place_are_taken_for_it() -> None:
    made = cell(lambda x, state_h, state_c: state_h - state_c, {"x": (1,), "state1": (1,), "state2": (1,)}, name="f")
    assert made.run(*[torch.full((1, 1), float(k)) for k in (1, 2, 5)])[0].item() == -3


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


def test_an_interrupt_from_the_keyboard_is_no_mistake_of_the_cell() -> None:
    with pytest.raises(KeyboardInterrupt):
        cell(is_interrupted, ONE)


def test_outputs_that_change_later() -> None:
    def fickle(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x} if x.shape[0] < 9 else {"z": x}

    made: Cell = cell(fickle, {"x": (2,)})
    with pytest.raises(CellError, match=r"expected outputs \['y'\], got \['z'\]"):
        made.run(torch.zeros(9, 2))
    with pytest.raises(CellError, match=r"output 'y': expected 3 rows of float32\[2\], got float32\[\]"):
        made.check_outputs([torch.zeros(())], 3)
