"""A language model with a state of fixed size chooses tokens as requests ask, as one with keys and values does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cellrt
from cellrt.errors import RequestError
from cellrt.language import served
from cellrt.language.checkpoints import read_checkpoint
from cellrt.language.model import LanguageModel
from tests.language.small_models import VOCABULARY, saved

PROMPTS = [[1, 7, 9, 3, 3, 11, 50], [5], list(range(3, 43)), [58, 4]]
LONG = [token % 50 + 3 for token in range(0, 7 * 100, 7)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LanguageModel, Any]]:
    folder: Path = tmp_path_factory.mktemp("mamba2")
    reference = saved("Mamba 2", folder)
    with cellrt.Engine(workers=1, page_bytes=1 << 20) as engine:
        yield LanguageModel(served.served(read_checkpoint(folder, name="recurrent")), engine), reference


@pytest.fixture(scope="module")
def model(pair: tuple[LanguageModel, Any]) -> LanguageModel:
    return pair[0]


def tokens_of(answer: Any) -> list[int]:
    return [token.id for token in answer.tokens]


def test_choosing_and_remembering_tokens_takes_no_python(model: LanguageModel) -> None:
    assert "memory, recurrent: head written by hand" in repr(model.engine)


@torch.inference_mode()
def test_the_repetition_penalty_is_that_of_transformers(pair: tuple[LanguageModel, Any]) -> None:
    model, reference = pair
    for prompt in PROMPTS:
        how: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12, "repetition_penalty": 1.7, "pad_token_id": 0}
        expected = reference.generate(torch.tensor([prompt]), **how)[0, len(prompt) :].tolist()
        made = tokens_of(model.generate(prompt, max_tokens=12, repetition_penalty=1.7))
        assert made == expected[: len(made)] and (len(made) == 12 or expected[len(made)] == 2)


@torch.inference_mode()
def test_the_likeliest_tokens_are_told(pair: tuple[LanguageModel, Any]) -> None:
    model, reference = pair
    answer = model.generate(PROMPTS[0], max_tokens=5, ignore_eos=True, logprobs=4)
    logits = reference(torch.tensor([PROMPTS[0] + tokens_of(answer)[:-1]])).logits[0, len(PROMPTS[0]) - 1 :]
    best = logits.log_softmax(1).topk(4)
    for token, ids, values in zip(answer.tokens, best.indices.tolist(), best.values.tolist(), strict=True):
        assert [id for id, _ in token.likeliest] == ids
        assert [value for _, value in token.likeliest] == pytest.approx(values, abs=1e-4)


def test_a_seed_draws_the_same_tokens_in_company_and_in_a_session(model: LanguageModel) -> None:
    how: dict[str, Any] = {"max_tokens": 10, "temperature": 1.3, "seed": 11, "ignore_eos": True, "top_k": 20}
    alone = [tokens_of(model.generate(prompt, **how)) for prompt in PROMPTS]
    assert len(set(map(tuple, alone))) == len(PROMPTS)

    async def together() -> list[Any]:
        greedy = [model.agenerate(prompt, max_tokens=10) for prompt in PROMPTS]
        return await asyncio.gather(*(model.agenerate(prompt, **how) for prompt in PROMPTS), *greedy)

    assert [tokens_of(answer) for answer in asyncio.run(together())[: len(PROMPTS)]] == alone
    with model.conversation() as session:
        first = model.generate(PROMPTS[0], **{**how, "max_tokens": 4}, session=session)
        again = model.generate(PROMPTS[0] + tokens_of(first), **{**how, "max_tokens": 6}, session=session)
    assert tokens_of(first) + tokens_of(again) == alone[0]
    assert again.num_cached_tokens == len(PROMPTS[0]) + 3


def test_several_answers_read_a_long_prompt_once(model: LanguageModel) -> None:
    how: dict[str, Any] = {"max_tokens": 8, "temperature": 1.0, "ignore_eos": True, "frequency_penalty": 0.5}
    alone = [tokens_of(model.generate(LONG, **how, seed=seed)) for seed in range(4)]
    assert [tokens_of(answer) for answer in model.samples(LONG, 4, **how, seed=0)] == alone


def test_only_what_a_mask_allows_is_chosen(model: LanguageModel) -> None:
    answer = model.generate(LONG, max_tokens=6, mask=lambda made: [10 + len(made), 30 + len(made)])
    assert all(token in (10 + k, 30 + k) for k, token in enumerate(tokens_of(answer)))


def test_the_end_of_an_answer_is_as_the_request_says(model: LanguageModel) -> None:
    free = tokens_of(model.generate(LONG, max_tokens=8, ignore_eos=True))
    cut = model.generate(LONG, max_tokens=8, ignore_eos=True, stop_tokens=[free[3]])
    assert (tokens_of(cut), cut.finish_reason) == (free[: free.index(free[3])], "stop")
    biased = model.generate(LONG, max_tokens=5, logit_bias={7: 100.0}, min_tokens=5)
    assert tokens_of(biased) == [7] * 5


def test_what_is_out_of_range_is_named(model: LanguageModel) -> None:
    for wrong in ({"temperature": -1}, {"logit_bias": {VOCABULARY: 1.0}}, {"logprobs": 99}):
        with pytest.raises(RequestError, match=next(iter(wrong))):
            model.generate(PROMPTS[0], max_tokens=3, **wrong)
