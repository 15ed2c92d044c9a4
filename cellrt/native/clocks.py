"""The time in compiled code: as ``time.perf_counter_ns`` and ``time.thread_time_ns`` give it."""

from __future__ import annotations

import sys
import time
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cellrt.native.jit import compiled

MONOTONIC, THREAD = (8, 16) if sys.platform == "darwin" else (1, 3)
"""The numbers of POSIX's clocks; a Mac's are those that Python reads."""
NS = 1_000_000_000


@intrinsic
def _read(typing_context: Any, number: Any) -> Any:
    """Return the time of a clock of the C library, in ns; -1 if it cannot be read."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        long, int_ = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(int_, [int_, long.as_pointer()])
        function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
        time_at = cgutils.alloca_once(builder, long, size=context.get_constant(types.intp, 2))
        status = builder.call(function, [arguments[0], time_at])
        seconds, rest = (builder.load(builder.gep(time_at, [ir.Constant(long, k)])) for k in range(2))
        now = builder.add(builder.mul(seconds, ir.Constant(long, NS)), rest)
        return builder.select(builder.icmp_signed("==", status, ir.Constant(int_, 0)), now, ir.Constant(long, -1))

    return types.int64(types.int32), generate


@compiled
def _now_ns() -> int:
    return int(_read(MONOTONIC))


@compiled
def _thread_ns() -> int:
    return int(_read(THREAD))


now_ns = time.perf_counter_ns if numba.config.DISABLE_JIT else _now_ns
thread_ns = time.thread_time_ns if numba.config.DISABLE_JIT else _thread_ns
