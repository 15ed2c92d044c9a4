"""Pages of other origins, in a browser that can reach the server, change nothing at it."""

from __future__ import annotations

import socket

import httpx
import pytest

from cellrt.errors import DefinitionError
from cellrt.serve.server_settings import Settings
from tests.serve.conftest import ALLOWED_ORIGIN as ALLOWED
from tests.serve.helpers import Server

FOREIGN = "http://evil.example"


def unload_answer(server: Server, origin: str) -> httpx.Response:
    headers = {"origin": origin, "content-type": "text/plain"}
    return server.post("/v2/repository/models/nobody/unload", headers=headers)


def unload(server: Server, origin: str) -> int:
    return unload_answer(server, origin).status_code


@pytest.mark.parametrize("origin", [FOREIGN, "null", "http://127.0.0.1:1", ""])
def test_a_page_of_another_origin_changes_nothing(server: Server, origin: str) -> None:
    assert unload(server, origin) == 403
    answer = server.post("/v1/models/letters/infer", {"request": "a"}, headers={"origin": origin})
    assert answer.status_code == 403 and "Origin: pages of" in answer.json()["error"]


def test_the_server_s_own_page_and_origins_that_are_allowed_may(server: Server) -> None:
    for origin in (server.url, server.url.upper(), ALLOWED):
        assert unload(server, origin) == 404
        answer = server.post("/v1/models/letters/infer", {"request": "a"}, headers={"origin": origin})
        assert answer.status_code == 200


def test_what_changes_nothing_is_open_but_not_readable(server: Server) -> None:
    answer = server.http.get("/v1/models", headers={"origin": FOREIGN})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(("origin", "status"), [(FOREIGN, b"403"), (ALLOWED, b"101"), (None, b"101")])
def test_a_websocket_needs_an_origin_of_its_own_or_none(server: Server, origin: str | None, status: bytes) -> None:
    host, port = server.address.split(":")
    head = ["GET /v1/models/letters/session HTTP/1.1", f"Host: {server.address}", "Upgrade: websocket"]
    head += ["Connection: Upgrade", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version: 13"]
    head += [f"Origin: {origin}"] if origin else []
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall("\r\n".join([*head, "", ""]).encode())
        assert sock.recv(64).split()[1] == status


def test_origins_are_several_and_are_taken_as_browsers_write_them() -> None:
    assert Settings(allowed_origins=("https://A.example", "null")).allowed_origins == ("https://a.example", "null")
    for wrong in ("https://a.example", ("https://a.example/page",), (5,)):
        with pytest.raises(DefinitionError, match="expected an origin, such as"):
            Settings(allowed_origins=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("path", "allow"),
    [
        ("/v2/health/ready", {"GET", "HEAD", "OPTIONS"}),
        ("/v1/models/letters/infer", {"POST", "OPTIONS"}),
        ("/v2/models/letters/infer", {"POST", "OPTIONS"}),
    ],
)
def test_options_says_what_a_path_takes(server: Server, path: str, allow: set[str]) -> None:
    answer = server.http.options(path)
    assert (answer.status_code, answer.content) == (204, b"")
    assert set(answer.headers["allow"].split(", ")) == allow
    assert server.http.options("/nowhere").status_code == 404


def test_a_browser_lets_a_page_of_an_allowed_origin_send_and_read(server: Server) -> None:
    asked = {"origin": ALLOWED, "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type"
    told = server.http.options("/v1/models/letters/infer", headers=asked)
    assert told.status_code == 204 and told.headers["access-control-allow-origin"] == ALLOWED
    assert "POST" in told.headers["access-control-allow-methods"]
    assert told.headers["access-control-allow-headers"] == "authorization,content-type"
    for text, status in (("a", 200), ("", 400)):
        answer = server.post("/v1/models/letters/infer", {"request": text}, headers={"origin": ALLOWED})
        assert answer.status_code == status and answer.headers["access-control-allow-origin"] == ALLOWED
        assert answer.headers["vary"] == "Origin"


def test_a_browser_lets_no_page_of_another_origin_send_or_read(server: Server) -> None:
    asked = {"origin": FOREIGN, "access-control-request-method": "POST"}
    for answer in (server.http.options("/v1/models/letters/infer", headers=asked), unload_answer(server, FOREIGN)):
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize(
    "path", ["/v2/health/live", "/v2/health/ready", "/v2/models/letters", "/metrics", "/docs", "/"]
)
def test_head_is_get_without_a_body(server: Server, path: str) -> None:
    head, got = server.http.head(path), server.http.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == got.headers["content-type"]
