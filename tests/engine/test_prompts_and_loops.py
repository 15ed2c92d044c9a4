"""A prompt, a loop to its end, a session: one state, which a chain reads into and a loop goes on with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from cellrt import Engine, Unfolder, cell, rows, token
from cellrt.errors import DefinitionError
from tests.engine.helpers import small_engine

WIDTH, TOKENS, END, MOST = 4, 12, 0, 7


class LinearAttention(nn.Module):
    """A step of a language model whose state is a matrix that decays: ``s' = a * s + k v``."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.key, self.value, self.query = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, token: torch.Tensor, s: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embedding(token)
        s = 0.9 * s + self.key(x)[:, :, None] * self.value(x)[:, None, :]
        logits = self.head(torch.einsum("bk,bkv->bv", self.query(x), s))
        best = logits.argmax(1)
        return {"s": s, "next": best, "stop": best == END}


def make_module() -> LinearAttention:
    torch.manual_seed(5)
    return LinearAttention().eval()


LM = cell(make_module(), {"token": token, "s": rows(WIDTH, WIDTH)}, name="lm", carry={"s": "s"})
LOOPED = cell(
    make_module(), {"token": token, "s": rows(WIDTH, WIDTH)}, name="looped", carry={"s": "s", "token": "next"}
)


def said(body: Any, state: Any) -> dict[str, Any]:
    step = LM(token=state.token, s=state.s)
    return {"s": step.s, "token": step.next, "stop": step.stop}


def by_a_function(graph: Any, prompt: Any) -> dict[str, Any]:
    """One cell reads and says, so prompts and answers of many requests are batched."""
    state = graph.state(LM)
    heard = graph.chain(LM, token=prompt, s=state.s)
    answer = graph.loop(said, until="stop", max_steps=MOST, token=heard.last.next, s=heard.last.s)
    graph.keep(state, after=answer.last)
    return {"first": heard.last.next, "rest": answer.token, "s": answer.last.s}


def by_one_cell(graph: Any, prompt: Any) -> dict[str, Any]:
    """The same with a loop of a cell that carries its token."""
    state = graph.state(LM)
    heard = graph.chain(LM, token=prompt, s=state.s)
    answer = graph.loop(LOOPED, until="stop", max_steps=MOST, token=heard.last.next, s=heard.last.s)
    graph.keep(state, after={"s": answer.last.s})
    return {"first": heard.last.next, "rest": answer.next, "s": answer.last.s}


def expected(module: LinearAttention, prompts: list[list[int]]) -> Iterator[tuple[int, list[int], torch.Tensor]]:
    """The first token of each answer, the others, and the state, in a bare loop."""
    s = torch.zeros(1, WIDTH, WIDTH)
    for prompt in prompts:
        for number in prompt:
            made = module(torch.tensor([number]), s)
            s = made["s"]
        first, rest = int(made["next"]), []
        number = first
        for _ in range(MOST):
            made = module(torch.tensor([number]), s)
            s, number = made["s"], int(made["next"])
            rest.append(number)
            if number == END:
                break
        yield first, rest, s[0]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with small_engine(debug=True) as made:
        yield made
        assert made.drain(timeout=60)
        made.check()


@pytest.mark.parametrize("unfold", [by_a_function, by_one_cell])
def test_a_session_goes_on_from_the_end_of_each_answer(engine: Engine, unfold: Any) -> None:
    engine.register(Unfolder("lm", unfold, torch.tensor([1, 2])))
    texts = [[[1 + (7 * k + j * n) % (TOKENS - 1) for j in range(1 + n)] for n in range(4)] for k in range(5)]
    sessions = [engine.session("lm") for _ in texts]
    for turn in range(4):
        futures = [session.submit(torch.tensor(text[turn])) for session, text in zip(sessions, texts)]
        for future, text in zip(futures, texts):
            result = future.result(timeout=60)
            with torch.no_grad():
                first, rest, s = list(expected(make_module(), text[: turn + 1]))[-1]
            assert int(result["first"]) == first and result["rest"].tolist() == rest
            torch.testing.assert_close(result["s"], s)
    for session in sessions:
        session.close()


def keep_twice(graph: Any, prompt: Any) -> dict[str, Any]:
    heard = graph.chain(LM, token=prompt, keep=True)
    answer = graph.loop(LOOPED, until="stop", max_steps=MOST, token=heard.last.next, s=heard.last.s, keep=["s"])
    return {"rest": answer.next}


def keep_two_chains(graph: Any, prompt: Any) -> dict[str, Any]:
    heard = graph.chain(LM, token=prompt, keep=True)
    return {"s": graph.chain(LM, token=prompt, s=heard.last.s, keep=True).last.s}


@pytest.mark.parametrize("unfold", [keep_twice, keep_two_chains])
def test_keep_on_a_chain_and_on_what_it_starts_is_refused_with_the_right_form(engine: Engine, unfold: Any) -> None:
    with pytest.raises(
        DefinitionError, match=r"input 's': keep: it begins with what cell 'lm' keeps.*graph.state\(lm\)"
    ):
        engine.register(Unfolder("twice", unfold, torch.tensor([1, 2])))


def test_two_states_on_purpose_are_said_so(engine: Engine) -> None:
    def unfold(graph: Any, prompt: Any) -> dict[str, Any]:
        heard = graph.chain(LM, token=prompt, keep=True)
        state = graph.state(LOOPED, s=heard.last.s)
        answer = graph.loop(LOOPED, max_steps=2, token=state.next, s=state.s)
        graph.keep(state, after=answer.last)
        return {"s": answer.last.s}

    engine.register(Unfolder("two", unfold, torch.tensor([1, 2])))


def test_what_starts_from_an_output_that_is_not_kept_may_be_kept(engine: Engine) -> None:
    def unfold(graph: Any, prompt: Any) -> dict[str, Any]:
        heard = graph.chain(LM, token=prompt)
        return {"s": graph.loop(LOOPED, max_steps=2, token=heard.last.next, s=heard.last.s, keep=["s"]).last.s}

    engine.register(Unfolder("bridged", unfold, torch.tensor([1, 2])))
