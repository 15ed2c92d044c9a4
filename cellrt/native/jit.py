"""The compilation of functions, and their access to tables that Python made.

``compiled`` is for functions that only compiled code calls: no Python wrapper, and no reference counts (an atomic
instruction or two for every table touched), so they create no array; ``making`` is for those that do. Both are parts of
their callers (``parts.py``). ``entry`` is for the few that Python calls, ``short_entry`` for those too short to be
worth giving up the interpreter lock.

Compiled functions pass on all tables, never a single one: the compiler does not know that no index of an array argument
is negative (see ``RowsPointer``), and loops over it become gathers.

Python passes the tables to an entry as one array of addresses, and compiled functions pass them on as a pointer to it
(``RowsPointer``): unpacking every table costs microseconds a call from Python, and a hundred words of arguments a call
inside. Without compilation (NUMBA_DISABLE_JIT) the tables are passed as they are.

All this uses Numba's internals. ``pyproject.toml`` bounds it to the minor versions that were tested, and
``tests/core/test_jit.py`` checks the internals that are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numba
import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.core import event as events
from numba.core.ccallback import CFunc
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, overload, register_model
from numba.np.arrayobj import make_array, populate_array
from numba.np.numpy_support import from_dtype

from cellrt.native.kept_code import KeptCode, named_compiler
from cellrt.native.row_types import new_table

Function = Callable[..., Any]
F = TypeVar("F", bound=Function)
"""A function that is called as if nothing had been compiled: type checkers see the author's own."""


def _kept(function: Function, is_part: bool = False, **options: bool | str) -> Any:
    """Return what Numba's ``njit`` does; the compiled code is kept as ``kept_code.py`` says.

    ``is_part``: only compiled code calls it.
    """
    if numba.config.DISABLE_JIT:
        return function
    told = sorted(options.items())
    dispatcher: Any = njit(pipeline_class=named_compiler(told, is_part), **options)(function)
    dispatcher._cache = KeptCode(function, told)
    if is_part:
        _refuse_python(dispatcher)
    return dispatcher


def _refuse_python(part: Any) -> None:
    """Have calls from Python raise TypeError: a part has no machine code, and they would go to address 0."""

    def refuse(*_: object, **__: object) -> None:
        raise TypeError(f"{part.py_func.__qualname__} is a part of compiled functions, which alone can call it")

    part._insert = lambda *_: None  # what Python's calls choose from
    part._compile_for_args = refuse


class _CFunction(CFunc):
    """A C function that reports its compilation as other functions do; Numba reports only theirs."""

    overloads: Mapping[Any, Any] = {}
    targetoptions: Mapping[str, bool] = {}

    @property
    def py_func(self) -> Function:
        """The function in Python."""
        function: Function = self._pyfunc  # type: ignore[attr-defined]
        return function

    def _compile_uncached(self) -> Any:
        with events.trigger_event("numba:compile", data={"dispatcher": self}):
            made = super()._compile_uncached()  # type: ignore[misc]
            made.library.get_pointer_to_function(made.fndesc.llvm_cfunc_wrapper_name)  # which has machine code made
            return made


def c_function(function: Function, signature: Any) -> CFunc:
    """Return a function as C calls it, compiled for a signature; its ``address`` is valid as long as it lives."""
    told = f"C {signature}"
    made = _CFunction(
        function,
        (signature.args, signature.return_type),
        {},
        {"error_model": "numpy"},
        pipeline_class=named_compiler(told),
    )
    made._cache = KeptCode(function, told)  # type: ignore[attr-defined]
    made.compile()
    return made


def _njit(function: Function, **options: bool) -> Any:
    """Compile a function once for all kinds of integers; Numba would do so for each kind that a caller has."""
    return _widening(_kept(function, error_model="numpy", no_cfunc_wrapper=True, **options))


def _widening(dispatcher: Any) -> Any:
    """Have compiled code call a function with int64 numbers only, whatever integers it has."""
    if not numba.config.DISABLE_JIT:
        resolve = dispatcher.get_call_template
        dispatcher.get_call_template = lambda args, kws: resolve([_widen(arg) for arg in args], kws)
    return dispatcher


def _widen(argument: types.Type) -> types.Type:
    argument = types.unliteral(argument)
    return types.int64 if isinstance(argument, types.Integer) else argument


def compiled(function: F) -> F:
    """Compile a function that only compiled code calls."""
    made: F = _njit(function, is_part=True, nogil=True, _nrt=False, no_cpython_wrapper=True)
    return made


