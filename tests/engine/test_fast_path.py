"""Plain requests of known graphs are handed in by compiled C, and it is not to be told from Python but by its speed."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cellrt.core.state.tables import MAX_SUBMISSIONS
from cellrt.definition.define import cell
from cellrt.engine import fast_path
from cellrt.engine.engine import Engine
from cellrt.engine.registry import Plan
from cellrt.engine.request_group import RequestGroup
from cellrt.engine.submission import Submission
from cellrt.errors import CellrtError, DeadlineError, EngineClosedError, OverloadError, UnknownModelError
from cellrt.graph.graph import Graph
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, error_of, small_engine
from tests.engine.models import NUMBER, RAISE, WIDTH, Gate, make_cells

pytestmark = pytest.mark.skipif(not fast_path.is_built(), reason="built where a C compiler is")

PLAIN, *_ = make_cells()


def chain(graph: Graph, request: Any) -> dict[str, object]:
    states = graph.chain(PLAIN, x=request)
    return {"every": states.h, "last": states.last.h}


CHAIN = Unfolder("chain", chain, torch.zeros(2, WIDTH), key=len)
NUMBERS = cell(lambda n: n * 2, {"n": NUMBER}, name="double")
DOUBLE = Unfolder(
    "double",
    lambda graph, request: {"n": graph.chain(NUMBERS, n=request["n"][0]).output},
    {"n": [[1, 2]]},
    key=lambda request: len(request["n"][0]),
)
UNKEYED = Unfolder("unkeyed", chain, torch.zeros(2, WIDTH))
MODELS = {"chain": CHAIN, "double": DOUBLE, "unkeyed": UNKEYED}


def steps(length: int, value: float = 0.0) -> torch.Tensor:
    return torch.arange(length * WIDTH, dtype=torch.float32).reshape(length, WIDTH) / 8 + value


def know(engine: Engine, model: str, request: Any, count: int = 5) -> None:
    """Have the engine know the graph of a request; it is unfolded no more until the count has doubled."""
    for _ in range(count):
        engine.submit(model, request).result(WAIT_S)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with small_engine() as made:
        for model in MODELS.values():
            made.register(model, warm_up=False)
        yield made
        made.check()


@pytest.fixture
def own_engine() -> Iterator[Engine]:
    made = small_engine()
    made.register(CHAIN, warm_up=False)
    know(made, "chain", steps(3))
    yield made
    close_and_check(made)


def test_an_extension_of_another_source_is_not_used_and_that_is_told_once(monkeypatch, caplog):
    fast_path._warn_of_another_source.cache_clear()
    monkeypatch.setattr(fast_path._hand_in, "SOURCE", fast_path._hand_in.SOURCE + 1)
    assert not fast_path.is_built() and not fast_path.is_built()
    assert [record.message for record in caplog.records if "another version of its source" in record.message][1:] == []
    assert "build it again" in caplog.text


def test_a_request_of_a_known_graph_is_handed_in_by_c_and_answered(engine):
    know(engine, "chain", steps(3))
    future = engine._hand_in_fast("chain", steps(3, 0.5), False)
    assert future is not None
    assert_same(future.result(WAIT_S), run_one_by_one(CHAIN, steps(3, 0.5)))


def test_a_request_without_a_key_is_handed_in_by_c_from_the_third_of_its_graph_on(engine, monkeypatch):
    know(engine, "unkeyed", steps(3), 2)
    monkeypatch.setattr(Submission, "_enqueue", None)
    future = engine.submit("unkeyed", steps(3, 0.5))
    assert_same(future.result(WAIT_S), run_one_by_one(UNKEYED, steps(3, 0.5)))


def test_a_graph_that_is_dropped_is_freed_at_once(own_engine):
    own_engine.register(UNKEYED, warm_up=False)
    know(own_engine, "unkeyed", steps(3), 3)
    plans = own_engine._models["unkeyed"].plans_by_program._templates
    (program,) = [plan.program for plan in plans.values() if plan.prepared]
    gc.disable()
    try:
        del plans
        own_engine.unregister("unkeyed")
        assert own_engine.drain(WAIT_S)
        own_engine._manager.turns.call(lambda: None)
        assert not [plan for plan in gc.get_objects() if type(plan) is Plan and plan.program is program]
    finally:
        gc.enable()


GIVEN: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda x: x,
    "array": lambda x: x.numpy().copy(),
    "read-only array": lambda x: np.frombuffer(x.numpy().tobytes(), np.float32).reshape(x.shape),
    "array of the other byte order": lambda x: x.numpy().astype(">f4"),
    "transposed": lambda x: x.t().contiguous().t(),
    "every other row": lambda x: torch.stack([x, x + 1], 1).reshape(-1, WIDTH)[::2],
    "needs grad": lambda x: x.clone().requires_grad_(),
    "parameter": lambda x: torch.nn.Parameter(x),
    "float64": lambda x: x.double(),
    "half": lambda x: x.half(),
    "wider": lambda x: torch.cat([x, x], 1),
    "flat": lambda x: x.reshape(-1),
    "negated view": lambda x: torch.complex(torch.zeros_like(x), -x).conj().imag,
    "list of tensors": lambda x: list(x),
    "list of lists": lambda x: x.tolist(),
    "tuple": lambda x: tuple(x),
    "meta": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(),
    "nothing": lambda x: None,
    "text": lambda x: "abc",
}


def outcome_of(submit: Callable[[], Any]) -> Any:
    """The results, or the error's type and text."""
    try:
        return submit().result(WAIT_S)
    except CellrtError as error:
        return type(error), str(error)


