"""The empty tables of a new scheduler, with its settings in them."""

from __future__ import annotations

from cellrt.core.scheduling.policy import CompiledPolicy, Policy
from cellrt.core.state.buddy_allocator import make_blocks
from cellrt.core.state.constants import MIN_RUN_S
from cellrt.core.state.settings import SUSPENSIONS, Limits, SchedulerSettings
from cellrt.core.state.tables import NEVER, Tables, make_tables

COPIED = (
    "max_tasks_to_submit",
    "fair_every",
    "early_release",
    "split",
    "gather",
    "runs",
    "large_batches",
    "steps_first",
    "joins",
    "reserve_pages",
    "prompts_apart",
)
"""The settings that are in the tables unchanged."""


def empty_tables(
    limits: Limits, settings: SchedulerSettings, num_workers: int, policy: Policy, compiled: CompiledPolicy
) -> Tables:
    """Return tables of these sizes without a request, a cell type or a kind."""
    made = make_tables(limits, num_workers)
    row = made.settings
    for name in COPIED:
        row[name] = getattr(settings, name)
    row["num_workers"], row["num_requests"], row["next_home"] = num_workers, limits.max_requests, NEVER
    row["suspension"] = SUSPENSIONS.index(settings.suspension)
    row["join_budget_ns"] = settings.join_budget_s * 1e9
    row["max_run_ns"] = settings.max_run_s * 1e9
    min_run_s = MIN_RUN_S * min(num_workers, 2) if settings.min_run_s is None else settings.min_run_s
    row["min_run_ns"] = min_run_s * 1e9
    max_wait_s = 2 * settings.join_budget_s if settings.max_wait_s is None else settings.max_wait_s
    row["max_wait_ns"] = max_wait_s * 1e9
    row["rank_at"], row["choose_at"], row["by_first"] = compiled.rank_at, compiled.choose_at, policy.by_first
    if not policy.is_bounded:
        row["fair_every"] = 0
    sizes = limits.max_nodes, limits.max_values, limits.max_links, limits.max_subgraphs, limits.max_places
    return made._replace(blocks=make_blocks(sizes))
