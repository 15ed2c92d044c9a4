"""The cost of a request of one step that goes on from its session's state: 200 sessions, each with one at a time.

The cell does nothing, and the model's graph is known by its key. Every session's next request is submitted by itself
and its result read; awaited by a task of one event loop for each session; or all sessions' next requests are handed in
together. Beside it what one would write by hand for a cell so small: the tasks' next steps are collected, and one call
of the module does them on a table of states.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable

import torch

import cellrt
from benchmarks.record import Recorder

SESSIONS = 200


def nothing(x: torch.Tensor, h: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the cell."""
    return {"h": h}


class ByHand:
    """Steps of actors in an event loop: what waits when the loop comes to it is done in one call."""

    def __init__(self) -> None:
        self._states = torch.zeros(SESSIONS, 1)
        self._waiting: list[tuple[int, torch.Tensor, asyncio.Future[dict[str, torch.Tensor]]]] = []

    async def step(self, actor: int, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return an actor's next step."""
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._run)
        future: asyncio.Future[dict[str, torch.Tensor]] = loop.create_future()
        self._waiting.append((actor, x, future))
        return await future

    @torch.inference_mode()
    def _run(self) -> None:
        waiting, self._waiting = self._waiting, []
        actors = torch.tensor([actor for actor, _, _ in waiting])
        made = nothing(torch.cat([x for _, x, _ in waiting]), self._states[actors])["h"]
        self._states[actors] = made
        for (_, _, future), h in zip(waiting, made.unbind()):
            future.set_result({"h": h})


def make_model() -> cellrt.Unfolder:
    """Return a chain of a cell that does nothing, whose state stays in a session."""
    cell = cellrt.cell(nothing, {"x": (1,), "h": (1,)})

    def unfold(graph: cellrt.Graph, x: torch.Tensor) -> dict[str, object]:
        return {"h": graph.chain(cell, keep=True, x=x).last.h}

    return cellrt.Unfolder("step", unfold, torch.zeros(1, 1), key=len)


def run_sessions(recorder: Recorder, rounds: int) -> None:
    """Record steps a second of all sessions, by each way in turns; medians over rounds."""
    requests, steps = list(torch.zeros(SESSIONS, 1, 1).unbind()), 20
    with cellrt.Engine(1) as engine:
        engine.register(make_model())
        sessions = [engine.session("step") for _ in range(SESSIONS)]

        def each() -> None:
            for _ in range(steps):
                for future in [session.submit(x) for session, x in zip(sessions, requests)]:
                    future.result()

        async def go_on(session: cellrt.Session, x: torch.Tensor) -> None:
            for _ in range(steps):
                await session.infer(x)

        async def all_go_on() -> None:
            await asyncio.gather(*map(go_on, sessions, requests))

        async def go_on_by_hand(by_hand: ByHand, actor: int, x: torch.Tensor) -> None:
            for _ in range(steps):
                await by_hand.step(actor, x)

        async def all_go_on_by_hand() -> None:
            by_hand = ByHand()
            await asyncio.gather(*[go_on_by_hand(by_hand, actor, x) for actor, x in enumerate(requests)])

        def together() -> None:
            for _ in range(steps):
                engine.submit_many("step", requests, sessions=sessions).results()

        ways: dict[str, Callable[[], object]] = {
            "one submit each": each,
            "a task of an event loop each": lambda: asyncio.run(all_go_on()),
            "a task each, collected by hand, without cellrt": lambda: asyncio.run(all_go_on_by_hand()),
            "submit_many of all": together,
        }
        rates: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds + 1):
            for name, go in ways.items():
                start = time.perf_counter()
                go()
                rates[name].append(steps * SESSIONS / (time.perf_counter() - start))
    for name, values in rates.items():
        recorder.add("sessions", f"steps of {SESSIONS} sessions, {name}", statistics.median(values[1:]), "requests/s")
