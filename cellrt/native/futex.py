"""Sleep until another thread changes a word, without the interpreter lock: Linux's futex.

A word is an int64 of an array; sleepers and wakers change it by the functions of ``atomics.py``. When a thread goes to
sleep, the kernel compares the low half of the word with the value that the thread expects. So no sleeper is missed if a
waker changes the word first, and wakes then.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from cellrt.native.atomics import exchange, load, replace
from cellrt.native.jit import compiled, entry, short_entry
from cellrt.native.memory import WORD_BYTES, start_of
from cellrt.native.row_types import Rows

_CALLS = {"x86_64": (202, 1), "aarch64": (98, 64)} if sys.platform == "linux" else {}
_CALL, _WRITE = _CALLS.get(platform.machine(), (0, 0))
"""The numbers of the system calls; 0 if there are none: then sleepers check the word at intervals."""
_WAIT, _WAKE = 0, 1
"""The operations of the system call; they work in memory that processes share, too."""
_ALL = (1 << 31) - 1
LOOK_EVERY_NS = 1_000_000
NS = 1_000_000_000
NEVER = -1
"""The time limit of a sleep that has none."""


@intrinsic
def _call(typing_context: Any, number: Any, address: Any, what: Any, value: Any, limit_ns: Any) -> Any:
    """Do the futex system call; its result is not needed, as the word tells all."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        long = ir.IntType(64)
        given = [context.cast(builder, one, of, types.int64) for one, of in zip(arguments, signature.args)]
        time_at = cgutils.alloca_once(builder, long, size=context.get_constant(types.intp, 2))
        for k, part in enumerate((builder.sdiv, builder.srem)):
            builder.store(part(given[4], ir.Constant(long, NS)), builder.gep(time_at, [ir.Constant(long, k)]))
        is_limited = builder.icmp_signed(">=", given[4], ir.Constant(long, 0))
        limit = builder.select(is_limited, builder.ptrtoint(time_at, long), ir.Constant(long, 0))
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(long, [long] * 7), "syscall")
        unused = [ir.Constant(long, 0)] * 2
        return builder.call(function, [given[0], given[1], given[2], given[3], limit, *unused])

    return types.int64(types.int64, types.int64, types.int64, types.int64, types.int64), generate


@intrinsic
def _write_one(typing_context: Any, number: Any, descriptor: Any) -> Any:
    """Write the number 1 to a descriptor by the system call ``number``; a failure is ignored, as a full one is rung."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        long = ir.IntType(64)
        one = cgutils.alloca_once_value(builder, ir.Constant(long, 1))
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(long, [long] * 7), "syscall")
        size, unused = ir.Constant(long, WORD_BYTES), [ir.Constant(long, 0)] * 3
        given = [context.cast(builder, value, of, types.int64) for value, of in zip(arguments, signature.args)]
        return builder.call(function, [*given, builder.ptrtoint(one, long), size, *unused])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _pause(typing_context: Any, microseconds: Any) -> Any:
    """Sleep for this many microseconds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        int_ = ir.IntType(32)
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(int_, [int_]), "usleep")
        return builder.call(function, [context.cast(builder, arguments[0], signature.args[0], types.int32)])

    return types.int32(types.int64), generate


@intrinsic
def _relax(typing_context: Any) -> Any:
    """Tell the processor that the thread polls a word."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        elif platform.machine() in ("aarch64", "arm64"):
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            hint = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(hint, [ir.Constant(ir.IntType(32), 1)])
        return context.get_dummy_value()

    return types.void(), generate


@compiled
def _sleep(words: Rows[int], index: int, known: int, limit_ns: int) -> None:
    if _CALL:
        _call(_CALL, start_of(words) + WORD_BYTES * index, _WAIT, known, limit_ns)
    elif load(words, index) == known:
        _pause((LOOK_EVERY_NS if limit_ns < 0 else min(limit_ns, LOOK_EVERY_NS)) // 1000)


@compiled
def _wake(words: Rows[int], index: int) -> None:
    if _CALL:
        _call(_CALL, start_of(words) + WORD_BYTES * index, _WAKE, _ALL, NEVER)


@compiled
def _ring(bell: int) -> None:
    if _WRITE:
        _write_one(_WRITE, bell)


class _Time(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("ns", ctypes.c_long)]


def _sleep_plainly(words: Rows[int], index: int, known: int, limit_ns: int) -> None:
    if _CALL:
        limit = ctypes.byref(_Time(*divmod(limit_ns, NS))) if limit_ns >= 0 else None
        address = ctypes.c_long(words.ctypes.data + WORD_BYTES * index)
        ctypes.CDLL(None).syscall(ctypes.c_long(_CALL), address, ctypes.c_long(_WAIT), ctypes.c_long(known), limit)
    elif load(words, index) == known:
        time.sleep((LOOK_EVERY_NS if limit_ns < 0 else min(limit_ns, LOOK_EVERY_NS)) / NS)


def _wake_plainly(words: Rows[int], index: int) -> None:
    if _CALL:
        address = ctypes.c_long(words.ctypes.data + WORD_BYTES * index)
        ctypes.CDLL(None).syscall(ctypes.c_long(_CALL), address, ctypes.c_long(_WAKE), ctypes.c_long(_ALL), None)


def _ring_plainly(bell: int) -> None:
    with suppress(BlockingIOError):
        os.eventfd_write(int(bell), 1)


HAS_BELLS = _WRITE > 0
"""True if compiled code can ring an eventfd."""
_INTERPRETED = bool(numba.config.DISABLE_JIT)
sleep: Callable[[Rows[int], int, int, int], None] = _sleep_plainly if _INTERPRETED else _sleep
"""Sleep while a word has a known value, at most this many ns or NEVER; a signal may end the sleep early."""
wake: Callable[[Rows[int], int], None] = _wake_plainly if _INTERPRETED else _wake
"""Wake all threads that sleep on a word; the caller has changed it before."""


ring: Callable[[int], None] = _ring_plainly if _INTERPRETED else _ring
"""Ring an eventfd: wake the threads that poll its descriptor."""


def _relax_plainly() -> None:
    """Do nothing, in place of ``relax``."""


relax: Callable[[], None] = _relax_plainly if _INTERPRETED else _relax
"""Let the processor core's other thread run for a moment, in a loop that polls a word."""
SPIN_NS = 60_000
"""The time for which a thread may poll before it sleeps: waking it would take as long, and its waker's time, too."""
SPINS = 16
"""A thread stops polling after this many polls in vain, until it has slept for less than twice ``SPIN_NS``."""
NUM_PROCESSORS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
MAY_SPIN = NUM_PROCESSORS > 1


@entry
def slept(words: Rows[int], index: int, known: int, limit_ns: int) -> None:
    """Sleep as ``sleep`` does, without the interpreter lock; called by Python."""
    sleep(words, index, known, limit_ns)


@short_entry
def woken(words: Rows[int], index: int, known: int, value: int) -> bool:
    """Change a word from a known value to another, and wake the threads that sleep on it; called by Python.

    Return False, with nothing done, if the word has another value.
    """
    if load(words, index) != known or not replace(words, index, known, value):
        return False
    wake(words, index)
    return True


@short_entry
def roused(words: Rows[int], index: int, value: int) -> None:
    """Set a word, and wake the threads that sleep on it if that changes it; called by Python."""
    if exchange(words, index, value) != value:
        wake(words, index)