def inlined(function: F) -> F:
    """Compile a function as ``compiled`` does, and inline it where it is called.

    It is for functions that are called for every row of a task, in one or two places.
    """
    made: F = _njit(function, is_part=True, nogil=True, _nrt=False, no_cpython_wrapper=True, forceinline=True)
    return made


def entry(function: Function) -> Any:
    """Compile a function that Python calls."""
    return _njit(function, nogil=True, _nrt=False)


def short_entry(function: Function) -> Any:
    """Compile a function that Python calls and that is too short to be worth giving up the interpreter lock."""
    return _njit(function, _nrt=False)


def nogil(function: Function) -> Any:
    """Compile a function outside the core, which may make arrays and gives up the interpreter lock."""
    return _widening(_kept(function, nogil=True))


def nogil_part(function: Function) -> Any:
    """Compile a function as ``nogil`` does that only compiled code calls."""
    options = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}
    return _widening(_kept(function, is_part=True, **options))


def allocating(function: Function) -> Any:
    """Compile a function that makes arrays: such functions compile graphs, which does not happen for every request."""
    return _njit(function, nogil=True)


def making(function: F) -> F:
    """Compile a function as ``allocating`` does that only compiled code calls."""
    made: F = _njit(function, is_part=True, nogil=True, no_cpython_wrapper=True)
    return made


def short_allocating(function: Function) -> Any:
    """Compile a function as ``allocating`` does that Python calls and that is too short to be worth giving up the lock.

    A thread that gives the interpreter lock up waits to get it back, which takes longer.
    """
    return _njit(function)


def make_rows(size: int, dtype: np.dtype[np.void]) -> Any:
    """Call ``new_table`` from compiled code."""
    return new_table(size, dtype)


@overload(make_rows, strict=False)
def _make_rows(size: Any, dtype: Any) -> Any:
    return lambda size, dtype: np.zeros(size, dtype)


WORDS = 3  # address, rows and columns of each table


class RowsPointer(types.Type):  # type: ignore[misc]
    """Compiled code's view of a named tuple of arrays: a pointer to their addresses; an attribute is an array.

    Numba adds an array's length to each index that is negative, which costs more than most of the core's work on the
    read values. So the arrays that are not ``sized`` have no length, and then nothing is added or tested. With bounds
    checks (``NUMBA_BOUNDSCHECK=1``) all have one.
    """

    def __init__(
        self,
        name: str,
        dtypes: dict[str, np.dtype[Any]],
        matrices: tuple[str, ...],
        sized: tuple[str, ...] | None = None,
    ) -> None:
        super().__init__(name=name)
        is_whole = sized is None or bool(numba.config.BOUNDSCHECK)
        self.sized = set(dtypes if is_whole else sized or ()) | set(matrices)
        self.arrays = {
            field: types.Array(from_dtype(dtype), 2 if field in matrices else 1, "C") for field, dtype in dtypes.items()
        }


register_model(RowsPointer)(models.OpaqueModel)


@infer_getattr
class _TypeOfField(AttributeTemplate):  # type: ignore[misc]
    key = RowsPointer

    def generic_resolve(self, pointer: RowsPointer, field: str) -> Any:
        return pointer.arrays.get(field)


@lower_getattr_generic(RowsPointer)
def _read_field(context: Any, builder: Any, pointer: RowsPointer, value: Any, field: str) -> Any:
    """Build an array from its three words. They do not change while compiled code runs, and it may assume so."""
    array = pointer.arrays[field]
    first = WORDS * list(pointer.arrays).index(field)
    words = builder.bitcast(value, context.get_value_type(types.intp).as_pointer())

    def word(k: int) -> Any:
        loaded = builder.load(cgutils.gep_inbounds(builder, words, context.get_constant(types.intp, first + k)))
        loaded.set_metadata("invariant.load", builder.module.add_metadata([]))
        return loaded

    table = make_array(array)(context, builder)
    itemsize = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(array.dtype)))
    shape = [context.get_constant(types.intp, 0)]
    if field in pointer.sized:
        shape = [word(1 + k) for k in range(array.ndim)]
    strides = [builder.mul(shape[1], itemsize), itemsize] if array.ndim == 2 else [itemsize]
    data = builder.inttoptr(word(0), table.data.type)
    populate_array(table, data=data, shape=shape, strides=strides, itemsize=itemsize, meminfo=None)
    return table._getvalue()


def opener(pointer: RowsPointer) -> Any:
    """Return a compiled function from the array of addresses to the pointer."""

    @intrinsic
    def open_at(typing_context: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            words = make_array(signature.args[0])(context, builder, arguments[0])
            return builder.bitcast(words.data, context.get_value_type(pointer))

        return pointer(at), generate

    return open_at
