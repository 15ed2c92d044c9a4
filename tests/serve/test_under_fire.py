"""Overload, limits, keys, processes that are killed, and the end: a server of its own, with little room."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from http.client import HTTPResponse
from pathlib import Path

import httpx
import pytest

from tests.serve.helpers import WAIT_S, Server, asked, begun_websocket, children, start
from tests.serve.models import DIE
from tests.steps import HOLD
from tests.waiting import until

KEY = "a-key-that-is-long-enough"
CONFIG = """
front-ends = 2
max_queued_requests = 8
drain_s = 10.0

[limits]
max_body_bytes = 100_000
max_depth = 10
max_items = 8000
max_steps = 2000
max_streams = 2
max_unread = 16
read_timeout_s = 2.0
write_timeout_s = 2.0
"""
HEADERS = {"authorization": f"Bearer {KEY}"}
LONG = {"request": [[HOLD, 0]] * 40}
"""Takes most of a second."""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("serve") / "server.toml"
    path.write_text(CONFIG)
    environment = {"CELLRT_SERVE_API_KEY": KEY}
    with start("chain", "kept", "count", "tree", options=["--config", str(path)], environment=environment) as made:
        made.http.headers.update(HEADERS)
        yield made


def chain(server: Server, **options: object) -> httpx.Response:
    return server.post("/v1/models/chain/infer", {"request": [[1, 2]]}, **options)


@pytest.mark.parametrize(
    "headers", [{}, {"authorization": "Bearer wrong"}, {"authorization": KEY[:-1]}, {"x-api-key": "\xe9"}]
)
def test_nothing_but_health_and_empty_pages_is_open_without_a_key(small: Server, headers: dict[str, str]) -> None:
    with httpx.Client(base_url=small.url, headers={k: v.encode("latin-1") for k, v in headers.items()}) as stranger:
        session = "/v1/models/chain/session"
        for path in ("/v2/models/chain", "/metrics", "/openapi.json", "/debug/timeline", session, "/nowhere"):
            answer = stranger.get(path)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        assert stranger.options("/v2/models/chain").status_code == 204  # a browser asks before it sends its page's key
        assert stranger.get("/v2/health/live").status_code == 200
        assert stranger.get("/v2/health/ready").status_code == 200


def test_a_websocket_without_a_key_is_told_why_it_is_refused(small: Server) -> None:
    refused = pytest.importorskip("websockets.exceptions").InvalidStatus
    connect = pytest.importorskip("websockets.sync.client").connect
    with pytest.raises(refused) as raised, connect(f"ws://{small.address}/v1/models/chain/session", proxy=None):
        pass
    answer = raised.value.response
    told = {"error": "a key is needed: Authorization: Bearer KEY, or X-API-Key", "type": "Unauthorized"}
    assert (answer.status_code, json.loads(answer.body)) == (401, told)
    assert answer.headers["www-authenticate"] == "Bearer"
    assert chain(small).status_code == 200
    assert not any("handshake" in line for line in small.lines), "what a client does wrong is no error of the server"


def test_either_header_has_the_key(small: Server) -> None:
    assert chain(small).status_code == 200
    assert httpx.get(f"{small.url}/v2/models/chain", headers={"x-api-key": KEY}).status_code == 200


@pytest.mark.parametrize(
    ("model", "request_", "status", "words"),
    [
        ("chain", [[1, 2]] * 2001, 413, "at most 2000 rows"),
        ("chain", [[1, 2]] * 40_000, 413, "at most 100000"),
        ("tree", json.loads("[" * 11 + "1" + "]" * 11), 400, "nested more than 10 deep"),
        ("tree", [[1, 2]] * 4000, 413, "at most 8000 items"),
    ],
)
def test_limits_of_a_request(small: Server, model: str, request_: object, status: int, words: str) -> None:
    answer = small.post(f"/v1/models/{model}/infer", {"request": request_})
    assert answer.status_code == status, answer.text
    assert words in answer.json()["error"]


HEAD = f"POST /v1/models/chain/infer HTTP/1.1\r\nauthorization: Bearer {KEY}\r\ncontent-length: 9999\r\n"


@pytest.mark.parametrize("begin", ["", HEAD, f"{HEAD}\r\n"], ids=["nothing", "head", "body"])
@pytest.mark.slow
def test_a_request_that_comes_byte_by_byte_is_given_up_and_others_are_not(small: Server, begin: str) -> None:
    with socket.create_connection((small.http.base_url.host, small.http.base_url.port), WAIT_S) as sock:
        sock.sendall(begin.encode())
        answered = b""
        for _ in range(100):
            assert chain(small).status_code == 200
            sock.settimeout(0.1)
            with suppress(TimeoutError):
                answered = sock.recv(100)
                break
            if begin:
                sock.sendall(b"x")
    assert answered.startswith(b"HTTP/1.1 408 ")


def test_a_body_without_length_is_limited_too(small: Server) -> None:
    answer = small.http.post("/v1/models/chain/infer", content=(b" " * 10_000 for _ in range(20)))
    assert answer.status_code == 413


def test_too_many_requests_are_refused_and_told_when_to_come_again(small: Server) -> None:
    answers: list[httpx.Response] = []
    threads = [
        threading.Thread(target=lambda: answers.append(small.post("/v1/models/chain/infer", LONG))) for _ in range(16)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    statuses = [answer.status_code for answer in answers]
    assert set(statuses) == {200, 429} and statuses.count(200) >= 8
    assert all(int(answer.headers["retry-after"]) >= 1 for answer in answers if answer.status_code == 429)
    text = small.http.get("/metrics").text
    assert f'cellrt_rejections_total{{model="chain"}} {statuses.count(429)}.0' in text


def test_messages_of_websockets_that_are_refused_are_counted(small: Server) -> None:
    connect = pytest.importorskip("websockets.sync.client").connect
    url = f"ws://{small.address}/v1/models/kept/session"
    with ExitStack() as stack:
        socks = [stack.enter_context(connect(url, proxy=None, additional_headers=HEADERS)) for _ in range(12)]
        for sock in socks:
            sock.send(json.dumps(LONG))
        kinds = [json.loads(sock.recv(WAIT_S)).get("type") for sock in socks]
    assert 1 <= kinds.count("OverloadError") <= 4
    line = f'cellrt_rejections_total{{model="kept"}} {kinds.count("OverloadError")}.0'
    until(lambda: line in small.http.get("/metrics").text, "the front ends have counted them")


@pytest.mark.slow
def test_requests_that_come_at_once_are_never_too_large_together() -> None:
    body = b'{"request": [[1, 2]]}'
    message = b"POST /v1/models/chain/infer HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    with start("chain", options=["--max-queued-requests", "4"]) as server, ExitStack() as stack:
        host, port = server.address.split(":")
        (front_end,) = children(server, "front_end")
        socks = [stack.enter_context(socket.create_connection((host, int(port)), WAIT_S)) for _ in range(32)]
        for sock in socks:  # it knows all of them
            sock.sendall(message)
            assert _status(sock) == 200
        os.kill(front_end, signal.SIGSTOP)  # so that it finds all that they send at once
        try:
            for sock in socks:
                sock.sendall(message)
        finally:
            os.kill(front_end, signal.SIGCONT)
        statuses = {_status(sock) for sock in socks}
    assert 200 in statuses and statuses <= {200, 429}


def _status(sock: socket.socket) -> int:
    """Of the next answer, all of which is read."""
    answer = HTTPResponse(sock)
    answer.begin()
    answer.read()
    return answer.status


def test_a_head_without_end_is_refused(small: Server) -> None:
    host, port = small.address.split(":")
    with socket.create_connection((host, int(port)), WAIT_S) as sock:
        sock.sendall(b"GET /v2 HTTP/1.1\r\nHost: a\r\nX: ")
        with suppress(OSError):
            for _ in range(64):
                sock.sendall(b"a" * 65_536)
        with suppress(ConnectionResetError):
            assert sock.recv(12) in (b"HTTP/1.1 400", b"")
    assert small.http.get("/v2", headers={"x-long": "a" * 500_000}).status_code == 200


def test_too_many_streams_are_refused(small: Server) -> None:
    opened: list[socket.socket] = []
    try:
        for _ in range(6):  # three at one of the two front ends, at least
            opened.append(_open_stream(small))
        first_lines = [raw.recv(12) for raw in opened]
        assert set(first_lines) == {b"HTTP/1.1 200", b"HTTP/1.1 429"}
    finally:
        for raw in opened:
            raw.close()
    until(lambda: small.unfinished() == 0, "the streams are given up")


def _open_stream(server: Server) -> socket.socket:
    """A stream of 20,000 steps, asked for over a socket that reads only what it is told to."""
    host, port = server.address.split(":")
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    raw.settimeout(WAIT_S)
    raw.connect((host, int(port)))
    body = json.dumps({"request": 4, "stream": True})
    head = f"POST /v1/models/count/infer HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    raw.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return raw


def test_a_slow_reader_costs_its_own_stream_only(small: Server) -> None:
    raw = _open_stream(small)
    try:
        assert raw.recv(12) == b"HTTP/1.1 200"
        until(lambda: small.unfinished() == 0, "the engine is free of it", 10.0)
        assert chain(small).status_code == 200
        rest = b""
        while b"OverloadError" not in rest and (part := raw.recv(1 << 16)):
            rest += part
        assert b"read too slowly" in rest
    finally:
        raw.close()


def test_a_client_that_reads_nothing_of_its_answers_is_left(small: Server) -> None:
    host, port = small.address.split(":")
    ask = f"GET /openapi.json HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n".encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        own_port = sock.getsockname()[1]
        sock.sendall(ask * 1000)  # more than the system keeps for it
        assert _is_kept(int(port), own_port)
        until(lambda: not _is_kept(int(port), own_port), "it is ended", 10.0)


def _is_kept(port: int, client_port: int) -> bool:
    """Whether the server's end of a connection is open."""
    entries = [line.split()[1:4] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return any(
        (own[-4:], other[-4:], state) == (f"{port:04X}", f"{client_port:04X}", "01") for own, other, state in entries
    )


@pytest.mark.slow
def test_a_killed_engine_is_told_at_once_and_has_a_successor(small: Server) -> None:
    (pid,) = children(small, "process.host")
    outcome: list[httpx.Response] = []
    waiter = threading.Thread(target=lambda: outcome.append(small.post("/v1/models/chain/infer", LONG)))
    waiter.start()
    until(lambda: small.unfinished() == 1, "it runs")
    os.kill(pid, signal.SIGKILL)
    waiter.join(2.0)
    assert outcome and outcome[0].status_code == 503 and "retry-after" in outcome[0].headers
    begin_s = time.monotonic()
    answer = chain(small)
    assert answer.status_code == 503 and answer.json()["type"] == "DeviceError" and time.monotonic() - begin_s < 1.0
    assert small.http.get("/v2/health/live").status_code == 200
    assert small.http.get("/v2/health/ready").status_code == 503
    assert "cellrt_up 0.0" in small.http.get("/metrics").text
    until(lambda: chain(small).status_code == 200, "its successor serves")
    assert small.post("/v1/models/kept/infer", {"request": [[1, 1]], "session": "gone"}).status_code == 410


@pytest.mark.slow
def test_websockets_go_on_with_the_next_engine_and_lost_sessions_are_closed(small: Server) -> None:
    pytest.importorskip("websockets")
    ask, lines = json.dumps({"request": [[8, 8]]}), len(small.lines)
    with ExitStack() as stack:
        stateless, session, left = (
            begun_websocket(small, model, ask, stack, HEADERS) for model in ("chain", "kept", "kept")
        )
        (pid,) = children(small, "process.host")
        os.kill(pid, signal.SIGKILL)
        left.close()
        with pytest.raises(Exception, match="1012"):
            session.recv(10)
        stateless.send(ask)
        assert json.loads(stateless.recv(10))["type"] == "DeviceError"
        until(lambda: chain(small).status_code == 200, "its successor serves")
        until(lambda: "results" in asked(stateless, ask), "the websocket is served by it")
    assert not [line for line in small.lines[lines:] if "Traceback" in line]


def test_a_killed_front_end_has_a_successor(small: Server) -> None:
    before = set(children(small, "front_end"))
    assert len(before) == 2
    os.kill(min(before), signal.SIGKILL)
    until(lambda: len(set(children(small, "front_end")) - before) == 1, "another is started")
    for _ in range(20):
        with httpx.Client(base_url=small.url, headers=HEADERS, timeout=WAIT_S) as fresh:
            until(lambda fresh=fresh: chain_by(fresh) == 200, "every connection is answered")


@pytest.mark.slow
def test_streams_of_killed_front_ends_are_not_counted_as_open(small: Server) -> None:
    until(lambda: len(children(small, "front_end")) == 2, "there are two")
    until(small.is_ready, "it is ready")
    before = set(children(small, "front_end"))
    with small.streaming("count", 4):
        until(lambda: small.gauge("cellrt_streams_open") > 0, "a stream is counted")
        for pid in before:
            os.kill(pid, signal.SIGKILL)
    until(lambda: len(set(children(small, "front_end")) - before) == 2, "others are started")
    small.http.close()
    small.http = httpx.Client(base_url=small.url, headers=HEADERS, timeout=WAIT_S)
    assert small.gauge("cellrt_streams_open") == 0


def test_an_id_may_be_used_again_whichever_front_end_ended_its_session(small: Server) -> None:
    until(small.is_ready, "it is ready")
    with ExitStack() as stack:
        clients = [stack.enter_context(httpx.Client(base_url=small.url, headers=HEADERS)) for _ in range(16)]
        for turn in range(8):
            for place, client in enumerate(clients):
                how = {"session": "again", "start": place == 0, "end": place == len(clients) - 1}
                answer = client.post("/v1/models/kept/infer", json={"request": [[turn, 1]], **how}, timeout=WAIT_S)
                h = answer.json()["results"]["h"]
                assert h == [[turn * (2 - 0.5**place), 2 - 0.5**place]], (turn, place, answer.text)
            clients = clients[1:] + clients[:1]
    assert small.statistics()["sessions"]["open"] == 0


def chain_by(client: httpx.Client) -> int:
    return client.post("/v1/models/chain/infer", json={"request": [[1, 2]]}).status_code


def test_sigterm_ends_what_was_begun_and_then_everything(small: Server) -> None:
    """The last of those that use this server."""
    until(small.is_ready, "it is ready")
    outcome: list[httpx.Response] = []
    waiter = threading.Thread(target=lambda: outcome.append(small.post("/v1/models/chain/infer", LONG)))
    waiter.start()
    until(lambda: small.unfinished() == 1, "it runs")
    pids = [small.process.pid, *children(small, "cellrt")]
    small.process.send_signal(signal.SIGTERM)
    until(lambda: not _is_open(small), "whoever comes now is refused")
    waiter.join(WAIT_S)
    assert outcome[0].status_code == 200
    assert small.process.wait(WAIT_S) == 0
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "every process has ended")


