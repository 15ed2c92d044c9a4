"""What a model is told of how an answer is made: what was asked, what its checkpoint says, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from cellrt.errors import RequestError
from cellrt.language.language import Language
from cellrt.language.options import Options

DRAWS = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 50, "repetition_penalty": 1.1}


def told(generation: dict[str, Any] | None = None, number: int = 0, **options: Any) -> dict[str, Any]:
    language = Language("m", "decoder", 100, 50, generation=generation or {})
    request = Options(**options).request(language, [1, 2], 40, number)
    assert request.pop("prompt") == [1, 2]
    return request


def test_the_likeliest_tokens_need_nothing_said() -> None:
    assert told() == {"max_tokens": 40}
    neutral = {"top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "presence_penalty": 0.0, "logit_bias": {}}
    assert told(temperature=0.0, seed=3, max_tokens=4, **neutral) == {"max_tokens": 4}


def test_what_is_drawn_has_a_seed_of_its_own() -> None:
    assert told(temperature=0.5, seed=7, number=2, top_k=3) == {
        **{"max_tokens": 40, "temperature": 0.5, "top_k": 3, "seed": 9}
    }
    assert told(temperature=0.5) == {"max_tokens": 40, "temperature": 0.5}


def test_a_checkpoint_says_what_a_request_does_not() -> None:
    made = told(DRAWS, top_p=0.5, seed=1)
    assert made == {
        **{"max_tokens": 40, "temperature": 0.6, "top_p": 0.5, "top_k": 50, "repetition_penalty": 1.1, "seed": 1}
    }
    assert told(DRAWS, temperature=0) == {"max_tokens": 40, "repetition_penalty": 1.1}
    assert told({"temperature": 0.6}) == {"max_tokens": 40}


def test_an_encoder_decoder_gives_the_likeliest_tokens_alone() -> None:
    language = Language("m", "encoder-decoder", 100, 50)
    assert Options().request(language, [1], 50) == {"source": [1], "max_steps": 50}
    with pytest.raises(RequestError, match="temperature"):
        Options(temperature=1.0).request(language, [1], 50)


@pytest.mark.parametrize("most", [0, 41])
def test_an_answer_has_room_in_the_context(most: int) -> None:
    with pytest.raises(RequestError, match="max_tokens: expected 1 to 40"):
        told(max_tokens=most)


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_tokens": "x"}, {"max_tokens": 2.5}, {"min_tokens": None}, {"min_tokens": "1"}, {"seed": "x"},
        {"logprobs": True}, {"stop": 5}, {"stop": {"a"}}, {"stop_tokens": 5}, {"stop_tokens": ["a"]},
        {"stop_tokens": [[1]]}, {"stop_tokens": "12"}, {"stop_tokens": [True]},
    ],
)  # fmt: skip
def test_a_field_of_another_type_is_named(wrong: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=f"^{next(iter(wrong))}: expected"):
        Options(**wrong)
