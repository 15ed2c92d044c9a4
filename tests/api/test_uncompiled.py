"""A module that ``torch.compile`` made is the module that it was made of: nothing is compiled for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from cellrt.definition.define import cell
from cellrt.errors import DefinitionError
from tests.api.models import linear_of

INPUTS = {"input": (4,)}


@pytest.fixture(autouse=True)
def _refuse_to_compile() -> Iterator[None]:
    with torch.compiler.set_stance("fail_on_recompile"):
        yield


def compiled_part() -> nn.Module:
    return nn.Sequential(torch.compile(linear_of(1)), nn.ReLU())


def compiled_in_place() -> nn.Module:
    module = linear_of(1)
    module.compile()
    return module


def compiled_method() -> nn.Module:
    module = linear_of(1)
    module.forward = torch.compile(module.forward)  # type: ignore[method-assign]
    return module


def compiled_twice_inside() -> nn.Module:
    return torch.compile(nn.Sequential(torch.compile(nn.Sequential(torch.compile(linear_of(1))))))  # type: ignore[return-value]


def compiled_function() -> Callable[..., Any]:
    layer = linear_of(1)
    return torch.compile(lambda input: layer(input))


MAKERS = [
    compiled_part,
    compiled_in_place,
    compiled_method,
    compiled_twice_inside,
    compiled_function,
    lambda: torch.compile(linear_of(1)),
]


@pytest.mark.parametrize("make", MAKERS)
def test_what_was_compiled_runs_as_what_it_was_made_of(make: Callable[[], Any]) -> None:
    module = make()
    with pytest.warns(RuntimeWarning, match=r"torch.compile is left out.*cellrt compiles cells itself") as told:
        made = cell(module, INPUTS)
    assert told[0].filename == __file__
    assert made.name != "OptimizedModule"
    given = torch.randn(3, 4)
    expected = linear_of(1)(given)
    (output,) = made.run(given)
    torch.testing.assert_close(output, expected.relu() if make is compiled_part else expected)
    assert made.check_row_wise() == []


def test_a_module_that_was_compiled_is_the_same_cell_as_the_module() -> None:
    with pytest.warns(RuntimeWarning, match="cell 'Linear'"):
        made = cell(torch.compile(linear_of(1)), INPUTS)
    assert made.identity == cell(linear_of(1), INPUTS).identity


def test_what_a_function_finds_compiled_is_not_compiled_either() -> None:
    inner = torch.compile(linear_of(1))
    (output,) = cell(lambda input: inner(input), INPUTS).run(torch.ones(2, 4))
    torch.testing.assert_close(output, linear_of(1)(torch.ones(2, 4)))


def test_the_users_module_stays_compiled() -> None:
    module = compiled_part()
    with pytest.warns(RuntimeWarning):
        cell(module, INPUTS)
    assert type(module[0]).__name__ == "OptimizedModule"  # type: ignore[index]


def test_a_compiled_method_of_another_object_is_refused() -> None:
    module = nn.Sequential(nn.ReLU())
    module.helper = torch.compile(linear_of(1).forward)  # type: ignore[assignment]
    with pytest.raises(DefinitionError, match="a part is compiled .*: give what it was made of"):
        cell(module, INPUTS)
