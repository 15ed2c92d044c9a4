"""Chooses between the two forms of an operation: its Triton kernel and its plain-torch reference."""

from __future__ import annotations

import functools
import importlib.util
import os

import torch
from torch import Tensor


@functools.cache
def has_triton() -> bool:
    """Return whether Triton is installed: it comes with torch's CUDA builds for Linux."""
    return importlib.util.find_spec("triton") is not None


def uses_triton(tensor: Tensor) -> bool:
    """Return whether an operation on this tensor runs its kernel.

    It does on a CUDA device; on a CPU only in Triton's interpreter, which TRITON_INTERPRET=1 turns on (it must be
    set before Triton is first imported).
    """
    return has_triton() and (tensor.is_cuda or (tensor.device.type == "cpu" and is_interpreted()))


def has_device() -> bool:
    """Return whether kernels run somewhere in this process."""
    return is_interpreted() or (has_triton() and torch.cuda.is_available())


def is_interpreted() -> bool:
    """Return whether kernels are interpreted on the CPU, as tests do."""
    return os.environ.get("TRITON_INTERPRET") == "1"
