"""Growing states: rows in pages, wherever these are, for chains, loops and sessions."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.core.state.settings import SchedulerSettings
from cellrt.definition.define import cell
from cellrt.definition.spec import grows, pages, ragged, span
from cellrt.errors import CellError, DefinitionError, RequestError, RequestTooLargeError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.effort import examples
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, error_of, small_engine, watch_suspensions
from tests.engine.mixed_tasks import tasks_of_pieces_and_steps
from tests.engine.paged_models import NAPPING, POISON, WIDTH, SumSoFar, make_cells, make_request, serve_in_company, sums

CELLS = {page_size: make_cells(page_size, rows) for page_size, rows in ((1, 5), (2, 64), (3, 7))}
LEADING = st.one_of(st.just(0), st.integers(1, 40))
REQUEST = st.tuples(st.integers(0, 99), st.integers(1, 12), st.integers(1, 40), st.integers(1, 30), LEADING)
THOROUGH = settings(suppress_health_check=list(HealthCheck), max_examples=examples(15), deadline=None)


@THOROUGH
@given(
    requests=st.lists(REQUEST, min_size=1, max_size=14),
    page_size=st.sampled_from(list(CELLS)),
    workers=st.integers(1, 2),
    poisoned=st.sets(st.integers(0, 13), max_size=3),
    cancelled=st.sets(st.integers(0, 13), max_size=3),
    reserve_pages=st.booleans(),
)
def test_whatever_the_company_and_the_room_each_result_is_that_of_its_request_alone(
    requests, page_size, workers, poisoned, cancelled, reserve_pages
):
    # 64 pages at a worker: requests of up to 82 rows have to share them.
    model = sums(CELLS[page_size])
    settings = SchedulerSettings(reserve_pages=reserve_pages)
    engine = small_engine(workers, page_bytes=1, debug=True, settings=settings)
    serve_in_company(engine, model, requests, poisoned, cancelled)


@pytest.mark.parametrize("reserve_pages", [False, True])
def test_pages_that_run_out_are_lent_by_the_latest_arrivals_unless_each_has_all_of_its_own(reserve_pages):
    model = sums(CELLS[1])
    engine = small_engine(1, page_bytes=1, debug=True, settings=SchedulerSettings(reserve_pages=reserve_pages))
    suspended = watch_suspensions(engine)
    requests = [make_request(seed, 3, 8, 40) for seed in range(12)]
    try:
        engine.register(model, warm_up=False)
        futures = [engine.submit("sums", request) for request in requests]
        for request, future in zip(requests, futures):
            assert_same(future.result(WAIT_S), run_one_by_one(model, request))
        assert any(suspended) != reserve_pages
    finally:
        close_and_check(engine)


def test_pages_are_lent_though_another_model_keeps_the_worker_busy():
    model = sums(CELLS[1])
    engine = small_engine(1, page_bytes=1, debug=True)
    suspended = watch_suspensions(engine)
    requests = [make_request(seed, 3, 8, 40) for seed in range(6)]
    try:
        engine.register(model, warm_up=False)
        engine.register(NAPPING, warm_up=False)
        naps = engine.submit("naps", 5_000)
        futures = [engine.submit("sums", request) for request in requests]
        for request, future in zip(requests, futures):
            assert_same(future.result(WAIT_S), run_one_by_one(model, request))
        assert any(suspended) and not naps.done()
        naps.cancel()
    finally:
        close_and_check(engine)


def test_pages_that_come_back_find_room_before_any_new_one_is_taken():
    # Of the rows read, each of these takes many pages at once beside those that it has lent.
    drawn = random.Random(16)
    requests = [
        make_request(drawn.randrange(99), drawn.randint(6, 12), drawn.randint(1, 40), drawn.randint(1, 30))
        for _ in range(drawn.randint(6, 14))
    ]
    model = sums(CELLS[2])
    engine = small_engine(1, page_bytes=1, debug=True)
    try:
        engine.register(model, warm_up=False)
        futures = [engine.submit("sums", request) for request in requests]
        for request, future in zip(requests, futures):
            assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    finally:
        close_and_check(engine)


def test_pieces_of_long_inputs_and_steps_of_loops_share_tasks():
    cells = make_cells(page_size=4, max_batch_rows=16)
    model = sums(cells)
    engine = small_engine(1, trace=True)
    try:
        engine.register(model, warm_up=False)
        futures = [engine.submit("sums", make_request(seed, 2, 40, 30)) for seed in range(6)]
        for future in futures:
            future.result(WAIT_S)
        tasks = [task for task in engine.timeline().tasks if task.cell == "generate"]
    finally:
        close_and_check(engine)
    assert max(task.rows for task in tasks) == 16
    assert tasks_of_pieces_and_steps(tasks, 40)


def test_a_session_goes_on_from_what_was_read_and_made_before():
    model = sums(CELLS[3], keep=True)
    engine = small_engine(2, debug=True)
    state: list[torch.Tensor] = []
    try:
        engine.register(model, warm_up=False)
        with engine.session("sums") as session:
            for seed in range(5):
                request = make_request(seed, 2, 3 + seed, 4)
                assert_same(session.submit(request).result(WAIT_S), run_one_by_one(model, request, state))
                exported = session.export()
                if seed == 2:
                    session.reset()
                    session.restore(exported)
    finally:
        close_and_check(engine)


def test_pages_in_use_are_counted_apart_from_rows():
    engine = small_engine(1, page_bytes=1, debug=True)
    try:
        engine.register(sums(CELLS[1], keep=True), warm_up=False)
        with engine.session("sums") as session:
            session.submit(make_request(1, 3, 4, 5)).result(WAIT_S)
            places = engine.statistics()["rows"]
            assert 0 < places["worker 1"]["used_pages"] <= places["worker 1"]["pages"] == 64
        assert engine.drain(WAIT_S)
        assert engine.statistics()["rows"]["worker 1"]["used_pages"] == 0
    finally:
        close_and_check(engine)


def test_idle_sessions_leave_their_pages_to_others_and_find_them_again():
    model = sums(CELLS[1], keep=True)
    engine = small_engine(1, page_bytes=1, debug=True)
    states: list[list[torch.Tensor]] = [[] for _ in range(8)]
    try:
        engine.register(model, warm_up=False)
        sessions = [engine.session("sums", str(k)) for k in range(8)]
        for turn in range(3):
            for k, session in enumerate(sessions):
                request = make_request(10 * turn + k, 2, 6, 5)
                assert_same(session.submit(request).result(WAIT_S), run_one_by_one(model, request, states[k]))
        assert engine.statistics()["sessions"]["evictions"] > 0
    finally:
        close_and_check(engine)


def test_a_failed_request_leaves_its_session_the_rows_before_the_step_that_failed():
    accumulate = cell(SumSoFar(), {"x": (WIDTH,), "total": grows(WIDTH, page_size=2)}, name="sum", max_batch_rows=4)

    def unfold(graph, request):
        return {"x": graph.chain(accumulate, x=request, total=graph.pages(accumulate, keep=True)).x}

    model = Unfolder("sum", unfold, torch.zeros(2, WIDTH))
    rows = torch.randn(12, WIDTH)
    engine, state = small_engine(1, debug=True), []
    try:
        engine.register(model, warm_up=False)
        with engine.session("sum") as session:
            assert_same(session.submit(rows[:3]).result(WAIT_S), run_one_by_one(model, rows[:3], state))
            bad = rows[3:9].clone()
            bad[5, 0] = POISON
            assert isinstance(error_of(session.submit(bad)), CellError)
            run_one_by_one(model, bad[:4], state)  # of its two tasks, of four rows each, the first was complete
            assert_same(session.submit(rows[9:]).result(WAIT_S), run_one_by_one(model, rows[9:], state))
    finally:
        close_and_check(engine)


def test_what_can_never_have_enough_pages_is_refused():
    accumulate = cell(SumSoFar(), {"x": (WIDTH,), "total": grows(WIDTH, page_size=1)}, name="sum")

    def unfold(graph, request):
        return {"x": graph.chain(accumulate, x=request, total=graph.pages(accumulate, keep=True)).x}

    engine = small_engine(1, page_bytes=1)
    try:
        engine.register(Unfolder("sum", unfold, torch.zeros(2, WIDTH)), warm_up=False)
        with pytest.raises(RequestTooLargeError, match="65 .*a worker has 64"):
            engine.submit("sum", torch.zeros(65, WIDTH))
        with engine.session("sum") as session:
            session.submit(torch.zeros(60, WIDTH)).result(WAIT_S)
            with pytest.raises(RequestTooLargeError, match="the request needs 65 .*a worker has 64; .*page_bytes=1040"):
                session.submit(torch.zeros(5, WIDTH)).result(WAIT_S)
            session.submit(torch.zeros(4, WIDTH)).result(WAIT_S)
    finally:
        close_and_check(engine)


def leading_model(cells, name: str = "leading") -> Unfolder:
    """A loop whose first step reads all of the request, with a cell behind that reads all steps."""
    add = cell(
        lambda x: x.values.sum(0, keepdim=True)[x.offsets[1:] * 0], {"x": ragged(WIDTH)}, name="add", max_batch=1
    )

    def unfold(graph, request):
        made = graph.loop(cells.memorise, x=request, total=graph.pages(cells.memorise), until="stop", max_steps=12)
        return {"made": made.x, "sum": add(x=made.x).output}

    return Unfolder(name, unfold, torch.zeros(2, WIDTH))


def test_all_rows_that_a_loops_first_step_reads_are_in_one_task_where_they_fit():
    model, request = leading_model(CELLS[2]), torch.randn(40, WIDTH)
    engine = small_engine(1, trace=True, debug=True)
    try:
        engine.register(model, warm_up=False)
        result = engine.submit("leading", request).result(WAIT_S)
        assert_same(result, run_one_by_one(model, request))
        rows = [task.rows for task in engine.timeline().tasks if task.cell == "memorise"]
    finally:
        close_and_check(engine)
    assert rows == [40] + (len(result["made"]) - 1) * [1]


def test_a_picture_shows_that_the_request_leads_a_loop():
    engine = small_engine(1)
    try:
        engine.register(leading_model(CELLS[2]), warm_up=False)
        drawn = engine.graph("leading", torch.zeros(3, WIDTH)).to_networkx()
    finally:
        close_and_check(engine)
    assert [(each["label"], each["inputs"], each["results"]) for _, each in drawn.nodes(data=True)] == [
        ("loop up to 12", ["x"], ["x"]),
        ("1", [], ["output"]),
    ]


def test_steps_of_a_loop_that_several_rows_lead_are_streamed_one_by_one():
    model, request = leading_model(CELLS[3]), torch.randn(30, WIDTH)
    engine = small_engine(1, debug=True)
    try:
        engine.register(model, warm_up=False)
        steps = [step["made"] for step in engine.stream("leading", request) if "made" in step]
    finally:
        close_and_check(engine)
    assert_same({"made": torch.stack(steps)}, {"made": run_one_by_one(model, request)["made"]})


def test_a_loop_may_begin_with_all_steps_of_a_chain():
    cells = CELLS[3]

    def unfold(graph, request):
        read = graph.chain(cells.centre, x=request)
        made = graph.loop(cells.memorise, x=read.output, total=graph.pages(cells.memorise), max_steps=5)
        return {"made": made.x}

    model = Unfolder("read", unfold, torch.zeros(2, WIDTH))
    engine = small_engine(2, debug=True)
    try:
        engine.register(model, warm_up=False)
        requests = [torch.randn(1 + 3 * k, WIDTH) for k in range(8)]
        for request, future in zip(requests, engine.submit_many("read", requests)):
            assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    finally:
        close_and_check(engine)


def refused(match: str):
    return pytest.raises(RequestError, match=match)


def test_mistakes_with_growing_states_are_named_where_they_are_made():
    cells = make_cells()

    def unfolding(build) -> Unfolder:
        def unfold(graph, request):
            build(graph)
            return {"x": graph.chain(cells.centre, x=request).output}

        return Unfolder("wrong", unfold, torch.zeros(2, WIDTH))

    x = torch.zeros(2, WIDTH)

    def append_after_loop(graph):
        total = graph.pages(cells.memorise)
        graph.loop(cells.memorise, x=x[0], total=total, max_steps=2)
        graph.chain(cells.memorise, x=x, total=total)

    def begin_with(rows):
        return lambda graph: graph.loop(cells.memorise, x=rows(graph), total=graph.pages(cells.memorise), max_steps=2)

    def outputs_of_nodes(graph):
        return [graph.chain(cells.centre, x=x).last.output, graph.chain(cells.centre, x=x).last.output]

    for build, match in (
        (lambda graph: graph.pages(cells.centre), "none of its inputs grows"),
        (lambda graph: graph.pages(cells.generate, "memory"), "expected one of the inputs \\['total'\\]"),
        (lambda graph: graph.chain(cells.memorise, x=x, total=x), "input 'total': expected growing pages of 3"),
        (append_after_loop, "a loop has appended to it"),
        (lambda graph: graph.chain(cells.centre, x=x, spans=x), "nobody gives a span"),
        (
            lambda graph: graph.chain(cells.centre, x=torch.zeros(65, WIDTH)),
            "65 rows; it needs all of them in one task",
        ),
        (lambda graph: graph.loop(cells.memorise, x=x[0], max_steps=2, carry={"x": "stop"}), "carry 'x' from 'stop'"),
        (begin_with(lambda graph: x[:0]), "its first step reads at least one row, got {'x': 0}"),
        (begin_with(lambda graph: x[:, :2]), "input 'x': expected float32\\[4\\] for each step, got float32\\[2\\]"),
        (begin_with(outputs_of_nodes), "expected rows of the request or a chain's steps, got a list with outputs"),
        (
            lambda graph: graph.loop(
                cells.centre, x=torch.zeros(65, WIDTH), max_steps=2, carry={"x": next(iter(cells.centre.outputs))}
            ),
            "65 rows; it needs all of them in one task",
        ),
    ):
        with refused(match):
            run_one_by_one(unfolding(build), x)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ({"x": torch.zeros(3, WIDTH), "note": torch.zeros(2, WIDTH)}, "of each carried input, got {'x': 3, 'note': 2}"),
        ({"x": torch.zeros(3, WIDTH)}, "got {'x': 3, 'note': 1}; what is not given is one row of zeros"),
        ({"x": "hello", "note": torch.zeros(3, WIDTH)}, "input 'x': expected float32\\[4\\]"),
        ({"x": torch.zeros(1, 3, WIDTH), "note": torch.zeros(3, WIDTH)}, "input 'x': expected float32\\[4\\]"),
    ],
)
def test_inputs_of_a_loops_first_step_that_do_not_go_together_are_named(rows, match):
    def both(x, note, spans):
        return {"x": x + note, "note": note}

    pair = cell(both, {"x": (WIDTH,), "note": (WIDTH,), "spans": span()})
    model = Unfolder(
        "wrong", lambda graph, request: {"x": graph.loop(pair, max_steps=2, **request).x}, {"x": torch.zeros(WIDTH)}
    )
    with refused(match):
        run_one_by_one(model, rows)


def test_a_cell_that_writes_to_pages_it_only_reads_is_refused():
    def write(x, memory):
        memory.pages[0, 0] = 1.0
        return x

    with pytest.raises(DefinitionError, match="'memory': writes to pages that it only reads"):
        cell(write, {"x": (WIDTH,), "memory": pages(WIDTH)})


def test_a_cell_that_appends_nothing_to_what_it_grows_is_refused():
    def forget(x, memory):
        return x + memory.lengths[memory.nodes][:, None]

    with pytest.raises(DefinitionError, match="'memory': appends no row"):
        cell(forget, {"x": (WIDTH,), "memory": grows(WIDTH)})


def test_a_session_keeps_all_rows_of_growing_states_that_a_request_appends_unequally_to():
    made = CELLS[2].memorise

    def unfold(graph, request):
        first, second = graph.pages(made, keep=True), graph.pages(made, keep=True)
        long = graph.chain(made, x=request[0], total=first)
        return {"long": long.x, "short": graph.chain(made, x=request[1], total=second).x}

    model = Unfolder("unequal", unfold, (torch.zeros(3, WIDTH), torch.zeros(1, WIDTH)))
    engine, state = small_engine(1), []
    engine.register(model, warm_up=False)
    session = engine.session("unequal")
    for lengths in ((5, 1), (2, 4), (3, 3)):
        request = tuple(torch.randn(length, WIDTH) for length in lengths)
        assert_same(session.submit(request).result(WAIT_S), run_one_by_one(model, request, state))
    close_and_check(engine)
