"""A language model with a state of fixed size, by OpenAI's own client against a live server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cellrt.language.model import LanguageModel
from cellrt.language.served import served
from tests.language import tiny
from tests.serve.helpers import Server
from tests.waiting import until

pytest.importorskip("openai")
pytest.importorskip("tokenizers")
PROMPT = list(range(40, 120))


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server(["--port", "0", "--device", "cpu:1", "tests.serve.language_models:recurrent"]) as made:
        yield made


@pytest.fixture(scope="module")
def model() -> Iterator[LanguageModel]:
    with LanguageModel(served(tiny.recurrent()), workers=1, page_bytes=1 << 20) as made:
        yield made


def texts(client: Any, **asked: Any) -> list[str]:
    made = client.completions.create(model="recurrent", prompt=PROMPT, max_tokens=10, **asked)
    return [choice.text for choice in made.choices]


def test_answers_are_drawn_as_the_request_says(server: Server, client: Any, model: LanguageModel) -> None:
    drawn = texts(client, temperature=1.2, seed=3, n=3, frequency_penalty=0.5)
    how: dict[str, Any] = {"temperature": 1.2, "seed": 3, "frequency_penalty": 0.5}
    assert drawn == [answer.text for answer in model.samples(PROMPT, 3, max_tokens=10, **how)]
    assert len(set(drawn)) == 3
    until(lambda: server.statistics()["sessions"]["open"] == 0, "what they began with is given back")


def test_the_best_answers_are_found(server: Server, client: Any, model: LanguageModel) -> None:
    found = texts(client, n=2, extra_body={"use_beam_search": True, "best_of": 4})
    assert found == [answer.text for answer in model.samples(PROMPT, 2, num_beams=4, max_tokens=10)]
    until(lambda: server.statistics()["sessions"]["open"] == 0, "the sessions are closed")


def test_a_conversation_reads_what_is_new_alone_and_begins_anew_where_it_differs(client: Any) -> None:
    def asked(prompt: list[int], **more: Any) -> Any:
        return client.completions.create(model="recurrent", prompt=prompt, max_tokens=5, extra_body=more)

    for prompt, cached in ((PROMPT, 0), ([*PROMPT[:20], 3, 3], 0), (PROMPT[:10], 0)):
        within = asked(prompt, session_id="mine")
        assert within.choices[0].text == asked(prompt).choices[0].text
        assert within.usage.prompt_tokens_details.cached_tokens == cached


def test_the_likeliest_tokens_are_told(client: Any) -> None:
    made = client.completions.create(model="recurrent", prompt=PROMPT, max_tokens=4, logprobs=3).choices[0].logprobs
    assert [max(best.values()) for best in made.top_logprobs] == made.token_logprobs
