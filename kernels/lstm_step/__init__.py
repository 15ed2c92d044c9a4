"""One step of an LSTM for many rows of arenas, in one launch: gather, products, gates and scatter.

For each row, with the equations and the layout of ``torch.nn.LSTMCell`` (gates i, f, g, o):

    i, f, g, o = W_ih x + gates + W_hh h + b,   c' = sigmoid(f) c + sigmoid(i) tanh(g),   h' = sigmoid(o) tanh(c')

``x`` and ``gates`` are both optional. ``gates`` is the input half where it was computed before: a row of it, or the row
of a folded embedding table that a token names. This is the cell of BatchMaker's section 2.5 with the copies around it
taken in: neither a gathered batch nor the sums are ever in memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from cellrt.kernels.arena_rows import ArenaRows, all_on_host, check_rows
from cellrt.kernels.choose import uses_triton
from cellrt.kernels.gate_weights import PackedWeights, Precision, check_precision, pack_gates, sum_of_biases
from cellrt.kernels.lstm_step import reference
from cellrt.kernels.tiles import Tile, choose_tile

SECTIONS = ((0, 1, 2, 3),)


def pack_weights(
    weight_hh: Tensor,
    bias_hh: Tensor | None = None,
    weight_ih: Tensor | None = None,
    bias_ih: Tensor | None = None,
) -> PackedWeights:
    """Interleave, once, the weights of a ``torch.nn.LSTMCell``: ``weight_hh`` ``[4 * hidden, hidden]``, ``weight_ih``
    ``[4 * hidden, input]`` (None if steps get ``gates`` instead, whose bias is then theirs) and the biases.

    Raise ValueError for shapes or types that do not fit.
    """
    return pack_gates(SECTIONS, weight_hh, weight_ih, sum_of_biases(weight_hh, bias_hh, bias_ih))


def lstm_step(
    weights: PackedWeights,
    *,
    h: ArenaRows,
    c: ArenaRows,
    h_out: ArenaRows,
    c_out: ArenaRows,
    x: ArenaRows | None = None,
    gates: ArenaRows | None = None,
    precision: Precision = "ieee",
    tile: Tile | None = None,
) -> None:
    """One step for ``len(h.rows)`` rows, written to ``h_out`` and ``c_out``.

    With spans, ``h`` and ``c`` have one, all others another: it says how many rows there are, and where they begin.

    ``h``, ``c``, ``h_out``, ``c_out`` are rows of ``hidden`` numbers, ``x`` of ``input`` numbers (given exactly if
    ``weights`` has ``weight_ih``), ``gates`` of ``4 * hidden`` numbers, gate after gate; all have the type and device
    of the weights: float32, bfloat16 or float16. Sums are float32, c is kept in the arena's type. ``precision`` is how
    float32 is multiplied. Rows that start at multiples of 16 bytes are fastest.

    **No row written may be a row read by the same call**: programs write h while others still read it. The
    scheduler gives a task no output row that it reads. Rows of h_out and c_out that are negative are not written.

    On CUDA the kernel is launched on the current stream and nothing waits; elsewhere the reference runs. ``tile``
    takes the place of the tuner's choice. Raise ValueError for shapes, types or devices that do not fit.
    """
    _check(weights, h, c, h_out, c_out, x, gates)
    check_precision(precision)
    if h.most_rows == 0:
        return
    if not uses_triton(weights.weight_hh):
        weight_hh, weight_ih = weights.plain_weights()
        rows: Any = all_on_host(h_out, h=h, c=c, h_out=h_out, c_out=c_out, x=x, gates=gates)
        reference.lstm_step(weight_hh, weights.plain_bias(), weight_ih=weight_ih, **rows)
        return
    from cellrt.kernels.lstm_step import triton

    tile = tile or choose_tile("lstm_step", weights, h.most_rows, precision)
    triton.lstm_step(weights, h=h, c=c, h_out=h_out, c_out=c_out, x=x, gates=gates, precision=precision, tile=tile)


def _check(
    weights: PackedWeights,
    h: ArenaRows,
    c: ArenaRows,
    h_out: ArenaRows,
    c_out: ArenaRows,
    x: ArenaRows | None,
    gates: ArenaRows | None,
) -> None:
    if weights.sections != SECTIONS:
        raise ValueError("the weights are not those of an LSTM")
    if (x is None) != (weights.weight_ih is None):
        raise ValueError("x is needed exactly if the weights were packed with weight_ih")
    hidden, like = weights.hidden_size, weights.weight_hh
    for name, arena in {"h": h, "c": c, "h_out": h_out, "c_out": c_out}.items():
        check_rows(name, arena, h, hidden, like)
    check_rows("x", x, h, weights.input_size, like)
    check_rows("gates", gates, h, 4 * hidden, like)
