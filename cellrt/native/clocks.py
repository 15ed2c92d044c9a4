"""What time it is, in compiled code: as ``time.perf_counter_ns`` and ``time.thread_time_ns`` say it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cellrt.native.jit import short_entry

MONOTONIC, THREAD = (8, 16) if sys.platform == "darwin" else (1, 3)
"""Numbers of POSIX's clocks; a Mac's are those that Python reads."""
NS = 1_000_000_000


def _clock(number: int) -> Any:
    """Return an intrinsic that reads a clock of the C library; -1 if it cannot be read."""

    @intrinsic
    def read(typing_context: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            long, int_ = ir.IntType(64), ir.IntType(32)
            kind = ir.FunctionType(int_, [int_, long.as_pointer()])
            function = cgutils.get_or_insert_function(builder.module, kind, "clock_gettime")
            time_at = cgutils.alloca_once(builder, long, size=context.get_constant(types.intp, 2))
            status = builder.call(function, [ir.Constant(int_, number), time_at])
            seconds, rest = (builder.load(builder.gep(time_at, [ir.Constant(long, k)])) for k in range(2))
            now = builder.add(builder.mul(seconds, ir.Constant(long, NS)), rest)
            return builder.select(builder.icmp_signed("==", status, ir.Constant(int_, 0)), now, ir.Constant(long, -1))

        return types.int64(), generate

    return read


_INTERPRETED = bool(numba.config.DISABLE_JIT)
now_ns: Callable[[], int] = time.perf_counter_ns if _INTERPRETED else _clock(MONOTONIC)
thread_ns: Callable[[], int] = time.thread_time_ns if _INTERPRETED else _clock(THREAD)


@short_entry
def read_now_ns() -> int:
    """As ``now_ns``, for Python."""
    return now_ns()


@short_entry
def read_thread_ns() -> int:
    """As ``thread_ns``, for Python."""
    return thread_ns()
