"""Addresses of the functions of CUDA's driver that compiled code calls."""

from __future__ import annotations

import ctypes
import functools
from typing import NamedTuple


class Driver(NamedTuple):
    """Addresses of functions of ``libcuda``; each returns 0, or the number of an error."""

    to_device: int
    to_host: int
    launch: int
    record: int
    wait: int


_NAMES = ("cuMemcpyHtoDAsync_v2", "cuMemcpyDtoHAsync_v2", "cuGraphLaunch", "cuEventRecord", "cuStreamWaitEvent")
"""The names of the functions, in the order of ``Driver``."""


@functools.cache
def find_driver() -> Driver | None:
    """Return the driver of this machine; None if there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        found = [ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0 for name in _NAMES]
    except (OSError, AttributeError):
        return None
    return Driver(*found)
