"""Answers of a form, ``response_format``, by OpenAI's own client against a live server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.serve.helpers import Server
from tests.waiting import until

openai = pytest.importorskip("openai")
pytest.importorskip("llguidance")
from tests.language.test_grammars import NAMES, PERSON, assert_is_person, form_of  # noqa: E402

SAID = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(["--port", "0", "--device", "cpu:1", "tests.serve.language_models:decoder"]) as made:
        yield made


def chat(client: Any, **more: Any) -> Any:
    given = {"model": "tiny", "messages": SAID, "max_tokens": 120, "response_format": form_of(PERSON), **more}
    return client.chat.completions.create(**given)


def test_chats_are_json_of_the_schema_whole_and_streamed(client: Any) -> None:
    choice = chat(client).choices[0]
    assert_is_person(choice.message.content)
    assert choice.finish_reason == "stop"
    pieces = list(chat(client, stream=True))
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == choice.message.content
    assert len(pieces) > 5 and pieces[-1].choices[0].finish_reason == "stop"


def test_completions_have_forms_and_n_answers_too(client: Any) -> None:
    made = client.completions.create(
        model="tiny", prompt=["hello", "who"], n=2, max_tokens=120, temperature=1.0, seed=3,
        extra_body={"response_format": form_of(NAMES)},
    )  # fmt: skip
    assert len(made.choices) == 4
    for choice in made.choices:
        assert {*json.loads(choice.text)} <= {"he", "she", "it"}


def test_answers_of_two_forms_and_of_none_are_made_at_once(client: Any) -> None:
    kinds = [{}, {"response_format": form_of(NAMES)}, {"response_format": {"type": "text"}}]
    alone = [chat(client, **kind).choices for kind in kinds]
    with ThreadPoolExecutor(6) as threads:
        together = list(threads.map(lambda kind: chat(client, **kind).choices, kinds * 2))
    assert together == alone * 2


def test_who_leaves_a_stream_of_a_form_ends_it(server: Server, client: Any) -> None:
    any_object = {"type": "json_object"}
    with chat(client, stream=True, max_tokens=370, temperature=1.0, seed=1, response_format=any_object) as stream:
        next(iter(stream))
    until(lambda: server.unfinished() == 0, "the request has ended")
    until(lambda: server.statistics()["sessions"]["open"] == 0, "its session is closed")
    assert_is_person(chat(client).choices[0].message.content)


@pytest.mark.parametrize("schema", [{"type": "frob"}, {"$ref": "http://nowhere.example/x.json"}])
def test_a_schema_that_nobody_can_hold_to_is_a_wrong_field(client: Any, schema: dict[str, Any]) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            chat(client, response_format=form_of(schema), stream=stream)
        assert caught.value.param == "response_format"


def test_a_conversation_goes_on_behind_an_answer_of_a_form(client: Any) -> None:
    def ask(messages: list[dict[str, str]], **more: Any) -> Any:
        return chat(client, messages=messages, response_format={"type": "text"}, max_tokens=5, extra_body=more)

    first = chat(client, extra_body={"session_id": "mine"}).choices[0].message.content
    said = [*SAID, {"role": "assistant", "content": first}, {"role": "user", "content": "and?"}]
    assert ask(said, session_id="mine").choices[0].message == ask(said).choices[0].message
