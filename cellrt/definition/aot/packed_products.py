"""Rewriting of products with a weight into calls of the packed product.

A library's product lays its weight out anew at each call, which for the few rows of a task costs more than the product
itself. Here the weight is packed once, when a library is loaded (``products/packed.py``), and the program takes the
packed weight instead. The bits of a row then do not depend on the other rows of the batch either.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from cellrt.definition.aot.product_operator import PRODUCT, PRODUCT_ADD
from cellrt.products.packed import pack_linear

ATEN = torch.ops.aten
LINEAR, MATMUL, MM, GRU, LSTM = (
    ATEN.linear.default,
    ATEN.matmul.default,
    ATEN.mm.default,
    ATEN.gru_cell.default,
    ATEN.lstm_cell.default,
)
WEIGHTS_AT: Mapping[Any, tuple[int, ...]] = {LINEAR: (1,), MATMUL: (1,), MM: (1,), GRU: (2, 3), LSTM: (2, 3)}
"""The positions of operators' arguments that are weights."""
BIASES_AT: Mapping[Any, tuple[int, ...]] = {LINEAR: (2,), GRU: (4, 5), LSTM: (4, 5)}
"""The positions of their biases, one for each weight."""
TRANSPOSED = (MATMUL, MM)
"""The operators whose weight is ``[depth, columns]``."""


def packed_values(weight: Tensor, is_transposed: bool) -> Tensor:
    """Return the memory that a program takes in place of a weight ``[columns, depth]``, or of a transposed one."""
    return pack_linear(weight.T if is_transposed else weight).values


def tied_weights(program: ExportedProgram, num_weights: int) -> list[int]:
    """Return the numbers of weights that products and other operators take, such as an embedding that is also the head.

    A program that takes these once more, after the others, can take them packed there.
    """
    return [
        number
        for node, number in _numbers(program, num_weights).items()
        if len({_use_of(node, user) for user in node.users} - {None}) == 1 and _is_used_otherwise(node)
    ]


def pack_products(program: ExportedProgram, num_weights: int, tied: Sequence[int] = ()) -> dict[int, bool]:
    """Rewrite a step's program; return the weights that it takes packed, by number, and whether they are transposed.

    Args:
        program: the program, whose first inputs are the weights.
        num_weights: the number of weights, with the repeated ones.
        tied: the numbers of the weights that the last inputs repeat.
    """
    graph, numbers = program.graph, _numbers(program, num_weights)
    nodes = {number: node for node, number in numbers.items()}
    for place, number in enumerate(tied, num_weights - len(tied)):
        for user in [user for user in nodes[number].users if _use_of(nodes[number], user) is not None]:
            user.replace_input_with(nodes[number], nodes[place])
    packed: dict[Node, bool] = {}
    for node in numbers:
        uses = [_use_of(node, user) for user in node.users]
        if uses and all(use is not None and use == uses[0] for use in uses):
            packed[node] = bool(uses[0])
    # An operator of several weights takes all of them packed, or none.
    while partly := [
        weight
        for weight in packed
        for user in weight.users
        if any(user.args[at] not in packed for at in WEIGHTS_AT[user.target])
    ]:
        for weight in partly:
            packed.pop(weight, None)
    for user in {user: None for weight in packed for user in weight.users}:
        with graph.inserting_before(user):
            _REWRITES[user.target](_Writer(graph, user), user)
    if packed:
        graph.eliminate_dead_code()
        program.graph_module.recompile()
    return {numbers[node]: is_transposed for node, is_transposed in packed.items()}


def _numbers(program: ExportedProgram, num_weights: int) -> dict[Node, int]:
    """Return the weights of a program with their numbers."""
    names = program.graph_signature.user_inputs[:num_weights]
    nodes = program.graph.nodes
    return {node: names.index(node.name) for node in nodes if node.op == "placeholder" and node.name in names}


def _is_used_otherwise(weight: Node) -> bool:
    return any(_use_of(weight, user) is None for user in weight.users)


def _use_of(weight: Node, user: Node) -> bool | None:
    """Return whether a user takes a product with the transposed weight; None for any other use."""
    value, places = weight.meta["val"], WEIGHTS_AT.get(user.target, ())
    if value.dim() != 2 or value.dtype != torch.float32 or not all(value.shape) or user.kwargs:
        return None
    given = [at for at, argument in enumerate(user.args) if argument is weight]
    if len(given) != 1 or given[0] not in places or _others_than_weights_are_wrong(user):
        return None
    return user.target in TRANSPOSED


