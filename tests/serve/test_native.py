"""A model's own requests: JSON by the form of its example, streams of events, sessions over a websocket."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from cellrt.errors import CancelledError
from cellrt.serve.connection import DIRECT
from cellrt.serve.http import gone
from cellrt.serve.http_native import _SocketSession
from cellrt.serve.inference import unless_gone
from tests.serve.helpers import Server
from tests.serve.test_watching import samples
from tests.steps import HOLD, RAISE
from tests.waiting import until

websocket = pytest.importorskip("websockets.sync.client")


@pytest.mark.parametrize(
    ("model", "request_", "expected"),
    [
        ("chain", [[1, 2], [3, 4]], {"every": [[1, 2], [3.5, 5]], "last": [3.5, 5]}),
        ("letters", "ab", {"codes": [98, 99]}),
        ("two", {"x": [[1, 2]], "y": [[1, 0]], "scale": 2}, {"h": [[4, 4]]}),
        ("half", [1, 2, 3], {"y": [2, 3, 4]}),
        ("tree", [[1, 2], [3, [4, 5]]], {"sum": 15}),
        ("pair", {"words": [1, 2, 3], "bias": 10}, {"sums": [11, 12, 13]}),
        (
            "network",
            {"nodes": [{"id": 1, "value": 4}, {"id": 2, "value": 5}], "edges": [{"source": 1, "target": 2}]},
            {"sum": 9},
        ),
    ],
)
def test_requests_of_every_form(server: Server, model: str, request_: object, expected: object) -> None:
    answer = server.post(f"/v1/models/{model}/infer", {"request": request_})
    assert answer.status_code == 200, answer.text
    assert answer.json() == {"model": model, "version": answer.json()["version"], "results": expected}


@pytest.mark.parametrize(
    ("model", "sent", "words"),
    [
        ("chain", {"request": [[1, 2, 3]]}, "expected shape [-1, 2], got [1, 3]"),
        ("chain", {"request": [["a", "b"]]}, "expected FP32, got texts"),
        ("chain", {"request": {}}, "expected FP32"),
        ("chain", {"request": [[1, 2]], "extra": 1}, "unknown field `extra`; its fields are ['request', "),
        ("chain", {"request": [[1, 2]], "priority": 4}, "<= 3"),
        ("chain", {"request": [[1, 2]], "deadline_s": 0}, "> 0"),
        ("chain", {"request": [[1, 2]], "schedule_by_s": 0}, "> 0"),
        ("chain", {"request": [[1, 2]], "start": True}, "need a session"),
        ("chain", {}, "missing required field `request`"),
        ("letters", {"request": ["a"]}, "expected a text"),
        ("letters", {"request": ""}, "an empty text"),
        ("two", {"request": {"x": [[1, 2]]}}, "expected ['x', 'y', 'scale']"),
        ("two", {"request": {"x": [[1, 2]], "y": [[1, 2]], "scale": 1.5}}, "request.scale: expected an integer"),
        ("half", {"request": [1, 2]}, "expected shape [3]"),
        ("pair", {"request": {"words": [1, "a"], "bias": 1}}, "request.words[1]: expected an integer"),
        ("network", {"request": {"nodes": [1], "edges": []}}, "not a graph"),
    ],
)
def test_a_wrong_request_is_a_400_that_says_where(server: Server, model: str, sent: object, words: str) -> None:
    answer = server.post(f"/v1/models/{model}/infer", sent)
    assert answer.status_code == 400, answer.text
    assert words in answer.json()["error"]


def test_what_is_not_there_is_said_by_path_and_method(server: Server) -> None:
    nowhere, wrong = server.http.get("/v1/models/chain/infers"), server.http.get("/v1/models/chain/infer")
    assert nowhere.status_code == 404 and nowhere.json()["error"].startswith(
        "there is nothing at /v1/models/chain/infers;"
    )
    assert wrong.status_code == 405 and wrong.json()["error"] == "/v1/models/chain/infer takes POST, got GET"


@pytest.mark.parametrize("content", [b"", b"{", b"[" * 200_000, b"\xff", b'{"request": NaN}', b"null"])
def test_what_is_no_json_is_a_400(server: Server, content: bytes) -> None:
    assert server.http.post("/v1/models/chain/infer", content=content).status_code == 400


def test_a_session_goes_on_over_requests(server: Server) -> None:
    def send(**how: object) -> object:
        answer = server.post("/v1/models/kept/infer", {"request": [[8, 8]], "session": "s", **how})
        return answer.json()["results"]["h"] if answer.status_code == 200 else answer.status_code

    assert [send(start=True), send(), send(end=True), send()] == [[[8, 8]], [[12, 12]], [[14, 14]], 410]


def test_a_stream_sends_each_step_and_then_what_has_none(server: Server) -> None:
    sent = {"request": [[1, 2], [3, 4]], "stream": True}
    with server.http.stream("POST", "/v1/models/chain/infer", json=sent) as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        events = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    assert events == [
        {"step": {"every": [1, 2]}},
        {"step": {"every": [3.5, 5]}},
        {"step": {"last": [3.5, 5]}},
        {"done": True},
    ]


@pytest.mark.parametrize(
    ("how", "status"),
    [({"stream": True}, 200), ({"session": "known", "start": True, "end": True, "deadline_s": 0.05}, 504)],
)
def test_every_answer_to_what_was_submitted_says_where_to_find_it(
    server: Server, how: dict[str, object], status: int
) -> None:
    rows = [[1, 2]] if status == 200 else [[HOLD, 0]] * 30
    answer = server.post("/v1/models/kept/infer", {"request": rows, **how})
    assert answer.status_code == status
    story = server.http.get(f"/debug/requests/{answer.headers['x-cellrt-request']}")
    assert story.json()["model"] == "kept"


def test_a_request_that_was_not_submitted_is_to_be_found_nowhere(server: Server) -> None:
    answer = server.post("/v1/models/chain/infer", {"request": 1})
    assert answer.status_code == 400 and "x-cellrt-request" not in answer.headers


def test_a_client_that_leaves_frees_its_request(server: Server) -> None:
    with server.http.stream("POST", "/v1/models/count/infer", json={"request": 4, "stream": True}) as answer:
        lines = answer.iter_lines()  # held, because its end closes the connection
        assert next(lines) == 'data: {"step":{"n":5}}'
        assert server.unfinished() == 1, server.statistics()["models"]["count"]
    until(lambda: server.unfinished() == 0, "the stream is given up")
    with pytest.raises(Exception, match="timed out"):
        server.post("/v1/models/chain/infer", {"request": [[HOLD, 0]] * 50}, timeout=0.3)
    until(lambda: server.unfinished() == 0, "the request is given up", 3.0)


def test_a_client_that_leaves_is_noticed_behind_another_server_too() -> None:
    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def ask() -> None:
        request = Request({"type": "http", "headers": []}, receive)
        with pytest.raises(CancelledError, match="the client is gone"):
            await unless_gone(asyncio.get_running_loop().create_future(), gone(request))

    asyncio.run(ask())


def connect(server: Server, path: str):
    return websocket.connect(f"ws://{server.address}{path}", proxy=None)


def unpacked(message: bytes) -> tuple[int, dict[str, tuple[list[int], list[float]]]]:
    """A binary answer: its number, and the shape and numbers of each output, which are FP32."""
    (size,) = struct.unpack_from("<I", message)
    head, place, found = json.loads(message[4 : 4 + size]), 4 + size, {}
    for output in head["outputs"]:
        assert output["datatype"] == "FP32"
        count = math.prod(output["shape"])
        found[output["name"]] = output["shape"], list(struct.unpack_from(f"<{count}f", message, place))
        place += 4 * count
    assert place == len(message)
    return head["number"], found


def test_a_websocket_is_a_session(server: Server) -> None:
    with connect(server, "/v1/models/kept/session") as socket:
        for rows in ([[8, 8]], [[8, 8], [8, 8]]):
            socket.send(json.dumps({"request": rows}))
        assert json.loads(socket.recv(10)) == {"number": 0, "results": {"h": [[8, 8]]}}
        assert json.loads(socket.recv(10)) == {"number": 1, "results": {"h": [[12, 12], [14, 14]]}}
        socket.send(struct.pack("<2f", 1, 1))  # audio, say, as it is
        assert unpacked(socket.recv(10)) == (2, {"h": ([1, 2], [8, 8])})
        socket.send(b"123")
        assert json.loads(socket.recv(10))["error"] == "expected rows of 8 bytes, got 3 bytes"
        socket.send(json.dumps({"request": [[8, 8]]}))
        assert json.loads(socket.recv(10)) == {"number": 4, "results": {"h": [[12, 12]]}}
    until(lambda: server.statistics()["sessions"]["open"] == 0, "the session ends with the connection")


@pytest.mark.parametrize("model", ["chain", "kept"])
def test_what_must_begin_by_a_time_ends_if_it_has_not(server: Server, model: str) -> None:
    late, in_time = ({"request": [[8, 8]], "schedule_by_s": time_s} for time_s in (1e-6, 60))
    answers = [server.post(f"/v1/models/{model}/infer", sent) for sent in (late, in_time)]
    assert [answer.status_code for answer in answers] == [504, 200]
    assert "not begun within 1e-06 s" in answers[0].text
    with connect(server, f"/v1/models/{model}/session") as socket:
        for sent in (late, in_time):
            socket.send(json.dumps(sent))
        assert json.loads(socket.recv(10))["type"] == "DeadlineError"
        assert json.loads(socket.recv(10)).keys() == {"number", "results"}


def test_an_error_in_a_websocket_is_one_answer(server: Server) -> None:
    with connect(server, "/v1/models/kept/session") as socket:
        for sent in ("nonsense", json.dumps({"request": [[RAISE, 0]]}), json.dumps({"request": [[2, 2]]}), b"abc"):
            socket.send(sent)
        answers = [json.loads(socket.recv(10)) for _ in range(4)]
    assert [answer.get("type") for answer in answers] == ["RequestError", "CellError", None, "RequestError"]


def test_a_websocket_that_is_left_frees_its_requests(server: Server) -> None:
    with connect(server, "/v1/models/kept/session") as socket:
        for _ in range(10):
            socket.send(json.dumps({"request": [[HOLD, 0]] * 20}))
        until(lambda: server.unfinished() > 1, "they run")
    until(lambda: server.unfinished() == 0, "they are given up", 5.0)


def test_a_websocket_that_is_left_with_more_than_may_be_under_way_frees_all(server: Server) -> None:
    with connect(server, "/v1/models/count/session") as socket:
        for _ in range(80):
            socket.send(json.dumps({"request": 4}))
        until(lambda: server.unfinished() == 64, "as many as may be are under way")
    until(lambda: server.unfinished() == 0, "they are given up", 3.0)


def test_a_websocket_of_a_model_without_state_takes_requests_too(server: Server) -> None:
    with connect(server, "/v1/models/letters/session") as socket:
        socket.send(json.dumps({"request": "a"}))
        assert json.loads(socket.recv(10))["results"] == {"codes": [98]}


def test_a_websocket_begins_a_session_that_others_go_on_with_and_ends_it_if_told_so(server: Server) -> None:
    path, ask = "/v1/models/kept/session", json.dumps({"request": [[8, 8]]})
    for flags, h in (("&start=true", 8), ("", 12), ("&end=true", 14)):
        with connect(server, f"{path}?id=named{flags}") as socket:
            socket.send(ask)
            assert json.loads(socket.recv(10))["results"] == {"h": [[h, h]]}
    until(lambda: server.statistics()["sessions"]["open"] == 0, "the session has ended")


def test_a_websockets_messages_go_to_the_engine_that_opened_its_session() -> None:
    """Its successor numbers sessions anew, and would go on with another one."""
    asked: list[str] = []
    first, successor = (SimpleNamespace(submit=lambda *_, name=name: asked.append(name)) for name in ("first", "next"))

    class Backend:
        pieces = first
        settings = SimpleNamespace(limits=SimpleNamespace(max_streams_per_connection=2, max_body_bytes=9))

        def __init__(self) -> None:
            self.engine_lost = asyncio.Event()

        async def session(self, *_: object, **__: object) -> object:
            return object()

        async def end_session(self, *_: object) -> None:
            pass

    async def serve() -> None:
        backend: Any = Backend()

        def listen(session: Any) -> None:
            backend.pieces = successor
            session.hear(b"rows")
            session.lose()

        counted: Any = SimpleNamespace(note_inference=lambda _: None)
        service: Any = SimpleNamespace(backend=backend, draining=asyncio.Event(), measures=counted)
        described: Any = SimpleNamespace(name="kept", keeps_state=True, raw_rows=SimpleNamespace(read=len))
        connection = SimpleNamespace(listen=listen)
        socket: Any = SimpleNamespace(scope={"extensions": {DIRECT: connection}}, query_params={})
        binary: Any = None
        await _SocketSession(service, described, socket, binary).run()

    asyncio.run(serve())
    assert asked == ["first"]


@pytest.mark.parametrize(
    ("query", "words"),
    [
        (f"id={'a' * 300}", "id: expected at most 256 characters, got 300"),
        ("id=a&start=yes", "start: expected true or false, got 'yes'"),
        ("start=true", "start and end need an id"),
    ],
)
def test_a_wrong_address_of_a_websocket_is_said_so(server: Server, query: str, words: str) -> None:
    with connect(server, f"/v1/models/kept/session?{query}") as socket:
        told = json.loads(socket.recv(10))
        assert told == {"error": words, "type": "RequestError"}


def test_a_websocket_that_is_nowhere_is_a_404_that_says_where_they_are(server: Server) -> None:
    with pytest.raises(Exception, match="404") as caught, connect(server, "/v1/models/kept/sessions"):
        pass
    assert "/v1/models/MODEL/session" in caught.value.response.body.decode()


def test_a_plain_get_where_a_websocket_is_says_so(server: Server) -> None:
    answer = server.http.get("/v1/models/kept/session")
    assert (answer.status_code, answer.headers["upgrade"], answer.headers["connection"]) == (
        426,
        "websocket",
        "upgrade",
    )
    told = {"error": "/v1/models/kept/session takes a websocket: upgrade the connection", "type": "RequestError"}
    assert answer.json() == told
    assert server.http.get("/v1/models/kept/session").status_code == 426, "the connection goes on"


def test_messages_of_a_websocket_are_counted_and_its_first_result_is_timed(server: Server) -> None:
    def counts() -> list[float]:
        found = samples(server)
        answered = found["cellrt_http_requests_total"]
        return [
            *(answered.get((("code", code), ("handler", "session")), 0.0) for code in ("200", "400")),
            found.get("cellrt_time_to_first_result_seconds_count", {}).get((("model", "letters"),), 0.0),
        ]

    before = counts()
    with connect(server, "/v1/models/letters/session") as socket:
        for sent in ('{"request": "a"}', "nonsense", '{"request": "b"}'):
            socket.send(sent)
            socket.recv(10)
    until(lambda: [now - then for now, then in zip(counts(), before)] == [2, 1, 1], "all are counted", 10.0)
