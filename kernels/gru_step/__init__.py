"""One step of a GRU for many rows of an arena, in one launch: gather, products, gates and scatter.

For each row, with the equations and the layout of ``torch.nn.GRUCell`` (gates r, z, n; the reset gate acts behind the
hidden product):

    r  = sigmoid(W_ir x + b_ir + gates_r + W_hr h + b_hr),   z likewise
    n  = tanh(W_in x + b_in + gates_n + r (W_hn h + b_hn))
    h' = (1 - z) n + z h

``x`` and ``gates`` are both optional; ``gates`` is as in ``lstm_step``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows, all_on_host, check_rows
from cellrt.kernels.choose import uses_triton
from cellrt.kernels.gate_weights import (
    PackedWeights,
    Precision,
    check_precision,
    pack_gates,
    row_order,
    sum_of_biases,
    unpack,
)
from cellrt.kernels.gru_step import reference
from cellrt.kernels.tiles import Tile, choose_tile

SECTIONS = ((0, 1), (2,))


def pack_weights(
    weight_hh: Tensor,
    bias_hh: Tensor | None = None,
    weight_ih: Tensor | None = None,
    bias_ih: Tensor | None = None,
) -> PackedWeights:
    """Interleave, once, the weights of a ``torch.nn.GRUCell``: ``weight_hh`` ``[3 * hidden, hidden]``, ``weight_ih``
    ``[3 * hidden, input]`` (None if steps get ``gates`` instead, whose bias is then theirs) and the biases.

    The packed bias has four sections: the sums of r and z, n's over the input, n's over h. Raise ValueError for
    shapes or types that do not fit.
    """
    inputs = pack_gates(SECTIONS, weight_hh, weight_ih, sum_of_biases(weight_hh, bias_ih))
    hidden_bias = pack_gates(SECTIONS, weight_hh, None, sum_of_biases(weight_hh, bias_hh)).bias
    r_and_z = 2 * inputs.padded_units
    bias = [inputs.bias[:r_and_z] + hidden_bias[:r_and_z], inputs.bias[r_and_z:], hidden_bias[r_and_z:]]
    return replace(inputs, bias=torch.cat(bias))


def gru_step(
    weights: PackedWeights,
    *,
    h: ArenaRows,
    h_out: ArenaRows,
    x: ArenaRows | None = None,
    gates: ArenaRows | None = None,
    precision: Precision = "ieee",
    tile: Tile | None = None,
) -> None:
    """One step for ``len(h.rows)`` rows, written to ``h_out``.

    ``h`` and ``h_out`` are rows of ``hidden`` numbers, ``x`` of ``input`` numbers (given exactly if ``weights`` has
    ``weight_ih``), ``gates`` of ``3 * hidden`` numbers, gate after gate. Types, alignment, devices, spans, negative
    rows, ``precision`` and ``tile`` are as in ``lstm_step``.

    **No row written may be a row read by the same call**: programs write h while others still read it. The
    scheduler gives a task no output row that it reads.

    Raise ValueError for shapes, types or devices that do not fit.
    """
    _check(weights, h, h_out, x, gates)
    check_precision(precision)
    if h.most_rows == 0:
        return
    if not uses_triton(weights.weight_hh):
        weight_hh, weight_ih = weights.plain_weights()
        bias_ih = weights.plain_bias()
        bias_n = unpack(weights.bias[3 * weights.padded_units :], row_order(weights.hidden_size, ((0,),)))
        bias_hh = torch.cat([torch.zeros_like(bias_ih[len(bias_n) :]), bias_n])
        rows: Any = all_on_host(h_out, h=h, h_out=h_out, x=x, gates=gates)
        reference.gru_step(weight_hh, bias_hh, bias_ih, weight_ih=weight_ih, **rows)
        return
    from cellrt.kernels.gru_step import triton

    tile = tile or choose_tile("gru_step", weights, h.most_rows, precision)
    triton.gru_step(weights, h=h, h_out=h_out, x=x, gates=gates, precision=precision, tile=tile)


def _check(
    weights: PackedWeights, h: ArenaRows, h_out: ArenaRows, x: ArenaRows | None, gates: ArenaRows | None
) -> None:
    if weights.sections != SECTIONS:
        raise ValueError("the weights are not those of a GRU")
    if (x is None) != (weights.weight_ih is None):
        raise ValueError("x is needed exactly if the weights were packed with weight_ih")
    hidden, like = weights.hidden_size, weights.weight_hh
    check_rows("h", h, h, hidden, like)
    check_rows("h_out", h_out, h, hidden, like)
    check_rows("x", x, h, weights.input_size, like)
    check_rows("gates", gates, h, 3 * hidden, like)
