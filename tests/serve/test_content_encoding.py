"""Bodies that come compressed: what they hold is what counts, and no more of it is made than may be read."""

from __future__ import annotations

import asyncio
import tracemalloc
import zlib

import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from cellrt.errors import RequestTooLargeError
from cellrt.serve.content_encoding import Decompressed
from cellrt.serve.http import read_body
from tests.serve.helpers import Server

GZIP = 31


def packed(data: bytes, wbits: int = GZIP) -> bytes:
    packer = zlib.compressobj(9, wbits=wbits)
    return packer.compress(data) + packer.flush()


def read(body: bytes, limit: int, part_bytes: int, encoding: bytes = b"gzip") -> bytes:
    """What an application reads of a body that comes in parts."""
    parts = [body[at : at + part_bytes] for at in range(0, len(body), part_bytes)] or [b""]
    found: list[bytes] = []

    async def receive() -> Message:
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        found.append(await read_body(Request(scope, receive), limit))

    scope = {"type": "http", "headers": [(b"content-encoding", encoding)]}
    asyncio.run(Decompressed(app)(scope, receive, None))  # type: ignore[arg-type]
    return found[0]


@pytest.mark.parametrize("part_bytes", [1, 100, 1 << 20])
@pytest.mark.parametrize("size", [0, 1, 1 << 16, 200_000])
@pytest.mark.parametrize(("encoding", "wbits"), [(b"gzip", 31), (b"deflate", 15), (b"GZip", 31)])
def test_what_comes_is_what_was_packed(part_bytes: int, size: int, encoding: bytes, wbits: int) -> None:
    data = bytes(size)
    assert read(packed(data, wbits), size, part_bytes, encoding) == data
    if size:
        with pytest.raises(RequestTooLargeError, match="more than"):
            read(packed(data, wbits), size - 1, part_bytes, encoding)


def test_a_body_is_not_decompressed_beyond_the_limit() -> None:
    bomb = packed(bytes(100 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(RequestTooLargeError):
            read(bomb, 1 << 20, len(bomb))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("encoding", "body", "status", "words"),
    [
        ("br", b"{}", 415, "Content-Encoding: expected one of ['gzip', 'deflate', 'identity'], got 'br'"),
        ("gzip, gzip", b"{}", 415, "got 'gzip, gzip'"),
        ("gzip", b"{}", 400, "expected gzip, as Content-Encoding says"),
        ("gzip", zlib.compress(b"{}"), 400, "expected gzip"),
        ("gzip", b"", 400, "it is cut off"),
        ("deflate", zlib.compress(b"{}")[:-1], 400, "it is cut off"),
        ("deflate", zlib.compress(b"{}") + b"x", 400, "bytes behind its end"),
        ("gzip", packed(bytes(17 << 20)), 413, "more than 16777216 bytes"),
        ("identity", b"{}", 400, "request"),
        ("gzip", packed(b'{"request": [[1, 2]]}'), 200, ""),
    ],
    ids=["br", "twice", "plain", "other", "empty", "cut", "behind", "large", "identity", "right"],
)
def test_an_encoding_that_is_none_is_refused_by_name(
    server: Server, encoding: str, body: bytes, status: int, words: str
) -> None:
    answer = server.post("/v1/models/chain/infer", content=body, headers={"content-encoding": encoding})
    assert answer.status_code == status and words in answer.text, answer.text
