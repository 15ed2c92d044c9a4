"""The modes of torch in which cells run: a worker's, wherever they are run; and what stays as the caller has it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import _pop_mode_temporarily
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def workers_modes() -> Iterator[None]:
    """Leave the modes that the caller has entered, such as a default device and autocast: on workers a cell runs in
    none.

    What cells draw inside, no generator of the process has drawn at the end.
    """
    with ExitStack() as modes:
        modes.enter_context(undrawn())
        if torch._C._len_torch_function_stack():
            while torch._C._len_torch_function_stack():
                modes.enter_context(_pop_mode_temporarily())
            modes.enter_context(torch.device("cpu"))  # code that asks for the default device is told so
        if torch._C._len_torch_dispatch_stack():
            modes.enter_context(_disable_current_modes())
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                modes.enter_context(torch.autocast(device_type, enabled=False))
        yield


@contextmanager
def undrawn() -> Iterator[None]:
    """Give the generators of torch (on the CPU), NumPy and Python their states back, if something was drawn inside."""
    of_torch, of_numpy, of_python = torch.random.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        if not torch.equal(torch.random.get_rng_state(), of_torch):
            torch.random.set_rng_state(of_torch)
        if not _are_same(np.random.get_state(), of_numpy):
            np.random.set_state(of_numpy)
        if random.getstate() != of_python:
            random.setstate(of_python)


def _are_same(one: Any, other: Any) -> bool:
    return all(np.array_equal(its, theirs) for its, theirs in zip(one, other))


def use_torch_threads(count: int) -> None:
    """Set the number for the calling thread, for good; threads that begin later get what they would have got."""
    # At its first operation a thread takes over the number that any thread set last; asking for it is an operation.
    torch.get_num_threads()
    with _SETTING:
        of_others: list[int] = []
        _on_a_new_thread(lambda: of_others.append(torch.get_num_threads()))
        torch.set_num_threads(count)
        if of_others != [count]:
            _on_a_new_thread(lambda: torch.set_num_threads(*of_others))


_SETTING = threading.Lock()
"""Held between asking what threads get and saying it again."""


def _on_a_new_thread(run: Callable[[], object]) -> None:
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Let the calling thread use ``count`` threads inside the context, and as many as before after it."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    use_torch_threads(count)
    try:
        yield
    finally:
        use_torch_threads(before)
