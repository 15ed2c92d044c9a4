"""The functions of ``memory.py`` in Python, to run the core without compiling it (NUMBA_DISABLE_JIT)."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORD_BYTES = 8


def _array(address: int, kind: Any, *shape: int) -> NDArray[Any]:
    """Return an array that owns no memory."""
    if 0 in shape:
        return np.empty(shape, np.dtype(kind))
    for size in reversed(shape):
        kind *= size
    made: NDArray[Any] = np.ctypeslib.as_array(kind.from_address(int(address)))
    return made


def read_word(address: int, index: int) -> int:
    """Return an int64 number, as ``memory.read_word``."""
    return ctypes.c_int64.from_address(int(address) + WORD_BYTES * int(index)).value


def read_int(address: int, index: int) -> int:
    """Return an int32 number, as ``memory.read_int``."""
    return ctypes.c_int32.from_address(int(address) + 4 * int(index)).value


def read_float(address: int, index: int) -> float:
    """Return a float32 number, as ``memory.read_float``."""
    return ctypes.c_float.from_address(int(address) + 4 * int(index)).value


def read_byte(address: int, index: int) -> int:
    """Return a byte, as ``memory.read_byte``."""
    return ctypes.c_uint8.from_address(int(address) + int(index)).value


def read_words(address: int, count: int) -> tuple[int, ...]:
    """Return the first int64 numbers, as ``memory.read_words``."""
    return tuple(read_word(address, k) for k in range(count))


def write_word(address: int, index: int, value: int) -> None:
    """Set an int64 number, as ``memory.write_word``."""
    ctypes.c_int64.from_address(int(address) + WORD_BYTES * int(index)).value = int(value)


def start_of(array: NDArray[Any]) -> int:
    """Return the address of an array, as ``memory.start_of``."""
    return int(array.ctypes.data)


def copy_bytes(target: int, source: int, count: int) -> None:
    """Copy bytes, as ``memory.copy_bytes``."""
    ctypes.memmove(int(target), int(source), int(count))


move_bytes = copy_bytes


def ints_at(address: int, rows: int, columns: int) -> NDArray[np.int32]:
    """Return int32 numbers as an array, as ``memory.ints_at``."""
    return _array(address, ctypes.c_int32, rows, columns)


def words_at(address: int, rows: int, columns: int) -> NDArray[np.int64]:
    """Return int64 numbers as an array, as ``memory.words_at``."""
    return _array(address, ctypes.c_int64, rows, columns)


def bytes_at(address: int, count: int) -> NDArray[np.uint8]:
    """Return bytes as an array, as ``memory.bytes_at``."""
    return _array(address, ctypes.c_uint8, count)


def call(function: int, first: int, second: int) -> int:
    """Call a C function, as ``memory.call``."""
    kind = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64, ctypes.c_int64)
    return int(kind(int(function))(int(first), int(second)))


__all__ = [name for name, made in globals().items() if getattr(made, "__module__", "") == __name__ and name[0] != "_"]
