"""What the front makes of requests on their way to a replica, without Ray."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("starlette")
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.websockets import WebSocket

from cellrt.errors import CellrtError
from cellrt.ray.front_app import front_app, read_call
from cellrt.serve.access import DENIAL, AccessPolicy
from cellrt.serve.app import let_recurse
from cellrt.serve.http import error_response
from cellrt.serve.keys import Keys
from cellrt.serve.server_settings import MOST_DEPTH, Limits

MOST_BYTES = 10_000
LIMITS = Limits(max_body_bytes=MOST_BYTES, max_depth=MOST_DEPTH)
KEY = "a key"
BODY = json.dumps({"request": 1, "session": "a", "stream": True}).encode()


class Telling:
    """Answers with what it saw of a request."""

    access = AccessPolicy(Keys([KEY]))

    async def answer(self, request: Request) -> Response:
        try:
            call = await read_call(request, LIMITS)
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


@pytest.fixture
def deep() -> Iterator[None]:
    """Python as a front has it, which reads what is as deep as its limit says."""
    before = sys.getrecursionlimit()
    let_recurse(MOST_DEPTH)
    yield
    sys.setrecursionlimit(before)


@pytest.mark.usefixtures("deep")
async def test_the_session_of_a_request_as_deep_as_the_limit_is_seen() -> None:
    body = f'{{"request": {"[" * MOST_DEPTH + "]" * MOST_DEPTH}, "session": "a", "stream": true}}'
    assert (await post(body.encode(), "")).json()[:2] == ["m/a", True]


@pytest.mark.usefixtures("deep")
async def test_what_is_too_deep_to_see_its_session_goes_to_no_replica(depth: int = 4500) -> None:
    answer = await post(f'{{"request": {"[" * depth + "]" * depth}, "session": "a"}}'.encode(), "")
    assert answer.status_code == 400
    assert answer.json()["error"] == f"the request is nested more than {MOST_DEPTH} deep (max_depth)"


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [(gzip.compress(bytes(MOST_BYTES + 1)), "gzip", 413), (b"none", "gzip", 400), (BODY, "br", 415)],
    ids=["too large", "no gzip", "unknown"],
)
async def test_what_cannot_be_decompressed_goes_to_no_replica(body: bytes, encoding: str, status: int) -> None:
    assert (await post(body, encoding)).status_code == status


@pytest.mark.parametrize(
    ("path", "headers", "status", "kind"),
    [
        ("/v1/models/m/session", {}, 401, "Unauthorized"),
        ("/v1/models/m/session", {"x-api-key": KEY, "origin": "http://evil.example"}, 403, "Forbidden"),
        ("/v1/models/m/sessions", {"x-api-key": KEY}, 404, "RequestError"),
    ],
)
async def test_a_websocket_is_refused_as_a_request_is(
    path: str, headers: dict[str, str], status: int, kind: str
) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    scope = {"type": "websocket", "path": path, "query_string": b"", "extensions": {DENIAL: {}}}
    pairs = [(name.encode(), value.encode()) for name, value in {"host": "test", **headers}.items()]
    await front_app(Telling)({**scope, "headers": pairs}, receive, send)
    start, body = sent
    assert (start["type"], start["status"]) == (f"{DENIAL}.start", status)
    assert json.loads(body["body"])["type"] == kind


async def test_counts_of_replicas_need_a_key() -> None:
    transport = httpx.ASGITransport(front_app(Telling))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
        assert (await http.get("/debug/replicas")).json()["type"] == "Unauthorized"
