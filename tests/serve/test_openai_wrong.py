"""Whatever a field of OpenAI's protocol holds, the answer is one, or an error object that blames the request."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from cellrt.serve.openai_messages import ChatRequest, CompletionRequest, EmbeddingRequest
from tests.serve.helpers import Server

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
GOOD: dict[str, tuple[Any, dict[str, Any]]] = {
    "completions": (CompletionRequest, {"model": "tiny", "prompt": "a", "max_tokens": 2}),
    "chat/completions": (
        ChatRequest,
        {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
    ),
    "embeddings": (EmbeddingRequest, {"model": "embedder", "input": "a"}),
}
JUNK: list[Any] = [
    "x", "", -1, 0, 2.5, 1e300, 1 << 62, 1 << 80, True, False, [], [[]], ["x", 1], [None], {}, {"x": "y"}, {"type": 1},
    [{"role": 1}], [{"role": "user", "content": {}}], "\0", "\U0001f600" * 40,
]  # fmt: skip


@pytest.fixture(scope="module")
def server(language_server: Server) -> Server:
    return language_server


def assert_told(answer: httpx.Response, *statuses: int) -> None:
    assert answer.status_code in statuses, answer.text
    if answer.status_code != 200:
        error = answer.json()["error"]
        assert {*error} == {"message", "type", "param", "code"}
        assert error["type"] == "invalid_request_error" and error["message"]


@pytest.mark.parametrize("path", GOOD)
def test_a_field_that_holds_anything_fails_only_its_request(server: Server, path: str) -> None:
    kind, good = GOOD[path]
    for field in kind.__struct_encode_fields__:
        for value in JUNK:
            assert_told(server.post(f"/v1/{path}", {**good, field: value}), 200, 400, 404)
    assert server.post(f"/v1/{path}", good).status_code == 200


def test_an_unknown_path_and_a_wrong_method_are_told_in_error_objects(server: Server) -> None:
    assert_told(server.post("/v1/responses", {}), 404)
    assert_told(server.http.get("/v1/completions"), 405)


@pytest.mark.parametrize("path", GOOD)
@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b"3", b'"x"', b"{", b"\xff", b'{"model": "\xff"}', b'{"model": "\\ud800"}', b"[" * 100_000,
     b'{"model": ' + b"[" * 100_000, b"{}", b'{"model": "tiny"}', b'{"model": NaN}'],
)  # fmt: skip
def test_a_body_that_is_no_request_is_told_so(server: Server, path: str, body: bytes) -> None:
    assert_told(server.http.post(f"/v1/{path}", content=body), 400)


@pytest.mark.parametrize("template", [{"messages": []}, {"self": 1}, {"add_generation_prompt": False}, {"x y": [1]}])
def test_what_a_template_is_told_beside_messages_never_stands_for_them(
    server: Server, template: dict[str, Any]
) -> None:
    path, good = "chat/completions", GOOD["chat/completions"][1]
    answer = server.post(f"/v1/{path}", {**good, "chat_template_kwargs": template, "max_tokens": 3})
    plain = server.post(f"/v1/{path}", {**good, "max_tokens": 3})
    assert answer.status_code == 200
    is_same = answer.json()["choices"] == plain.json()["choices"]
    assert is_same or "add_generation_prompt" in template


def test_a_body_that_is_too_large_is_told_so(server: Server) -> None:
    body = json.dumps({**GOOD["completions"][1], "user": "x" * (1 << 25)}).encode()
    answer = server.http.post("/v1/completions", content=body)
    assert_told(answer, 200, 413)