@pytest.mark.parametrize("how", GIVEN)
@pytest.mark.parametrize("model", ["chain", "unkeyed"])
def test_whatever_is_given_ends_as_by_python(engine, model, how):
    know(engine, model, steps(3))
    request = GIVEN[how](steps(3, 0.25))
    fast, by_python = (
        outcome_of(lambda: engine.submit(model, request)),
        outcome_of(lambda: engine.submit(model, request, priority=2)),
    )
    if isinstance(by_python, tuple):
        assert fast == by_python
    else:
        assert_same(fast, by_python)


@pytest.mark.parametrize(
    "numbers", [[1, 2], (1, 2), [1, 2**62], [1, 2**63], [1, True], [1, 2.0], ["1", "2"], [1, np.int64(2)], [1, None]]
)
def test_whatever_numbers_are_given_end_as_by_python(engine, numbers):
    know(engine, "double", {"n": [[5, 6]]})
    request = {"n": [numbers]}
    fast, by_python = (
        outcome_of(lambda: engine.submit("double", request)),
        outcome_of(lambda: engine.submit("double", request, priority=2)),
    )
    assert fast == by_python if isinstance(by_python, tuple) else fast["n"].tolist() == by_python["n"].tolist()


def test_what_was_handed_in_is_the_clients_again(engine):
    know(engine, "chain", steps(4))
    request = torch.empty(4, WIDTH)
    futures = []
    for value in range(50):
        request.copy_(steps(4, value))
        futures.append(engine.submit("chain", request))
        request.fill_(-1.0)
    for value, future in enumerate(futures):
        assert_same(future.result(WAIT_S), run_one_by_one(CHAIN, steps(4, value)))


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=40),
    cancelled=st.sets(st.integers(0, 39)),
    model=st.sampled_from(["chain", "unkeyed"]),
)
def test_any_lengths_in_any_order_are_answered_and_nothing_leaks(engine, lengths, cancelled, model):
    requests = [steps(length, value) for value, length in enumerate(lengths)]
    futures = [engine.submit(model, request) for request in requests]
    for k in cancelled & set(range(len(futures))):
        futures[k].cancel()
    for request, future in zip(requests, futures):
        if future.cancelled():
            continue
        assert_same(future.result(WAIT_S), run_one_by_one(CHAIN, request))
    assert engine.drain(WAIT_S)
    assert engine.statistics()["unfinished"] == 0
    engine.check()


def test_a_cell_that_fails_on_a_row_costs_that_request_alone(own_engine):
    wrong = steps(3)
    wrong[1, 0] = RAISE
    futures = [own_engine.submit("chain", request) for request in (steps(3), wrong, steps(3, 1.0))]
    assert "a row this cell cannot take" in str(error_of(futures[1]))
    assert_same(futures[0].result(WAIT_S), run_one_by_one(CHAIN, steps(3)))
    assert_same(futures[2].result(WAIT_S), run_one_by_one(CHAIN, steps(3, 1.0)))


def test_the_queue_has_an_end_for_it_too():
    gate = Gate(WAIT_S)
    engine = small_engine(max_queue=3)
    engine.register(CHAIN, warm_up=False)
    engine.register(gate.unfolder, warm_up=False)
    know(engine, "chain", steps(3))
    held = engine.submit("gate", torch.ones(WIDTH))
    assert gate.entered.wait(WAIT_S)
    futures = [engine.submit("chain", steps(3, value)) for value in range(2)]
    with pytest.raises(OverloadError, match="3 requests are unfinished"):
        engine.submit("chain", steps(3))
    with pytest.raises(DeadlineError):
        engine.submit("chain", steps(3), wait=True, deadline=0.05)
    waiting = threading.Thread(target=lambda: futures.append(engine.submit("chain", steps(3, 2), wait=True)))
    waiting.start()
    gate.open.set()
    waiting.join(WAIT_S)
    assert held.result(WAIT_S) and len(futures) == 3
    for value, future in enumerate(futures):
        assert_same(future.result(WAIT_S), run_one_by_one(CHAIN, steps(3, value)))
    close_and_check(engine)


