"""What the front sees in a request: its session, whether its answer is streamed; never an error of its own."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cellrt.ray.messages import Call

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def post(path: str, body: object, headers: tuple[tuple[bytes, bytes], ...] = (), extra: bytes = b"") -> Call:
    return Call("POST", path, b"", headers, json.dumps(body).encode() + extra)


@pytest.mark.parametrize(
    ("path", "body", "session"),
    [
        ("/v1/models/m/infer", {"request": 1, "session": "a"}, "m/a"),
        ("/v1/models/m/infer", {"request": 1}, ""),
        ("/v2/models/m/infer", {"inputs": [], "parameters": {"sequence_id": 7}}, "m/7"),
        ("/v2/models/m/infer", {"inputs": [], "parameters": {"sequence_id": 0}}, ""),
        ("/v2/models/m/versions/1/infer", {"inputs": [], "parameters": {"sequence_id": "x/y"}}, "m/x/y"),
        ("/v2/models/m/generate", {"x": 1, "parameters": {"sequence_id": 7}}, "m/7"),
        ("/v2/models/m/ready", {"parameters": {"sequence_id": 7}}, ""),
    ],
)
def test_a_request_s_session_is_found_where_its_protocol_has_it(path: str, body: object, session: str) -> None:
    assert post(path, body).session == session


def test_tensors_behind_the_json_are_not_read() -> None:
    body = {"inputs": [], "parameters": {"sequence_id": 7}}
    size = str(len(json.dumps(body))).encode()
    call = post("/v2/models/m/infer", body, ((b"inference-header-content-length", size),), b"\xff\x00")
    assert call.session == "m/7"


@pytest.mark.parametrize(
    ("path", "body", "is_stream"),
    [
        ("/v1/models/m/infer", {"stream": True}, True),
        ("/v1/models/m/infer", {"stream": "yes"}, False),
        ("/v1/models/m/infer", {}, False),
        ("/v2/models/m/generate_stream", {}, True),
        ("/v2/models/m/infer", {"stream": True}, False),
    ],
)
def test_streams_are_told_from_other_requests(path: str, body: object, is_stream: bool) -> None:
    assert post(path, body).is_stream is is_stream


@given(JSON)
def test_whatever_the_body_is_it_is_left_to_the_replica(body: object) -> None:
    call = post("/v1/models/m/infer", body)
    assert isinstance(call.session, str) and isinstance(call.is_stream, bool)
    assert isinstance(post("/v2/models/m/infer", body).session, str)
