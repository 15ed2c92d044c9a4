"""Serve a recurrent policy (untrained) to many actors: features in, action out; the engine keeps each actor's state."""

import asyncio
import random
import sys
import time

import torch
from torch import Tensor, nn

import cellrt
from cellrt.cells import LSTMCell, ProjectionArgmax

HIDDEN, FEATURES, ACTIONS = 64, 2, 3


class Policy(nn.Module):
    """Of ``x`` ``[rows, FEATURES]``, ``h`` and ``c`` ``[rows, HIDDEN]``: the best ``action``, int64, and the state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = LSTMCell(FEATURES, HIDDEN), ProjectionArgmax(HIDDEN, ACTIONS)

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> dict[str, Tensor]:
        """One decision for each row."""
        state = self.lstm(x, h, c)
        return {"action": self.head(state.h).token, "h": state.h, "c": state.c}


async def episode(session: cellrt.Session, world: random.Random) -> int:
    """Steps until the actor leaves the track; how many steps that took."""
    place, speed, step = 0.0, world.gauss(0, 0.1), 0
    while abs(place) <= 1 and step < 50:
        found = await session.infer(torch.tensor([[place, step / 50]]))
        speed += 0.05 * (int(found["action"][0]) - 1) + world.gauss(0, 0.05)
        place, step = place + speed, step + 1
    session.reset()
    return step


def main(quick: bool = False) -> None:
    """Prints how many actions a second the actors got."""
    cell = cellrt.cell(Policy(), {"x": (FEATURES,), "h": (HIDDEN,), "c": (HIDDEN,)})

    @cellrt.unfold("policy", example=torch.zeros(1, FEATURES))
    def policy(graph: cellrt.Graph, features: Tensor) -> object:
        return {"action": graph.chain(cell, keep=True, x=features).action}

    async def act(actors: list[cellrt.Session]) -> int:
        return sum(await asyncio.gather(*(episode(actor, random.Random(k)) for k, actor in enumerate(actors))))

    with cellrt.Engine() as engine:
        engine.register(policy)
        start = time.perf_counter()
        steps = asyncio.run(act([engine.session("policy", f"actor-{k}") for k in range(4 if quick else 200)]))
    print(f"{steps} steps, {steps / (time.perf_counter() - start):.0f} a second")


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
