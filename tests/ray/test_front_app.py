"""What the front makes of requests on their way to a replica, without Ray."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable

import httpx
import pytest

pytest.importorskip("starlette")
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket

from cellrt.errors import CellrtError
from cellrt.ray.front_app import front_app, read_call
from cellrt.serve.http import error_response

MOST_BYTES = 1000
BODY = json.dumps({"request": 1, "session": "a", "stream": True}).encode()


class Telling:
    """Answers with what it saw of a request."""

    async def answer(self, request: Request) -> Response:
        try:
            call = await read_call(request, MOST_BYTES)
        except CellrtError as error:
            return await error_response(request, error)
        encodings = [name for name, _ in call.headers if name == b"content-encoding"]
        return JSONResponse([call.session, call.is_stream, call.body.decode(), len(encodings)])

    async def overview(self, request: Request) -> Response:
        raise NotImplementedError

    async def converse(self, socket: WebSocket) -> None:
        raise NotImplementedError


async def post(body: bytes, encoding: str) -> httpx.Response:
    transport = httpx.ASGITransport(front_app(Telling))
    headers = {"content-encoding": encoding} if encoding else {}
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        return await http.post("/v1/models/m/infer", content=body, headers=headers)


@pytest.mark.parametrize(("encoding", "encode"), [("", bytes), ("gzip", gzip.compress), ("deflate", zlib.compress)])
async def test_the_session_of_a_compressed_request_is_seen(encoding: str, encode: Callable[[bytes], bytes]) -> None:
    answer = await post(encode(BODY), encoding)
    assert answer.json() == ["m/a", True, BODY.decode(), 0]


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [(gzip.compress(bytes(MOST_BYTES + 1)), "gzip", 413), (b"none", "gzip", 400), (BODY, "br", 415)],
    ids=["too large", "no gzip", "unknown"],
)
async def test_what_cannot_be_decompressed_goes_to_no_replica(body: bytes, encoding: str, status: int) -> None:
    assert (await post(body, encoding)).status_code == status
