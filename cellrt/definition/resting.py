"""Constant weights, which no code writes to: snapshots share them, and those that lie in files may stay there.

A packed weight is a second copy of it. Of one that lies in a file the first is in memory only while it is read:
its memory is given back when a model is registered, and the system fetches it again from the file if it is read.
What is converted while it is read is set aside in a file without a name, which goes with the process.
"""

from __future__ import annotations

import ctypes
import mmap
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cellrt.definition.snapshot import set_constant, weights_of

LEAST_BYTES = 1 << 16
"""Smaller weights stay in memory: they are norms and biases, which are read at every step."""
IN_FILE = "_lies_in_file_of_cellrt"
"""The attribute of a weight that rests."""


def set_aside(weight: Tensor) -> Tensor:
    """Return a copy that lies in a file without a name; the weight itself where there is no room for one."""
    if weight.nbytes < LEAST_BYTES:
        return weight.contiguous()
    content: Any = weight.detach().contiguous().view(torch.uint8).flatten().numpy()
    with suppress(OSError), tempfile.TemporaryFile() as file:
        file.write(content.data)
        file.flush()
        mapped = mmap.mmap(file.fileno(), len(content))
        return torch.frombuffer(mapped, dtype=weight.dtype).view(weight.shape)
    return weight.contiguous()


def keep_constant(weights: Iterable[Tensor]) -> None:
    """Mark weights as constant: only cells have them, and no code will write to them. Note which lie in files."""
    found = list(weights)
    for weight in found:
        set_constant(weight)
    with suppress(OSError):
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
        of_files = [[int(end, 16) for end in line[0].split("-")] for line in lines if line[4] != "0"]
        for weight in found:
            first = weight.data_ptr()
            if any(start <= first and first + weight.nbytes <= end for start, end in of_files):
                setattr(weight, IN_FILE, weight.nbytes >= LEAST_BYTES)


def let_rest(definitions: Iterable[Callable[..., Any]]) -> None:
    """Give back the memory of the weights of these modules that lie in files, and what was used to read them."""
    give_back(one for each in definitions for one in weights_of(each).values())


def give_back(weights: Iterable[Tensor]) -> None:
    """Give back the memory of those of these constant weights that lie in files, and what was used to read them."""
    resting = [one for one in weights if getattr(one, IN_FILE, False)]
    for weight in resting:
        first = -(-weight.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = (weight.data_ptr() + weight.nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
        _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
    if resting and hasattr(_libc(), "malloc_trim"):
        _libc().malloc_trim(0)


@cache
def _libc() -> Any:
    return ctypes.CDLL(None)
