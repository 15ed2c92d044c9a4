"""What an LSTM and a GRU do to the sums of their gates: the pointwise half of the fused CPU kernels.

One call works on `LANES` units of one row, as whole vector registers. It is written as LLVM vector
instructions, because the vectoriser of the compiler gives up on the limits inside `tanh`. The readable form
of each function is the plain-torch one in `lstm.py` and `gru.py`, which the tests compare with this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cellrt.cells._gemm import FLOAT_BYTES, LANES

_SINGLE = ir.FloatType()
_VECTOR = ir.VectorType(_SINGLE, LANES)

# tanh(x) = x P(x^2) / Q(x^2) for |x| <= 8.5, fitted to the least maximum error (3e-9 before rounding).
# Beyond, it is 1.
_LIMIT = 8.5
_P = (1.0, 0.131024197, 0.00312466058, 1.13757824e-05, -2.11610178e-08, 5.7539782e-11, -9.79158093e-14)
_Q = (1.0, 0.464357466, 0.0245772265, 0.000257656502)


class VectorBuilder:
    """Writes float32 vector arithmetic into the function that `builder` is building."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder
        signature = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        self._fma = cgutils.get_or_insert_function(builder.module, signature, f"llvm.fmuladd.v{LANES}f32")

    def constant(self, value: float) -> Any:
        """`value` in every lane."""
        return ir.Constant(_VECTOR, [ir.Constant(_SINGLE, value)] * LANES)

    def pointer(self, address: Any, group: int) -> Any:
        """Where vector number `group` behind `address` lies."""
        base = self.builder.inttoptr(address, _SINGLE.as_pointer())
        place = self.builder.gep(base, [ir.IntType(64)(group * LANES)])
        return self.builder.bitcast(place, _VECTOR.as_pointer())

    def load(self, address: Any, group: int = 0) -> Any:
        return self.builder.load(self.pointer(address, group), align=FLOAT_BYTES)

    def store(self, value: Any, address: Any, group: int = 0) -> None:
        self.builder.store(value, self.pointer(address, group), align=FLOAT_BYTES)

    def multiply(self, left: Any, right: Any) -> Any:
        return self.builder.fmul(left, right)

    def subtract(self, left: Any, right: Any) -> Any:
        return self.builder.fsub(left, right)

    def multiply_add(self, left: Any, right: Any, plus: Any) -> Any:
        return self.builder.call(self._fma, [left, right, plus])

    def polynomial(self, coefficients: Sequence[float], x: Any) -> Any:
        """The polynomial with these coefficients, lowest power first (Horner)."""
        total = self.constant(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            total = self.multiply_add(total, x, self.constant(coefficient))
        return total

    def tanh(self, x: Any) -> Any:
        """Hyperbolic tangent, off by at most 4e-7; NaN stays NaN."""
        high, low = self.constant(_LIMIT), self.constant(-_LIMIT)
        x = self.builder.select(self.builder.fcmp_ordered(">", x, high), high, x)
        x = self.builder.select(self.builder.fcmp_ordered("<", x, low), low, x)
        square = self.multiply(x, x)
        return self.builder.fdiv(self.multiply(x, self.polynomial(_P, square)), self.polynomial(_Q, square))

    def sigmoid(self, x: Any) -> Any:
        """Logistic function, off by at most 3e-7; NaN stays NaN."""
        half = self.constant(0.5)
        return self.multiply_add(self.tanh(self.multiply(x, half)), half, half)


@intrinsic
def lstm_units(typing_context: Any, sums: Any, c: Any, h_out: Any, c_out: Any) -> Any:
    """From the sums of the gates i, f, g, o `[4, LANES]` and the state `c` `[LANES]`, write the next `h` and
    `c`."""

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
    """From the sums r, z (complete) and n (hidden half) `[3, LANES]`, the input half `given` of n and the
    state `h` `[LANES]`, write the next `h`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        sums, given, h, h_out = arguments
        lanes = VectorBuilder(builder)
        reset, update = lanes.sigmoid(lanes.load(sums, 0)), lanes.sigmoid(lanes.load(sums, 1))
        candidate = lanes.tanh(lanes.multiply_add(reset, lanes.load(sums, 2), lanes.load(given)))
        change = lanes.subtract(lanes.load(h), candidate)
        lanes.store(lanes.multiply_add(update, change, candidate), h_out)
        return context.get_dummy_value()

    return types.void(*[types.intp] * 4), generate
