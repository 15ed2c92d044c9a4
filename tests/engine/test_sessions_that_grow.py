"""Sessions whose state grows: what one leaves when it is reset, closed, evicted or restored is nobody else's."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cellrt.core.checks.validate import broken_rules
from cellrt.engine.session_limits import SessionLimits
from cellrt.graph.reference import run_one_by_one
from tests.effort import examples
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, small_engine
from tests.engine.paged_models import make_cells, make_request, sums

CELLS = {page_size: make_cells(page_size, rows) for page_size, rows in ((1, 5), (3, 7))}


@settings(max_examples=examples(12))
@given(
    seed=st.integers(0, 1 << 16),
    resident=st.sampled_from([0, 1, None]),
    page_bytes=st.sampled_from([1 << 12, 1 << 16]),
)
def test_each_session_has_its_own_rows_alone_whatever_became_of_others(seed, resident, page_bytes):
    draw = random.Random(seed)
    model = sums(CELLS[draw.choice((1, 3))], keep=True)
    engine = small_engine(1, sessions=SessionLimits(max_resident=resident), page_bytes=page_bytes, debug=True)
    engine.register(model, warm_up=False)
    sessions = [(engine.session("sums", str(k)), []) for k in range(3)]
    for turn in range(12):
        its = draw.sample(range(3), draw.randint(1, 3))
        requests = [make_request(seed + 10 * turn + k, 2, draw.randint(1, 5), draw.randint(1, 4)) for k in its]
        futures = engine.submit_many("sums", requests, sessions=[sessions[k][0] for k in its])
        for k, future, request in zip(its, futures, requests):
            assert_same(future.result(WAIT_S), run_one_by_one(model, request, sessions[k][1]))
        k = draw.randrange(3)
        session, state = sessions[k]
        match draw.choice(("reset", "close", "restore", "restore and reset", "nothing")):
            case "reset":
                session.reset()
                state.clear()
            case "close":
                session.close()
                sessions[k] = engine.session("sums", str(k)), []
            case "restore":
                session.restore(session.export())
            case "restore and reset":
                session.restore(session.export())
                session.reset()
                state.clear()
    for session, _ in sessions:
        session.close()
    close_and_check(engine)


@pytest.mark.parametrize("how", ["reset", "close"])
def test_what_was_evicted_is_not_the_next_sessions(how):
    model, request = sums(CELLS[1], keep=True), make_request(0, 2, 4, 3)
    with small_engine(1, sessions=SessionLimits(max_resident=0)) as engine:
        engine.register(model, warm_up=False)
        first = engine.session("sums", "alice")
        for _ in range(2):
            first.submit(request).result(WAIT_S)
        first.reset() if how == "reset" else first.close()
        following = first if how == "reset" else engine.session("sums", "bob")
        assert_same(following.submit(request).result(WAIT_S), run_one_by_one(model, request))
        engine.check()


def test_the_validator_finds_rows_that_are_nowhere():
    with small_engine() as engine:
        engine.register(sums(CELLS[1], keep=True), warm_up=False)
        engine._processor.tables.slots["length"][3] = 5
        assert broken_rules(engine._processor.tables) == ["session 0: rows of its state 3 are nowhere"]
        engine._processor.tables.slots["length"][3] = 0
