"""Who waits for a request in a front end hears how it went, whatever happens."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from cellrt.serve.collector import Collector


async def test_an_error_that_is_not_ours_reaches_who_waits():
    def submit_many(*_: object, **__: object) -> None:
        raise OSError("too many open files")

    collector = Collector(SimpleNamespace(client=SimpleNamespace(submit_many=submit_many)))
    for waiter in [collector.submit("model", request, None, 0) for request in (1, 2)]:
        with pytest.raises(OSError, match="too many open files"):
            await asyncio.wait_for(waiter, 1)
