"""What sessions have in common lies in pages that they share, until they differ; no answer knows of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.core.state.tables import MAX_KINDS
from cellrt.engine.engine import Engine
from cellrt.engine.session import Session
from cellrt.engine.session_limits import SessionLimits
from cellrt.errors import SessionError
from cellrt.unfolders.completion import complete
from tests.effort import examples
from tests.engine import models
from tests.engine.helpers import WAIT_S, close_and_check, small_engine, watch_suspensions
from tests.engine.paged_models import WIDTH
from tests.engine.test_cut_back import MODELS, answers_as_new, told
from tests.engine.test_room_of_sessions import appending
from tests.unfolders.language_models import draw_prompt, small_cell

PAGE = 4
LM = MODELS["one cell"]
APPEND = appending(2, keep=True, max_batch=8, max_batch_rows=8)


def used_pages(engine: Engine, place: str = "worker 1") -> int:
    return engine.statistics()["rows"][place]["used_pages"]


def read(session: Session, count: int) -> list[int]:
    """Has a session read so many tokens, and no more."""
    text = draw_prompt(count, count).tolist()
    session.submit(told(text, 1)).result(WAIT_S)
    return text


@pytest.fixture
def engine():
    made = small_engine(page_bytes=1 << 18, arena_bytes=1 << 19, debug=True)
    try:
        made.register(LM, warm_up=False)
        yield made
    finally:
        close_and_check(made)


@pytest.mark.parametrize("rows", [40, 41])
def test_a_prompt_is_held_once_for_all_who_go_on_from_it(engine, rows):
    first, *others = sessions = [engine.session("lm") for _ in range(8)]
    text = read(first, rows)
    first.copy_to(others)
    assert used_pages(engine) == 10 + (8 if rows % PAGE else 0)
    bytes_of_page = engine.statistics()["rows"]["worker 1"]["used_bytes"] // used_pages(engine)
    assert engine.statistics()["sessions"]["bytes"]["worker 1"] == bytes_of_page * used_pages(engine)
    assert engine.statistics()["sessions"]["bytes"]["saved"] == 0
    for number, session in enumerate(sessions):
        answers_as_new(LM, session, text, [number, 7], 6)
    for session in sessions:
        session.close()
    assert used_pages(engine) == 0


def test_who_is_at_work_gets_the_state_when_it_has_done_what_it_was_asked_before(engine):
    first, other = engine.session("lm"), engine.session("lm")
    text = read(first, 9)
    before = other.submit(told([1, 2, 3], 40))
    after = first.submit(told([5], 1))
    first.copy_to([other])
    assert before.done() and after.done()
    answers_as_new(LM, other, [*text, 5], [3, 4], 5)
    answers_as_new(LM, first, [*text, 5], [3, 4], 5)


@pytest.mark.parametrize("resident", [0, 1, 2])
def test_those_who_share_pages_are_saved_each_with_its_own_rows(resident):
    with small_engine(page_bytes=1 << 18, debug=True, sessions=SessionLimits(max_resident=resident)) as engine:
        engine.register(LM, warm_up=False)
        sessions = [engine.session("lm") for _ in range(3)]
        text = read(sessions[0], 10)
        sessions[0].copy_to(sessions[1:])
        assert engine.statistics()["sessions"]["resident"] == resident
        assert len({session.export() for session in sessions}) == 1
        for number, session in enumerate(sessions):
            answers_as_new(LM, session, text, [number], 6)


def test_a_session_that_ends_while_others_get_its_state_says_so():
    """It was idle longest, and there is no memory for those that may not stay at the worker."""
    with small_engine(page_bytes=1 << 18, sessions=SessionLimits(max_resident=2, max_saved_bytes=64)) as engine:
        engine.register(LM, warm_up=False)
        first, *others = [engine.session("lm") for _ in range(4)]
        text = read(first, 10)
        with pytest.raises(SessionError, match="has expired"):
            first.copy_to(others)
        answers_as_new(LM, others[1], text, [3], 4)
        answers_as_new(LM, others[2], [], [3], 4)  # it was not given any


def test_a_session_that_is_new_is_copied_as_new(engine):
    first, other = engine.session("lm"), engine.session("lm")
    read(other, 9)
    first.copy_to([other])
    assert used_pages(engine) == 0
    answers_as_new(LM, other, [], [1, 2], 3)


@pytest.mark.parametrize("rows", [5, 4])
def test_a_session_is_cut_back_where_it_shares_pages_and_nothing_goes_to_host_memory(engine, rows):
    first, other = engine.session("lm"), engine.session("lm")
    text = read(first, 12)
    first.copy_to([other])
    other.cut_back(rows)
    other.submit(told([1], 1)).result(WAIT_S)
    assert used_pages(engine) == 3 + 1
    assert engine.statistics()["sessions"]["bytes"]["saved"] == 0
    answers_as_new(LM, other, [*text[:rows], 1], [8, 9], 4)
    answers_as_new(LM, first, text, [8, 9], 4)


def test_a_session_for_whose_rest_there_is_no_room_ends():
    limits = SessionLimits(max_saved_bytes=64, when_full="refuse")
    with small_engine(page_bytes=1, sessions=limits, debug=True) as engine:
        engine.register(APPEND, warm_up=False)
        first, other, last = (engine.session("append") for _ in range(3))
        first.submit(torch.ones(20, WIDTH)).result(WAIT_S)
        first.copy_to([other])
        last.submit(torch.ones(2 * (64 - 10), WIDTH)).result(WAIT_S)
        assert used_pages(engine) == 64
        first.cut_back(19)  # the page is alone with neither, and there is none for a copy
        with pytest.raises(SessionError, match="could not be cut back to 19 rows: .*may take 64"):
            first.submit(torch.ones(1, WIDTH)).result(WAIT_S)
        other.cut_back(17)  # now it is
        other.submit(torch.ones(1, WIDTH)).result(WAIT_S)


def test_requests_that_share_pages_are_suspended_as_others_are():
    """They run together, as the worker waits until all of them are there."""
    model, gate = complete("lm", small_cell(1), keep=True), models.Gate(WAIT_S)
    with small_engine(page_bytes=1, debug=True) as engine:  # 64 pages of one row each
        engine.register(model, warm_up=False)
        engine.register(gate.unfolder, warm_up=False)
        told_of = watch_suspensions(engine)
        sessions = [engine.session("lm") for _ in range(4)]
        text = read(sessions[0], 24)
        sessions[0].copy_to(sessions[1:])
        assert used_pages(engine) == 24
        engine.submit("gate", torch.ones(models.WIDTH))
        assert gate.entered.wait(WAIT_S)
        futures = [session.submit(told([number], 20)) for number, session in enumerate(sessions)]
        gate.open.set()
        lengths = [len(future.result(WAIT_S)["token"]) for future in futures]
        assert any(told_of), lengths
        for number, (session, future) in enumerate(zip(sessions, futures)):
            made = [number, *future.result()["token"].tolist()[:-1]]
            answers_as_new(model, session, [*text, *made], [3], 3)
            session.close()
        assert used_pages(engine) == used_pages(engine, "host") == 0
        assert not engine._processor.tables.holders.any()


Step = tuple[str, int, int, int]
STEPS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "copy", "copy", "cut back", "new", "restore"]),
        st.integers(0, 3),
        st.integers(0, 3),
        st.integers(1, 14),
    ),
    min_size=4,
    max_size=14,
)


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(10), deadline=None)
@given(
    name=st.sampled_from([*MODELS]),
    steps=STEPS,
    resident=st.sampled_from([None, None, 1, 3]),
    workers=st.integers(1, 2),
    is_tight=st.booleans(),
)
def test_whatever_was_copied_each_answer_is_that_of_its_own_text(
    name: str, steps: list[Step], resident: int | None, workers: int, is_tight: bool
) -> None:
    model, limits = MODELS[name], SessionLimits(max_resident=resident)
    pages: dict[str, Any] = {"page_bytes": 1 if is_tight else 1 << 18}
    engine = small_engine(workers, **pages, arena_bytes=1 << 19, debug=True, sessions=limits)
    try:
        engine.register(model, warm_up=False)
        sessions = [engine.session("lm") for _ in range(4)]
        texts: list[list[int]] = [[] for _ in sessions]
        read(sessions[0], 6)
        texts[0] = draw_prompt(6, 6).tolist()
        for what, each, other, count in steps:
            if what == "ask":
                beside = sessions[other].submit(told([1, 2], 2)) if other != each else None
                texts[each] = answers_as_new(model, sessions[each], texts[each], draw_prompt(count, count).tolist(), 3)
                if beside is not None:
                    beside.result(WAIT_S)
                    sessions[other].cut_back(len(texts[other]))
            elif what == "copy" and other != each:
                sessions[each].copy_to([sessions[other]])
                texts[other] = list(texts[each])
            elif what == "cut back":
                texts[each] = texts[each][: max(0, len(texts[each]) - count)]
                sessions[each].cut_back(len(texts[each]))
            elif what == "new":
                sessions[each].close()
                sessions[each], texts[each] = engine.session("lm"), []
            elif what == "restore":
                sessions[each].restore(sessions[each].export())
        for session, text in zip(sessions, texts):
            answers_as_new(model, session, text, [1, 2], 3)
            session.close()
        assert not engine._processor.tables.holders.any()
        arenas = engine._processor.tables.arenas
        kinds = [kind for kind in range(MAX_KINDS) if engine._processor.tables.kinds["is_paged"][kind]]
        assert all((arenas[kind::MAX_KINDS]["num_free"] == arenas[kind::MAX_KINDS]["capacity"]).all() for kind in kinds)
    finally:
        close_and_check(engine)
