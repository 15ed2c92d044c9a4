"""Kernels are interpreted on threads of their own, as a device's worker and a registration do, and keep apart."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from cellrt.kernels.arena_rows import ArenaRows
from cellrt.kernels.table_rows import table_rows

TIMES = 20


def found(count: int, device: str) -> list[list[int]]:
    numbers = ArenaRows(torch.arange(count, device=device), torch.arange(count, device=device))
    return [table_rows(numbers, 7).tolist() for _ in range(TIMES)]


def test_threads_interpret_kernels_at_once(device: str) -> None:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(2) as threads:
            made = list(threads.map(found, (8, 500), (device, device)))
    finally:
        sys.setswitchinterval(interval)
    assert made == [[[min(k, 7) for k in range(count)]] * TIMES for count in (8, 500)]
