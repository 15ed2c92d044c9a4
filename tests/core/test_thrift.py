"""Compiling cheaply gives the same code, and Numba is left as it was."""

from __future__ import annotations

import gc
import operator
from typing import Any

import numba
import pytest
from llvmlite.binding import ffi
from numba.core import ir, types
from numba.core.compiler import Flags
from numba.core.registry import cpu_target
from numba.core.targetconfig import TargetConfig
from numba.core.types.functions import BaseFunction

from cellrt.native import thrift as thrift_module
from cellrt.native.thrift import thrift

pytestmark = pytest.mark.skipif(bool(numba.config.DISABLE_JIT), reason="nothing is compiled")


def state_of_numba() -> tuple[Any, ...]:
    functions = BaseFunction.get_call_type, TargetConfig.__eq__, TargetConfig.__hash__, ir.Inst._rec_list_vars
    return (*functions, list(ffi.lib._lock._cblist), gc.isenabled())


def test_numba_is_left_as_it_was_whatever_happens_inside():
    before = state_of_numba()
    with pytest.raises(ZeroDivisionError), thrift(), thrift():
        assert gc.isenabled() and state_of_numba()[:4] != before[:4]
        raise ZeroDivisionError
    assert state_of_numba() == before and ffi.lib._lock._cblist


@pytest.mark.parametrize("left", (types.int64, types.float64, types.literal(3), types.boolean))
def test_an_operator_gives_the_type_that_it_gives_without_asked_once_or_twice(left: types.Type):
    context = cpu_target.typing_context
    context.refresh()
    for asked in (operator.add, operator.lt, operator.eq):
        function = context.resolve_value_type(asked)
        arguments = (left, types.int32)
        plain = function.get_call_type(context, arguments, {})
        with thrift():
            assert [function.get_call_type(context, arguments, {}) for _ in range(2)] == [plain, plain]


def test_what_an_operator_cannot_do_is_refused_as_ever():
    context = cpu_target.typing_context
    context.refresh()
    function = context.resolve_value_type(operator.getitem)
    with thrift():
        for _ in range(2):
            with pytest.raises(numba.core.errors.TypingError):
                function.get_call_type(context, (types.int64, types.int64), {})


def flags(**options: Any) -> Flags:
    made = Flags()
    for name, value in options.items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("one", ({}, {"nrt": True}, {"nrt": False}, {"nrt": True, "fastmath": True}))
@pytest.mark.parametrize("other", ({}, {"nrt": True}, {"release_gil": True}, {"nrt": False}))
def test_flags_are_equal_if_they_are_without(one: dict[str, Any], other: dict[str, Any]):
    plain, number = flags(**one) == flags(**other), hash(flags(**one))
    with thrift():
        assert (flags(**one) == flags(**other)) == plain and hash(flags(**one)) == number


def test_an_instruction_has_the_variables_that_it_has_without():
    place = ir.Loc("file.py", 1)
    scope = ir.Scope(None, place)
    x, y = ir.Var(scope, "x", place), ir.Var(scope, "y", place)
    for made in (
        ir.Assign(ir.Expr.binop(operator.add, x, y, place), x, place),
        ir.Assign(ir.Const(3, place), y, place),
        ir.Assign(ir.Expr.call(x, [y, y], (("name", x),), place), y, place),
        ir.SetItem(x, y, x, place),
    ):
        plain = made.list_vars()
        with thrift():
            assert made.list_vars() == plain and plain


def test_what_is_taken_from_inside_is_there():
    assert {owner.__dict__[name] for owner, name in thrift_module._PLACES} == set(thrift_module._PLAIN)
