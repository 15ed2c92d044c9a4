"""What every test of the benchmarks does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def thread_count() -> Iterator[None]:
    """Workers set torch's thread count: give the tests that follow theirs back."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
