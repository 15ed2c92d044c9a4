"""Answers that are JSON of a schema: each fits, beside others whose bits stay the same."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cellrt.errors import RequestError
from cellrt.language import served
from cellrt.language.grammar import Grammars
from cellrt.language.model import LanguageModel
from tests.language import tiny

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
pytest.importorskip("llguidance")
NAMES = {"type": "array", "items": {"enum": ["he", "she", "it"]}, "minItems": 1, "maxItems": 3}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "is_here": {"type": "boolean"},
    },
    "required": ["name", "age", "is_here"],
    "additionalProperties": False,
}


def form_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "any", "schema": schema}}


def assert_is_person(text: str) -> None:
    made = json.loads(text)
    assert made.keys() == PERSON["properties"].keys()
    assert isinstance(made["name"], str) and len(made["name"]) <= 6
    assert type(made["age"]) is int and 0 <= made["age"] <= 130 and type(made["is_here"]) is bool


def odd(tokens: Sequence[int]) -> list[int]:
    return list(range(1, 100, 2))


@pytest.mark.parametrize("options", [{}, *({"temperature": 1.0, "seed": seed} for seed in range(6))])
def test_every_answer_fits_its_schema(model: LanguageModel, options: dict[str, Any]) -> None:
    answer = model.chat(
        [{"role": "user", "content": "who?"}], max_tokens=120, response_format=form_of(PERSON), **options
    )
    assert_is_person(answer.text)
    assert answer.finish_reason == "stop"


def test_a_json_object_is_one(model: LanguageModel) -> None:
    made = model.samples("hello", 3, max_tokens=200, temperature=1.5, seed=2, response_format={"type": "json_object"})
    for answer in made:
        assert answer.text.startswith("{")
        assert answer.finish_reason == "length" or isinstance(json.loads(answer.text), dict)


def test_answers_of_several_forms_and_of_none_are_made_together(model: LanguageModel) -> None:
    """Each has the bits that it has alone, in threads and in one event loop."""
    kinds: list[dict[str, Any]] = [
        {"response_format": form_of(PERSON)},
        {"response_format": form_of(NAMES)},
        {},
        {"mask": odd},
    ]
    asked = [{"max_tokens": 100, "temperature": 0.9, "seed": seed, **kind} for seed in range(2) for kind in kinds]
    alone = [model.generate("hello world", **options) for options in asked]
    with ThreadPoolExecutor(len(asked)) as threads:
        assert list(threads.map(lambda options: model.generate("hello world", **options), asked)) == alone

    async def together() -> list[Any]:
        return await asyncio.gather(*(model.agenerate("hello world", **options) for options in asked))

    assert asyncio.run(together()) == alone
    assert_is_person(alone[0].text)
    assert {*json.loads(alone[1].text)} <= {"he", "she", "it"}


def test_n_answers_of_one_form_are_each_one(model: LanguageModel) -> None:
    options = {"max_tokens": 120, "temperature": 1.0, "seed": 5, "response_format": form_of(PERSON)}
    made = model.samples("hello", 3, **options)
    assert made == asyncio.run(model.asamples("hello", 3, **options))
    for answer in made:
        assert_is_person(answer.text)
    assert len({answer.text for answer in made}) > 1


def test_a_stream_has_the_pieces_of_the_answer(model: LanguageModel) -> None:
    options = {"max_tokens": 120, "response_format": form_of(PERSON)}
    pieces = list(model.stream("hello", **options))
    assert "".join(piece.text for piece in pieces) == model.generate("hello", **options).text
    assert len(pieces) > 5 and pieces[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    "form, match",
    [
        ({"type": "yaml"}, "expected a type of text, json_object, json_schema"),
        (3, "expected a type of"),
        ({"type": "json_schema"}, "expected a schema in json_schema"),
        (form_of({"type": "frob"}), "Invalid type: frob"),
        (form_of({"$ref": "http://nowhere.example/x.json"}), "not present in a registry"),
        (form_of({"type": "string", "pattern": "(" * 50}), "response_format: "),
        (form_of({"enum": [{1, 2}]}), "as JSON has it"),
    ],
)
def test_a_form_that_nobody_can_hold_to_is_refused(model: LanguageModel, form: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        model.generate("hello", max_tokens=3, response_format=form)


def test_a_form_beside_what_works_against_it_is_refused(model: LanguageModel) -> None:
    for more in ({"mask": odd}, {"ignore_eos": True}):
        with pytest.raises(RequestError, match=f"response_format: expected no {next(iter(more))} beside it"):
            model.generate("hello", max_tokens=3, response_format={"type": "json_object"}, **more)


def test_a_model_with_more_tokens_than_its_tokenizer_makes_none_of_those() -> None:
    made = tiny.checkpoint("bare")
    with LanguageModel(served.served(made), workers=1, page_bytes=1 << 20) as model:
        grammars = model.language.grammars
        flags = grammars.of(PERSON).begin()(())
        assert flags.shape == (tiny.vocabulary(),) and flags.sum() >= 1
        wider = Grammars(tiny.tokenizer_json(), tiny.vocabulary() + 40, [tiny.END])
        assert not wider.of({"type": "string"}).begin()(())[tiny.vocabulary() :].any()
