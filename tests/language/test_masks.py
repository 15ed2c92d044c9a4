"""Answers that keep to what a function allows, which is asked before each token."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from cellrt.errors import DeadlineError, RequestError
from cellrt.language import served
from cellrt.language.masks import flags_of
from cellrt.language.model import LanguageModel
from tests.language import tiny

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")


def odd(tokens: Sequence[int]) -> list[int]:
    return list(range(1, 100, 2))


def test_only_tokens_that_a_mask_allows_are_made(model: LanguageModel) -> None:
    told: list[tuple[int, ...]] = []

    def mask(tokens: Sequence[int]) -> list[int]:
        told.append(tuple(tokens))
        return odd(tokens)

    answer = model.generate("hello", max_tokens=12, mask=mask)
    made = [token.id for token in answer.tokens]
    assert len(made) == 12 and all(token % 2 and token < 100 for token in made)
    assert told == [tuple(made[:count]) for count in range(12)]
    flags = np.isin(np.arange(tiny.vocabulary()), odd(()))
    for same in (flags, torch.from_numpy(flags), torch.tensor(odd(()))):
        assert model.generate("hello", max_tokens=12, mask=lambda _, same=same: same) == answer


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "seed": 3, "frequency_penalty": 0.9, "min_tokens": 5}])
def test_a_mask_that_allows_everything_changes_no_answer(model: LanguageModel, options: dict[str, Any]) -> None:
    plain = model.generate("hello world", max_tokens=15, logprobs=3, **options)
    assert model.generate("hello world", max_tokens=15, logprobs=3, mask=lambda _: None, **options) == plain
    awaited = model.agenerate("hello world", max_tokens=15, logprobs=3, mask=lambda _: None, **options)
    assert asyncio.run(awaited) == plain


def test_an_answer_ends_with_a_token_that_ends_it(model: LanguageModel) -> None:
    answer = model.generate(
        "hello", max_tokens=9, min_tokens=6, mask=lambda made: [tiny.END] if len(made) > 3 else [65]
    )
    assert [token.id for token in answer.tokens] == [65] * 4
    assert (answer.finish_reason, answer.num_tokens) == ("stop", 5)


def test_stop_strings_cut_what_is_masked(model: LanguageModel) -> None:
    token = model.language.tokens_of("b")[0]
    answer = model.generate("hello", max_tokens=9, stop=["bbb"], mask=lambda made: [64 if len(made) < 3 else token])
    assert answer.text == model.language.tokenizer.decode([64] * 3)
    assert (answer.finish_reason, answer.num_tokens) == ("stop", 6)


def test_an_error_of_a_mask_is_that_of_its_answer_alone(model: LanguageModel) -> None:
    plain = model.generate("hello", max_tokens=30)

    def mask(tokens: Sequence[int]) -> None:
        if len(tokens) == 4:
            raise ZeroDivisionError("of its own")

    with ThreadPoolExecutor(1) as other:
        beside = other.submit(model.generate, "hello", max_tokens=30)
        with pytest.raises(ZeroDivisionError, match="of its own"):
            model.generate("hello", max_tokens=30, mask=mask)
        assert beside.result() == plain
    with pytest.raises(ZeroDivisionError):
        asyncio.run(model.agenerate("hello", max_tokens=30, mask=mask))
    assert model.engine.drain(60)
    assert model.engine.statistics()["sessions"]["open"] == 0


@pytest.mark.parametrize("allowed", [[], [999], [-1], np.zeros(3, bool), np.zeros(tiny.vocabulary(), bool), [0.5]])
def test_a_mask_that_says_nothing_usable_is_refused(model: LanguageModel, allowed: Any) -> None:
    with pytest.raises(RequestError, match="mask: expected"):
        flags_of(allowed, tiny.vocabulary())
    with pytest.raises(RequestError, match="mask: expected"):
        model.generate("hello", max_tokens=3, mask=lambda _: allowed)
    with pytest.raises(RequestError, match="mask: expected a function"):
        model.generate("hello", mask=3)


def test_a_deadline_is_that_of_the_whole_answer(model: LanguageModel) -> None:
    def slow(tokens: Sequence[int]) -> None:
        if len(tokens) == 3:
            asyncio.run(asyncio.sleep(0.5))

    with pytest.raises(DeadlineError):
        model.generate("hello", max_tokens=10, mask=slow, deadline=0.4)
    assert model.generate("hello", max_tokens=10, mask=slow, schedule_by=0.4).num_tokens == 10


def test_an_answer_that_is_left_makes_no_more_tokens(model: LanguageModel) -> None:
    told: list[int] = []

    def mask(tokens: Sequence[int]) -> None:
        told.append(len(tokens))

    with model.stream("hello", max_tokens=300, mask=mask) as stream:
        next(stream)

    async def cancelled() -> None:
        task = asyncio.create_task(model.agenerate("hello", max_tokens=390, mask=mask))
        while len(told) < 5:
            await asyncio.sleep(0.001)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancelled())
    assert model.engine.drain(60) and max(told) < 300 and list(stream) == []


def test_a_conversation_goes_on_behind_a_masked_answer(model: LanguageModel) -> None:
    with model.conversation() as session:
        first = model.generate([1, 2, 3], max_tokens=6, mask=odd, session=session)
        longer = [1, 2, 3, *(token.id for token in first.tokens), 4]
        second = model.generate(longer, max_tokens=6, session=session)
        assert second.num_cached_tokens == 8
        assert second.text == model.generate(longer, max_tokens=6).text
        third = [*longer, *(token.id for token in second.tokens), 4]
        assert (
            model.generate(third, max_tokens=6, mask=odd, session=session).text
            == model.generate(third, max_tokens=6, mask=odd).text
        )


def test_without_the_package_an_answer_of_a_form_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with LanguageModel(served.served(tiny.checkpoint()), workers=1, page_bytes=1 << 20) as model:
        with pytest.raises(RequestError, match=r"pip install '\.\[grammar\]'"):
            model.generate("hello", response_format={"type": "json_object"})
        assert model.generate("hello", max_tokens=3, response_format={"type": "text"}).num_tokens == 3
