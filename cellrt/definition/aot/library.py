"""A compiled library in this process: its AOTInductor container, its packed weights, and handles of all weights."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from cellrt.definition.aot.packed_products import packed_values
from cellrt.definition.aot.product_operator import KERNEL
from cellrt.definition.aot.refusal import NotCompiledError, Reason
from cellrt.definition.aot.run_function import RUN
from cellrt.definition.traced_pages import KERNELS
from cellrt.products.packed import product_kernel

CONTAINER_MODELS = 32
"""The number of models in a container, and so of the tasks that it runs at once. No engine has more CPU workers."""
CREATE = "aoti_torch_create_tensor_from_blob_v2"
SHARE, DELETE = "aoti_torch_new_tensor_handle", "aoti_torch_delete_tensor_object"
OPEN, CLOSE = (f"AOTInductorModelContainer{verb}" for verb in ("CreateWithDevice", "Delete"))


class Library:
    """A library with the weights of one cell. The weights must not change while it exists.

    Attributes:
        container: the address of AOTInductor's container.
        handles: the addresses of AOTInductor's handles of the weights.

    Raises NotCompiledError if it cannot be loaded.
    """

    def __init__(self, path: Path, weights: Sequence[torch.Tensor], packed: Mapping[int, bool]) -> None:
        try:
            self._library = ctypes.CDLL(str(path))
            self.container = self._open()
        except (OSError, AttributeError) as error:
            raise NotCompiledError(Reason.NOT_COMPILED, str(error)) from error
        kernels = {KERNEL: product_kernel(), **KERNELS}
        for name, kernel in kernels.items():
            with suppress(ValueError):  # the library does not call this kernel
                ctypes.c_void_p.in_dll(self._library, name).value = kernel.address
        self._memory = list(weights)
        for number, is_transposed in packed.items():
            self._memory[number] = packed_values(weights[number], is_transposed)
        self.handles = [self._handle(value, memory) for value, memory in zip(weights, self._memory)]
        weakref.finalize(self, _close, self._library, self.container, tuple(self.handles)).atexit = False

    def step_words(self) -> list[int]:
        """Return the first words of a step's constants, in the order in which ``run_step.py`` reads them.

        They are the addresses of the functions that a step calls and of the container, and the number of weights.
        """
        return [*map(self.address, (RUN, CREATE, SHARE, DELETE)), self.container, len(self.handles)]

    def address(self, function: str) -> int:
        """Return the address of a C function of the library, or of torch."""
        return ctypes.cast(getattr(self._library, function), ctypes.c_void_p).value or 0

    def _open(self) -> int:
        container = ctypes.c_void_p()
        if getattr(self._library, OPEN)(ctypes.byref(container), ctypes.c_size_t(CONTAINER_MODELS), b"cpu", None) != 0:
            raise OSError("its container cannot be made")
        return container.value or 0

    def _handle(self, value: torch.Tensor, memory: torch.Tensor) -> int:
        """Return the handle of a tensor with the shape, strides and dtype of ``value``, whose data is in ``memory``."""
        shape, strides = ((ctypes.c_int64 * value.dim())(*numbers) for numbers in (value.shape, value.stride()))
        handle, none = ctypes.c_void_p(), ctypes.c_int64(0)
        dtype = ctypes.c_int32(self.dtype_number(value.dtype))
        at, dims = ctypes.c_void_p(memory.data_ptr()), ctypes.c_int64(value.dim())
        cpu, index, layout = ctypes.c_int32(0), ctypes.c_int32(-1), ctypes.c_int32(0)
        create = getattr(self._library, CREATE)
        if create(at, dims, shape, strides, none, dtype, cpu, index, ctypes.byref(handle), layout, None, none) != 0:
            raise NotCompiledError(Reason.NOT_COMPILED, "a weight is refused")
        return handle.value or 0

    def dtype_number(self, dtype: torch.dtype) -> int:
        """Return the number of a dtype in the C interface."""
        return int(getattr(self._library, f"aoti_torch_dtype_{str(dtype).removeprefix('torch.')}")())


def _close(library: ctypes.CDLL, container: int, handles: Sequence[int]) -> None:
    for handle in handles:
        getattr(library, DELETE)(ctypes.c_void_p(handle))
    getattr(library, CLOSE)(ctypes.c_void_p(container))
