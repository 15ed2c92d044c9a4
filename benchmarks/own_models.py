"""The parts that the served models of users' own cells share: sizes, and weights that are the same in every process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

HIDDEN, TOKENS = 256, 160
Made = TypeVar("Made", bound=nn.Module)


def seeded(make: Callable[[], Made]) -> Made:
    """Return the module, with the same weights in each process, for inference."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make().eval().requires_grad_(False)