def test_no_one_overtakes_those_who_wait_for_a_place(own_engine, monkeypatch):
    assert own_engine._hand_in_fast("chain", steps(3), True) is not None
    monkeypatch.setattr(own_engine._manager.room, "line", [weakref.ref(own_engine)])
    assert own_engine._hand_in_fast("chain", steps(3), True) is None
    assert own_engine._hand_in_fast("chain", steps(3), False) is not None


def test_a_model_that_was_replaced_is_asked_no_more(own_engine):
    doubled = cell(lambda x, h: 2 * (x + 0.5 * h), {"x": (WIDTH,), "h": (WIDTH,)}, carry={"h": "output"}, name="add")
    other = Unfolder("chain", lambda graph, x: {"last": graph.chain(doubled, x=x).last.output}, CHAIN.example, key=len)
    own_engine.register(other, replace=True, warm_up=False)
    for _ in range(9):
        assert_same(own_engine.submit("chain", steps(3)).result(WAIT_S), run_one_by_one(other, steps(3)))


def test_a_key_that_does_not_tell_the_graph_is_found_out():
    rows = {"tensor": 0, "reversed": 0}

    def unfold(graph: Graph, request: Any) -> dict[str, object]:
        rows["tensor"] += 1
        x = request["x"]
        first = graph.chain(PLAIN, x=x)
        return {"last": first.last.h if request["twice"] is None else graph.chain(PLAIN, x=first.h).last.h}

    model = Unfolder("told", unfold, {"x": torch.zeros(2, WIDTH), "twice": None}, key=lambda request: len(request["x"]))
    with small_engine() as engine:
        engine.register(model, warm_up=False)
        request = {"x": steps(2), "twice": None}
        know(engine, "told", request, 3)
        with pytest.raises(CellrtError, match="a key must tell"):
            for _ in range(40):
                engine.submit("told", {"x": steps(2), "twice": 1}).result(WAIT_S)


def test_what_nobody_may_submit_to_is_told_as_by_python(own_engine):
    with pytest.raises(UnknownModelError):
        own_engine.submit("nobody", steps(3))
    with pytest.raises(UnknownModelError):
        own_engine.submit(CHAIN, steps(3))  # type: ignore[arg-type]
    own_engine.close()
    with pytest.raises(EngineClosedError):
        own_engine.submit("chain", steps(3))


def test_an_interrupt_in_a_key_is_the_callers():
    interrupts = [False]

    def key(request: torch.Tensor) -> int:
        if interrupts[0]:
            raise KeyboardInterrupt
        return len(request)

    with small_engine() as engine:
        engine.register(Unfolder("chain", chain, torch.zeros(2, WIDTH), key=key), warm_up=False)
        know(engine, "chain", steps(3))
        interrupts[0] = True
        with pytest.raises(KeyboardInterrupt):
            engine.submit("chain", steps(3))
        interrupts[0] = False
        assert engine.submit("chain", steps(3)).result(WAIT_S)


def test_answers_of_bulks_and_of_single_requests_come_to_their_own_futures(own_engine):
    bulks = [own_engine.submit_many("chain", [steps(3, -10 * k - j) for j in range(5)]) for k in range(4)]
    single = [own_engine.submit("chain", steps(3, -100 - k)) for k in range(4)]
    one_by_one = [future.result(WAIT_S) for future in bulks[3]]
    for k, results in enumerate([*[bulk.results(WAIT_S) for bulk in bulks[:3]], one_by_one]):
        for j, result in enumerate(results):
            assert_same(result, run_one_by_one(CHAIN, steps(3, -10 * k - j)))
    for k, future in enumerate(single):
        assert_same(future.result(WAIT_S), run_one_by_one(CHAIN, steps(3, -100 - k)))


def test_collections_of_garbage_whose_finalizers_submit_do_no_harm(own_engine):
    futures: list[Any] = []

    class Submits:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            if len(futures) < 400:
                futures.append((own_engine.submit("chain", steps(3, 7.0)), 7.0))

    before = gc.get_threshold()
    gc.set_threshold(3, 1, 1)
    try:
        for value in range(200):
            Submits()
            futures.append((own_engine.submit("chain", steps(3, value / 8)), value / 8))
    finally:
        gc.set_threshold(*before)
        gc.collect()  # while the engine takes requests
    assert len(futures) > 250
    for future, value in futures:
        assert_same(future.result(WAIT_S), run_one_by_one(CHAIN, steps(3, value)))


