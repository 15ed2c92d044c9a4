"""A session that was cut back is one that was never told of what followed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.engine.session_limits import SessionLimits
from cellrt.errors import RequestError, SessionError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.process.engine_process import EngineProcess
from cellrt.unfolders.completion import complete
from tests.effort import examples
from tests.engine.helpers import WAIT_S, close_and_check, small_engine
from tests.engine.models import make_cells
from tests.unfolders.language_models import draw_prompt, small_cell, small_layers

MODELS = {
    "one cell": complete("lm", small_cell(4), keep=True),
    "a cell a layer": complete("lm", small_layers(3, 11), keep=True),
}


def told(tokens: list[int], max_tokens: int = 3) -> dict[str, Any]:
    return {"prompt": torch.tensor(tokens), "max_tokens": max_tokens}


def answers_as_new(model: Unfolder, session: Any, text: list[int], new: list[int], steps: int) -> list[int]:
    """Have a session answer; check that a new one would, of all the text; return what it has read now."""
    answer = session.submit(told(new, steps)).result(WAIT_S)
    expected = run_one_by_one(model, told([*text, *new], steps))
    assert all(torch.equal(value, expected[name]) for name, value in answer.items())
    return [*text, *new, *answer["token"].tolist()[:-1]]


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(10), deadline=None)
@given(
    name=st.sampled_from([*MODELS]),
    turns=st.lists(st.tuples(st.integers(1, 25), st.integers(1, 6), st.floats(0, 1)), min_size=1, max_size=4),
    resident=st.sampled_from([None, 1]),
    workers=st.integers(1, 2),
)
def test_the_next_answer_is_that_of_the_text_that_stayed(name, turns, resident, workers):
    """However far back, whether the state lies at a worker or in host memory, with another's requests beside it."""
    model, limits = MODELS[name], SessionLimits(max_resident=resident)
    engine = small_engine(workers, page_bytes=1 << 18, arena_bytes=1 << 19, debug=True, sessions=limits)
    try:
        engine.register(model, warm_up=False)
        session, other = engine.session("lm"), engine.session("lm")
        text: list[int] = []
        for turn, (length, steps, part) in enumerate([*turns, (3, 4, 0.5)]):
            beside = other.submit(told([1, 2, 3]))
            read = answers_as_new(model, session, text, draw_prompt(turn, length).tolist(), steps)
            beside.result(WAIT_S)
            text = read[: int(part * len(read))]
            session.cut_back(len(text))
    finally:
        close_and_check(engine)


@pytest.fixture(scope="module")
def engine():
    with small_engine(page_bytes=1 << 18, arena_bytes=1 << 19, debug=True) as made:
        made.register(MODELS["one cell"], warm_up=False)
        fixed = make_cells()[0]
        made.register(
            Unfolder("fixed", lambda graph, x: {"h": graph.chain(fixed, keep=True, x=x).h}, torch.zeros(1, 2))
        )
        yield made


@pytest.mark.parametrize("rows", [11, 8, 7, 1, 0])
def test_it_waits_for_the_requests_before_and_for_nothing_else(engine, rows):
    session = engine.session("lm")
    before = session.submit(told(list(range(1, 10))))
    session.cut_back(rows)
    after = session.submit(told([4, 5]))
    read = [*range(1, 10), *before.result(WAIT_S)["token"].tolist()[:-1]]
    expected = run_one_by_one(MODELS["one cell"], told([*read[:rows], 4, 5]))
    assert torch.equal(after.result(WAIT_S)["logprob"], expected["logprob"])
    session.close()


def test_what_was_cut_back_is_exported_so(engine):
    session, other = engine.session("lm"), engine.session("lm")
    session.submit(told([1, 2, 3, 4, 5, 6], 1)).result(WAIT_S)
    session.cut_back(5)
    other.submit(told([1, 2, 3, 4, 5], 1)).result(WAIT_S)
    assert session.export() == other.export()
    session.cut_back(2)  # now from host memory, then back to where it was made
    session.cut_back(1)
    again = engine.session("lm", state=session.export())
    answers_as_new(MODELS["one cell"], again, [1], [7, 8], 3)
    for one in (session, other, again):
        one.close()


@pytest.mark.parametrize("text, rows, match", [([], 1, "it has 0 rows"), ([1, 2, 3], 4, "it has 3 rows")])
def test_a_session_that_has_fewer_rows_ends(engine, text, rows, match):
    session = engine.session("lm")
    if text:
        session.submit(told(text, 1)).result(WAIT_S)
    session.cut_back(rows)
    with pytest.raises(SessionError, match=f"could not be cut back to {rows} rows: {match}"):
        session.submit(told([1])).result(WAIT_S)


def test_a_state_of_a_fixed_size_is_not_cut_back_but_to_nothing(engine):
    session = engine.session("fixed")
    first = session.submit(torch.ones(3, 2)).result(WAIT_S)
    session.cut_back(0)
    assert torch.equal(session.submit(torch.ones(3, 2)).result(WAIT_S)["h"], first["h"])
    session.cut_back(2)
    with pytest.raises(SessionError, match="it has states of a fixed size"):
        session.submit(torch.ones(3, 2)).result(WAIT_S)


def test_no_number_of_rows_is_refused(engine):
    session = engine.session("lm")
    for rows in (-1, 1.5, "2", 1 << 40):
        with pytest.raises(RequestError, match="cut_back: expected a number of rows"):
            session.cut_back(rows)
    session.close()
    with pytest.raises(SessionError):
        session.cut_back(1)


def small_model() -> Unfolder:
    return MODELS["one cell"]


def test_sessions_of_an_engine_elsewhere_are_cut_back_too():
    with EngineProcess(workers=1, page_bytes=1 << 18) as client:
        client.register("tests.engine.test_cut_back:small_model")
        session = client.session("lm")
        read = answers_as_new(MODELS["one cell"], session, [], [1, 2, 3, 4, 5, 6], 4)
        session.cut_back(5)
        answers_as_new(MODELS["one cell"], session, read[:5], [9, 8], 4)
        with pytest.raises(RequestError, match="cut_back"):
            session.cut_back(-1)
        session.cut_back(50)
        with pytest.raises(SessionError, match="could not be cut back"):
            session.submit(told([1])).result(WAIT_S)
