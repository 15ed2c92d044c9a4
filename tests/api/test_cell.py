"""Defining cells: what may be one, what is inferred, and every misuse."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from cellrt.definition.cell import Cell
from cellrt.definition.computation import takes_order
from cellrt.definition.define import cell
from cellrt.definition.spec import RaggedRows, RowSpec, Spans, ragged, rows, span, token
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
    by_name = cell(minus, {"b": (), "a": ()})
    by_order = cell(lambda *given: given[0] - given[1], {"b": (), "a": ()})
    one, two = torch.ones(1), torch.full((1,), 2.0)
    assert by_name.run(one, two)[0] == 1
    assert by_order.run(one, two)[0] == -1
    assert child_sum().run(torch.zeros(2, SIZE), RaggedRows(torch.ones(3, SIZE), torch.tensor([0, 0, 3])))[0].shape == (
        2,
        SIZE,
    )


class Forward(nn.Module):
    """With an option behind its inputs."""

    def forward(self, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
        return scale * (a - b)


class Called(Forward):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def minus(a: Tensor, b: Tensor) -> Tensor:
    return a - b


@functools.wraps(minus)
def by_keywords(**given: Tensor) -> Tensor:
    return minus(**given)


def hooked() -> nn.Module:
    module = Forward()
    module.register_forward_hook(lambda *_: None)
    return module


@pytest.mark.parametrize(
    ("module", "names", "expected"),
    [
        (minus, "ab", True),
        (minus, "ba", False),
        (by_keywords, "ab", False),
        (lambda *, a, b: a - b, "ab", False),
        (functools.partial(minus), "ab", False),
        (Forward(), "ab", True),
        (Forward(), "a", True),
        (Forward(), "b", False),
        (Called(), "ab", False),
        (hooked(), "ab", False),
    ],
)
def test_what_goes_by_name_goes_in_order_where_that_is_the_same(module: Any, names: str, expected: bool) -> None:
    assert takes_order(module, list(names)) == expected
    assert takes_order(nn.Linear(2, 2), ["input"])


def test_a_wrapper_that_takes_keywords_alone_gets_them() -> None:
    assert cell(by_keywords, {"a": (), "b": ()}).run(torch.ones(1), torch.full((1,), 2.0))[0] == -1


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


@pytest.mark.parametrize(("longest", "expected"), [(None, 512), (100, 512), (1024, 1024), (1 << 20, 65_536)])
@pytest.mark.parametrize("whole", [True, False])
def test_a_task_has_the_longest_sequence_that_its_cell_takes_whole(
    longest: int | None, expected: int, whole: bool
) -> None:
    class Centre(nn.Module):
        longest_span = longest

        def forward(self, x: Tensor, spans: Spans) -> Tensor:
            return x - spans.positions[:, None]

    inputs = {"x": (SIZE,), "spans": span(whole=whole)}
    assert cell(Centre(), inputs).max_batch_rows == (expected if whole else 512)
    assert cell(Centre(), inputs, max_batch_rows=7).max_batch_rows == 7


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


def is_interrupted(x: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


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


def test_an_interrupt_from_the_keyboard_is_no_mistake_of_the_cell() -> None:
    with pytest.raises(KeyboardInterrupt):
        cell(is_interrupted, {"x": (2,)})


def test_outputs_that_change_later() -> None:
    def fickle(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": x} if x.shape[0] < 9 else {"z": x}

    made: Cell = cell(fickle, {"x": (2,)})
    with pytest.raises(CellError, match=r"expected outputs \['y'\], got \['z'\]"):
        made.run(torch.zeros(9, 2))
    with pytest.raises(
        CellError, match=r"output 'y': expected float32\[3, 2\] \(3 rows of float32\[2\]\), got float32\[\]"
    ):
        made.check_outputs([torch.zeros(())], 3)
