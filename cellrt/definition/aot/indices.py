"""Checks of indices and divisors that operators make and their compiled code does not.

The compiler checks that an index is below the size, and takes one below zero from the end, as ``tensor[index]`` does.
Most operators with an index refuse those. The checks here are added to the program, or refuse it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Node
from torch.fx.node import map_arg

ATEN = torch.ops.aten
INDEX_AT: Mapping[Any, int] = {
    operator.default: 2
    for name in (
        "index_select",
        "index_add",
        "index_copy",
        "index_reduce",
        "index_add_",
        "index_copy_",
        "index_reduce_",
    )
    if (operator := getattr(ATEN, name))
}
"""The positions of operators' arguments that are indices and must not be below zero."""
UNCHECKED: Mapping[str, str] = {
    "scatter.value": "scatter of a tensor, torch.full_like(...) instead of a number, compiles",
    "scatter.reduce": "",
    "scatter.value_reduce": "",
    "scatter_reduce.two": 'index_reduce(0, owner, values, "amax") compiles, with one index for each row of values',
}
"""Operators whose compiled code skips indices outside of the tensor, each with an alternative that compiles, if any."""
DIVISIONS = frozenset(
    f"{name}.{overload}"
    for name in ("div", "divide", "floor_divide", "remainder", "fmod")
    for overload in ("Tensor_mode", "default", "Tensor", "Scalar_Tensor")
)
"""Operators that may divide by a tensor; of integers they give integers if they round."""
CLAMPS = frozenset((ATEN.clamp.default, ATEN.clamp_min.default))
OUTSIDE = 2**31 - 1
"""An index above every size that fits in an int32."""


def is_unchecked(operator: torch._ops.OpOverload) -> bool:
    """Return whether an operator's indices are not checked in compiled code."""
    return _name_of(operator) in UNCHECKED


def instead_of(operator: Any) -> str:
    """Return an alternative that compiles for an operator with unchecked indices; empty if none is known."""
    return UNCHECKED.get(_name_of(operator), "")


def may_divide_by_zero(node: Node) -> bool:
    """Return whether a node divides integers by a divisor that may be zero: compiled, that would end the process."""
    if _name_of(node.target) not in DIVISIONS or node.meta["val"].dtype.is_floating_point:
        return False
    divisor = node.args[1]
    if not isinstance(divisor, Node) or not isinstance(divisor.meta["val"], torch.Tensor):
        return False
    limits = (*divisor.args[1:], *divisor.kwargs.values())  # the least, and perhaps the most, which goes first
    return divisor.target not in CLAMPS or not all(isinstance(limit, int) and limit >= 1 for limit in limits)


def _name_of(operator: Any) -> str:
    """Return an operator's name without its namespace, equal for operators that work in place."""
    return str(operator).removeprefix("aten.").replace("_.", ".")


def check_indices(program: ExportedProgram) -> None:
    """Add the operators' own checks of indices to a step's program."""
    graph = program.graph
    users = [node for node in graph.nodes if node.target in INDEX_AT]
    for user in users:
        at = INDEX_AT[user.target]
        with graph.inserting_before(user):
            is_below = _call(program, ATEN.lt.Scalar, user.args[at], 0)
            user.update_arg(at, _call(program, ATEN.masked_fill.Scalar, user.args[at], is_below, OUTSIDE))
    if users:
        program.graph_module.recompile()


def _call(program: ExportedProgram, operator: Any, *arguments: Any) -> Node:
    node: Node = program.graph.call_function(operator, arguments)
    with arguments[0].meta["val"].fake_mode:
        node.meta["val"] = operator(*map_arg(arguments, lambda one: one.meta["val"]))
    return node
