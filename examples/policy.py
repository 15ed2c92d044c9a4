"""Serve a recurrent policy (untrained) to many actors: features in, action out; the engine keeps each actor's state.

All actors that are still on their track ask together, in one call. One that comes alone does
``await session.infer(features)``, or ``session.submit(features)``.
"""

import random
import sys
import time

import torch
from torch import Tensor, nn

import cellrt
from cellrt.cells import LSTMCell, ProjectionArgmax

HIDDEN, FEATURES, ACTIONS = 64, 2, 3
MOST_STEPS = 50


class Policy(nn.Module):
    """A policy: ``x`` ``[rows, FEATURES]``, ``h`` and ``c`` ``[rows, HIDDEN]`` -> ``action``, int64, and the state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = LSTMCell(FEATURES, HIDDEN), ProjectionArgmax(HIDDEN, ACTIONS)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> dict[str, Tensor]:
        """Make one decision for each row."""
        state = self.lstm(x, h, c)
        return {"action": self.head(state.h).token, "h": state.h, "c": state.c}


class World:
    """A track that an actor must stay on."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._place, self._speed, self._steps = 0.0, self._random.gauss(0, 0.1), 0

    def features(self) -> tuple[float, float]:
        """Return the features that the policy sees."""
        return self._place, self._steps / MOST_STEPS

    def act(self, action: int) -> bool:
        """Take one step; return False if the episode is over."""
        self._speed += 0.05 * (action - 1) + self._random.gauss(0, 0.05)
        self._place, self._steps = self._place + self._speed, self._steps + 1
        return abs(self._place) <= 1 and self._steps < MOST_STEPS


def play(engine: cellrt.Engine, actors: list[cellrt.Session]) -> int:
    """Play one episode of each actor, all of them a step at a time; return how many steps that took."""
    live, steps = [(actor, World(k)) for k, actor in enumerate(actors)], 0
    while live:
        features = torch.tensor([world.features() for _, world in live])
        sessions = [actor for actor, _ in live]
        found = engine.submit_many("policy", features[:, None].unbind(), sessions=sessions).stacked()
        actions = found["action"].flatten().tolist()
        steps += len(live)
        live = [(actor, world) for (actor, world), action in zip(live, actions) if world.act(action)]
    for actor in actors:
        actor.reset()
    return steps


def main(quick: bool = False) -> None:
    """Print how many actions a second the actors got."""
    torch.manual_seed(0)
    cell = cellrt.cell(Policy(), {"x": (FEATURES,), "h": (HIDDEN,), "c": (HIDDEN,)})

    @cellrt.unfold("policy", example=torch.zeros(1, FEATURES), key=len)
    def policy(graph: cellrt.Graph, features: Tensor) -> object:
        return {"action": graph.chain(cell, keep=True, x=features).action}

    with cellrt.Engine(1) as engine:
        engine.register(policy)
        actors = [engine.session("policy", f"actor-{k}") for k in range(4 if quick else 200)]
        start = time.perf_counter()
        steps = sum(play(engine, actors) for _ in range(1 if quick else 20))
    print(f"{steps} steps, {steps / (time.perf_counter() - start):.0f} a second")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
