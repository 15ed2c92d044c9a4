"""Simulated workers: by hand where it can be counted, and monotone where it cannot."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from cellrt import Graph, Unfolder
from cellrt.errors import DefinitionError
from cellrt.planning.profile import CellProfile, HostCosts, Profile
from cellrt.planning.simulation import Plant, fewest_workers, poisson_times
from tests.engine.paged_models import WIDTH, make_cells
from tests.serve import models

STEP_S = 1e-3
FLAT = Profile("cpu", {models.STEP.identity: CellProfile("step", (1, 8), (STEP_S, STEP_S), 8)})


def chain(steps: int) -> torch.Tensor:
    return torch.zeros(steps, models.WIDTH)


def test_a_lone_request_takes_its_steps() -> None:
    plant = Plant(models.chain, FLAT, 1)
    outcome = plant.play([plant.template(chain(7))], [0.0], 1.0)
    assert outcome.p99_s == pytest.approx(7 * STEP_S)
    assert outcome.busy == pytest.approx(1.0) and outcome.mean_rows == 1


def test_what_the_host_does_is_counted() -> None:
    host = HostCosts(request_s=2e-3, task_s=5e-3)
    plant = Plant(models.chain, replace(FLAT, host=host), 2)
    lone = plant.play([plant.template(chain(1))], [0.0], 1.0)
    assert lone.p99_s == pytest.approx(host.request_s + host.task_s + STEP_S)
    count = 100
    crowd = plant.play([plant.template(chain(1))] * count, [0.0] * count, 1e7)
    assert crowd.p50_s > host.request_s * count / 2
    assert crowd.throughput < 1 / host.request_s  # however many workers and requests there are


def test_requests_that_come_together_share_their_steps() -> None:
    plant = Plant(models.chain, FLAT, 1)
    outcome = plant.play([plant.template(chain(5)) for _ in range(8)], [0.0] * 8, 1.0)
    assert outcome.p99_s == pytest.approx(5 * STEP_S)
    assert outcome.mean_rows == 8


def test_more_than_the_profile_allows_in_a_batch_wait() -> None:
    narrow = Profile("cpu", {models.STEP.identity: CellProfile("step", (1, 4), (STEP_S, STEP_S), 4)})
    plant = Plant(models.chain, narrow, 1)
    outcome = plant.play([plant.template(chain(5)) for _ in range(8)], [0.0] * 8, 1.0)
    assert outcome.mean_rows <= 4 and outcome.p99_s > 5 * STEP_S


def test_the_fewest_workers_that_keep_a_bound_are_found() -> None:
    requests, times_s = [chain(10)] * 200, poisson_times(4000.0, 200, 0)
    found, tried = fewest_workers(models.chain, FLAT, requests, times_s, most=8, bound_s=0.02)
    assert found is not None and found is tried[-1]
    assert [one.workers for one in tried] == list(range(1, found.workers + 1))
    assert all(one.p99_s > 0.02 for one in tried[:-1])
    assert fewest_workers(models.chain, FLAT, requests, times_s, most=1, bound_s=1e-6)[0] is None


def test_a_profile_of_other_cells_is_refused() -> None:
    with pytest.raises(DefinitionError, match="lacks cell 'next'"):
        Plant(models.letters, FLAT, 1)


@pytest.mark.parametrize(("rows", "tasks"), [(4, 6), (5, 7)])
def test_a_loop_that_several_rows_lead_takes_its_steps(rows: int, tasks: int) -> None:
    cell = make_cells(max_batch_rows=4).memorise

    def unfold(graph: Graph, request: torch.Tensor) -> object:
        loop = graph.loop(cell, x=request, total=graph.pages(cell), until="stop", max_steps=12)
        return {"made": loop.x}

    profile = Profile("cpu", {cell.identity: CellProfile("memorise", (1, 8), (STEP_S, STEP_S), 8)})
    plant = Plant(Unfolder("led", unfold, torch.zeros(2, WIDTH)), profile, 1)
    outcome = plant.play([plant.template(torch.zeros(rows, WIDTH))], [0.0], 1.0, loop_share=0.5)
    assert outcome.p99_s == pytest.approx(tasks * STEP_S)
