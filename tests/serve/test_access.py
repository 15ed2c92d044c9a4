"""The middleware where the ASGI server has no answers for websockets that are refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cellrt.serve.access import LONGEST_REASON, AccessMiddleware, AccessPolicy
from cellrt.serve.keys import Keys
from cellrt.serve.measures import Measures


@pytest.mark.parametrize(
    ("headers", "said"),
    [([], "a key is needed"), ([(b"origin", b"http://" + 99 * b"a")], "Origin: pages of 'http://aaa")],
)
def test_a_websocket_is_closed_with_the_reason(headers: list[tuple[bytes, bytes]], said: str) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def nobody(*_: object) -> None:
        raise AssertionError("it was let in")

    middleware = AccessMiddleware(nobody, AccessPolicy(Keys(["a key"])), Measures(is_shared=False))
    scope = {"type": "websocket", "path": "/v1/models/a/session", "headers": headers}
    asyncio.run(middleware(scope, nobody, send))  # type: ignore[arg-type]
    (close,) = sent
    assert (close["type"], close["code"]) == ("websocket.close", 1008)
    assert close["reason"].startswith(said) and len(close["reason"].encode()) <= LONGEST_REASON
