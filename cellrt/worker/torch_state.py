"""Torch's state of each thread: the number of threads of its operations, and its modes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

import torch
from torch.overrides import _get_current_function_mode, _pop_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._python_dispatch import _pop_mode as _pop_dispatch_mode

from cellrt.definition.modes import use_torch_threads

Result = TypeVar("Result")
HOST_THREADS = 1
"""The torch threads of a thread that calls compiled functions for a device; torch compiles again for another number."""


def on_a_new_thread(run: Callable[[], Result]) -> Result:
    """Run a function on a new thread, where torch is in none of the modes that the caller may have entered.

    Those are autocast, a default device and so on. A function that ``torch.compile`` makes in them is not for a
    worker's
    thread.
    """
    with ThreadPoolExecutor(1, "cellrt-compile") as threads:
        return threads.submit(run).result()


class CellMode:
    """The mode in which a cell runs: without gradients; changes that it makes to its thread are undone at the end.

    They are gradients, the number of threads, autocast, and modes such as a default device. State of the whole process
    (the
    default dtype, random seeds) is left alone, as other threads may change it, too.

    It is made on the thread that uses it, any number of times, one after the other.

    Args:
        device_type: "cpu" or so, for autocast.
    """

    __slots__ = ("_before", "_device_type", "_inference")

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._before = self._state()

    def __enter__(self) -> None:
        # The guard of torch.inference_mode, made directly at a third of its time.
        self._inference = torch._C._InferenceMode(True)
        self._inference.__enter__()

    def __exit__(self, *_: object) -> None:
        if self._state() != self._before:
            self._put_back()
        self._inference.__exit__(None, None, None)

    def _state(self) -> tuple[int, int, int, bool]:
        return (
            torch.get_num_threads(),
            torch._C._len_torch_function_stack(),
            torch._C._len_torch_dispatch_stack(),
            torch.is_autocast_enabled(self._device_type),
        )

    def _put_back(self) -> None:
        num_threads, num_functions, num_dispatches, has_autocast = self._before
        if torch._C._len_torch_function_stack() > num_functions:
            torch.set_default_device(None)
        while torch._C._len_torch_function_stack() > num_functions:
            _leave(_get_current_function_mode(), torch._C._len_torch_function_stack, _pop_mode)
        while torch._C._len_torch_dispatch_stack() > num_dispatches:
            _leave(_get_current_dispatch_mode(), torch._C._len_torch_dispatch_stack, _pop_dispatch_mode)
        torch.set_autocast_enabled(self._device_type, has_autocast)
        use_torch_threads(num_threads)


def _leave(mode: Any, depth: Callable[[], int], pop: Callable[[], object]) -> None:
    """Leave a mode that a cell entered, whatever the mode's own code does."""
    before = depth()
    with suppress(BaseException):
        mode.__exit__(None, None, None)
    if depth() >= before:
        pop()