def test_a_collection_of_garbage_that_submits_while_python_hands_in_does_no_harm(own_engine):
    futures: list[Any] = []
    gate = own_engine._manager.turns.gate
    is_inside = [False]

    def submit(phase: str, _: object) -> None:
        if phase == "start" and not is_inside[0] and gate._is_owned():  # type: ignore[attr-defined]
            is_inside[0] = True
            futures.append((own_engine.submit("chain", steps(3, 7.0)), 7.0))
            is_inside[0] = False

    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    gc.callbacks.append(submit)
    try:
        for value in range(20):
            futures.append((own_engine.submit("chain", steps(3, value), deadline=WAIT_S), value))
    finally:
        gc.callbacks.remove(submit)
        gc.set_threshold(*before)
    assert len(futures) > 40
    for future, value in futures:
        assert_same(future.result(WAIT_S), run_one_by_one(CHAIN, steps(3, value)))


def test_a_request_that_c_does_not_hand_in_is_freed_at_once(own_engine):
    def num_groups() -> int:
        return sum(type(each) is RequestGroup for each in gc.get_objects())

    manager = own_engine._manager
    assert own_engine.drain(WAIT_S)
    gc.collect()
    gc.disable()
    try:
        before = num_groups()
        manager.is_closing = True
        for _ in range(9):
            assert own_engine._hand_in_fast("chain", steps(3), False) is None
        assert num_groups() == before
    finally:
        manager.is_closing = False
        gc.enable()


def test_tensors_of_any_number_of_dimensions_are_handed_in():
    shape = (1,) * 8 + (2,)
    twice = cell(lambda x: x * 2, {"x": shape}, name="twice")
    model = Unfolder("deep", lambda graph, x: {"y": graph.chain(twice, x=x).output}, torch.zeros(2, *shape), key=len)
    with small_engine() as engine:
        engine.register(model, warm_up=False)
        request = torch.rand(2, *shape)
        know(engine, "deep", request)
        for given in (request, request.numpy()):
            future = engine._hand_in_fast("deep", given, False)
            assert future is not None
            assert_same(future.result(WAIT_S), {"y": request * 2})


def test_results_that_the_key_does_not_tell_are_the_requests_own():
    def unfold(graph: Graph, request: Any) -> dict[str, object]:
        return {request["name"]: graph.chain(PLAIN, x=tensor_of(request)).last.h}

    def tensor_of(request: Any) -> torch.Tensor:
        return request["x"] if "x" in request else request["y"]

    example = {"x": torch.zeros(2, WIDTH), "name": "one"}
    model = Unfolder("named", unfold, example, key=lambda request: len(tensor_of(request)))
    with small_engine() as engine:
        engine.register(model, warm_up=False)
        one, other = {"x": steps(3), "name": "one"}, {"y": steps(3), "name": "other"}
        for _ in range(2):
            engine.submit_many("named", [one, one]).results(WAIT_S)
        assert list(engine.submit("named", other).result(WAIT_S)) == ["other"]
        for _ in range(5):
            assert list(engine.submit("named", one).result(WAIT_S)) == ["one"]


def test_many_threads_hand_in_more_than_there_are_rows(own_engine):
    wrong: list[str] = []

    def client(value: int) -> None:
        want = run_one_by_one(CHAIN, steps(3, value))
        futures = [own_engine.submit("chain", steps(3, value), wait=True) for _ in range(MAX_SUBMISSIONS // 2)]
        wrong.extend(f"{value}" for future in futures if not torch.equal(future.result(WAIT_S)["last"], want["last"]))

    threads = [threading.Thread(target=client, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT_S)
    assert not wrong and not any(thread.is_alive() for thread in threads)


def test_a_model_that_was_removed_is_freed_at_once(own_engine):
    gone = weakref.ref(own_engine._models["chain"])
    gc.disable()
    try:
        own_engine.unregister("chain")
        assert own_engine.drain(WAIT_S)
        own_engine._manager.turns.call(lambda: None)
        assert gone() is None
    finally:
        gc.enable()


def test_rows_of_another_layout_are_left_to_python(monkeypatch):
    monkeypatch.setitem(fast_path.LAYOUT, "Submission.plan", 0)
    assert not fast_path.is_built()
    with small_engine() as engine:
        engine.register(CHAIN, warm_up=False)
        know(engine, "chain", steps(3))
        assert engine._hand_in_fast("chain", steps(3), False) is None


def test_it_can_be_switched_off():
    code = "from cellrt.engine import fast_path; assert not fast_path.is_built()"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "CELLRT_FAST_PATH": "off"}, check=True, timeout=60)
