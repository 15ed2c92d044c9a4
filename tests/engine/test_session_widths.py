"""Sessions of models with several cells of different widths: each goes on from its own state, whoever else is there."""

from __future__ import annotations

import random
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.engine.engine import Engine
from cellrt.engine.session import Session
from cellrt.engine.session_limits import SessionLimits
from cellrt.errors import CancelledError, CellError
from cellrt.graph.graph import Graph
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from tests.effort import examples
from tests.engine.helpers import WAIT_S, assert_same, close_and_check, error_of, small_engine
from tests.engine.stacks import INPUT, RAISE, front, generator, make_model, recurrent


class Talk:
    """A session, the state that it must have, and what it was asked and has not answered."""

    def __init__(self, engine: Engine, model: Unfolder) -> None:
        self.model, self.session = model, engine.session(model.name)
        self.state: list[Any] = []

    def expect(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """What the next request must give."""
        return run_one_by_one(self.model, x, self.state)

    def forget(self) -> None:
        """Begins anew, as after a request that may have left its state at any step."""
        self.session.reset()
        self.state.clear()


class Play:
    """Rounds of requests to some sessions, in one of the ways in which they can be handed in."""

    def __init__(self, engine: Engine, talks: list[Talk], draw: random.Random) -> None:
        self.engine, self.talks, self.draw = engine, talks, draw
        self.waiting: list[tuple[Any, dict[str, torch.Tensor]]] = []

    def request(self) -> torch.Tensor:
        return torch.randn(self.draw.randint(1, 5), INPUT)

    def round(self) -> None:
        """One round; the state of every talk is known behind it."""
        its = self.draw.sample(self.talks, self.draw.randint(1, len(self.talks)))
        self.draw.choice([self.one_by_one, self.in_bulk, self.streamed, self.cancelled, self.failing])(its)
        if self.draw.random() < 0.5:
            self.collect()

    def one_by_one(self, its: list[Talk]) -> None:
        for talk in its:
            x = self.request()
            self.waiting.append((talk.session.submit(x), talk.expect(x)))
            if self.draw.random() < 0.3:
                self.collect()

    def in_bulk(self, its: list[Talk]) -> None:
        name = its[0].model.name
        its = [talk for talk in its if talk.model.name == name]
        requests = [self.request() for _ in its]
        sessions: list[Session] = [talk.session for talk in its]
        futures = self.engine.submit_many(name, requests, sessions=sessions)
        self.waiting += [(future, talk.expect(x)) for future, talk, x in zip(futures, its, requests, strict=True)]

    def streamed(self, its: list[Talk]) -> None:
        x = self.request()
        expected = its[0].expect(x)
        with its[0].session.stream(x) as stream:
            for _ in stream:
                pass
            assert_same(stream.result(), expected)

    def cancelled(self, its: list[Talk]) -> None:
        for talk in its:
            future = talk.session.submit(self.request())
            future.cancel()
            error = error_of(future)
            assert error is None or isinstance(error, CancelledError)
            talk.forget()

    def failing(self, its: list[Talk]) -> None:
        for talk in its:
            x = self.request()
            x[0, 0] = RAISE
            error = error_of(talk.session.submit(x))
            assert error is None or isinstance(error, CellError)
            talk.forget()

    def collect(self) -> None:
        """Compares what was answered, and looks at all of the scheduler's tables."""
        for future, expected in self.waiting:
            assert_same(future.result(WAIT_S), expected)
        self.waiting.clear()
        self.engine.check()


def play(seed: int, workers: int, resident: int | None, num_models: int) -> None:
    """Some sessions of some models, for a while; others for each of the numbers, as Hypothesis likes a few seeds."""
    draw = random.Random(f"{seed} {workers} {resident} {num_models}")
    torch.manual_seed(draw.getrandbits(32))
    limits = SessionLimits(max_resident=resident)
    engine = small_engine(workers, sessions=limits, arena_bytes=draw.choice([1 << 12, 1 << 14]), debug=True)
    try:
        models = [make_model(f"model {k}", draw.randrange(1 << 16)) for k in range(num_models)]
        for model in models:
            engine.register(model, warm_up=False)
        talks = [Talk(engine, draw.choice(models)) for _ in range(draw.randint(1, 5))]
        scene = Play(engine, talks, draw)
        for _ in range(draw.randint(2, 8)):
            scene.round()
        scene.collect()
        for talk in talks:
            talk.session.close()
    finally:
        close_and_check(engine)


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(100), deadline=None)
@given(
    seed=st.integers(0, 1 << 32),
    workers=st.integers(1, 3),
    resident=st.sampled_from([None, 0, 2]),
    num_models=st.integers(1, 3),
)
def test_each_goes_on_from_its_own_state_whatever_the_widths_of_its_cells(
    seed: int, workers: int, resident: int | None, num_models: int
) -> None:
    play(seed, workers, resident, num_models)


def test_a_chain_between_layers_of_other_widths_goes_on_from_its_own_state() -> None:
    """The usual streaming shape: a layer, a recurrent one that keeps its state, and a head."""

    def unfold(graph: Graph, x: torch.Tensor) -> dict[str, object]:
        middle = graph.chain(recurrent(2, 3, 3, 5), keep=True, x=graph.chain(front(INPUT, 2), x=x).y)
        return {"y": graph.chain(front(3, 5), x=middle.h).y}

    assert_sessions_go_on(Unfolder("speech", unfold, torch.zeros(2, INPUT)), torch.randn(12, 4, INPUT))


def test_a_loop_whose_last_step_others_read_leaves_it_to_its_session() -> None:
    def unfold(graph: Graph, x: torch.Tensor) -> dict[str, object]:
        made = graph.loop(generator(INPUT, 2, 3), keep=True, max_steps=4, mood=x, token=3)
        return {"read": front(2, 3)(x=made.last.h).y, "y": made.y}

    assert_sessions_go_on(Unfolder("loop", unfold, torch.zeros(INPUT)), torch.randn(5, INPUT))


def assert_sessions_go_on(model: Unfolder, requests: torch.Tensor) -> None:
    """Three sessions give what the oracle gives, request after request."""
    engine = small_engine(debug=True)
    engine.register(model, warm_up=False)
    talks = [Talk(engine, model) for _ in range(3)]
    for x in requests:
        for talk in talks:
            assert_same(talk.session.submit(x).result(WAIT_S), talk.expect(x))
            engine.check()
    for talk in talks:
        talk.session.close()
    close_and_check(engine)
