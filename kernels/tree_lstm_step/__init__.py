"""One step of a binary TreeLSTM (Tai, Socher and Manning 2015, section 3.2, with two children) for many rows of
arenas, in one launch: gather, products, gates and scatter.

For each node, with W over the input (optional), U over h_left and h_right one after the other, and one bias:

    i, f_left, f_right, o, g = W x + U [h_left, h_right] + b
    c = sigmoid(f_left) c_left + sigmoid(f_right) c_right + sigmoid(i) tanh(g)
    h = sigmoid(o) tanh(c)

A child that is missing is a row of zeros. The paper has one W for both forget gates: give it twice.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows, all_on_host, check_rows
from cellrt.kernels.choose import uses_triton
from cellrt.kernels.gate_weights import PackedWeights, Precision, check_precision, pack_gates, sum_of_biases
from cellrt.kernels.tiles import Tile, choose_tile
from cellrt.kernels.tree_lstm_step import reference

SECTIONS = ((0, 1, 2, 3), (4,))


def pack_weights(weight_hh: Tensor, bias: Tensor | None = None, weight_ih: Tensor | None = None) -> PackedWeights:
    """Interleave, once, ``weight_hh`` ``[5 * hidden, 2 * hidden]`` (the columns of h_left before those of h_right),
    ``bias`` ``[5 * hidden]`` and ``weight_ih`` ``[5 * hidden, input]``; gates are i, f_left, f_right, o, g.

    Raise ValueError for shapes or types that do not fit.
    """
    return pack_gates(SECTIONS, weight_hh, weight_ih, sum_of_biases(weight_hh, bias), states=2)


def tree_lstm_step(
    weights: PackedWeights,
    *,
    h_left: ArenaRows,
    h_right: ArenaRows,
    c_left: ArenaRows,
    c_right: ArenaRows,
    h_out: ArenaRows,
    c_out: ArenaRows,
    x: ArenaRows | None = None,
    precision: Precision = "ieee",
    tile: Tile | None = None,
) -> None:
    """One step for ``len(h_left.rows)`` nodes, written to ``h_out`` and ``c_out``.

    States are rows of ``hidden`` numbers, ``x`` rows of ``input`` numbers (given exactly if ``weights`` has
    ``weight_ih``). Types, alignment, devices, spans, negative rows, ``precision`` and ``tile`` are as in ``lstm_step``.

    **No row written may be a row read by the same call**: programs write h while others still read it. The
    scheduler gives a task no output row that it reads.

    Raise ValueError for shapes, types or devices that do not fit.
    """
    states = {"h_left": h_left, "h_right": h_right, "c_left": c_left, "c_right": c_right}
    outputs = {"h_out": h_out, "c_out": c_out}
    _check(weights, states | outputs, x)
    check_precision(precision)
    num_rows = h_left.most_rows
    if num_rows == 0:
        return
    if not uses_triton(weights.weight_hh):
        weight_hh, weight_ih = weights.plain_weights()
        rows: Any = all_on_host(h_out, x=x, **states, **outputs)
        reference.tree_lstm_step(weight_hh, weights.plain_bias(), weight_ih=weight_ih, **rows)
        return
    from cellrt.kernels.tree_lstm_step import triton

    tile = tile or choose_tile("tree_lstm_step", weights, num_rows, precision)
    triton.tree_lstm_step(weights, x=x, precision=precision, tile=tile, **states, **outputs)


def _check(weights: PackedWeights, arenas: dict[str, ArenaRows], x: ArenaRows | None) -> None:
    if weights.sections != SECTIONS:
        raise ValueError("the weights are not those of a binary TreeLSTM")
    if (x is None) != (weights.weight_ih is None):
        raise ValueError("x is needed exactly if the weights were packed with weight_ih")
    first, weight = arenas["h_left"], weights.weight_hh
    for name, arena in arenas.items():
        check_rows(name, arena, first, weights.hidden_size, weight)
    check_rows("x", x, first, weights.input_size, weight)
