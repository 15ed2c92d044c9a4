"""Conversion of tensors from JSON and from bytes, and back: the datatypes of the Open Inference Protocol.

Protocol: "Predict Protocol - Version 2" (KServe), and Triton's extension for binary tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch

from cellrt.definition.bits import NUMPY_DTYPES, as_bits
from cellrt.errors import RequestError

DATATYPES = {
    "BOOL": torch.bool,
    "UINT8": torch.uint8,
    "INT8": torch.int8,
    "INT16": torch.int16,
    "INT32": torch.int32,
    "INT64": torch.int64,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "FP32": torch.float32,
    "FP64": torch.float64,
}
"""The dtype of each datatype. Texts and JSON have the datatype BYTES."""
DATATYPE_OF = {dtype: name for name, dtype in DATATYPES.items()}
BYTES = "BYTES"
MOST_DIMENSIONS = 64
"""The most dimensions that a NumPy array may have."""
TOO_LARGE = ", got a number that is too large for it"
_ACCEPTED: dict[str, tuple[set[type], type]] = {
    "b": ({bool}, np.bool_),
    **dict.fromkeys("iu", ({int}, np.int64)),
    "f": ({int, float}, np.float64),
}
"""The Python types that a kind of NumPy dtype accepts, and the widest dtype of that kind, to see which numbers fit."""
_TYPE_NAMES = {
    bool: "true or false",
    str: "texts",
    type(None): "null",
    dict: "an object",
    float: "numbers with a fraction",
    int: "integers",
}
"""The names of JSON's types in errors."""
_LENGTH = struct.Struct("<I")


class Leaves(NamedTuple):
    """The leaves of nested lists in one flat list, with their types and the shape of the nested lists."""

    items: list[Any]
    kinds: set[type]
    shape: tuple[int, ...]


def leaves_of(value: Any, where: str) -> Leaves:
    """Return the leaves of nested lists. Raise RequestError unless all lists of a level are equally long."""
    level, shape = [value], []
    while list in (kinds := set(map(type, level))):
        if len(kinds) > 1:
            raise RequestError(f"{where}: expected lists of equal lengths, got {_kind(kinds - {list})} beside a list")
        if len(sizes := set(map(len, level))) > 1:
            shown = " and ".join(map(str, sorted(sizes)[:2]))
            raise RequestError(f"{where}: expected lists of equal lengths, got some of {shown}")
        shape.append(sizes.pop())
        level = level[0] if len(level) == 1 else list(chain.from_iterable(level))
    return Leaves(level, kinds, tuple(shape))


def from_lists(value: Any, dtype: torch.dtype, where: str) -> torch.Tensor:
    """Return the numbers in nested lists as a tensor. Raise RequestError if one does not fit the dtype."""
    leaves, kinds, shape = leaves_of(value, where)
    if len(shape) > MOST_DIMENSIONS:
        raise RequestError(f"{where}: expected lists nested at most {MOST_DIMENSIONS} deep, got {len(shape)}")
    wanted = NUMPY_DTYPES.get(dtype, np.dtype(np.float32))
    is_whole = wanted.kind in "iu"
    if is_whole and float in kinds:  # 1.0 is an integer, too. NumPy would round large integers beside it
        leaves = [int(leaf) if type(leaf) is float and leaf.is_integer() else leaf for leaf in leaves]
        kinds = set(map(type, leaves))
    accepted, widest = _ACCEPTED[wanted.kind]
    if not kinds <= accepted:  # refuse texts here: NumPy would make each as long as the longest
        raise RequestError(f"{where}: expected {DATATYPE_OF[dtype]}, got {_kind(kinds - accepted)}")
    fitting = f", from {np.iinfo(wanted).min} to {np.iinfo(wanted).max}" if is_whole else TOO_LARGE
    try:
        array: np.ndarray = np.fromiter(leaves, widest, len(leaves))
    except OverflowError:
        raise RequestError(f"{where}: expected {DATATYPE_OF[dtype]}{fitting}") from None
    if is_whole and not _fits(array, wanted):
        raise RequestError(f"{where}: expected {DATATYPE_OF[dtype]}{fitting}")
    with np.errstate(over="ignore"):
        narrowed = array.astype(wanted, copy=False)
    made = torch.from_numpy(narrowed.reshape(shape)).to(dtype)
    is_finite = np.isfinite(narrowed).all() if dtype in NUMPY_DTYPES else torch.isfinite(made).all()
    if wanted.kind == "f" and not is_finite and np.isfinite(array).all():
        raise RequestError(f"{where}: expected {DATATYPE_OF[dtype]}{fitting}")
    return made


def _fits(array: np.ndarray, dtype: np.dtype) -> bool:
    bounds = np.iinfo(dtype)
    return not array.size or bool(array.min() >= bounds.min and array.max() <= bounds.max)


def _kind(types: set[type]) -> str:
    """Return the name of the first of some types that were not expected, for an error."""
    return next((name for kind, name in _TYPE_NAMES.items() if kind in types), "something that is no number")


def from_bytes(data: bytes | memoryview, dtype: torch.dtype, shape: Sequence[int], where: str) -> torch.Tensor:
    """Return a new tensor ``[*shape]`` of raw little-endian rows. Raise RequestError for another number of bytes."""
    count = 1
    for size in shape:
        count *= size
    expected = count * dtype.itemsize
    if len(data) != expected:
        raise RequestError(f"{where}: {list(shape)} of {DATATYPE_OF[dtype]} are {expected} bytes, got {len(data)}")
    if not expected:
        return torch.empty(tuple(shape), dtype=dtype)
    array = np.frombuffer(data, NUMPY_DTYPES.get(dtype, np.dtype(np.int16))).copy()
    if dtype == torch.bool:
        array = array.view(np.uint8) != 0
    made = torch.from_numpy(array)
    return (made if made.dtype == dtype else made.view(dtype)).reshape(tuple(shape))


def to_bytes(tensor: torch.Tensor) -> bytes:
    """Return a tensor's rows, raw and little-endian."""
    return as_bits(tensor.contiguous()).tobytes()


def to_list(tensor: torch.Tensor) -> Any:
    """Return a tensor as nested lists of numbers."""
    return tensor.tolist()


def texts_of(data: bytes | memoryview, count: int, where: str) -> list[bytes]:
    """Return the elements of a BYTES tensor, each preceded by its length in 4 bytes. Raise RequestError."""
    texts: list[bytes] = []
    place = 0
    while place < len(data) and len(texts) <= count:
        if place + _LENGTH.size > len(data):
            break
        (size,) = _LENGTH.unpack_from(data, place)
        place += _LENGTH.size
        texts.append(bytes(data[place : place + size]))
        place += size
    if place != len(data) or len(texts) != count:
        raise RequestError(f"{where}: expected {count} texts, each behind its length in 4 bytes")
    return texts
