"""How many workers a load needs: a model's requests played on simulated workers whose steps take what a profile says.

The scheduler is the real one; only time and results are not (``core/simulate.py``). What the engine's host does is
added: a request reaches the scheduler when the host has had its time for it and for all before it, and a task takes its
worker longer. There are as many rows and pages as an engine would have, so requests wait for room and are suspended as
there; what a step reads of growing states, and copies of pages, take their time. That tasks of several workers wait for
each other's turns, and HTTP, are not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from cellrt.core.processor import Processor, SizedTemplate
from cellrt.core.scheduling.policy import Policy
from cellrt.core.simulate import Arrival, simulate
from cellrt.core.state.settings import SchedulerSettings
from cellrt.engine.arena_sizes import AS_MEMORY_ALLOWS, ArenaBytes, ArenaSizes
from cellrt.engine.discovery import Discovery
from cellrt.engine.registry import Model, Registry
from cellrt.errors import DefinitionError
from cellrt.graph.unfolder import Unfolder
from cellrt.planning.profile import HostCosts, Profile

MAX_NODES = 65_535


@dataclass(frozen=True)
class Outcome:
    """What a load came to. Times in seconds; ``busy`` is the share of the time that a worker ran, ``in_time`` the share
    of the requests that were done by their deadlines, None if they had none."""

    workers: int
    rate: float
    requests: int
    throughput: float
    mean_rows: float
    busy: float
    p50_s: float
    p90_s: float
    p99_s: float
    in_time: float | None = None

    def as_json(self) -> dict[str, Any]:
        """By name."""
        return asdict(self)


class Plant:
    """A model on a number of simulated workers; for one simulation after the other."""

    def __init__(
        self,
        unfolder: Unfolder,
        profile: Profile,
        workers: int,
        arena_bytes: ArenaBytes = AS_MEMORY_ALLOWS,
        policy: Policy | None = None,
    ) -> None:
        """``arena_bytes``, ``policy``: as of the engine. Raises DefinitionError if the profile lacks a cell of the
        model, or the example does not unfold."""
        self._workers = workers
        self._host = profile.host or HostCosts(0.0, 0.0)
        self.processor = Processor(workers, None, SchedulerSettings(), policy)
        registry = Registry(self.processor, MAX_NODES)
        discovery = Discovery(registry)
        discovery.unfold(unfolder)
        sizes = ArenaSizes(arena_bytes, workers)
        for spec, num_rows in sizes.choose(discovery.new_kinds, discovery.cells).items():
            registry.add_kind(spec, num_rows.worker, num_rows.host)
        for kind, content, row in discovery.new_constants:
            registry.constants[kind, content] = row
        max_batch: Mapping[str, int] = {cell.name: cell.max_batch for cell in profile.cells.values()}
        self._costs = {}
        for cell in discovery.cells:
            if cell.identity not in profile.cells:
                raise DefinitionError(f"the profile lacks cell {cell.name!r} as it is now: run cellrt tune again")
            made = registry.add_type(cell, None, max_batch)
            if made is not None:
                self._costs[made.id] = profile.cells[cell.identity]
        self.model = Model(unfolder, registry, self.processor, registry.use(discovery.cells))

    def template(self, request: Any) -> SizedTemplate:
        """A request as the scheduler has it. Raises RequestError."""
        return self.model.plans([request])[0].plan.template

    def play(
        self,
        templates: Sequence[SizedTemplate],
        times_s: Sequence[float],
        rate: float,
        loop_share: float = 1.0,
        deadline_s: float | None = None,
    ) -> Outcome:
        """Plays requests at their times.

        Args:
            templates: of the requests.
            times_s: when each arrives.
            rate: what the times were drawn for, in requests a second; for the outcome.
            loop_share: how many of its most steps each loop takes.
            deadline_s: in how many seconds each must be done. What is late is done all the same.
        """
        arrivals = [
            Arrival(
                handed_in_s,
                template,
                loop_steps=_loop_steps(template, loop_share),
                deadline_s=None if deadline_s is None else time_s + deadline_s,
            )
            for template, time_s, handed_in_s in zip(templates, times_s, self._handed_in_s(times_s), strict=True)
        ]
        simulation = simulate(
            self.processor,
            arrivals,
            self._cost,
            reading=lambda cell_type, rows_read: rows_read * self._costs[cell_type].read_s,
            page_s=self._host.page_s,
        )
        finish_s, arrival_s = np.array(simulation.finish_s), np.array(times_s)
        elapsed_s = float(finish_s.max() - arrival_s.min())
        busy_s = sum(task.end_s - task.start_s for task in simulation.tasks)
        p50, p90, p99 = np.percentile(finish_s - arrival_s, (50, 90, 99))
        return Outcome(
            self._workers,
            rate,
            len(arrivals),
            len(arrivals) / elapsed_s,
            float(np.mean([task.rows for task in simulation.tasks])),
            busy_s / elapsed_s / self._workers,
            float(p50),
            float(p90),
            float(p99),
            None if deadline_s is None else float(np.mean(finish_s - arrival_s <= deadline_s)),
        )

    def _cost(self, cell_type: int, rows: int, steps: int) -> float:
        return self._host.task_s + steps * self._costs[cell_type].seconds(rows)

    def _handed_in_s(self, times_s: Sequence[float]) -> list[float]:
        """When requests that arrive in this order reach the scheduler: the host has them one after the other."""
        return list(
            accumulate(times_s, lambda free_s, time_s: max(free_s, time_s) + self._host.request_s, initial=0.0)
        )[1:]


def _loop_steps(template: SizedTemplate, share: float) -> tuple[int, ...] | None:
    if share >= 1.0:
        return None
    return tuple(max(1, round(share * limit)) for limit in template.loop_limits())


def poisson_times(rate: float, count: int, seed: int) -> list[float]:
    """Arrivals of a Poisson process, in seconds from the start."""
    gaps: list[float] = np.random.default_rng(seed).exponential(1 / rate, count).cumsum().tolist()
    return gaps


def fewest_workers(
    unfolder: Unfolder,
    profile: Profile,
    requests: Sequence[Any],
    times_s: Sequence[float],
    *,
    most: int,
    bound_s: float,
    loop_share: float = 1.0,
    arena_bytes: ArenaBytes = AS_MEMORY_ALLOWS,
    policy: Policy | None = None,
    deadline_s: float | None = None,
) -> tuple[Outcome | None, list[Outcome]]:
    """The outcome with the fewest workers whose p99 is within the bound, if any, and all that were tried."""
    tried: list[Outcome] = []
    rate = len(times_s) / max(times_s[-1], 1e-9)
    for workers in range(1, most + 1):
        plant = Plant(unfolder, profile, workers, arena_bytes, policy)
        templates = [plant.template(request) for request in requests]
        tried.append(plant.play(templates, times_s, rate, loop_share, deadline_s))
        if tried[-1].p99_s <= bound_s:
            return tried[-1], tried
    return None, tried
