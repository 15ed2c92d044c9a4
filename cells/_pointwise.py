"""The pointwise half of the fused CPU kernels of LSTM and GRU: what follows the sums of their gates.

One call works on ``LANES`` units of one row, as whole vector registers (``vectors.py``). The readable form of each
function is the plain-torch one in ``lstm.py`` and ``gru.py``. The tests compare both.
"""

from __future__ import annotations

from typing import Any

from numba import types
from numba.extending import intrinsic

from cellrt.products.vectors import VectorBuilder


@intrinsic
def add_units(typing_context: Any, left: Any, right: Any, out: Any) -> Any:
    """Write the sum of two vectors."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = VectorBuilder(builder)
        left, right = (lanes.load(address) for address in arguments[:2])
        lanes.store(builder.fadd(left, right), arguments[2])
        return context.get_dummy_value()

    return types.void(*[types.intp] * 3), generate


@intrinsic
def lstm_units(typing_context: Any, sums: Any, c: Any, h_out: Any, c_out: Any) -> Any:
    """Write the next ``h`` and ``c`` from the sums of the gates i, f, g, o ``[4, LANES]`` and the state ``c``
    ``[LANES]``.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, c, h_out, c_out = arguments
        lanes = VectorBuilder(builder)
        added = lanes.multiply(lanes.sigmoid(lanes.load(sums, 0)), lanes.tanh(lanes.load(sums, 2)))
        state = lanes.multiply_add(lanes.sigmoid(lanes.load(sums, 1)), lanes.load(c), added)
        lanes.store(state, c_out)
        lanes.store(lanes.multiply(lanes.sigmoid(lanes.load(sums, 3)), lanes.tanh(state)), h_out)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate


@intrinsic
def gru_units(typing_context: Any, sums: Any, given: Any, h: Any, h_out: Any) -> Any:
    """Write the next ``h`` from the sums r, z (complete) and n (hidden half) ``[3, LANES]``.

    Also given are the input half ``given`` of n and the state ``h`` ``[LANES]``.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, given, h, h_out = arguments
        lanes = VectorBuilder(builder)
        reset, update = lanes.sigmoid(lanes.load(sums, 0)), lanes.sigmoid(lanes.load(sums, 1))
        candidate = lanes.tanh(lanes.multiply_add(reset, lanes.load(sums, 2), lanes.load(given)))
        change = lanes.subtract(lanes.load(h), candidate)
        lanes.store(lanes.multiply_add(update, change, candidate), h_out)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate
