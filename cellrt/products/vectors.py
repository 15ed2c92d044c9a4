"""Float32 vector arithmetic, written into a function that Numba compiles, in the width of this machine's registers.

It is written as LLVM vector instructions, because the compiler's vectoriser gives up on limits and reductions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.core.registry import cpu_target

FLOAT32, BFLOAT16, FLOAT16 = 0, 1, 2
"""The kinds of numbers in memory; in registers all are float32."""
SIZES = (4, 2, 2)
"""The bytes of a number of each kind."""

LINE_BYTES = 64
"""The bytes of a cache line."""

_SINGLE, _INT = ir.FloatType(), ir.IntType(32)

# tanh(x) = x P(x^2) / Q(x^2) for |x| <= 8.5, fitted to the least maximum error (3e-9 before rounding).
# Beyond, it is 1.
_LIMIT = 8.5
_P = (1.0, 0.131024197, 0.00312466058, 1.13757824e-05, -2.11610178e-08, 5.7539782e-11, -9.79158093e-14)
_Q = (1.0, 0.464357466, 0.0245772265, 0.000257656502)

# 2^x for |x| <= 1/2, fitted at Chebyshev's points (3e-9 before rounding).
_POWERS = (1.0, 0.693147207, 0.240226509, 0.0555032723, 0.00961805668, 0.00134004282, 0.000154614447)
_LEAST_POWER = -126.0
_TO_INTEGER = 12582912.0  # 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits


def _processor() -> tuple[bool, set[str]]:
    """Return whether Numba compiles for an ARM processor, and that processor's features, by LLVM's names."""
    triple, _, features = cpu_target.target_context.codegen().magic_tuple()
    names = {name.removeprefix("+") for name in features.split(",") if name.startswith("+")}
    return triple.startswith(("aarch64", "arm64")), names


def registers_of(is_arm: bool, features: set[str]) -> tuple[int, int]:
    """Return the float32 lanes of a vector register of such a processor, and the number of its registers."""
    if "avx512f" in features:
        return 16, 32
    if "avx" in features:
        return 8, 16
    return 4, 32 if is_arm else 16


_IS_ARM, _FEATURES = _processor()
LANES, REGISTERS = registers_of(_IS_ARM, _FEATURES)
"""The vector width of this machine: all compiled cells work in it, and their weights are packed for it.

