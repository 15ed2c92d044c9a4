"""Language models in Python: answers, streams, conversations and embeddings, here and with an engine elsewhere."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

import cellrt
from cellrt.errors import DefinitionError, RequestError
from cellrt.language import served
from cellrt.language.model import LanguageModel
from tests.language import tiny

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")
SAID = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def embedder(engine: cellrt.Engine) -> LanguageModel:
    return LanguageModel(served.served(tiny.embedder()), engine)


def test_an_answer_is_the_text_of_the_tokens_that_the_engine_makes(model: LanguageModel) -> None:
    tokens = model.language.tokens_of("hello")
    made = model.engine.submit("tiny", {"prompt": tokens, "max_tokens": 20}).result()["token"].tolist()
    answer = model.generate("hello", max_tokens=20)
    assert [token.id for token in answer.tokens] == made
    assert str(answer) == answer.text == model.language.tokenizer.decode(made)
    assert (answer.num_tokens, answer.num_prompt_tokens, answer.finish_reason) == (20, len(tokens), "length")


def test_pieces_of_a_stream_are_the_answer(model: LanguageModel) -> None:
    whole = model.generate("hello", max_tokens=20)
    with model.stream("hello", max_tokens=20) as stream:
        pieces = list(stream)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert tuple(token for piece in pieces for token in piece.tokens) == whole.tokens

    async def read() -> str:
        return "".join([piece.text async for piece in model.stream("hello", max_tokens=20)])

    assert asyncio.run(read()) == whole.text


def test_a_token_that_ends_the_text_is_none_of_it(engine: cellrt.Engine, model: LanguageModel) -> None:
    whole = model.generate("hello", max_tokens=20)
    third = whole.tokens[2].id
    ending = LanguageModel(served.served(tiny.checkpoint("ending", end_tokens=(tiny.END, third))), engine)
    answer = ending.generate("hello", max_tokens=20)
    assert [token.id for token in answer.tokens] == [token.id for token in whole.tokens[:2]]
    assert (answer.finish_reason, answer.num_tokens) == ("stop", 3)


def test_n_answers_are_a_list(model: LanguageModel) -> None:
    one = model.generate("hello", max_tokens=5)
    assert model.samples("hello", 3, max_tokens=5) == [one] * 3
    assert asyncio.run(model.asamples(SAID, 2, max_tokens=5)) == [model.chat(SAID, max_tokens=5)] * 2


def test_a_chat_is_asked_as_the_template_says(model: LanguageModel) -> None:
    answer = model.chat(SAID, max_tokens=8)
    text = "<|start|>user: hello<|end|>\n<|start|>assistant:"
    assert answer == model.generate(text, max_tokens=8) == asyncio.run(model.achat(SAID, max_tokens=8))
    assert "".join(piece.text for piece in model.stream_chat(SAID, max_tokens=8)) == answer.text


def test_a_stream_that_is_left_ends_its_request(model: LanguageModel, engine: cellrt.Engine) -> None:
    with model.stream("hello", max_tokens=390) as stream:
        next(stream)
    assert engine.drain(60)
    assert list(stream) == []


def test_a_conversation_changes_no_answer(model: LanguageModel) -> None:
    with model.conversation() as session:
        prompt, read = [1, 2, 3], 0
        for stop in ((), (), ("\x1b",), ()):
            within = model.generate(prompt, max_tokens=8, session=session, stop=stop)
            alone = model.generate(prompt, max_tokens=8, stop=stop)
            assert (within.text, within.num_cached_tokens) == (alone.text, read)
            read = len(prompt) + within.num_tokens - 1
            prompt = [*prompt, *(token.id for token in within.tokens), 4, 5]


class Sessions:
    """Remembers what a session was told, beside it."""

    def __init__(self, session: Any) -> None:
        self.session, self.rows = session, [0]

    def cut_back(self, rows: int) -> None:
        self.rows.append(rows)
        self.session.cut_back(rows)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.session, name)


@pytest.mark.parametrize("change", [0, 2, 9, 15, 18])
def test_what_a_prompt_does_not_repeat_is_taken_back(model: LanguageModel, change: int) -> None:
    """Of 12 tokens of a prompt, and 7 of 8 that were made; the last was never read."""
    with model.conversation() as session:
        seen = session._session = Sessions(session.session)  # type: ignore[assignment]
        first = model.generate(list(range(1, 13)), max_tokens=8, session=session)
        read = [*range(1, 13), *(token.id for token in first.tokens)][:19]
        other = [*read[:change], (read[change] + 1) % 200, 3, 4]
        within = model.generate(other, max_tokens=8, session=session)
        assert within.text == model.generate(other, max_tokens=8).text
        assert (within.num_cached_tokens, seen.rows[-1]) == (change, change)


def test_what_follows_a_stop_string_is_what_was_shown(model: LanguageModel) -> None:
    """The next turn has the visible text alone, and has all of it cached."""
    whole = model.generate([1, 2, 3], max_tokens=12)
    stop = whole.text[6:8]
    visible = whole.text[: whole.text.index(stop)]
    with model.conversation() as session:
        cut = model.generate([1, 2, 3], max_tokens=300, stop=[stop], session=session)
        assert (cut.text, cut.finish_reason) == (visible, "stop")
        prompt = [1, 2, 3, *(token.id for token in whole.tokens[:4]), 70, 71]
        after = model.generate(prompt, max_tokens=9, session=session)
        assert (after.text, after.num_cached_tokens) == (model.generate(prompt, max_tokens=9).text, 7)


def test_an_answer_that_was_left_is_cached_as_far_as_it_was_read(model: LanguageModel) -> None:
    whole = model.generate([1, 2, 3], max_tokens=8)
    with model.conversation() as session:
        with model.stream([1, 2, 3], max_tokens=300, session=session) as stream:
            while stream.num_tokens < 6:
                next(stream)
        prompt = [1, 2, 3, *(token.id for token in whole.tokens[:5]), 70]
        after = model.generate(prompt, max_tokens=9, session=session)
        assert (after.text, after.num_cached_tokens) == (model.generate(prompt, max_tokens=9).text, 8)


def test_an_answer_beside_another_of_its_conversation_is_made_without(model: LanguageModel) -> None:
    alone = model.generate([1, 2, 3], max_tokens=8)
    with model.conversation() as session:
        with model.stream([7, 8], max_tokens=300, session=session) as other:
            next(other)
            assert model.generate([1, 2, 3], max_tokens=8, session=session) == alone
        assert model.generate([1, 2, 3], max_tokens=8, session=session) == alone  # after one that was left, too


def test_a_conversation_whose_session_has_ended_opens_another(model: LanguageModel) -> None:
    alone = model.generate([1, 2, 3, 4], max_tokens=8)
    with model.conversation() as session:
        model.generate([1, 2, 3], max_tokens=1, session=session)
        session.session.close()
        assert model.generate([1, 2, 3, 4], max_tokens=8, session=session) == alone
        session.session.close()
        answer = asyncio.run(model.agenerate([1, 2, 3, 4], max_tokens=8, session=session))
        assert answer == alone


def test_embeddings_of_texts_are_rows_of_length_one(embedder: LanguageModel) -> None:
    texts = ["hello", "hello world"]
    made = embedder.embed(texts)
    assert made.shape == (2, 32)
    torch.testing.assert_close(made.norm(dim=1), torch.ones(2))
    assert torch.equal(made, asyncio.run(embedder.aembed(texts)))


def test_what_a_model_cannot_do_is_refused(model: LanguageModel, embedder: LanguageModel) -> None:
    with pytest.raises(RequestError, match="makes texts, and no embeddings"):
        model.embed(["hello"])
    with pytest.raises(RequestError, match="makes embeddings, and no texts"):
        embedder.generate("hello", max_tokens=1)
    with pytest.raises(RequestError, match="got one text"):
        embedder.embed("hello")
    with pytest.raises(RequestError, match=r"unknown are \['tokens'\]"):
        model.generate("hello", tokens=3)
    with pytest.raises(RequestError, match="n: expected"):
        model.samples("hello", 0)
    with pytest.raises(RequestError, match="at least one token"):
        model.generate("")
    with pytest.raises(RequestError, match=f"from 0 to {tiny.vocabulary() - 1}, got 999"):
        model.generate([999])
    with pytest.raises(DefinitionError, match="options of an engine of its own"):
        cellrt.load("nowhere", engine=model.engine, workers=1)


def test_a_model_without_a_tokenizer_takes_tokens(engine: cellrt.Engine, model: LanguageModel) -> None:
    bare = LanguageModel(served.served(tiny.checkpoint("bare", tokenizer=None, chat_template=None)), engine)
    answer = bare.generate([1, 2, 3], max_tokens=4)
    assert answer.tokens == model.generate([1, 2, 3], max_tokens=4).tokens and answer.text == ""
    with pytest.raises(RequestError, match="no tokenizer"):
        bare.generate("hello")
    with pytest.raises(RequestError, match="no chat template"):
        bare.chat(SAID)
