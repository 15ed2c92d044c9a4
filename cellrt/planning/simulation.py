"""Estimates how many workers a load needs: plays requests on simulated workers with step times from a profile.

The scheduler is the real one; only time and results are simulated (``core/simulate.py``). Host costs are added: a
request reaches the scheduler after the host's time for it and for all before it, and each task takes its worker longer.
Rows and pages are as many as an engine has, so requests wait for room and are suspended as in an engine. Reads of
growing states and copies of pages take their time. Late requests are dropped.

Three things are left out: workers that wait for each other's turns, the refusal of requests that cannot meet their
deadline, and HTTP.
"""

from __future__ import annotations

import math
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
from cellrt.engine.due import ANY_TIME, Due
from cellrt.engine.registry import Model, Registry
from cellrt.errors import DefinitionError
from cellrt.graph.unfolder import Unfolder
from cellrt.planning.profile import HostCosts, Profile

MAX_NODES = 65_535
SPAN, PRECISION = 1024, 1.01
"""A deadline is looked for between the median latency by this and times this, until it is known to a hundredth."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a simulated load.

    Attributes:
        throughput: requests a second that were done.
        mean_rows: the mean number of rows of a task.
        busy: the share of the time that a worker ran.
        p50_s, p90_s, p99_s: latencies of what was done, in seconds; None if nothing was.
        deadline_s, schedule_by_s: in how many seconds each had to be done and have begun; None: any time.
        in_time: the share of the requests that were done and not dropped; None if nothing could be late.
    """

    workers: int
    rate: float
    requests: int
    throughput: float
    mean_rows: float
    busy: float
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    deadline_s: float | None = None
    schedule_by_s: float | None = None
    in_time: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the fields by name."""
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
        """``arena_bytes``, ``policy``: as of the engine. Raise DefinitionError if the profile lacks a cell of the
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
        """Return a request as the scheduler has it. Raise RequestError."""
        return self.model.plans([request])[0].plan.template

    def play(
        self,
        templates: Sequence[SizedTemplate],
        times_s: Sequence[float],
        rate: float,
        loop_share: float = 1.0,
        due: Due = ANY_TIME,
    ) -> Outcome:
        """Play requests at their times.

        Args:
            templates: the templates of the requests.
            times_s: when each arrives.
            rate: what the times were drawn for, in requests a second; for the outcome.
            loop_share: how many of its most steps each loop takes.
            due: in how many seconds after its arrival each must be done, and have begun. What is late is dropped.
        """
        arrivals = [
            Arrival(
                handed_in_s,
                template,
                loop_steps=_loop_steps(template, loop_share),
                deadline_s=None if due.done_s is None else time_s + due.done_s,
                schedule_by_s=None if due.begun_s is None else time_s + due.begun_s,
            )
            for template, time_s, handed_in_s in zip(templates, times_s, self._handed_in_s(times_s), strict=True)
        ]
        simulation = simulate(
            self.processor,
            arrivals,
            self._cost,
            reading=lambda cell_type, rows_read: rows_read * self._costs[cell_type].read_s,
            page_s=self._host.page_s,
            drops_late=True,
        )
        finish_s, arrival_s = np.array(simulation.finish_s), np.array(times_s)
        is_done = np.isfinite(finish_s)
        took_s = (finish_s - arrival_s)[is_done]
        p50_s, p90_s, p99_s = np.percentile(took_s, (50, 90, 99)).tolist() if took_s.size else [None] * 3
        ends_s = [*finish_s[is_done], *(task.end_s for task in simulation.tasks), arrival_s.max()]
        elapsed_s = max(float(max(ends_s) - arrival_s.min()), 1e-9)
        busy_s = sum(task.end_s - task.start_s for task in simulation.tasks)
        return Outcome(
            self._workers,
            rate,
            len(arrivals),
            int(is_done.sum()) / elapsed_s,
            float(np.mean([task.rows for task in simulation.tasks])) if simulation.tasks else 0.0,
            busy_s / elapsed_s / self._workers,
            p50_s,
            p90_s,
            p99_s,
            due.done_s,
            due.begun_s,
            None if due == ANY_TIME else float(is_done.mean()),
        )

    def _cost(self, cell_type: int, rows: int, steps: int) -> float:
        return self._host.task_s + steps * self._costs[cell_type].seconds(rows)

    def _handed_in_s(self, times_s: Sequence[float]) -> list[float]:
        """Return the times at which requests that arrive in this order reach the scheduler. The host takes one at a
        time.
        """
        return list(
            accumulate(times_s, lambda free_s, time_s: max(free_s, time_s) + self._host.request_s, initial=0.0)
        )[1:]


def _loop_steps(template: SizedTemplate, share: float) -> tuple[int, ...] | None:
    if share >= 1.0:
        return None
    return tuple(max(1, round(share * limit)) for limit in template.loop_limits())


def poisson_times(rate: float, count: int, seed: int) -> list[float]:
    """Return arrivals of a Poisson process, in seconds from the start."""
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
    due: Due = ANY_TIME,
) -> tuple[Outcome | None, list[Outcome]]:
    """Return the outcome with the fewest workers whose p99 is within the bound, if any, and all that were tried.

    With times in ``due`` it is the p99 of what was done in time.
    """
    tried: list[Outcome] = []
    rate = len(times_s) / max(times_s[-1], 1e-9)
    for workers in range(1, most + 1):
        plant = Plant(unfolder, profile, workers, arena_bytes, policy)
        templates = [plant.template(request) for request in requests]
        tried.append(plant.play(templates, times_s, rate, loop_share, due))
        if (p99_s := tried[-1].p99_s) is not None and p99_s <= bound_s:
            return tried[-1], tried
    return None, tried


def shortest_deadline(
    plant: Plant,
    templates: Sequence[SizedTemplate],
    times_s: Sequence[float],
    rate: float,
    share: float,
    loop_share: float = 1.0,
    schedule_by_s: float | None = None,
) -> Outcome | None:
    """Find the shortest deadline, to about a hundredth of it, by which such a share of the requests is done.

    Args:
        plant, templates, times_s, rate, loop_share: see ``Plant.play``.
        share: above 0, at most 1.
        schedule_by_s: in how many seconds each must have begun besides.

    Returns:
        What that deadline came to; None if no deadline is enough, as too few begin in time.
    """

    def play(seconds: float | None) -> Outcome:
        return plant.play(templates, times_s, rate, loop_share, Due(seconds, schedule_by_s))

    def is_kept(outcome: Outcome) -> bool:
        return outcome.in_time is None or outcome.in_time >= share

    without = play(None)
    if without.p50_s is None or not is_kept(without):
        return None
    low_s, high_s = without.p50_s / SPAN, without.p50_s * SPAN
    shortest = play(high_s)
    while is_kept(shortest) and high_s > PRECISION * low_s:
        middle_s = math.sqrt(low_s * high_s)
        found = play(middle_s)
        if is_kept(found):
            shortest, high_s = found, middle_s
        else:
            low_s = middle_s
    return shortest if is_kept(shortest) else None
