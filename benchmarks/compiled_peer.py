"""``torch.compile`` as a peer uses it: a step of any number of rows, weights frozen, compiled before it is timed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.server import Runner

COMPILERS = ("c++", "g++", "clang++")


def has_compiler() -> bool:
    """Return whether there is the C++ compiler that ``torch.compile`` needs on a CPU."""
    return any(shutil.which(name) for name in COMPILERS)


def compiled_step(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the step compiled for any sizes; frozen weights are packed, as in ``benchmarks.packed``."""
    torch._dynamo.config.recompile_limit = 64
    compiled: Callable[..., Any] = torch.compile(step, dynamic=True, options={"freezing": True})
    return compiled


def warmed(run: Runner, requests: Sequence[Any]) -> Runner:
    """Return the runner, once it has met one request, and a few, and all: a single row is compiled by itself."""
    with torch.inference_mode():
        for count in (1, 2, 3, len(requests) // 2, len(requests)):
            for _ in run(requests[:count]):
                pass
    return run
