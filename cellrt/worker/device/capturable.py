"""A check whether work can be captured: in this mode, it raises where it transfers a value to the host.

A capture that fails on a device costs it more than the capture (see ``CudaDevice.capture``), so work that would fail
is found before, where it does no harm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_NEEDS_VALUES = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
_ATEN = torch.ops.aten
_BY_INDEX = frozenset({_ATEN.index, _ATEN.index_put, _ATEN.index_put_, _ATEN._unsafe_index})
"""Operators that need values only where an index is a mask."""
_MASKS = (torch.bool, torch.uint8)


class NotCapturableError(RuntimeError):
    """Work does something that a capture would refuse."""


class Capturable(TorchDispatchMode):
    """A mode in which operations that transfer a value of the device to the host raise NotCapturableError.

    Args:
        device: the device that does the work.

    Attributes:
        is_random: whether an operation drew random numbers: then torch must prepare each replay.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._type = device.type
        self.is_random = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Return True, so that compiled functions run, whose operations torch would run one by one in a mode."""
        return True

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        tags, packet = function.tags, function.overloadpacket
        if packet in _BY_INDEX:
            needs_values = any(index is not None and index.dtype in _MASKS for index in args[1])
        elif packet is _ATEN.repeat_interleave:
            is_counted = function is not packet.self_int
            needs_values = is_counted and (kwargs or {}).get("output_size") is None
        else:
            needs_values = packet is _ATEN.is_nonzero or not _NEEDS_VALUES.isdisjoint(tags)
        if needs_values and any(given.device.type == self._type for given in _tensors((args, kwargs))):
            raise NotCapturableError(f"{packet} hands values to the host")
        self.is_random |= torch.Tag.nondeterministic_seeded in tags
        result = function(*args, **(kwargs or {}))
        if self._type != "cpu" and packet in (_ATEN._to_copy, _ATEN.copy_):
            self._check_copy(packet, (args, kwargs), result)
        return result

    def _check_copy(self, packet: Any, given: object, result: torch.Tensor) -> None:
        """Raise NotCapturableError for a copy between host and device, which waits unless the
        host's memory is pinned.
        """
        on_host = [value for value in (*_tensors(given), result) if value.device.type == "cpu" and value.dim() > 0]
        on_device = [value for value in (*_tensors(given), result) if value.device.type == self._type]
        if on_device and any(not value.is_pinned() for value in on_host):
            raise NotCapturableError(f"{packet} between the host and {self._type} waits")


def _tensors(given: object) -> list[torch.Tensor]:
    return [value for value in torch.utils._pytree.tree_leaves(given) if isinstance(value, torch.Tensor)]
