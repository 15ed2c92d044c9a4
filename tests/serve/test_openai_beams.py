"""Beam search by OpenAI's own client against a live server, as clients of vLLM ask for it: ``use_beam_search``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from cellrt.language.model import LanguageModel
from cellrt.language.served import served
from tests.language import tiny
from tests.serve.helpers import Server
from tests.waiting import until

openai = pytest.importorskip("openai")
pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
PROMPT = list(range(40, 75))
SAID = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(language_server: Server) -> Server:
    return language_server


@pytest.fixture(scope="module")
def model() -> Iterator[LanguageModel]:
    with LanguageModel(served(tiny.checkpoint()), workers=1, page_bytes=1 << 20) as made:
        yield made


def num_open(server: Server) -> int:
    """Sessions, those of other tests' conversations among them."""
    return int(server.statistics()["sessions"]["open"])


def asked(client: Any, prompt: Any = PROMPT, *, n: int = 1, **more: Any) -> Any:
    given = {"max_tokens": 12, **{name: more.pop(name) for name in ("max_tokens", "logprobs") if name in more}}
    body = {"use_beam_search": True, **more}
    return client.completions.create(model="tiny", prompt=prompt, n=n, extra_body=body, **given)


@pytest.mark.parametrize(
    ("n", "more", "how"),
    [
        (3, {}, {"num_beams": 3}),
        (1, {"best_of": 4}, {"num_beams": 4}),
        (2, {"best_of": 5, "length_penalty": -2.0}, {"num_beams": 5, "length_penalty": -2.0}),
        (2, {"best_of": 3, "early_stopping": True}, {"num_beams": 3, "early_stopping": True}),
        (2, {"ignore_eos": True, "stop_token_ids": [9]}, {"num_beams": 2, "ignore_eos": True, "stop_tokens": [9]}),
    ],
)
def test_the_answers_are_the_best_that_a_search_finds(
    client: Any, model: LanguageModel, n: int, more: dict[str, Any], how: dict[str, Any]
) -> None:
    best = model.samples(PROMPT, n, max_tokens=12, **how)
    made = asked(client, n=n, logprobs=0, **more)
    assert [choice.text for choice in made.choices] == [answer.text for answer in best]
    assert [choice.finish_reason for choice in made.choices] == [answer.finish_reason for answer in best]
    assert [choice.logprobs.token_logprobs for choice in made.choices] == [
        [token.logprob for token in answer.tokens] for answer in best
    ]
    counted = made.usage.prompt_tokens, made.usage.completion_tokens
    assert counted == (len(PROMPT), sum(answer.num_tokens for answer in best))


def test_each_of_several_prompts_is_searched_for_itself(server: Server, client: Any) -> None:
    prompts, before = ["hello", "who are you", "a"], num_open(server)
    alone = [choice.text for prompt in prompts for choice in asked(client, prompt, n=2).choices]
    assert [choice.text for choice in asked(client, prompts, n=2).choices] == alone
    until(lambda: num_open(server) == before, "the sessions are closed")


def test_a_chat_is_searched_for_too(client: Any, model: LanguageModel) -> None:
    made = client.chat.completions.create(
        model="tiny", messages=SAID, max_tokens=10, n=2, extra_body={"use_beam_search": True, "best_of": 4}
    )
    best = model.samples(SAID, 2, num_beams=4, max_tokens=10)
    assert [choice.message.content for choice in made.choices] == [answer.text for answer in best]


def test_without_a_search_what_belongs_to_it_changes_nothing(client: Any) -> None:
    plain = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12)
    for more in ({"length_penalty": 3.0, "early_stopping": True}, {"use_beam_search": False, "best_of": 1}):
        same = client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, extra_body=more)
        assert same.choices == plain.choices


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize(
    ("more", "param", "said"),
    [
        ({"stream": True, "n": 2}, "stream", "not supported with use_beam_search"),
        ({"n": 2, "temperature": 0.7}, "use_beam_search", "expected no temperature beside it"),
        ({"n": 2, "stop": ["x"]}, "use_beam_search", "expected no stop beside it"),
        ({"n": 2, "min_tokens": 3}, "use_beam_search", "expected no min_tokens beside it"),
        ({"n": 2, "response_format": {"type": "json_object"}}, "use_beam_search", "no response_format beside it"),
        ({"n": 11}, "n", "expected at most 10"),
        ({"n": 1, "best_of": 11}, "best_of", "expected at most 10"),
        ({"n": 3, "best_of": 2}, "best_of", "at least as many as the 3 answers"),
        ({"best_of": 0}, "best_of", ">= 1"),
        ({"best_of": 129}, "best_of", "<= 128"),
        ({"n": 2, "length_penalty": -11}, "length_penalty", "from -10 to 10"),
        ({"n": 2, "length_penalty": "long"}, "length_penalty", "Expected `float"),
        ({"n": 2, "early_stopping": "never"}, "early_stopping", "Expected `bool"),
        ({"use_beam_search": 1}, "use_beam_search", "Expected `bool"),
        ({"use_beam_search": False, "best_of": 2}, "best_of", "without use_beam_search"),
        ({"n": 2, "max_tokens": 4000}, None, "max_tokens: expected 1 to"),
    ],
)
def test_what_no_search_has_is_told(
    server: Server, path: str, more: dict[str, Any], param: str | None, said: str
) -> None:
    given: dict[str, Any] = {"messages": SAID} if path.startswith("chat") else {"prompt": PROMPT}
    answer = server.post(f"/v1/{path}", {"model": "tiny", "use_beam_search": True, "max_tokens": 5, **given, **more})
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)
    assert said in error["message"]


def test_a_model_that_makes_no_texts_has_no_beams(server: Server) -> None:
    answer = server.post("/v1/completions", {"model": "embedder", "prompt": "a", "n": 2, "use_beam_search": True})
    assert (answer.status_code, "no beams" in answer.json()["error"]["message"]) == (400, True)


def test_beams_of_all_prompts_are_bounded(server: Server) -> None:
    prompts = [[5, 6]] * 20
    answer = server.post(
        "/v1/completions", {"model": "tiny", "prompt": prompts, "n": 1, "best_of": 10, "use_beam_search": True}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")


@pytest.mark.parametrize("late", [{"schedule_by_s": 1e-6}, {"deadline_s": 1e-6}], ids=["begun by", "done by"])
def test_a_search_that_is_late_is_told_so(server: Server, client: Any, late: dict[str, float]) -> None:
    before = num_open(server)
    with pytest.raises(openai.APIStatusError) as caught:
        asked(client, n=3, **late)
    assert caught.value.status_code == 504
    assert asked(client, n=2, **{name: 60 for name in late}, priority=3).choices[0].text
    until(lambda: num_open(server) == before, "the sessions are closed")


def test_who_leaves_ends_the_search(server: Server) -> None:
    before = num_open(server)
    body = {"model": "tiny", "prompt": PROMPT, "n": 8, "max_tokens": 360, "use_beam_search": True, "ignore_eos": True}
    for _ in range(3):
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=0.2, trust_env=False)
    until(lambda: server.unfinished() == 0, "the requests have ended")
    until(lambda: num_open(server) == before, "the sessions are closed")


def test_a_search_says_where_to_find_its_first_request(server: Server) -> None:
    answer = server.post("/v1/completions", {"model": "tiny", "prompt": PROMPT, "n": 2, "use_beam_search": True})
    id = answer.headers["x-cellrt-request"]
    assert server.http.get(f"/debug/requests/{id}").json()["model"] == "tiny"