def _others_than_weights_are_wrong(user: Node) -> bool:
    """Return whether an argument is not float32, has too few dimensions, or is a bias without a
    number for each column.
    """
    first = user.args[0]
    if any(node.meta["val"].dtype != torch.float32 for node in user.all_input_nodes) or not isinstance(first, Node):
        return True
    for weight, at in zip(WEIGHTS_AT[user.target], BIASES_AT.get(user.target, ())):
        bias, columns = _optional(user.args, at), user.args[weight].meta["val"].shape[0]  # type: ignore[union-attr]
        if bias is not None and (bias.meta["val"].shape != (columns,) or bias.meta["val"].stride() != (1,)):
            return True
    return first.meta["val"].dim() < 2 or (user.target in (GRU, LSTM) and first.meta["val"].dim() != 2)


class _Writer:
    """A writer of operators before a node, with their values for tracing."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self._graph, self._mode = graph, before.args[0].meta["val"].fake_mode  # type: ignore[union-attr]

    def call(self, operator: Any, *arguments: Any) -> Node:
        """Write one operator; return its node."""
        node = self._graph.call_function(operator, arguments)
        with self._mode:
            node.meta["val"] = operator(*map_arg(arguments, lambda one: one.meta["val"]))
        return node

    def product(self, x: Any, weight: Node, bias: Any, is_transposed: bool = False) -> Node:
        """Write ``x @ weight.T + bias``; return its node."""
        columns = int(weight.meta["val"].shape[1 if is_transposed else 0])
        if bias is None:
            return self.call(PRODUCT, x, weight, columns)
        return self.call(PRODUCT_ADD, x, weight, bias, columns)

    def parts(self, value: Node, count: int) -> list[Node]:
        """Write slices of the columns in equal parts; return their nodes."""
        size = int(value.meta["val"].shape[1]) // count
        return [self.call(ATEN.slice.Tensor, value, 1, k * size, (k + 1) * size) for k in range(count)]


def _optional(arguments: Sequence[Any], at: int) -> Any:
    return arguments[at] if len(arguments) > at else None


def _write_linear(writer: _Writer, user: Node) -> None:
    arguments: Sequence[Any] = user.args
    x, weight, bias = arguments[0], arguments[1], _optional(arguments, 2)
    user.replace_all_uses_with(writer.product(x, weight, bias, user.target in TRANSPOSED))


def _write_gru(writer: _Writer, user: Node) -> None:
    """Write the operators of ``torch.nn.GRUCell``."""
    arguments: Sequence[Any] = user.args
    (x, h, of_x, of_h), call = arguments[:4], writer.call
    reset, update, new = writer.parts(writer.product(x, of_x, _optional(arguments, 4)), 3)
    of_reset, of_update, of_new = writer.parts(writer.product(h, of_h, _optional(arguments, 5)), 3)
    reset = call(ATEN.sigmoid.default, call(ATEN.add.Tensor, reset, of_reset))
    update = call(ATEN.sigmoid.default, call(ATEN.add.Tensor, update, of_update))
    new = call(ATEN.tanh.default, call(ATEN.add.Tensor, new, call(ATEN.mul.Tensor, reset, of_new)))
    kept = call(ATEN.mul.Tensor, call(ATEN.sub.Tensor, h, new), update)
    user.replace_all_uses_with(call(ATEN.add.Tensor, new, kept))


def _write_lstm(writer: _Writer, user: Node) -> None:
    """Write the operators of ``torch.nn.LSTMCell``."""
    arguments: Sequence[Any] = user.args
    (x, (h, c), of_x, of_h), call = arguments[:4], writer.call
    gates = call(
        ATEN.add.Tensor,
        writer.product(x, of_x, _optional(arguments, 4)),
        writer.product(h, of_h, _optional(arguments, 5)),
    )
    parts = writer.parts(gates, 4)
    entry, forget, output = (call(ATEN.sigmoid.default, parts[k]) for k in (0, 1, 3))
    made = call(ATEN.mul.Tensor, entry, call(ATEN.tanh.default, parts[2]))
    c = call(ATEN.add.Tensor, call(ATEN.mul.Tensor, forget, c), made)
    h = call(ATEN.mul.Tensor, output, call(ATEN.tanh.default, c))
    for item in list(user.users):
        item.replace_all_uses_with((h, c)[item.args[1]])  # type: ignore[index]


_REWRITES: Mapping[Any, Callable[[_Writer, Node], None]] = {
    LINEAR: _write_linear,
    MATMUL: _write_linear,
    MM: _write_linear,
    GRU: _write_gru,
    LSTM: _write_lstm,
}
