"""Loops that grow a state and go ahead of their stop on a device, as language models do, say what they do on a CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from cellrt.definition.define import cell
from cellrt.definition.spans import PagedRows
from cellrt.definition.spec import grows
from cellrt.errors import CancelledError, CellError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.unfolders.completion import complete
from cellrt.worker.device.device_arenas import DeviceArenas
from cellrt.worker.device.dry import DryDeviceError
from cellrt.worker.device.executor import DeviceOptions
from tests.effort import quickly
from tests.engine.capturable_attention import capturable_attention  # noqa: F401 - a fixture
from tests.engine.helpers import WAIT_S, assert_same, assert_streamed, close_and_check, error_of
from tests.engine.test_cuda_device import stub, stub_engines  # noqa: F401 - fixtures
from tests.engine.test_cuda_loops import LATE, NUMBER, ahead, note_in_flight
from tests.engine.test_cuda_worker import FEW, OPTIONS, device_engine, on_every_device
from tests.unfolders.language_models import END, draw_prompt, small_cell, small_layers

MODELS = {"one cell": small_cell(4, 16), "layers": small_layers(4, 16)}
MOST = 12
CAPTURED = DeviceOptions(ring_bytes=1 << 16, capture_after=1)
SIZES = {"arena_bytes": 1 << 19, "page_bytes": 1 << 18, "debug": True}


def prompts(count: int, first: int = 0) -> list[dict[str, object]]:
    return [{"prompt": draw_prompt(first + k, 1 + (3 * k) % 11), "max_tokens": MOST} for k in range(count)]


def assert_says(made, wanted) -> None:
    assert made["token"].tolist() == wanted["token"].tolist()
    torch.testing.assert_close(made["logprob"], wanted["logprob"], rtol=1e-4, atol=1e-4)


@on_every_device
@pytest.mark.parametrize(("kind", "count"), quickly([("layers", 3), ("one cell", 1)], of=product(MODELS, [0, 1, 3])))
def test_a_language_model_that_goes_ahead_says_what_it_says_on_a_cpu(device, kind, count):
    model = complete("lm", MODELS[kind], max_tokens=MOST)
    engine = device_engine(device, 1, CAPTURED, settings=ahead(count), **SIZES)
    try:
        engine.register(model)
        requests, num_ended = prompts(12), 0
        for _ in range(2):  # the second time what was captured is repeated
            futures = [engine.submit("lm", request) for request in requests]
            for request, future in zip(requests, futures):
                made = future.result(WAIT_S)
                assert_says(made, run_one_by_one(model, request))
                num_ended += made["token"].tolist()[-1] == END
        assert num_ended > 2
    finally:
        close_and_check(engine)


@pytest.mark.parametrize(("kind", "workers"), quickly([("layers", 2)], of=product(MODELS, [1, 2])))
@pytest.mark.slow
def test_sessions_go_on_where_the_step_before_the_stop_was(kind, workers):
    model = complete("lm", MODELS[kind], max_tokens=MOST, keep=True)
    engine = device_engine("dry", workers, LATE, settings=ahead(2), **{**SIZES, "page_bytes": 1 << 15})
    states: list[list[Tensor]] = [[] for _ in range(6)]
    try:
        engine.register(model)
        sessions = [engine.session("lm", str(k)) for k in range(6)]
        for turn in range(3):
            requests = prompts(6, 10 * turn)
            futures = [session.submit(request) for session, request in zip(sessions, requests)]
            for request, future, state in zip(requests, futures, states):
                assert_says(future.result(WAIT_S), run_one_by_one(model, request, state))
    finally:
        close_and_check(engine)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.slow
def test_while_a_step_is_on_the_device_the_next_is_there_before_its_stop_is_known(kind):
    model = complete("lm", MODELS[kind], max_tokens=MOST)
    engine = device_engine("dry", 1, replace(LATE, dry_delay_s=1e-2), settings=ahead(None), **SIZES)
    engine.register(model)
    behind = note_in_flight(engine)
    try:
        made = engine.submit("lm", prompts(1)[0]).result(WAIT_S)
        assert engine.drain(WAIT_S)
    finally:
        close_and_check(engine)
    assert len(made["token"]) > 3
    assert min(behind[:-4]) > 0  # but those of the last step, and what is behind it


class Told(NamedTuple):
    n: Tensor
    total: Tensor
    stop: Tensor


class Passed(NamedTuple):
    n: Tensor


class Passes(nn.Module):
    """Hands a number on."""

    def forward(self, n: Tensor) -> Passed:
        return Passed(n + 0)


class Counts(nn.Module):
    """Counts up to ``end``, which says stop, and appends what it counts; returns the sum of all that was appended.

    On a number beyond the end the device is lost, if it ``looks``. From a row that counts to BAD on nothing is finite.
    """

    def __init__(self, looks: bool) -> None:
        super().__init__()
        self.looks = looks

    def forward(self, n: Tensor, end: Tensor, seen: PagedRows) -> Told:
        if self.looks and n.device.type != "meta" and (n > end).any():
            raise DryDeviceError("a row that has stopped goes on")
        seen.append(n[:, None].float())
        grown = seen.by_row[seen.tables].flatten(1, 2)[seen.nodes]
        is_seen = torch.arange(grown.shape[1], device=n.device) <= seen.positions[:, None]
        total = torch.where(is_seen, grown[:, :, 0], 0).sum(1)
        total = total.masked_fill((end == BAD) & (n == 4), torch.nan)
        return Told(n + 1, total, n + 1 > end)


BAD = 100
COUNTS = {
    looks: cell(
        Counts(looks),
        {"n": NUMBER, "end": NUMBER, "seen": grows(1, page_size=2)},
        name="counts",
        max_batch=6,
        finite=["total"],
    )
    for looks in (False, True)
}


def counter(looks: bool, keep: bool = False) -> Unfolder:
    """Requests are numbers to count to, at most so many steps."""
    made = COUNTS[looks]

    def unfold(graph, request):
        loop = graph.loop(made, n=0, end=request, seen=graph.pages(made, keep=keep), until="stop", max_steps=MOST)
        return {"total": loop.total, "n": loop.last.n}

    return Unfolder("count", unfold, 3)


def counter_of_two(looks: bool) -> Unfolder:
    """The same by a loop of two cells, the first of which only hands the number on."""
    made = COUNTS[looks]
    passes = cell(Passes(), {"n": NUMBER}, name="passes", max_batch=6)

    def unfold(graph, request):
        seen = graph.pages(made)

        def step(body, state):
            told = made(n=passes(n=state.n).n, end=request, seen=seen)
            return {"n": told.n, "total": told.total, "stop": told.stop}

        loop = graph.loop(step, n=0, until="stop", max_steps=MOST)
        return {"total": loop.total, "n": loop.last.n}

    return Unfolder("count", unfold, 3)


@FEW
@given(
    requests=st.lists(st.integers(0, MOST + 2), min_size=1, max_size=12),
    count=st.integers(0, 3),
    workers=st.integers(1, 2),
    page_bytes=st.sampled_from([1, 1 << 12]),
    options=OPTIONS,
    looks=st.booleans(),
    make=st.sampled_from([counter, counter_of_two]),
)
def test_loops_with_pages_that_go_ahead_give_what_their_steps_give_one_by_one(
    requests, count, workers, page_bytes, options, looks, make
):
    model = make(looks)
    engine = device_engine("dry", workers, options, settings=ahead(count), page_bytes=page_bytes, debug=True)
    try:
        engine.register(model, warm_up=False)
        for _ in range(2):
            futures = engine.submit_many("count", requests)
            for request, future in zip(requests, futures):
                assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    finally:
        close_and_check(engine)


@pytest.mark.parametrize("count", [1, 3])
def test_a_row_that_fails_ahead_costs_its_own_request_and_its_session_goes_on_before_it(count):
    model = counter(False, keep=True)
    engine = device_engine("dry", 1, LATE, settings=ahead(count), debug=True)
    engine.register(model, warm_up=False)
    with engine.session("count", "good") as good, engine.session("count", "bad") as bad:
        futures = [good.submit(5), bad.submit(BAD)]
        assert isinstance(error_of(futures[1]), CellError)
        assert_same(futures[0].result(WAIT_S), run_one_by_one(model, 5, of_good := []))
        of_bad: list[Tensor] = []
        run_one_by_one(model, 3, of_bad)  # what it counts before it goes wrong: 0 to 3
        for session, state in ((good, of_good), (bad, of_bad)):
            assert_same(session.submit(2).result(WAIT_S), run_one_by_one(model, 2, state))
    close_and_check(engine)


def test_streamed_steps_are_those_before_the_stop():
    model = counter(False)
    engine = device_engine("dry", 1, LATE, settings=ahead(3))
    engine.register(model, warm_up=False)
    assert_streamed(engine, model, "total", (0, 3, 8))
    close_and_check(engine)


@FEW
@given(turns=st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=5), count=st.integers(1, 3))
def test_a_session_that_is_given_up_has_the_steps_that_were_done(turns, count):
    """Each turn appends 0 and up; of one that is given up any number was appended, but none beyond its end."""
    engine = device_engine("dry", 1, LATE, settings=ahead(count), debug=True)
    engine.register(counter(False, keep=True), warm_up=False)
    possible = {0}
    with engine.session("count") as session:
        for end, gives_up in turns:
            future = session.submit(end)
            if gives_up and future.cancel():
                possible |= {total + sum(range(k)) for total in possible for k in range(end + 2)}
                continue
            error = error_of(future)
            if isinstance(error, CancelledError):
                continue
            first = int(future.result()["total"][0])
            assert first in possible
            assert future.result()["total"].tolist() == [first + sum(range(k + 1)) for k in range(end + 1)]
            possible = {first + sum(range(end + 1))}
    close_and_check(engine)


@pytest.mark.parametrize(
    ("make", "direct"),
    quickly([(counter_of_two, True), (counter, False)], of=product([counter, counter_of_two], [True, False])),
)
@pytest.mark.slow
def test_captured_steps_that_go_ahead_race_with_nothing(stub_engines, make, direct, monkeypatch):  # noqa: F811
    monkeypatch.setattr(DeviceArenas, "settle", lambda arenas: torch.cuda.current_stream(arenas.device).synchronize())
    options = DeviceOptions(ring_bytes=1 << 16, capture_after=1, direct=direct)
    engine = device_engine("dry", 2, options, settings=ahead(2), page_bytes=1, debug=True)
    model = make(False)
    engine.register(model, warm_up=False)
    for _ in range(4):
        requests = [11, 0, 3, 7, 11, 2, 5, 11]
        for request, future in zip(requests, engine.submit_many("count", requests)):
            assert_same(future.result(WAIT_S), run_one_by_one(model, request))
    counts = [worker.counts() for worker in engine._manager.workers]
    close_and_check(engine)
    assert stub_engines.races == []
    assert (stub_engines.num_launched > 0) == direct
    assert sum(each["replayed"] for each in counts) > 0, counts


@pytest.mark.parametrize(("kind", "count"), quickly([("one cell", 2)], of=product(MODELS, [0, 2])))
@pytest.mark.usefixtures("capturable_attention")
@pytest.mark.slow
def test_a_language_model_whose_steps_are_captured_says_what_it_says_on_a_cpu(stub_engines, kind, count):  # noqa: F811
    model = complete("lm", MODELS[kind], max_tokens=MOST)
    engine = device_engine("dry", 1, CAPTURED, settings=ahead(count), **SIZES)
    try:
        engine.register(model, warm_up=False)
        for _ in range(2):
            requests = prompts(5)
            for request, future in zip(requests, engine.submit_many("lm", requests)):
                assert_says(future.result(WAIT_S), run_one_by_one(model, request))
        counts = engine._manager.workers[0].counts()
    finally:
        close_and_check(engine)
    assert stub_engines.races == []
    assert counts["replayed"] > 0, counts
    assert counts["captures_refused"] == 0, counts
