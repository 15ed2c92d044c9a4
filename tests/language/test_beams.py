"""Beam search: the answer is that of ``transformers``, and what beams have in common is held once."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

import cellrt
from cellrt.engine.session_limits import SessionLimits
from cellrt.errors import DeadlineError, RequestError
from cellrt.language import beams, served
from cellrt.language.checkpoints import read_checkpoint
from cellrt.language.model import LanguageModel
from tests.language import tiny
from tests.language.small_models import saved
from tests.waiting import until

pytest.importorskip("tokenizers")
PROMPTS = [[1, 7, 9, 3, 3, 11, 50], [5], list(range(3, 43)), [58, 4]]
HOW: list[dict[str, Any]] = [
    {"num_beams": 2},
    {"num_beams": 4, "length_penalty": 2.0},
    {"num_beams": 3, "length_penalty": -1.0},
    {"num_beams": 3, "length_penalty": 0.0, "early_stopping": True},
]
NAMES = ["Llama", "Llama 3", "GPT-2", "Qwen 3", "Mistral", "Mamba 2"]
TEXT = [token % 200 for token in range(7, 7 * 90, 7)]


def all_closed(engine: Any) -> None:
    until(lambda: engine.statistics()["sessions"]["open"] == 0, "the sessions are closed")


@pytest.mark.parametrize("name", NAMES)
@torch.inference_mode()
def test_the_answer_is_that_of_transformers(name: str, engine: cellrt.Engine, tmp_path: Path) -> None:
    reference = saved(name, tmp_path)
    reference.get_output_embeddings().weight[2] *= 3  # so that texts end now and then
    reference.save_pretrained(tmp_path)
    model = LanguageModel(served.served(read_checkpoint(tmp_path, name=name)), engine)
    num_ended = 0
    for how in HOW:
        for prompt in PROMPTS:
            expected = reference.generate(
                torch.tensor([prompt]), do_sample=False, max_new_tokens=12, pad_token_id=0, **how
            )[0, len(prompt) :].tolist()
            answer = model.generate(prompt, max_tokens=12, **how)
            made = [token.id for token in answer.tokens]
            assert made == expected[: len(made)]
            if answer.finish_reason == "stop":
                num_ended += 1
                assert expected[len(made)] in model.language.end_tokens
                assert set(expected[len(made) + 1 :]) <= {0}
            else:
                assert len(made) == len(expected) == 12
    assert num_ended > 0
    all_closed(engine)


@pytest.mark.parametrize("name", ["Llama", "Mamba 2"])
@torch.inference_mode()
def test_several_answers_are_the_best_as_in_transformers(name: str, engine: cellrt.Engine, tmp_path: Path) -> None:
    reference = saved(name, tmp_path)
    reference.generation_config.eos_token_id = None
    model = LanguageModel(served.served(read_checkpoint(tmp_path, name=f"several {name}")), engine)
    for prompt in PROMPTS:
        expected = reference.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=8, pad_token_id=0, num_beams=4,
            num_return_sequences=3,
        )[:, len(prompt) :].tolist()  # fmt: skip
        how: dict[str, Any] = {"num_beams": 4, "max_tokens": 8, "ignore_eos": True}
        for answers in (model.samples(prompt, 3, **how), asyncio.run(model.asamples(prompt, 3, **how))):
            assert [[token.id for token in answer.tokens] for answer in answers] == expected
        assert [token.id for token in model.generate(prompt, **how).tokens] == expected[0]


def test_a_search_is_the_same_in_a_coroutine_and_with_an_engine_elsewhere(model: LanguageModel) -> None:
    how: Any = {"max_tokens": 15, "num_beams": 4}
    expected = model.generate(TEXT, **how)
    assert expected.num_tokens == 15 and len(expected.tokens[0]) == 3
    assert asyncio.run(model.agenerate(TEXT, **how)) == expected
    with cellrt.EngineProcess(workers=1, page_bytes=1 << 20) as client:
        client.register("tests.serve.language_models:decoder")
        unfolder: Any = client.binding("tiny").unfolder
        assert LanguageModel(unfolder, client, is_registered=True).generate(TEXT, **how) == expected
        all_closed(client)


@pytest.mark.parametrize("resident", [0, 2])
def test_a_search_is_the_same_where_sessions_give_up_their_pages(model: LanguageModel, resident: int) -> None:
    limits = SessionLimits(max_resident=resident)
    with cellrt.Engine(workers=1, page_bytes=1 << 20, sessions=limits) as engine:
        moved = LanguageModel(served.served(tiny.checkpoint()), engine)
        how: Any = {"max_tokens": 10, "num_beams": 4}
        assert moved.generate(TEXT, **how) == model.generate(TEXT, **how)
        assert engine.statistics()["sessions"]["evictions"] > 0


def test_one_beam_is_the_greedy_answer(model: LanguageModel) -> None:
    assert model.generate(TEXT, max_tokens=9, num_beams=1) == model.generate(TEXT, max_tokens=9)


def test_beams_are_no_worse_than_the_greedy_answer(model: LanguageModel) -> None:
    def score(answer: Any) -> float:
        return sum(token.logprob for token in answer.tokens) / len(answer.tokens)

    greedy = model.generate(TEXT, max_tokens=12, ignore_eos=True)
    assert score(model.generate(TEXT, max_tokens=12, ignore_eos=True, num_beams=6)) >= score(greedy)


def test_what_beams_have_in_common_is_held_once(
    model: LanguageModel, engine: cellrt.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.drain()
    most, states = 0, 0
    take = beams.SearchedBeams._take

    def watched(self: beams.SearchedBeams, made: Any) -> None:
        nonlocal most, states
        take(self, made)
        most = max(most, engine.statistics()["rows"]["worker 1"]["used_pages"])
        states = len(self._sessions[0]._record.states)

    monkeypatch.setattr(beams.SearchedBeams, "_take", watched)
    model.generate(TEXT, max_tokens=10, num_beams=6)
    pages = engine._processor.tables.slots["page_size"]
    per_text = states * -(-(len(TEXT) + 10) // int(pages[pages > 0].min()))
    assert 0 < most <= per_text + 5 * 2 * states  # each of the others has two pages of its own at most
    assert engine.statistics()["sessions"]["bytes"]["saved"] == 0
    all_closed(engine)
    assert engine.statistics()["rows"]["worker 1"]["used_pages"] == 0


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"num_beams": 0}, "num_beams: expected a number of beams, got 0"),
        ({"num_beams": 2.5}, "num_beams: expected a number of beams, got 2.5"),
        ({"num_beams": 11}, "num_beams: expected at most 10 of a model with 1 ends of texts, got 11"),
        ({"num_beams": 2, "length_penalty": "x"}, "length_penalty"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty"),
        ({"num_beams": 2, "length_penalty": 10.5}, "length_penalty: expected a number from -10 to 10, got 10.5"),
        ({"num_beams": 2, "early_stopping": "never"}, "early_stopping"),
        ({"num_beams": 2, "temperature": 0.5}, "num_beams: expected no temperature beside it"),
        ({"num_beams": 2, "repetition_penalty": 1.2}, "num_beams: expected no repetition_penalty beside it"),
        ({"num_beams": 2, "stop": ["x"]}, "num_beams: expected no stop beside it"),
        ({"num_beams": 2, "mask": lambda made: None}, "num_beams: expected no mask beside it"),
        ({"num_beams": 2, "response_format": {"type": "json_object"}}, "expected no response_format beside it"),
        (
            {"num_beams": 2, "response_format": {"type": "json_schema", "json_schema": {"schema": {}}}},
            "response_format",
        ),
        ({"num_beams": 2, "session": None}, "unknown are .*session"),
        ({"num_beams": 2, "max_tokens": 1000}, "max_tokens"),
    ],
)
def test_what_no_search_has_is_said(model: LanguageModel, engine: cellrt.Engine, how: Any, match: str) -> None:
    with pytest.raises(RequestError, match=match):
        model.generate(TEXT, **how)
    all_closed(engine)


@pytest.mark.parametrize("penalty", [-beams.MOST_PENALTY, beams.MOST_PENALTY])
def test_the_longest_answers_have_a_score(penalty: float) -> None:
    search = beams.BeamSearch(2, 1 << 20, [0], penalty, False)
    one, other = (search._scored(beams.Beam((1,) * length, (), -0.5 * length)) for length in (1 << 20, (1 << 20) - 1))
    assert (one.score < other.score) is (penalty < 1) and one.score < 0


def test_a_search_gives_no_more_answers_than_it_has_beams(model: LanguageModel) -> None:
    with pytest.raises(RequestError, match="num_beams: expected at least as many as the 5 answers, got 4"):
        model.samples(TEXT, 5, num_beams=4)
    with pytest.raises(RequestError, match="n: expected a number of answers, got 0"):
        model.samples(TEXT, 0, num_beams=4)


def test_only_a_decoder_has_beams(engine: cellrt.Engine) -> None:
    embedder = LanguageModel(served.served(tiny.embedder()), engine)
    with pytest.raises(RequestError, match="no beams, only a decoder has those"):
        embedder.generate([1, 2], num_beams=2)


def test_a_search_that_is_late_or_cancelled_leaves_nothing(model: LanguageModel, engine: cellrt.Engine) -> None:
    with pytest.raises(DeadlineError):
        model.generate(TEXT, num_beams=3, deadline=1e-6)

    async def cancelled() -> None:
        task = asyncio.create_task(model.agenerate(TEXT, num_beams=4, max_tokens=250))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for _ in range(3):
        asyncio.run(cancelled())
    assert engine.drain(60)
    all_closed(engine)


def test_the_tokens_that_a_search_ends_with_are_those_of_the_request(model: LanguageModel) -> None:
    free = model.generate(TEXT, max_tokens=12, num_beams=3, ignore_eos=True)
    stop = free.tokens[1].id
    ended = model.generate(TEXT, max_tokens=12, num_beams=3, stop_tokens=[stop], length_penalty=-5.0)
    assert (ended.finish_reason, stop in [token.id for token in ended.tokens]) == ("stop", False)
