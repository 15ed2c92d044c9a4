"""Tensors as NumPy arrays of the same bits, for every dtype that a row may have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

NUMPY_DTYPES = {
    dtype: torch.empty(0, dtype=dtype, device="cpu").numpy().dtype
    for dtype in (
        *(torch.float16, torch.float32, torch.float64, torch.bool),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    )
}
"""The NumPy dtype of each torch dtype that has one."""
DTYPES = (*NUMPY_DTYPES, torch.bfloat16)
"""Every dtype that a row may have: those that torch can gather, scatter and compare on all devices."""


def tensor_of(memory: bytearray | memoryview, dtype: torch.dtype, shape: Sequence[int], begin: int = 0) -> torch.Tensor:
    """Return a tensor of this shape in writable memory, from byte ``begin`` on; it shares the memory."""
    if len(shape) == 1 and shape[0]:
        return torch.frombuffer(memory, dtype=dtype, count=shape[0], offset=begin)
    # Made by NumPy: each of torch's steps beyond that gives up the interpreter lock, and it takes long to get it back.
    if dtype == torch.bfloat16:
        return torch.from_numpy(np.ndarray(shape, np.int16, memory, begin)).view(dtype)
    return torch.from_numpy(np.ndarray(shape, NUMPY_DTYPES[dtype], memory, begin))


def as_bits(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a CPU tensor as an array that shares its memory; dtypes that NumPy lacks as integers of the same size."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy()
    try:
        return tensor.numpy()
    except RuntimeError:  # a view of a complex tensor's conjugate, which NumPy cannot express
        return tensor.resolve_conj().resolve_neg().numpy()
