"""Where a new session begins: with what its first request gives; later ones go on from what was kept."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cellrt.cells import LSTMCell
from cellrt.definition.define import cell
from cellrt.definition.spec import rows
from cellrt.engine.session_limits import SessionLimits
from cellrt.errors import CellError, RequestError, SessionError
from cellrt.graph.graph import Graph
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.effort import examples
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, small_engine
from tests.engine.models import RAISE, WIDTH, make_cells

PLAIN, WITH_STEPS, LOOP = make_cells()
NUMBER = rows(dtype=torch.int64)
DOUBLE = cell(lambda x: 2 * x, {"x": (WIDTH,)}, name="double")
COUNTER = cell(
    lambda n, m, by: {"n": n + by, "m": m + 10 * by}, {"n": NUMBER, "m": NUMBER, "by": NUMBER}, name="counter"
)
DOUBLE_COUNTER = cell(lambda n: {"n": 2 * n}, {"n": NUMBER}, name="double counter")
torch.manual_seed(0)
LSTM = cell(LSTMCell(WIDTH, 3), {"x": (WIDTH,), "h": (3,), "c": (3,)})
ENCODER = cell(lambda x: {"h": torch.cat([x, x[:, :1]], 1), "c": torch.cat([x, x[:, :1]], 1) * 2}, {"x": (WIDTH,)})


def starting(graph: Graph, request):
    """The state is half of what it was, plus one a step; the request is (steps, start)."""
    count, start = request
    return {"h": graph.chain(PLAIN, keep=True, x=torch.ones(count, WIDTH), h=start).last.h}


def prompted(graph: Graph, request):
    """A decoder that begins where an encoder ended; both run in every request that has a prompt."""
    x, prompt = request
    given = {}
    if prompt is not None:
        encoded = ENCODER(x=prompt)
        given = {"h": encoded.h, "c": encoded.c}
    return {"h": graph.chain(LSTM, keep=True, x=x, **given).h}


def by_hand(graph: Graph, request):
    x, prompt = request
    before = state = graph.state(LSTM, **({} if prompt is None else {"h": ENCODER(x=prompt).h}))
    for row in x:
        state = LSTM(x=row, h=state.h, c=state.c)
    graph.keep(before, state)
    return {"h": state.h}


def stacked(graph: Graph, request):
    """Two chains that keep their states, so that these change together; the upper one begins with a constant."""
    x, prompt = request
    start = {} if prompt is None else {"h": graph.constant(torch.tensor([1.0, 2, 3])), "c": ENCODER(x=prompt).c}
    below = graph.chain(LSTM, keep=True, x=x, **start)
    gather = graph.chain(DOUBLE, x=x)
    return {"h": below.h, "sum": graph.chain(PLAIN, keep="h", x=gather.output, h=torch.ones(WIDTH)).last.h}


def looped(graph: Graph, request):
    """A loop that keeps its state and counts anew in each request."""
    x, prompt = request
    start = {} if prompt is None else {"h": graph.chain(PLAIN, x=x, h=prompt).last.h}
    loop = graph.loop(LOOP, max_steps=9, until="stop", keep=["h"], n=3, x=x[0], at=1, **start)
    return {"h": loop.h, "n": loop.last.n}


START = Unfolder("starting", starting, (2, torch.zeros(WIDTH)))
ROWS = torch.zeros(2, WIDTH)
MODELS = [
    Unfolder(name, function, (ROWS, ROWS[0]))
    for name, function in (("prompted", prompted), ("by_hand", by_hand), ("stacked", stacked), ("looped", looped))
]


def value_after(count: int, start: float) -> float:
    for _ in range(count):
        start = 1 + 0.5 * start
    return start


def filled(value: float) -> torch.Tensor:
    return torch.full((WIDTH,), value)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
@settings(max_examples=examples(15))
@given(seed=st.integers(0, 1 << 16), workers=st.integers(1, 3), resident=st.sampled_from([None, 0, 2]))
def test_requests_continue_from_each_other_and_the_first_from_its_start(model, seed, workers, resident):
    draw = random.Random(seed)
    torch.manual_seed(seed)
    engine = small_engine(workers, sessions=SessionLimits(max_resident=resident), arena_bytes=1 << 14)
    engine.register(model, warm_up=False)
    sessions = [(engine.session(model.name), []) for _ in range(draw.randint(1, 5))]
    waiting = []
    for _ in range(draw.randint(1, 16)):
        session, state = draw.choice(sessions)
        if draw.random() < 0.2:
            session.reset()
            state.clear()
        request = torch.randn(draw.randint(1, 6), WIDTH), torch.randn(WIDTH) if draw.random() < 0.6 else None
        waiting.append((session.submit(request), run_one_by_one(model, request, state)))
        if draw.random() < 0.3:
            waiting.append((engine.submit(model.name, request), run_one_by_one(model, request)))
    for future, expected in waiting:
        assert_same(future.result(WAIT_S), expected)
    close_and_check(engine)


@pytest.mark.parametrize("resident", [None, 0])
def test_the_start_counts_for_a_new_session_alone(resident):
    engine = small_engine(sessions=SessionLimits(max_resident=resident))
    engine.register(START, warm_up=False)
    session = engine.session("starting")
    for start, expected in ((8.0, value_after(3, 8.0)), (100.0, value_after(6, 8.0)), (-5.0, value_after(9, 8.0))):
        assert torch.equal(session.submit((3, filled(start))).result(WAIT_S)["h"], filled(expected))
        alone = engine.submit("starting", (3, filled(start))).result(WAIT_S)
        assert torch.equal(alone["h"], filled(value_after(3, start)))
    session.reset()
    assert torch.equal(session.submit((1, filled(4.0))).result(WAIT_S)["h"], filled(value_after(1, 4.0)))
    close_and_check(engine)


def test_a_new_session_is_exported_as_new_and_another_as_what_it_is():
    first, second = small_engine(), small_engine()
    for engine in (first, second):
        engine.register(START, warm_up=False)
    new, old = first.session("starting", "new"), first.session("starting", "old")
    old.submit((3, filled(8.0)))
    here, there = second.session("starting", state=new.export()), second.session("starting", state=old.export())
    assert here.export() == new.export() and there.export() == old.export() != new.export()
    assert torch.equal(here.submit((1, filled(4.0))).result(WAIT_S)["h"], filled(value_after(1, 4.0)))
    assert torch.equal(there.submit((1, filled(4.0))).result(WAIT_S)["h"], filled(value_after(4, 8.0)))
    old.restore(new.export())
    assert torch.equal(old.submit((1, filled(6.0))).result(WAIT_S)["h"], filled(value_after(1, 6.0)))
    close_and_check(first)
    close_and_check(second)


def test_a_new_session_of_other_cells_is_refused():
    with small_engine() as engine:
        engine.register(START, warm_up=False)
        engine.register(MODELS[0], warm_up=False)
        with pytest.raises(SessionError, match="other cells or weights"):
            engine.session("prompted", state=engine.session("starting").export())


def test_a_first_request_that_fails_leaves_the_session_new():
    engine = small_engine()
    model = Unfolder(
        "failing", lambda graph, r: {"h": graph.chain(PLAIN, keep=True, x=r[0], h=r[1]).h}, (ROWS, ROWS[0])
    )
    engine.register(model, warm_up=False)
    session = engine.session("failing")
    with pytest.raises(CellError):
        session.submit((torch.full((1, WIDTH), RAISE), filled(8.0))).result(WAIT_S)
    after = session.submit((torch.ones(2, WIDTH), filled(4.0))).result(WAIT_S)
    assert torch.equal(after["h"][-1], filled(value_after(2, 4.0)))
    close_and_check(engine)


def test_only_the_inputs_that_are_named_are_kept():
    """The others begin with what each request gives."""
    model = Unfolder(
        "counter",
        lambda graph, r: {k: getattr(graph.chain(COUNTER, keep=("n",), by=[1, 1], n=r, m=r).last, k) for k in "nm"},
        0,
    )
    with small_engine() as engine:
        engine.register(model, warm_up=False)
        session = engine.session("counter")
        results = [session.submit(start).result(WAIT_S) for start in (5, 100, 200)]
        assert [(int(r["n"]), int(r["m"])) for r in results] == [(7, 25), (9, 120), (11, 220)]


def test_the_oracle_begins_a_new_session_with_the_start():
    state: list[torch.Tensor] = []
    results = [run_one_by_one(START, (3, filled(start)), state)["h"] for start in (8.0, 100.0)]
    assert torch.equal(results[0], filled(value_after(3, 8.0))) and torch.equal(results[1], filled(value_after(6, 8.0)))


def test_states_may_be_kept_in_any_order():
    def function(graph: Graph, by):
        first, second = graph.state(COUNTER), graph.state(DOUBLE_COUNTER, n=100)
        counted, doubled = COUNTER(by=by, n=first.n, m=first.m), DOUBLE_COUNTER(n=second.n)
        graph.keep(second, doubled)
        graph.keep(first, counted)
        return {"n": counted.n, "m": counted.m, "doubled": doubled.n}

    model = Unfolder("order", function, 1)
    state: list[torch.Tensor] = []
    with small_engine() as engine:
        engine.register(model, warm_up=False)
        session = engine.session("order")
        for expected in ((1, 10, 200), (2, 20, 400), (3, 30, 800)):
            result = session.submit(1).result(WAIT_S)
            assert_same(result, run_one_by_one(model, 1, state))
            assert tuple(map(int, result.values())) == expected


def test_a_state_may_begin_with_another_ones_start():
    """Both are new together, so it begins with what the other does; or with zeros."""

    def function(graph: Graph, by):
        state = graph.state(COUNTER, n=7)
        chain = graph.chain(COUNTER, keep=True, by=[by], n=state.n, m=state.m)
        graph.keep(state, COUNTER(by=by, n=state.n, m=state.m))
        return {"n": chain.last.n, "m": chain.last.m}

    model = Unfolder("begins", function, 1)
    with small_engine() as engine:
        engine.register(model, warm_up=False)
        session = engine.session("begins")
        found = [tuple(map(int, session.submit(1).result(WAIT_S).values())) for _ in range(2)]
        assert found == [(8, 10), (9, 20)]


def test_an_output_is_kept_once():
    """A session has a row of its own for each of its states."""

    def twice(graph: Graph, by):
        state = graph.state(COUNTER)
        chain = graph.chain(COUNTER, keep="n", by=[by])
        graph.keep(state, {"n": chain.last.n, "m": chain.last.m})
        return {"n": chain.last.n}

    with pytest.raises(RequestError, match="state 'counter.n': its output is kept as state 'counter.n' already"):
        run_one_by_one(Unfolder("twice", twice, 1), 1)


def test_a_session_is_of_its_engine_whatever_was_registered_before():
    """Rows of the same kind have another number where other models came first."""
    engine = small_engine(sessions=SessionLimits(max_resident=0))
    engine.register(MODELS[0], warm_up=False)
    engine.register(Unfolder("double", lambda graph, n: DOUBLE_COUNTER(n=graph.constant(3)), None), warm_up=False)
    counter = Unfolder("counter", lambda graph, by: {"n": graph.chain(COUNTER, keep=True, by=by).last.n}, [1, 2])
    engine.register(counter, warm_up=False)
    session = engine.session("counter")
    assert [int(session.submit([1, 1]).result(WAIT_S)["n"]) for _ in range(3)] == [2, 4, 6]
    again = engine.session("counter", state=session.export())
    assert int(again.submit([1]).result(WAIT_S)["n"]) == 7
    close_and_check(engine)


def test_two_inputs_that_are_carried_from_one_output_begin_alike():
    both = cell(lambda a, b: {"h": a + b + 1}, {"a": NUMBER, "b": NUMBER}, carry={"a": "h", "b": "h"}, name="both")

    def function(graph: Graph, request):
        alike, second = request
        start = DOUBLE_COUNTER(n=5).n
        return {"h": graph.loop(both, max_steps=2, keep=True, a=start, b=start if alike else second).last.h}

    model = Unfolder("both", function, (True, 0))
    with small_engine() as engine:
        engine.register(model, warm_up=False)
        assert int(engine.session("both").submit((True, 0)).result(WAIT_S)["h"]) == 43
        with pytest.raises(RequestError, match="input 'b': keep: carried from 'h' like another input"):
            engine.submit("both", (False, 3))


def test_a_graph_shows_what_a_new_session_begins_with():
    with small_engine() as engine:
        engine.register(MODELS[0], warm_up=False)
        drawn = engine.graph("prompted", (torch.zeros(1, WIDTH), torch.zeros(WIDTH))).to_networkx()
        (edge,) = drawn.edges(data=True)
        assert [drawn.nodes[node]["cell"] for node in edge[:2]] == [ENCODER.name, "LSTMCell"]
        assert edge[2] == {"output": ["h", "c"], "input": ["h", "c"]}
        priorities = {made.cell.name: made.id for made in engine._registry.types.values()}
        found = engine._processor.tables.types["priority"]
        assert found[priorities["LSTMCell"]] > found[priorities[ENCODER.name]]
