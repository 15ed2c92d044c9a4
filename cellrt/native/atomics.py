"""Words that several threads change at once, in compiled code: tested and set in one step, in one order for all.

Each is one int64 of an array. Without compilation (NUMBA_DISABLE_JIT) a lock makes the steps atomic.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numba
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array

from cellrt.native.jit import short_entry
from cellrt.native.row_types import Rows

WORD_BYTES, ORDER = 8, "seq_cst"
_ONE_BY_ONE = threading.Lock()


def _at(builder: Any, context: Any, signature: Any, arguments: Any) -> Any:
    words = make_array(signature.args[0])(context, builder, arguments[0])
    return builder.gep(words.data, [context.cast(builder, arguments[1], signature.args[1], types.intp)])


@intrinsic
def _load(typing_context: Any, words: Any, index: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(_at(builder, context, signature, arguments), ORDER, WORD_BYTES)

    return types.int64(words, index), generate


@intrinsic
def _store(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        stored = context.cast(builder, arguments[2], signature.args[2], types.int64)
        builder.store_atomic(stored, _at(builder, context, signature, arguments), ORDER, WORD_BYTES)
        return context.get_dummy_value()

    return types.void(words, index, value), generate


@intrinsic
def _replace(typing_context: Any, words: Any, index: Any, known: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        given = [context.cast(builder, arguments[k], signature.args[k], types.int64) for k in (2, 3)]
        pair = builder.cmpxchg(_at(builder, context, signature, arguments), *given, ORDER, ORDER)
        return builder.extract_value(pair, 1)

    return types.boolean(words, index, known, value), generate


@intrinsic
def _exchange(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        given = context.cast(builder, arguments[2], signature.args[2], types.int64)
        return builder.atomic_rmw("xchg", _at(builder, context, signature, arguments), given, ORDER)

    return types.int64(words, index, value), generate


@intrinsic
def _add(typing_context: Any, words: Any, index: Any, value: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        given = context.cast(builder, arguments[2], signature.args[2], types.int64)
        return builder.atomic_rmw("add", _at(builder, context, signature, arguments), given, ORDER)

    return types.int64(words, index, value), generate


def _load_plainly(words: Rows[int], index: int) -> int:
    with _ONE_BY_ONE:
        return int(words[index])


def _store_plainly(words: Rows[int], index: int, value: int) -> None:
    with _ONE_BY_ONE:
        words[index] = value


def _replace_plainly(words: Rows[int], index: int, known: int, value: int) -> bool:
    with _ONE_BY_ONE:
        if words[index] != known:
            return False
        words[index] = value
        return True


def _exchange_plainly(words: Rows[int], index: int, value: int) -> int:
    with _ONE_BY_ONE:
        before = int(words[index])
        words[index] = value
        return before


def _add_plainly(words: Rows[int], index: int, value: int) -> int:
    with _ONE_BY_ONE:
        before = int(words[index])
        words[index] = before + value
        return before


_INTERPRETED = bool(numba.config.DISABLE_JIT)
load: Callable[[Rows[int], int], int] = _load_plainly if _INTERPRETED else _load
"""Return a word, with all that was written before it was set."""
store: Callable[[Rows[int], int, int], None] = _store_plainly if _INTERPRETED else _store
"""Set a word, after all that was written before."""
replace: Callable[[Rows[int], int, int, int], bool] = _replace_plainly if _INTERPRETED else _replace
"""Set a word if it is the known one; return whether it was."""
exchange: Callable[[Rows[int], int, int], int] = _exchange_plainly if _INTERPRETED else _exchange
"""Set a word; return what it was."""
add: Callable[[Rows[int], int, int], int] = _add_plainly if _INTERPRETED else _add
"""Add to a word; return what it was."""


@short_entry
def replaced(words: Rows[int], index: int, known: int, value: int) -> bool:
    """Call ``replace`` from Python."""
    return replace(words, index, known, value)


@short_entry
def stored(words: Rows[int], index: int, value: int) -> None:
    """Call ``store`` from Python."""
    store(words, index, value)


@short_entry
def added(words: Rows[int], index: int, value: int) -> int:
    """Add to a word, for Python; return what it was."""
    return add(words, index, value)
