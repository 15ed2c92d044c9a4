"""Copies of a cell's definition with its tensors on a device."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cellrt.definition.snapshot import FunctionSnapshot


def move(definition: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a copy of a cell's module or function with its tensors on a device."""
    if isinstance(definition, nn.Module):
        moved = copy.deepcopy(definition).to(device)
        for part in moved.modules():
            if isinstance(part, FunctionSnapshot):
                part._values = {key: _move_value(value, device) for key, value in part._values.items()}
        return moved
    if isinstance(definition, functools.partial):
        args, keywords = _move_value((definition.args, definition.keywords), device)
        return functools.partial(move(definition.func, device), *args, **keywords)
    return definition


def _move_value(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, nn.Module | functools.partial):
        return move(value, device)
    if isinstance(value, dict):
        return {key: _move_value(item, device) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_move_value(item, device) for item in value)
    return value
