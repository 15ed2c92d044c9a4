"""Faster compilation: Numba gives the same results in half of its processor time in Python.

Each of these was measured on the scheduler's 570 functions, and changes no result:

- The result type of an operator for numbers and arrays is asked for tens of thousands of times, and found a thousand
  times by trials that end in exceptions with coloured texts. Here it is remembered while one function is compiled.
- Compiler flags are compared by dicts made for it, and all have one hash.
- Every call of LLVM notifies each timer of each function that waits for another. These timers are never read.
- Numba looks for an instruction's variables in fields that cannot have any, too.

Numba lets one thread compile at a time, so this touches no other thread's work; afterwards everything is restored.
``tests/core/test_thrift.py`` checks the internals that are used.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite.binding import ffi
from numba.core import ir, types
from numba.core.targetconfig import ConfigStack, TargetConfig
from numba.core.types.functions import BaseFunction

OPERATORS = frozenset(value for value in vars(operator).values() if callable(value)) | {bool}
PLAIN_TYPES = (types.Number, types.Boolean, types.Array, types.IntegerLiteral, types.BooleanLiteral)
"""The types of arguments for which the type of an operator's result depends on nothing else."""
NO_VARIABLES = frozenset({str, int, bool, type(None), ir.Loc, ir.Scope})

_plain_call_type = BaseFunction.get_call_type
_plain_variables = ir.Inst._rec_list_vars
_plain_hash = TargetConfig.__hash__
_is_on = False


@contextmanager
def thrift() -> Iterator[None]:
    """Compile faster within the block. Only the outermost block has an effect."""
    if _is_on:
        yield
        return
    callbacks = ffi.lib._lock._cblist
    told = callbacks[:]
    made = _remembering(), _equal_flags, _hashing(), _variables
    _set(True, [], made)
    try:
        yield
    finally:
        _set(False, told, _PLAIN)


_PLACES = (
    (BaseFunction, "get_call_type"),
    (TargetConfig, "__eq__"),
    (TargetConfig, "__hash__"),
    (ir.Inst, "_rec_list_vars"),
)
_PLAIN = tuple(getattr(owner, name) for owner, name in _PLACES)


def _set(is_on: bool, callbacks: list[Any], functions: tuple[Any, ...]) -> None:
    global _is_on
    _is_on = is_on
    ffi.lib._lock._cblist[:] = callbacks
    for (owner, name), function in zip(_PLACES, functions):
        setattr(owner, name, function)


def _remembering() -> Any:
    known: dict[Any, Any] = {}

    def get_call_type(self: Any, context: Any, args: Any, kws: Any) -> Any:
        if kws or self.typing_key not in OPERATORS or not all(isinstance(each, PLAIN_TYPES) for each in args):
            return _plain_call_type(self, context, args, kws)
        asked = self, context, tuple(args), ConfigStack.top_or_none()
        found = known.get(asked)
        if found is None:
            known[asked] = found = _plain_call_type(self, context, args, kws)
        return found

    return get_call_type


def _equal_flags(self: Any, other: Any) -> Any:
    if not isinstance(other, TargetConfig):
        return NotImplemented
    ours, theirs = self._values, other._values
    if ours == theirs or ours.keys() == theirs.keys():  # what neither has is the default in both
        return ours == theirs
    return self.values() == other.values()


def _hashing() -> Any:
    """Return a hash that is Numba's, remembered for each type: it is of the options' names only."""
    known: dict[type, int] = {}

    def get_hash(self: Any) -> int:
        kind = type(self)
        if kind not in known:
            known[kind] = _plain_hash(self)
        return known[kind]

    return get_hash


def _variables(self: Any, value: Any) -> Any:
    kind = type(value)
    if kind is ir.Var:
        return [value]
    return [] if kind in NO_VARIABLES else _plain_variables(self, value)
