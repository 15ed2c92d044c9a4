"""The arguments of a scheduler: sizes of its tables, and its settings."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from cellrt.errors import DefinitionError

POLICY_NAMES = (
    "batchmaker",
    "first-come-first-served",
    "shortest-job-first",
    "earliest-deadline-first",
    "deadline-aware-utility",
)
"""The names of the policies of ``policies.py``, for callers that start an engine elsewhere and need no more of them."""
SUSPENSIONS = ("cheaper", "copy", "recompute")
"""The ways to take pages from a suspended request."""


@dataclass(frozen=True)
class Limits:
    """Sizes of the tables, fixed at start. A request that would not fit in empty tables is refused at once."""

    max_requests: int = 16_384
    max_nodes: int = 1 << 18
    max_values: int = 1 << 20
    max_links: int = 1 << 21
    max_subgraphs: int = 1 << 17
    max_places: int = 1 << 21
    max_tasks: int = 64
    max_sessions: int = 16_384
    max_events: int = 1 << 16


@dataclass(frozen=True)
class SchedulerSettings:
    """The settings of the scheduler; each optimisation has its switch.

    Attributes:
        max_tasks_to_submit: tasks of one type submitted in a row (``MaxTasksToSubmit``).
        early_release: release a subgraph to the worker its producers were submitted to, before they complete.
        runs: let a task hold several successive steps of each chain.
        join_budget_s: how long a newcomer may have to wait for a run to end while requests arrive, in seconds.
        max_run_s: the same while hardly any arrive: the longest run of all.
        min_run_s: once a run has taken this many seconds, it ends with the first of its rows that ends. That row's
            request is answered then, and another takes its place (on a GPU: if that was known before the run). A run of
            loops that go ahead is no longer. Default: 0.7 ms; with several workers, which share the turns that shorter
            runs cost, 1.4 ms.
        max_wait_s: rows that have been ready for more seconds go before others of their client priority, and now and
            then before higher ones; default: two join budgets. ``schedule.py`` says how long anything waits then.
            ``math.inf``: for ever, if the rows before them never end.
        fair_every: every so many tasks of a type, the request that arrived first goes first, whatever the policy says.
        split: share ready nodes out among idle workers, instead of filling one worker's task first.
        gather: leave a few rows to a worker that will be free soon, instead of giving an idle one a small task.
        large_batches: a batch is full where more rows would gain little, as measured; else with ``max_batch`` alone.
        steps_first: for a cell that grows a state, let requests with a single step go into a task before those with
            more rows, so that none waits for a long input that came before. Without, a task is strictly in order: the
            policy's, else that of arrival, and no request goes before one that does not fit (ORCA section 4.2).
        joins: let requests begin beside others. Without, none takes its first pages of growing states at a worker where
            another has some: they begin together, and the next when all have ended (request-level scheduling, to
            compare with).
        reserve_pages: let a request begin only where all pages that it may need are free at its worker, which it takes
            at once; no request of the same cell goes before one that has to wait for them (ORCA section 4.2:
            ``n_slots`` and ``max_tokens``). So no request is suspended. Without, pages are taken as states grow.
        prompts_apart: for a cell that grows a state, never have several rows of one request, as prompts have, and
            single steps in one task; prompts go first: to compare with tasks of both (Pensieve section 3.4.2).
        loops_ahead: how many tasks (for loops of several cells: steps) a loop may be ahead of the first that is not
            complete, whose stop is not known yet; None: as many as its worker wants, which on a CPU is none, as it
            knows the stop at once.
        suspension: how pages are taken from a suspended request: ``copy`` moves them to the host, ``recompute`` drops
            them, and the steps that filled them run again, where that is possible (``recomputation.py``); ``cheaper``
            does what takes less time as measured.

    Raises DefinitionError for a suspension that is none of these.
    """

    max_tasks_to_submit: int = 5
    early_release: bool = True
    runs: bool = True
    join_budget_s: float = 3e-3
    max_run_s: float = 20e-3
    min_run_s: float | None = None
    max_wait_s: float | None = None
    fair_every: int = 16
    split: bool = True
    gather: bool = True
    large_batches: bool = True
    steps_first: bool = True
    joins: bool = True
    reserve_pages: bool = False
    prompts_apart: bool = False
    loops_ahead: int | None = None
    suspension: str = "cheaper"

    @classmethod
    def algorithm_1(cls, **others: Any) -> SchedulerSettings:
        """Return settings with which the scheduler is Algorithm 1 of BatchMaker and nothing else.

        ``others`` are settings of the class. ``docs/policies.md`` says what each of them is worth.
        """
        never = math.inf
        off: dict[str, Any] = {
            "early_release": False,
            "runs": False,
            "join_budget_s": never,
            "min_run_s": never,
            "max_wait_s": never,
            "split": False,
            "gather": False,
            "large_batches": False,
            "loops_ahead": 0,
        }
        return cls(**{**off, **others})

    def __post_init__(self) -> None:
        if self.suspension not in SUSPENSIONS:
            raise DefinitionError(f"suspension: expected one of {', '.join(SUSPENSIONS)}, got {self.suspension!r}")
