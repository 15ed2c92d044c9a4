"""OpenAI's own client against a live server of small language models: what it asks, it is answered."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import numpy as np
import pytest

from cellrt.errors import DeadlineError
from cellrt.language.text import Tokenizer
from cellrt.serve.http import EventStream
from cellrt.serve.openai_messages import error_json
from tests.language import tiny
from tests.serve.helpers import Server
from tests.waiting import until

openai = pytest.importorskip("openai")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
SAID = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(language_server: Server) -> Server:
    return language_server


def test_models_are_told_in_both_shapes(server: Server, client: Any) -> None:
    assert {"tiny", "embedder", "chain", "tree"} == {model.id for model in client.models.list()}
    assert server.http.get("/v1/models").json()["models"] == ["chain", "embedder", "tiny", "tree"]
    assert client.models.retrieve("tiny").id == "tiny"
    assert server.http.get("/health").json() == {"ready": True}
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("none")


def test_a_stream_has_the_text_of_the_whole_completion(client: Any) -> None:
    whole = client.completions.create(model="tiny", prompt="hello world", max_tokens=20)
    pieces = list(client.completions.create(model="tiny", prompt="hello world", max_tokens=20, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == whole.choices[0].text
    assert len(pieces) > 2 and pieces[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    assert whole.usage.completion_tokens == 20
    assert whole.usage.total_tokens == 20 + whole.usage.prompt_tokens


def test_a_chat_is_the_completion_of_what_the_template_makes_of_it(client: Any) -> None:
    text = "<|start|>user: hello<|end|>\n<|start|>assistant:"
    chat = client.chat.completions.create(model="tiny", messages=SAID, max_completion_tokens=20)
    assert chat.choices[0].message.role == "assistant"
    assert (
        chat.choices[0].message.content
        == client.completions.create(model="tiny", prompt=text, max_tokens=20).choices[0].text
    )


def test_a_chat_that_is_streamed_ends_with_its_usage(client: Any) -> None:
    options = {"model": "tiny", "messages": SAID, "max_tokens": 12}
    whole = client.chat.completions.create(**options)
    *pieces, last = client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    deltas = [piece.choices[0].delta for piece in pieces]
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert deltas[0].role == "assistant" and pieces[-1].choices[0].finish_reason == "length"
    assert not last.choices and last.usage == whole.usage


def test_parts_of_text_are_one_text(client: Any) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    texts = [
        client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": content}], max_tokens=8
        ).choices[0]
        for content in ("hello", parts)
    ]
    assert texts[0] == texts[1]


def test_prompts_are_texts_or_tokens_one_or_many(client: Any) -> None:
    def texts(prompt: object) -> list[str]:
        made = client.completions.create(model="tiny", prompt=prompt, max_tokens=8)
        assert [choice.index for choice in made.choices] == list(range(len(made.choices)))
        return [choice.text for choice in made.choices]

    one, other = texts("hello"), texts([7, 8, 9])
    assert texts(["hello", "hello"]) == one * 2
    assert texts([[7, 8, 9], [7, 8, 9]]) == other * 2


@pytest.mark.parametrize("late", [{"schedule_by_s": 1e-6}, {"deadline_s": 1e-6}], ids=["begun by", "done by"])
def test_what_is_late_is_told_so(client: Any, late: dict[str, float]) -> None:
    for ask, given in (
        (client.completions.create, {"model": "tiny", "prompt": "hello", "max_tokens": 5}),
        (client.chat.completions.create, {"model": "tiny", "messages": SAID, "max_tokens": 5}),
        (client.embeddings.create, {"model": "embedder", "input": "hello"}),
    ):
        with pytest.raises(openai.APIStatusError) as caught:
            ask(**given, extra_body=late)
        assert caught.value.status_code == 504
        ask(**given, extra_body={name: 60 for name in late})


def test_n_answers_are_choices_of_their_own(client: Any) -> None:
    made = client.completions.create(model="tiny", prompt=["hello", "world"], n=2, max_tokens=8)
    texts = [choice.text for choice in made.choices]
    assert len(texts) == 4 and texts[0] == texts[1] and texts[2] == texts[3]  # the likeliest, each time
    pieces = client.completions.create(model="tiny", prompt=["hello", "world"], n=2, max_tokens=8, stream=True)
    streamed = ["", "", "", ""]
    for piece in pieces:
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert streamed == texts


def test_a_long_prompt_is_read_once_for_its_answers(server: Server, client: Any) -> None:
    prompts, more = [list(range(60, 160)), [5, 6], list(range(200, 80, -1))], {"max_tokens": 8, "temperature": 1.0}

    def asked_of(prompt: Any, **options: Any) -> list[str]:
        made = client.completions.create(model="tiny", prompt=prompt, **more, **options)
        assert made.usage.prompt_tokens_details.cached_tokens == 0
        return [choice.text for choice in made.choices]

    alone = [text for prompt in prompts for seed in range(3) for text in asked_of(prompt, seed=seed)]
    assert asked_of(prompts, n=3, seed=0) == alone
    streamed = [""] * 9
    for piece in client.completions.create(model="tiny", prompt=prompts, n=3, seed=0, stream=True, **more):
        streamed[piece.choices[0].index] += piece.choices[0].text
    assert streamed == alone
    until(lambda: server.statistics()["sessions"]["open"] == 0, "what they began with is given back")


def test_a_stop_string_cuts_an_answer(client: Any) -> None:
    text = client.completions.create(model="tiny", prompt="hello", max_tokens=30).choices[0].text
    stop = text[5:8]
    cut = client.completions.create(model="tiny", prompt="hello", max_tokens=30, stop=[stop, "never"]).choices[0]
    assert (cut.text, cut.finish_reason) == (text[: text.index(stop)], "stop")


def test_logprobs_are_those_of_the_tokens(client: Any) -> None:
    made = client.completions.create(model="tiny", prompt="hello", max_tokens=6, logprobs=0).choices[0].logprobs
    assert len(made.tokens) == len(made.token_logprobs) == 6 and max(made.token_logprobs) <= 0
    chat = client.chat.completions.create(model="tiny", messages=SAID, max_tokens=6, logprobs=True).choices[0]
    assert len(chat.logprobs.content) == 6
    pieces = client.completions.create(model="tiny", prompt="hello", max_tokens=6, logprobs=0, stream=True)
    streamed = [logprob for piece in pieces for logprob in piece.choices[0].logprobs.token_logprobs]
    assert streamed == made.token_logprobs


def test_the_likeliest_tokens_are_told_as_many_as_were_asked_for(client: Any) -> None:
    made = client.completions.create(model="tiny", prompt="hello", max_tokens=4, logprobs=3).choices[0].logprobs
    assert [max(best.values()) for best in made.top_logprobs] == made.token_logprobs
    chat = client.chat.completions.create(
        model="tiny", messages=SAID, max_tokens=4, logprobs=True, top_logprobs=2
    ).choices[0]
    assert [len(each.top_logprobs) for each in chat.logprobs.content] == [2] * 4


def test_a_seed_draws_the_same_tokens_and_each_of_n_answers_others(client: Any) -> None:
    def drawn(**options: Any) -> list[str]:
        made = client.completions.create(model="tiny", prompt="hello", max_tokens=12, temperature=1.5, **options)
        return [choice.text for choice in made.choices]

    texts = drawn(seed=7, n=3)
    assert texts == drawn(seed=7, n=3) and len(set(texts)) == 3
    assert drawn(seed=9) == texts[2:]
    assert drawn() != drawn()


def test_how_tokens_are_chosen_is_as_a_request_says(client: Any) -> None:
    free = client.completions.create(model="tiny", prompt="hello", max_tokens=12, logprobs=0).choices[0]
    biased = client.completions.create(model="tiny", prompt="hello", max_tokens=4, logit_bias={"72": 100}).choices[0]
    assert biased.text == tiny_text([72] * 4) != free.text
    ended = client.completions.create(
        model="tiny", prompt="hello", max_tokens=12, extra_body={"stop_token_ids": [72], "min_tokens": 3},
        logit_bias={"72": 100},
    )  # fmt: skip
    assert (ended.usage.completion_tokens, ended.choices[0].finish_reason) == (4, "stop")


def tiny_text(tokens: list[int]) -> str:
    return Tokenizer(tiny.tokenizer_json()).decode(tokens)


def test_embeddings_are_numbers_or_their_bytes(server: Server, client: Any) -> None:
    given = {"model": "embedder", "input": ["hello", "world"]}
    numbers = server.post("/v1/embeddings", {**given, "encoding_format": "float"}).json()["data"]
    packed = server.post("/v1/embeddings", {**given, "encoding_format": "base64"}).json()["data"]
    for number, bits in zip(numbers, packed, strict=True):
        assert np.frombuffer(base64.b64decode(bits["embedding"]), "<f4").tolist() == number["embedding"]
    assert np.linalg.norm(numbers[0]["embedding"]) == pytest.approx(1)
    made = client.embeddings.create(**given)
    assert [each.embedding for each in made.data] == [each["embedding"] for each in numbers]
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        client.embeddings.create(**given, dimensions=8)


def test_as_many_texts_are_embedded_at_once_as_openai_takes(client: Any) -> None:
    texts = [[token % 200, token // 200] for token in range(2048)]
    made = client.embeddings.create(model="embedder", input=texts)
    assert [each.index for each in made.data] == list(range(2048))
    some = client.embeddings.create(model="embedder", input=texts[700:703])
    assert [each.embedding for each in some.data] == [each.embedding for each in made.data[700:703]]
    with pytest.raises(openai.BadRequestError, match="1 to 2048 texts"):
        client.embeddings.create(model="embedder", input=[*texts, [1]])


@pytest.mark.parametrize(
    ("path", "body", "param", "said"),
    [
        ("completions", {"model": "tiny", "prompt": 3}, "prompt", "Expected"),
        ("completions", {"model": "tiny", "prompt": "a", "n": "two"}, "n", "Expected `int"),
        ("completions", {"model": "tiny", "prompt": "a", "temperature": -1}, "temperature", ">= 0"),
        ("completions", {"model": "tiny", "prompt": "a", "max_tokens": 0}, "max_tokens", ">= 1"),
        ("completions", {"model": "tiny", "prompt": ["a", [1]]}, "prompt", "expected a text"),
        ("completions", {"model": "tiny", "prompt": [9999]}, None, "expected tokens from 0 to"),
        ("completions", {"model": "tiny", "prompt": "a", "max_tokens": 4000}, None, "max_tokens: expected 1 to"),
        ("completions", {"model": "tiny", "prompt": "a" * 500}, None, "a context of 400"),
        ("completions", {"model": "tiny", "prompt": "a" * (15 << 20)}, None, "15728640 characters; a context of 400"),
        ("completions", {"model": "tiny", "prompt": [5] * (1 << 20)}, None, "1048576 tokens; model 'tiny' has"),
        ("completions", {"model": "tiny", "prompt": "a", "echo": True}, "echo", "not supported"),
        ("completions", {"model": "tiny"}, None, "prompt"),
        ("completions", {"model": "embedder", "prompt": "a"}, None, "makes embeddings"),
        ("completions", {"model": "chain", "prompt": "a"}, None, "no language model"),
        ("chat/completions", {"model": "tiny", "messages": []}, "messages", ">= 1"),
        ("chat/completions", {"model": "tiny", "messages": SAID, "tools": [{}]}, "tools", "not supported"),
        (
            "chat/completions",
            {"model": "tiny", "messages": SAID, "response_format": {"type": "yaml"}},
            "response_format",
            "Invalid enum value 'yaml'",
        ),
        (
            "chat/completions",
            {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages",
            "of type text",
        ),
        ("chat/completions", {"model": "tiny", "messages": SAID, "stop": [""]}, None, "stop: expected"),
        ("chat/completions", {"model": "tiny", "messages": SAID, "n": 0}, "n", ">= 1"),
        ("embeddings", {"model": "tiny", "input": "a"}, None, "no embeddings"),
        ("embeddings", {"model": "embedder", "input": "a" * 99}, None, "1 to 64 tokens"),
    ],
)
def test_what_is_wrong_is_told_as_openai_tells_it(
    server: Server, path: str, body: dict[str, Any], param: str | None, said: str
) -> None:
    answer = server.post(f"/v1/{path}", body)
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert said in error["message"]


def test_an_unknown_model_is_not_found(client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="none", messages=SAID)
    assert caught.value.code == "model_not_found"


def test_unknown_fields_are_ignored(client: Any) -> None:
    made = client.completions.create(
        model="tiny", prompt="hello", max_tokens=2, user="me", extra_body={"beam_width": 3, "ignore_eos": None}
    )
    assert made.usage.completion_tokens == 2


def test_an_error_before_the_first_token_is_the_answer_of_a_stream(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="context of 400"):
        client.completions.create(model="tiny", prompt="a" * 500, stream=True)


async def test_an_error_after_the_first_piece_is_an_event() -> None:
    async def events() -> AsyncIterator[bytes]:
        yield b"{}"
        raise DeadlineError("too late")

    async def receive() -> dict[str, Any]:
        await asyncio.Event().wait()
        return {}

    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await EventStream(events(), 1.0, {}, error_json)({"type": "http"}, receive, send)
    assert [message.get("status") for message in sent] == [200, None, None, None]
    error = json.loads(sent[2]["body"].removeprefix(b"data: "))["error"]
    assert error == {"message": "too late", "type": "server_error", "param": None, "code": None}


def test_who_leaves_before_the_answer_ends_all_its_requests(server: Server) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 390, "n": 100}

    def leave(_: int) -> None:
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.3, trust_env=False)

    with ThreadPoolExecutor(8) as clients:  # more than ends in the second for which clients may be half there
        list(clients.map(leave, range(8)))
    until(lambda: server.unfinished() == 0, "the requests have ended")
    assert server.statistics()["errors"].get("CancelledError", 0) >= 10


def test_an_answer_says_where_to_find_its_request(server: Server) -> None:
    answer = server.post("/v1/completions", {"model": "tiny", "prompt": "hello", "max_tokens": 2})
    id = answer.headers["x-cellrt-request"]
    assert server.http.get(f"/debug/requests/{id}").json()["model"] == "tiny"


def test_who_leaves_a_stream_ends_its_request(server: Server, client: Any) -> None:
    before = server.statistics()["errors"].get("CancelledError", 0)
    with ExitStack() as streams:  # several, as one may be done before it is seen to be left
        asked = {"model": "tiny", "prompt": "hello", "max_tokens": 390, "stream": True}
        for stream in [streams.enter_context(client.completions.create(**asked)) for _ in range(24)]:
            next(iter(stream))
    until(lambda: server.unfinished() == 0, "the request has ended")
    assert server.statistics()["errors"].get("CancelledError", 0) > before


def asked(client: Any, prompt: list[int], **more: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, max_tokens=5, extra_body=more)


def test_a_conversation_reads_what_is_new_alone_and_changes_no_answer(server: Server, client: Any) -> None:
    prompt, read = list(range(40)), 0
    for _ in range(3):
        alone, within = asked(client, prompt), asked(client, prompt, session_id="mine")
        assert within.choices[0].text == alone.choices[0].text
        assert within.usage.prompt_tokens_details.cached_tokens == read
        request = {"prompt": prompt, "max_tokens": 5}
        made = server.post("/v1/models/tiny/infer", {"request": request}).json()["results"]["token"]
        prompt, read = [*prompt, *made, 1, 2], len(prompt) + len(made) - 1


def test_another_prompt_in_a_conversation_is_read_from_where_it_differs(client: Any) -> None:
    asked(client, [1, 2, 3, 4], session_id="other")
    for prompt, cached in (([1, 2, 9, 8, 7], 2), ([5, 6], 0)):
        made = asked(client, prompt, session_id="other")
        assert made.choices[0].text == asked(client, prompt).choices[0].text
        assert made.usage.prompt_tokens_details.cached_tokens == cached


def test_a_stop_string_in_a_conversation_leaves_nothing_unseen(client: Any) -> None:
    text = asked(client, [1, 2, 3, 4]).choices[0].text
    cut = asked(client, [1, 2, 3, 4], session_id="cut", stop=[text[2]])
    assert cut.choices[0].text == text[:2]
    longer = [1, 2, 3, 4, 5]
    made = asked(client, longer, session_id="cut")
    assert made.choices[0].text == asked(client, longer).choices[0].text
    assert made.usage.prompt_tokens_details.cached_tokens == 4
