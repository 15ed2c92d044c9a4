"""The modes of torch in which cells run: a worker's, wherever they are run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch


@contextmanager
def workers_modes() -> Iterator[None]:
    """Leaves the default device and autocast that the caller has entered: on workers a cell runs in neither."""
    with ExitStack() as modes:
        if torch._C._len_torch_function_stack():
            modes.enter_context(torch.device("cpu"))
        for device_type in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device_type):
                modes.enter_context(torch.autocast(device_type, enabled=False))
        yield


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """The calling thread uses so many inside, and as many as before after."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
