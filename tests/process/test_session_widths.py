"""Sessions of random models of several widths, which threads of this process use in an engine of another."""

from __future__ import annotations

import random
import threading
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.engine.session_limits import SessionLimits
from tests.effort import examples
from tests.engine.stacks import make_model
from tests.engine.test_session_widths import Play, Talk
from tests.process.helpers import start

THREADS = 3


class Actor(threading.Thread):
    """Plays with sessions of its own, and keeps what went wrong."""

    def __init__(self, engine: Any, seeds: list[int], draw: random.Random) -> None:
        super().__init__()
        self.engine, self.seeds, self.draw = engine, seeds, draw
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self.play()
        except BaseException as error:  # shown by the thread of the test
            self.error = error

    def play(self) -> None:
        models = [make_model(f"model_{seed}", seed) for seed in self.seeds]
        talks = [Talk(self.engine, self.draw.choice(models)) for _ in range(self.draw.randint(1, 3))]
        scene = Play(self.engine, talks, self.draw)
        for _ in range(self.draw.randint(2, 6)):
            scene.round()
        scene.collect()
        for talk in talks:
            talk.session.close()


@pytest.fixture(scope="module", params=[None, 2])
def engine(request: pytest.FixtureRequest) -> Any:
    with start(2, sessions=SessionLimits(max_resident=request.param), arena_bytes=1 << 14) as made:
        yield made


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(12), deadline=None)
@given(seed=st.integers(0, 1 << 32))
def test_threads_go_on_from_their_sessions_states_whatever_the_widths(engine: Any, seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    seeds = [draw.randrange(1 << 16) for _ in range(2)]
    for model in seeds:
        engine.register(f"tests.engine.stacks:model_{model}", warm_up=False)
    actors = [Actor(engine, seeds, random.Random(draw.random())) for _ in range(THREADS)]
    for actor in actors:
        actor.start()
    for actor in actors:
        actor.join()
    for actor in actors:
        if actor.error is not None:
            raise actor.error
    engine.check()
    for model in set(seeds):
        engine.unregister(f"model_{model}")