def _is_open(server: Server) -> bool:
    host, port = server.address.split(":")
    try:
        socket.create_connection((host, int(port)), 1.0).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.slow
def test_the_last_worker_s_death_is_told_within_a_second_and_the_engine_has_a_successor() -> None:
    with start("chain", "deadly") as server:
        assert server.post("/v1/models/deadly/infer", {"request": [[1, 2]]}).status_code == 200
        answer = server.post("/v1/models/deadly/infer", {"request": [[DIE, 0]]})
        assert answer.status_code == 503 and answer.json()["type"] == "DeviceError"
        until(lambda: not server.is_ready(), "it says so", 1.5)
        until(server.is_ready, "its successor is ready")
        assert chain(server).status_code == 200


@pytest.mark.slow
def test_a_second_sigterm_ends_at_once() -> None:
    server = start("chain")
    waiter = threading.Thread(target=lambda: _ignoring(server))
    waiter.start()
    until(lambda: server.unfinished() == 1, "it runs")
    pids = children(server, "cellrt")
    server.process.send_signal(signal.SIGTERM)
    until(lambda: any("ending: at most" in line for line in server.lines), "the first is heard")
    begin_s = time.monotonic()
    assert server.close() == 1
    assert time.monotonic() - begin_s < 1.0
    waiter.join(WAIT_S)
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "every process has ended")


def _ignoring(server: Server) -> None:
    with suppress(httpx.HTTPError):
        server.post("/v1/models/chain/infer", {"request": [[HOLD, 0]] * 200})
