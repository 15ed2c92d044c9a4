"""What coroutines ask between two rounds of their loop goes together, and each hears how its own went."""

from __future__ import annotations

import asyncio

import pytest

from cellrt.engine.collector import Collector


async def test_an_error_that_is_not_ours_reaches_who_waits():
    def submit(*_: object) -> None:
        raise OSError("too many open files")

    collector = Collector()
    for waiter in [collector.submit(submit, "model", request, None, None, 0) for request in (1, 2)]:
        with pytest.raises(OSError, match="too many open files"):
            await asyncio.wait_for(waiter, 1)
