"""Memory by its address, in compiled code: numbers, copies and calls where no array and no Python object exists."""

from __future__ import annotations

from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

WORD_BYTES = 8


def _word(builder: Any, address: Any, index: Any) -> Any:
    return builder.gep(builder.inttoptr(address, ir.IntType(64).as_pointer()), [index])


@intrinsic
def read_word(typing_context: Any, address: Any, index: Any) -> Any:
    """Return the int64 number ``index`` of those at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load(_word(builder, *arguments))

    return types.int64(types.intp, types.intp), generate


@intrinsic
def read_int(typing_context: Any, address: Any, index: Any) -> Any:
    """Return the int32 number ``index`` of those at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base = builder.inttoptr(arguments[0], ir.IntType(32).as_pointer())
        return builder.load(builder.gep(base, [arguments[1]]))

    return types.int32(types.intp, types.intp), generate


@intrinsic
def start_of(typing_context: Any, array: Any) -> Any:
    """Return the address of an array's numbers.

    It is for loops over a part of the array. The compiler does not know that no index of an array is negative, and
    would turn a loop that reads its numbers in order into one that gathers them, which takes several times as long (see
    ``jit.py``).
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = make_array(signature.args[0])(context, builder, arguments[0]).data
        return builder.ptrtoint(data, ir.IntType(64))

    return types.intp(array), generate


@intrinsic
def write_word(typing_context: Any, address: Any, index: Any, value: Any) -> Any:
    """Set the int64 number ``index`` of those at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store(arguments[2], _word(builder, *arguments[:2]))
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.int64), generate


@intrinsic(prefer_literal=True)
def read_words(typing_context: Any, address: Any, count: Any) -> Any:
    """Return the first ``count`` (a literal) int64 numbers at ``address``, as a tuple."""
    if not isinstance(count, types.IntegerLiteral):
        return None
    size = count.literal_value

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        words = [builder.load(_word(builder, arguments[0], ir.Constant(ir.IntType(64), k))) for k in range(size)]
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.int64, size)(types.intp, count), generate


@intrinsic
def read_float(typing_context: Any, address: Any, index: Any) -> Any:
    """Return the float32 number ``index`` of those at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base = builder.inttoptr(arguments[0], ir.FloatType().as_pointer())
        return builder.load(builder.gep(base, [arguments[1]]))

    return types.float32(types.intp, types.intp), generate


@intrinsic
def read_byte(typing_context: Any, address: Any, index: Any) -> Any:
    """Return the byte number ``index`` of those at ``address``."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        base = builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())
        return builder.load(builder.gep(base, [arguments[1]]))

    return types.uint8(types.intp, types.intp), generate


@intrinsic
def copy_bytes(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy ``count`` bytes from one address to another; they do not overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, source = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in arguments[:2])
        cgutils.raw_memcpy(builder, to, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@intrinsic
def as_pointer(typing_context: Any, address: Any) -> Any:
    """Return an address as the pointer that ``numba.carray`` takes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(types.intp), generate


def _array_at(context: Any, builder: Any, array: types.Array, address: Any, shape: list[Any]) -> Any:
    """Return an array that owns no memory."""
    made = make_array(array)(context, builder)
    itemsize = context.get_constant(types.intp, context.get_abi_sizeof(context.get_data_type(array.dtype)))
    strides = [builder.mul(shape[1], itemsize), itemsize] if array.ndim == 2 else [itemsize]
    data = builder.inttoptr(address, made.data.type)
    populate_array(made, data=data, shape=shape, strides=strides, itemsize=itemsize, meminfo=None)
    return made._getvalue()


@intrinsic
def ints_at(typing_context: Any, address: Any, rows: Any, columns: Any) -> Any:
    """Return the int32 numbers at an address as an array ``[rows, columns]``, which does not own them."""
    array = types.Array(types.int32, 2, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _array_at(context, builder, array, arguments[0], list(arguments[1:]))

    return array(types.intp, types.intp, types.intp), generate


@intrinsic
def words_at(typing_context: Any, address: Any, rows: Any, columns: Any) -> Any:
    """Return the int64 numbers at an address as an array ``[rows, columns]``, which does not own them."""
    array = types.Array(types.int64, 2, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _array_at(context, builder, array, arguments[0], list(arguments[1:]))

    return array(types.intp, types.intp, types.intp), generate


@intrinsic
def bytes_at(typing_context: Any, address: Any, count: Any) -> Any:
    """Return the bytes at an address as an array ``[count]``, which does not own them."""
    array = types.Array(types.uint8, 1, "C")

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _array_at(context, builder, array, arguments[0], list(arguments[1:]))

    return array(types.intp, types.intp), generate


@intrinsic
def call(typing_context: Any, function: Any, first: Any, second: Any) -> Any:
    """Call the C function ``int64 (int64, int64)`` at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        pointer = builder.inttoptr(arguments[0], ir.FunctionType(word, [word, word]).as_pointer())
        return builder.call(pointer, arguments[1:])

    return types.int64(types.intp, types.intp, types.intp), generate


@intrinsic
def move_bytes(typing_context: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy as ``copy_bytes`` does; the two may overlap."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, source = (builder.inttoptr(address, ir.IntType(8).as_pointer()) for address in arguments[:2])
        cgutils.raw_memmove(builder, to, source, arguments[2], 1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp, types.intp), generate


@intrinsic
def call_status(typing_context: Any, function: Any, arguments: Any) -> Any:
    """Call the C function at an address, which returns an int32; ``arguments`` is a tuple of int64 and int32 numbers.

    Pointers and sizes are int64. Each argument has the type that it has in the tuple.
    """

    def generate(context: Any, builder: Any, signature: Any, given: Any) -> Any:
        kinds = [context.get_value_type(kind) for kind in arguments.types]
        pointer = builder.inttoptr(given[0], ir.FunctionType(ir.IntType(32), kinds).as_pointer())
        values = [builder.extract_value(given[1], k) for k in range(len(kinds))]
        return builder.call(pointer, values)

    return types.int32(types.intp, arguments), generate


if numba.config.DISABLE_JIT:
    from cellrt.native.plain_memory import *  # noqa: F403
