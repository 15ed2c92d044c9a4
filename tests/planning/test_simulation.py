"""Simulated workers: by hand where it can be counted, and monotone where it cannot."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from cellrt import Graph, Unfolder
from cellrt.core.scheduling.policies import POLICIES
from cellrt.engine.arena_sizes import ArenaBytes
from cellrt.engine.due import Due
from cellrt.errors import DefinitionError
from cellrt.planning.measuring import reading_seconds
from cellrt.planning.profile import CellProfile, HostCosts, Profile, read_profile
from cellrt.planning.simulation import Plant, fewest_workers, poisson_times, shortest_deadline
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


def test_a_policy_decides_how_many_are_done_by_their_deadlines() -> None:
    """Two long requests fill each batch until they are late; the short ones behind them would not be."""
    narrow = Profile("cpu", {models.STEP.identity: CellProfile("step", (1, 2), (STEP_S, STEP_S), 2)})

    def in_time(name: str) -> float | None:
        plant = Plant(models.chain, narrow, 1, policy=POLICIES[name])
        templates = [plant.template(chain(steps)) for steps in (40, 40, 1, 1, 1, 1, 1, 1)]
        return plant.play(templates, [0.0] * 8, 1.0, due=Due(20.5 * STEP_S)).in_time

    assert in_time("first-come-first-served") == 0
    assert in_time("shortest-job-first") == in_time("deadline-aware-utility") == 6 / 8
    plant = Plant(models.chain, narrow, 1)
    assert plant.play([plant.template(chain(1))], [0.0], 1.0).in_time is None


def test_what_is_late_is_dropped_and_not_counted_as_done() -> None:
    """Of three chains of ten steps, one row a task, the second is dropped as it goes on and the third as it waits."""
    narrow = Profile("cpu", {models.STEP.identity: CellProfile("step", (1,), (STEP_S,), 1)})
    plant = Plant(models.chain, narrow, 1)
    templates = [plant.template(chain(10)) for _ in range(3)]
    by_end = plant.play(templates, [0.0] * 3, 1.0, due=Due(15.5 * STEP_S))
    assert by_end.in_time == pytest.approx(1 / 3) and by_end.p99_s == pytest.approx(10 * STEP_S)
    assert 1 / (20 * STEP_S) <= by_end.throughput <= 1 / (15.5 * STEP_S)  # what was sent by then goes on
    by_begin = plant.play(templates, [0.0] * 3, 1.0, due=Due(None, 15.5 * STEP_S))
    assert by_begin.in_time == pytest.approx(2 / 3) and by_begin.p99_s == pytest.approx(20 * STEP_S, rel=0.01)
    nothing = plant.play(templates, [0.0] * 3, 1.0, due=Due(0.5 * STEP_S))
    assert nothing.in_time == 0 and nothing.p50_s is None and nothing.throughput == 0


def test_the_shortest_deadline_that_is_kept_is_found() -> None:
    narrow = Profile("cpu", {models.STEP.identity: CellProfile("step", (1,), (STEP_S,), 1)})
    plant = Plant(models.chain, narrow, 1)
    templates, times_s = [plant.template(chain(10)) for _ in range(4)], [0.0] * 4

    def shortest_s(share: float, begun_s: float | None = None) -> float | None:
        found = shortest_deadline(plant, templates, times_s, 1.0, share, schedule_by_s=begun_s)
        return None if found is None else found.deadline_s

    assert shortest_s(0.25) == pytest.approx(10 * STEP_S, rel=0.011)
    assert shortest_s(1.0) == pytest.approx(40 * STEP_S, rel=0.011)
    assert shortest_s(0.5, 15 * STEP_S) == pytest.approx(20 * STEP_S, rel=0.011)
    assert shortest_s(0.75, 15 * STEP_S) is None  # no more than two begin by then


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


def test_a_model_whose_pages_run_out_is_simulated_as_it_is_served() -> None:
    """Each request comes to 4 or 7 pages of 3 rows, of which there are 64 at the worker."""
    cell = make_cells(max_batch_rows=4).memorise

    def unfold(graph: Graph, request: torch.Tensor) -> object:
        return {"made": graph.loop(cell, x=request, total=graph.pages(cell), until="stop", max_steps=20).x}

    def p99_s(page_bytes: int | None, read_s: float = 0.0, page_s: float = 0.0) -> float:
        step = CellProfile("memorise", (1, 8), (STEP_S, STEP_S), 8, read_s)
        profile = Profile("cpu", {cell.identity: step}, HostCosts(0.0, 0.0, page_s))
        plant = Plant(Unfolder("led", unfold, torch.zeros(2, WIDTH)), profile, 1, ArenaBytes(pages=page_bytes))
        times_s = [STEP_S * k for k in range(40)]
        found_s = plant.play([plant.template(torch.zeros(2, WIDTH))] * len(times_s), times_s, 1.0).p99_s
        assert found_s is not None
        return found_s

    roomy_s, tight_s = p99_s(None), p99_s(1)
    assert tight_s >= roomy_s
    assert p99_s(1, page_s=STEP_S) >= tight_s
    assert p99_s(None, read_s=STEP_S / 10) > 1.5 * roomy_s


def test_a_profile_has_what_reading_a_growing_state_costs(tmp_path: Path) -> None:
    cell = make_cells().memorise
    assert reading_seconds(cell, None, 0.01) > 0
    made = Profile("cpu", {cell.identity: CellProfile("memorise", (1,), (1e-3,), 1, 2e-6)}, HostCosts(0.1, 0.2, 0.3))
    made.save(tmp_path / "profile.json")
    assert read_profile(tmp_path / "profile.json") == made


def test_a_profile_of_before_costs_nothing_for_what_it_lacks(tmp_path: Path) -> None:
    cell = {"name": "step", "rows": [1], "step_s": [1e-3], "max_batch": 1}
    host = {"request_s": 0.1, "task_s": 0.2}
    path = tmp_path / "profile.json"
    path.write_text(json.dumps({"format": 1, "device": "cpu", "cells": {"x": cell}, "host": host}))
    read = read_profile(path)
    assert read.cells["x"].read_s == 0 and read.host == HostCosts(0.1, 0.2, 0.0)
