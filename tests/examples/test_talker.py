"""A conversation through a session is the text that one request would read from its beginning."""

from __future__ import annotations

import pytest
import torch

import cellrt
from examples.chat import answer
from models import talker

SAID = ["Hello!", "Why is the sky blue?", "ß and 語"]


@pytest.fixture(scope="module")
def stand_in() -> talker.Talker:
    return talker.make_stand_in()


@pytest.mark.parametrize("max_tokens", [1, 12])
def test_each_answer_follows_from_all_that_was_said_before(stand_in: talker.Talker, max_tokens: int) -> None:
    read: list[int] = []
    made: list[int] = []
    with cellrt.Engine() as engine:
        engine.register(stand_in.unfolder(max_tokens), warm_up=False)
        with engine.session("talker") as session:
            for text in SAID:
                read += made[:-1] + stand_in.prompt(text, made).tolist()
                pieces = list(answer(session, stand_in, text, made))
                whole = engine.submit("talker", torch.tensor(read)).result(30)
                assert made == whole["token"].tolist()
                assert stand_in.decode(made).startswith("".join(pieces))
                assert len(made) == max_tokens or made[-1] == stand_in.end_token


def test_a_prompt_begins_with_what_was_not_read(stand_in: talker.Talker) -> None:
    begin = stand_in.prompt("a", [])
    assert bytes(begin.tolist()).startswith(b"<|im_start|>system")
    assert stand_in.prompt("a", [5, 6]).tolist()[:2] == [6, stand_in.end_token]
    assert stand_in.prompt("a", [5, stand_in.end_token]).tolist()[:3] == [stand_in.end_token, ord("\n"), ord("<")]
