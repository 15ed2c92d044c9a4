"""Tensors from JSON and from bytes, and back: the datatypes of the Open Inference Protocol.

Protocol: "Predict Protocol - Version 2" (KServe), and Triton's extension for binary tensors.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

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
"""All that a row may have; texts and JSON are BYTES."""
NAMES = {dtype: name for name, dtype in DATATYPES.items()}
BYTES = "BYTES"
_LENGTH = struct.Struct("<I")


def array_of(value: Any, dtype: torch.dtype, where: str) -> torch.Tensor:
    """A tensor of numbers in nested lists, all of which must fit the dtype. Raises RequestError."""
    try:
        array = np.array(value)
    except ValueError as error:
        raise RequestError(f"{where}: expected lists of equal lengths: {error}") from None
    wanted = NUMPY_DTYPES.get(dtype, np.dtype(np.float32))
    if array.size == 0 and array.dtype.kind == "f":
        return torch.empty(array.shape, dtype=dtype)
    allowed = {"b": "b", "i": "iub", "u": "iub", "f": "fiub"}[wanted.kind]
    if wanted.kind in "iu" and array.dtype.kind == "f" and np.isfinite(array).all() and not (array % 1).any():
        allowed += "f"  # JSON's 1.0 is an integer
    if array.dtype.kind not in allowed:
        raise RequestError(f"{where}: expected {NAMES[dtype]}, got {_kind(array)}")
    if wanted.kind in "iu" and array.size:
        bounds = np.iinfo(wanted)
        if not (array.min() >= bounds.min and array.max() <= bounds.max):
            raise RequestError(f"{where}: expected {NAMES[dtype]}, from {bounds.min} to {bounds.max}")
    with np.errstate(over="ignore"):
        made = torch.from_numpy(np.array(array, dtype=wanted, copy=None)).to(dtype)
    if wanted.kind == "f" and not torch.isfinite(made).all() and np.isfinite(array).all():
        raise RequestError(f"{where}: expected {NAMES[dtype]}, got a number that is too large for it")
    return made


def _kind(array: np.ndarray) -> str:
    names = {"b": "true or false", "i": "integers", "u": "integers", "f": "numbers with a fraction", "U": "texts"}
    return names.get(array.dtype.kind, "what is no number, or too large")


def from_bytes(data: bytes | memoryview, dtype: torch.dtype, shape: Sequence[int], where: str) -> torch.Tensor:
    """A new tensor of raw little-endian rows, ``[*shape]``. Raises RequestError if they are not as many bytes."""
    count = 1
    for size in shape:
        count *= size
    expected = count * dtype.itemsize
    if len(data) != expected:
        raise RequestError(f"{where}: {list(shape)} of {NAMES[dtype]} are {expected} bytes, got {len(data)}")
    if not expected:
        return torch.empty(tuple(shape), dtype=dtype)
    array = np.frombuffer(data, NUMPY_DTYPES.get(dtype, np.dtype(np.int16))).copy()
    if dtype == torch.bool:
        array = array.view(np.uint8) != 0
    return torch.from_numpy(array).view(dtype).reshape(tuple(shape))


def to_bytes(tensor: torch.Tensor) -> bytes:
    """A tensor's rows, raw and little-endian."""
    return as_bits(tensor.contiguous()).tobytes()


def to_list(tensor: torch.Tensor) -> Any:
    """A tensor as nested lists of numbers."""
    return tensor.tolist()


def texts_of(data: bytes | memoryview, count: int, where: str) -> list[bytes]:
    """The elements of a BYTES tensor, each behind its length in 4 bytes. Raises RequestError."""
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