The processor is the one that Numba compiles for (``NUMBA_CPU_NAME`` and ``NUMBA_CPU_FEATURES`` name another one), as
Numba's disk cache knows it: code that was compiled for another width is never found there.
"""
_CONVERTS_FLOAT16 = _IS_ARM or bool({"f16c", "avx512f"} & _FEATURES)
"""True if the processor converts float16; else LLVM would call a function that compiled code does not find."""


def fetch_line(builder: Any, address: Any, nearness: int) -> None:
    """Prefetch the cache line at an address, which need not be readable.

    ``nearness`` 3 brings it to the first level of the caches, 2 to the second.
    """
    byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
    prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0")
    builder.call(prefetch, [builder.inttoptr(address, byte), flag(0), flag(nearness), flag(1)])


class VectorBuilder:
    """A writer of float32 vector arithmetic, ``lanes`` numbers at a time, into the function that ``builder`` builds."""

    def __init__(self, builder: Any, lanes: int = LANES) -> None:
        self.builder, self.lanes = builder, lanes
        self.type = ir.VectorType(_SINGLE, lanes)
        self.integers = ir.VectorType(_INT, lanes)
        signature = ir.FunctionType(self.type, [self.type] * 3)
        self._fma = cgutils.get_or_insert_function(builder.module, signature, f"llvm.fmuladd.v{lanes}f32")

    def constant(self, value: float) -> Any:
        """Return ``value`` in every lane."""
        return ir.Constant(self.type, [ir.Constant(_SINGLE, value)] * self.lanes)

    def integer(self, value: int) -> Any:
        """Return ``value`` in every lane, as int32."""
        return ir.Constant(self.integers, [ir.Constant(_INT, value)] * self.lanes)

    def spread(self, value: Any) -> Any:
        """Return a single number, or integer, in every lane."""
        vector = ir.VectorType(value.type, self.lanes)
        undefined = ir.Constant(vector, ir.Undefined)
        first = self.builder.insert_element(undefined, value, _INT(0))
        return self.builder.shuffle_vector(first, undefined, ir.Constant(self.integers, None))

    def place(self, address: Any, index: Any, kind: int = FLOAT32) -> Any:
        """Return a pointer to a vector in memory: number ``index`` after ``address``, and the numbers after it."""
        element = (_SINGLE, ir.IntType(16), ir.HalfType())[kind]
        base = self.builder.inttoptr(address, element.as_pointer())
        at = self.builder.gep(base, [index])
        return self.builder.bitcast(at, ir.VectorType(element, self.lanes).as_pointer())

    def read(self, address: Any, index: Any, kind: int = FLOAT32) -> Any:
        """Read the numbers from number ``index`` after ``address`` on."""
        found = self.builder.load(self.place(address, index, kind), align=SIZES[kind])
        if kind == BFLOAT16:
            shifted = self.builder.shl(self.builder.zext(found, self.integers), self.integer(16))
            return self.builder.bitcast(shifted, self.type)
        return self._from_float16(found) if kind == FLOAT16 else found

    def write(self, value: Any, address: Any, index: Any, kind: int = FLOAT32) -> None:
        """Write the numbers from number ``index`` after ``address`` on, rounded to the nearest."""
        place = self.place(address, index, kind)
        if kind == BFLOAT16:
            value = self._to_bfloat16(value)
        elif kind == FLOAT16:
            value = self._to_float16(value)
        self.builder.store(value, place, align=SIZES[kind])

    def _to_bfloat16(self, value: Any) -> Any:
        builder = self.builder
        bits = builder.bitcast(value, self.integers)
        odd = builder.and_(builder.lshr(bits, self.integer(16)), self.integer(1))
        rounded = builder.add(bits, builder.add(odd, self.integer(0x7FFF)))
        # Rounding might carry a NaN over to zero.
        kept = builder.select(builder.fcmp_unordered("uno", value, value), self.integer(0x7FC00000), rounded)
        return builder.trunc(builder.lshr(kept, self.integer(16)), ir.VectorType(ir.IntType(16), self.lanes))

    def _from_float16(self, value: Any) -> Any:
        builder = self.builder
        if _CONVERTS_FLOAT16:
            return builder.fpext(value, self.type)
        bits = builder.zext(builder.bitcast(value, ir.VectorType(ir.IntType(16), self.lanes)), self.integers)
        sign = builder.shl(builder.and_(bits, self.integer(0x8000)), self.integer(16))
        size = builder.and_(bits, self.integer(0x7FFF))
        moved = builder.shl(size, self.integer(13))
        # The exponent grows by 127 - 15; multiplying does that for numbers below the least exponent too.
        finite = builder.bitcast(
            builder.fmul(builder.bitcast(moved, self.type), self.constant(2.0**112)), self.integers
        )
        is_finite = builder.icmp_unsigned("<", size, self.integer(0x7C00))
        bits = builder.select(is_finite, finite, builder.or_(moved, self.integer(0x7F800000)))
        return builder.bitcast(builder.or_(bits, sign), self.type)

    def _to_float16(self, value: Any) -> Any:
        builder, half = self.builder, ir.VectorType(ir.HalfType(), self.lanes)
        if _CONVERTS_FLOAT16:
            return builder.fptrunc(value, half)
        bits = builder.bitcast(value, self.integers)
        size = builder.and_(bits, self.integer(0x7FFFFFFF))
        sign = builder.lshr(builder.xor(bits, size), self.integer(16))
        odd = builder.and_(builder.lshr(size, self.integer(13)), self.integer(1))
        rounded = builder.add(size, builder.add(odd, self.integer(0xFFF - ((127 - 15) << 23))))
        normal = builder.lshr(rounded, self.integer(13))
        # Beside 1/2 the last bit is worth 2^-24, as it is below the least exponent.
        small = builder.fadd(builder.bitcast(size, self.type), self.constant(0.5))
        small = builder.sub(builder.bitcast(small, self.integers), self.integer(0x3F000000))
        is_small = builder.icmp_unsigned("<", size, self.integer((127 - 14) << 23))
        result = builder.select(is_small, small, normal)
        is_large = builder.icmp_unsigned(">=", size, self.integer(0x477FF000))  # 65520, which is rounded to infinity
        result = builder.select(is_large, self.integer(0x7C00), result)
        is_number = builder.icmp_unsigned("<=", size, self.integer(0x7F800000))
        result = builder.or_(builder.select(is_number, result, self.integer(0x7E00)), sign)
        return builder.bitcast(builder.trunc(result, ir.VectorType(ir.IntType(16), self.lanes)), half)

    def load(self, address: Any, group: int = 0) -> Any:
        """Load vector number ``group`` after ``address``."""
        return self.read(address, ir.IntType(64)(group * self.lanes))

    def store(self, value: Any, address: Any, group: int = 0) -> None:
        """Store vector number ``group`` after ``address``."""
        self.write(value, address, ir.IntType(64)(group * self.lanes))

    def multiply(self, left: Any, right: Any) -> Any:
        """Return the product in each lane."""
        return self.builder.fmul(left, right)

    def subtract(self, left: Any, right: Any) -> Any:
        """Return ``left - right``."""
        return self.builder.fsub(left, right)

    def multiply_add(self, left: Any, right: Any, plus: Any) -> Any:
        """Return ``left * right + plus``, rounded once."""
        return self.builder.call(self._fma, [left, right, plus])

    def larger(self, left: Any, right: Any) -> Any:
        """Return the larger of the two in each lane; ``right`` where one is not a number."""
        return self.builder.select(self.builder.fcmp_ordered(">", left, right), left, right)

    def largest(self, x: Any) -> Any:
        """Return the largest lane, in every lane."""
        step = self.lanes // 2
        while step:
            order = [ir.Constant(_INT, lane ^ step) for lane in range(self.lanes)]
            x = self.larger(self.builder.shuffle_vector(x, x, ir.Constant(self.integers, order)), x)
            step //= 2
        return x

    def first(self, x: Any) -> Any:
        """Return the number in lane 0."""
        return self.builder.extract_element(x, _INT(0))

    def polynomial(self, coefficients: Sequence[float], x: Any) -> Any:
        """Return the value of the polynomial with these coefficients, lowest power first (Horner)."""
        total = self.constant(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            total = self.multiply_add(total, x, self.constant(coefficient))
        return total

    def power_of_two(self, x: Any) -> Any:
        """Return 2^x for x <= 0, with a relative error of at most 2e-7; 0 below 2^-126. NaN stays NaN."""
        moved = self.builder.fadd(x, self.constant(_TO_INTEGER))
        whole = self.subtract(moved, self.constant(_TO_INTEGER))
        part = self.polynomial(_POWERS, self.subtract(x, whole))
        exponent = self.builder.add(self.builder.bitcast(moved, self.integers), self.integer(127))
        factor = self.builder.bitcast(self.builder.shl(exponent, self.integer(23)), self.type)
        is_small = self.builder.fcmp_ordered("<", x, self.constant(_LEAST_POWER))
        return self.builder.select(is_small, self.constant(0.0), self.multiply(part, factor))

    def tanh(self, x: Any) -> Any:
        """Return the hyperbolic tangent, with an error of at most 4e-7; NaN stays NaN."""
        high, low = self.constant(_LIMIT), self.constant(-_LIMIT)
        x = self.builder.select(self.builder.fcmp_ordered(">", x, high), high, x)
        x = self.builder.select(self.builder.fcmp_ordered("<", x, low), low, x)
        square = self.multiply(x, x)
        return self.builder.fdiv(self.multiply(x, self.polynomial(_P, square)), self.polynomial(_Q, square))

    def sigmoid(self, x: Any) -> Any:
        """Return the logistic function, with an error of at most 3e-7; NaN stays NaN."""
        half = self.constant(0.5)
        return self.multiply_add(self.tanh(self.multiply(x, half)), half, half)
