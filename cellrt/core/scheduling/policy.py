"""The interface of policies, and the one place where the scheduler asks them: for an order, and for a cell type.

A policy is one or two small functions, which are compiled by themselves and called by their addresses: editing one
compiles nothing else. Either is optional.

- ``rank(waiting, asked)`` is called before a task takes rows of a queue. It writes a ``score`` to each row of
  ``waiting``, one for each subgraph that has rows ready for this worker; lower goes first, and of equal ones the
  earlier request.
- ``choose(ready, asked)`` is called for the next cell type. It returns the index of a row of ``ready``; any other
  number leaves the choice to Algorithm 1.

``docs/policies.md`` says how to write one; ``tables.py`` has the fields of ``WAITING``, ``READY`` and ``ASKED``.

The following holds under any policy. A higher client priority goes first. Every ``fair_every``-th task of a cell type
begins with the request that arrived first, unless the policy says that this does not hold (``is_bounded``). A cell type
that has waited for ``max_wait`` goes next (``schedule.py``).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numba import carray, types
from numba.core.errors import NumbaError
from numba.np.numpy_support import from_dtype

from cellrt.core.scheduling.gathering import fills_a_task
from cellrt.core.state.queue import backlog_of, num_ready, num_ready_at
from cellrt.core.state.record_layout import most_steps, record_of
from cellrt.core.state.step_times import step_time
from cellrt.core.state.tables import (
    ASKED,
    NEVER,
    NUM_PRIORITIES,
    READY,
    WAITING,
    Asked,
    Ready,
    Request,
    Subgraph,
    Tables,
    Waiting,
)
from cellrt.errors import DefinitionError
from cellrt.native.jit import allocating, c_function, compiled
from cellrt.native.memory import call, start_of
from cellrt.native.row_types import Rows

Function = Callable[..., Any]
Rank = Callable[[Rows[Waiting], Asked], None]
Choose = Callable[[Rows[Ready], Asked], int]
ADMISSION_ORDERS = ("arrival", "length", "deadline")


@dataclass(frozen=True)
class Policy:
    """An order in which requests are admitted and run. Without arguments it is BatchMaker's Algorithm 1, by arrival.

    Attributes:
        name: for people.
        rank: ``rank(waiting, asked) -> None``, which Numba can compile; None: by arrival.
        choose: ``choose(ready, asked) -> int``, the same; None: Algorithm 1.
        by_first: the choice between cell types that are equal for Algorithm 1. True: the type whose first row in order
            has the lowest score. False: the type of the highest priority.
        admit_by: the order in which requests are admitted where the tables are full: "arrival", "length" or "deadline".
        is_bounded: whether every ``fair_every``-th task begins with the request that arrived first; without, a request
            that never comes first waits for ever. How long a cell type waits is ``max_wait_s`` of the settings.

    Raises DefinitionError for an unknown ``admit_by``, and if ``rank`` or ``choose`` is not a function.
    """

    name: str = "batchmaker"
    rank: Rank | None = None
    choose: Choose | None = None
    by_first: bool = False
    admit_by: str = "arrival"
    is_bounded: bool = True

    def __post_init__(self) -> None:
        """Check the arguments, as the class says."""
        if self.admit_by not in ADMISSION_ORDERS:
            expected = ", ".join(ADMISSION_ORDERS)
            raise DefinitionError(f"policy {self.name!r}: admit_by: expected one of {expected}, got {self.admit_by!r}")
        for what in ("rank", "choose"):
            function = getattr(self, what)
            if function is not None and not callable(function):
                raise DefinitionError(f"policy {self.name!r}: {what}: expected a function or None, got {function!r}")


def policy_of(given: Policy | str | None, known: dict[str, Policy]) -> Policy:
    """Return a policy by itself, by its name in ``known``, or by "module:attribute"; None: the first of ``known``.

    Raise DefinitionError if there is none.
    """
    if given is None:
        return next(iter(known.values()))
    if isinstance(given, Policy):
        return given
    if isinstance(given, str) and given in known:
        return known[given]
    expected = f"a Policy, one of {', '.join(known)}, or module:attribute"
    if not isinstance(given, str) or ":" not in given:
        raise DefinitionError(f"policy: expected {expected}, got {given!r}")
    module, _, attribute = given.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise DefinitionError(f"policy: cannot import {given!r}: {error}") from error
    if not isinstance(found, Policy):
        raise DefinitionError(f"policy: expected {expected}, and {given!r} is {found!r}")
    return found


class CompiledPolicy:
    """The functions of a policy as compiled code, which last as long as this object.

    Attributes:
        rank_at, choose_at: their addresses; 0: there is none.

    Raises DefinitionError for a function that cannot be compiled.
    """

    def __init__(self, policy: Policy) -> None:
        self._kept: list[object] = []
        self.rank_at = self._address(policy, "rank", WAITING, types.none)
        self.choose_at = self._address(policy, "choose", READY, types.intp)

    def _address(self, policy: Policy, what: str, rows: np.dtype[np.void], returned: Any) -> int:
        function = getattr(policy, what)
        if function is None:
            return 0
        if numba.config.DISABLE_JIT:
            _UNCOMPILED.append(function)
            return len(_UNCOMPILED)
        inner = allocating(function)
        gives = what == "choose"

        def asked_of(rows_at: Any, asked_at: Any) -> Any:
            asked = carray(asked_at, 1)
            try:
                if gives:
                    return inner(carray(rows_at, asked[0].count), asked[0])
                inner(carray(rows_at, asked[0].count), asked[0])
            except Exception:
                return FAILED
            return 0

        signature = types.int64(types.CPointer(from_dtype(rows)), types.CPointer(from_dtype(ASKED)))
        try:
            made = c_function(asked_of, signature)
        except (NumbaError, KeyError) as error:  # the latter for a field that there is not
            raise DefinitionError(f"policy {policy.name!r}: {what} cannot be compiled: {error}") from error
        self._kept += [inner, made]
        return int(made.address or 0)


FAILED = -(1 << 40)
"""The value that stands for an error raised by a policy's function."""
_UNCOMPILED: list[Function] = []
"""The functions, by 1 plus their index, in place of addresses where nothing is compiled."""


def _ask_python(t: Tables, address: int, rows: Rows[Any]) -> int:
    try:
        given = _UNCOMPILED[address - 1](rows[: t.asked[0].count], t.asked[0])
    except Exception:
        return FAILED
    return 0 if given is None else int(given)


if numba.config.DISABLE_JIT:

    def _ask_rank(t: Tables) -> int:
        return _ask_python(t, int(t.settings[0].rank_at), t.waiting)

    def _ask_choose(t: Tables) -> int:
        return _ask_python(t, int(t.settings[0].choose_at), t.choices)

else:

    @compiled
    def _ask_rank(t: Tables) -> int:
        return int(call(t.settings[0].rank_at, start_of(t.waiting), start_of(t.asked)))

    @compiled
    def _ask_choose(t: Tables) -> int:
        return int(call(t.settings[0].choose_at, start_of(t.choices), start_of(t.asked)))


@compiled
def put_in_order(t: Tables, type_id: int, priority: int, worker: int) -> None:
    """Put the rows that a task could take of a queue at its front, in the policy's order; the rest stays as it is.

    Without a ``rank`` a queue is in the order in which its chains and loops came to it. That is the order of arrival,
    except where a request has several of them; tasks strictly in order (``steps_first``) have the order of arrival.
    """
    settings, cell_type = t.settings[0], t.types[type_id]
    if settings.rank_at == 0 and (settings.steps_first or not cell_type.has_spans):
        return
    # Score what is ready.
    count = _show_waiting(t, type_id, priority, worker)
    if count < 2:
        return
    is_fair = settings.fair_every > 0 and (cell_type.num_formed + 1) % settings.fair_every == 0
    if settings.rank_at == 0 or is_fair:
        for k in range(count):
            t.waiting[k].score = t.waiting[k].sequence
    else:
        _score(t, count)
    # Sort with a heap, as far as a task can take rows, and move these to the front.
    for k in range(count):
        t.order[k] = k
    for k in range(count // 2 - 1, -1, -1):
        _sink(t, k, count)
    most = min(count, cell_type.max_rows if cell_type.has_spans else cell_type.max_batch)
    behind = -1
    for k in range(most):
        subgraph_id = t.waiting[t.order[0]].subgraph
        t.order[0] = t.order[count - 1 - k]
        _sink(t, 0, count - 1 - k)
        _move_behind(t, backlog_of(type_id, priority), subgraph_id, behind)
        behind = subgraph_id


@compiled
def _show_waiting(t: Tables, type_id: int, priority: int, worker: int) -> int:
    """Fill ``waiting`` and ``asked`` with the rows of a queue that are ready for a worker; return their number."""
    cell_type, count = t.types[type_id], 0
    backlog = backlog_of(type_id, priority)
    if t.ready[backlog, 0] + t.ready[backlog, worker] == 0:
        return 0
    subgraph_id = t.lanes[backlog].head
    while subgraph_id >= 0:
        subgraph = t.subgraphs[subgraph_id]
        if subgraph.num_ready > 0 and (subgraph.pinned == 0 or subgraph.pinned == worker):
            request, row = t.requests[subgraph.request], t.waiting[count]
            row.sequence, row.admitted_ns = request.sequence, request.admitted_ns
            row.deadline_ns = _deadline_of(t, request, subgraph)
            row.length, row.client, row.subgraph = request.length, request.client, subgraph_id
            row.ready, row.has_begun, row.score = subgraph.num_ready, subgraph.has_begun, 0
            row.left = subgraph.nodes_left
            if subgraph.record >= 0:
                row.left = most_steps(t, subgraph) - record_of(t, subgraph).position
            count += 1
        subgraph_id = subgraph.next
    asked = t.asked[0]
    asked.now_ns, asked.count, asked.cell_type, asked.worker = t.settings[0].now_ns, count, type_id, worker
    asked.client_priority = priority
    asked.most = cell_type.max_rows if cell_type.has_spans else cell_type.max_batch
    return count


@compiled
def _deadline_of(t: Tables, request: Request, subgraph: Subgraph) -> int:
    """Return the deadline of a request that a policy goes by.

    Before the request has begun this is the earlier of when it must be done and have begun, from then on when it must
    be done. A request that has begun and has no such time counts as due now. Else requests that have yet to begin would
    go before it for as long as they come, and a request that was chosen in time would never be done.
    """
    if request.started_ns == 0 and not subgraph.has_begun:
        return min(request.deadline_ns, request.schedule_by_ns)
    if request.deadline_ns < NEVER or request.schedule_by_ns == NEVER:
        return request.deadline_ns
    return max(request.schedule_by_ns, t.settings[0].now_ns)


@compiled
def _score(t: Tables, count: int) -> None:
    """Let the policy score what is shown; if it raises, take the order of arrival."""
    if _ask_rank(t) == FAILED:
        t.settings[0].policy_errors += 1
        for k in range(count):
            t.waiting[k].score = t.waiting[k].sequence


@compiled
def _is_before(t: Tables, one: int, other: int) -> bool:
    a, b = t.waiting[one], t.waiting[other]
    if a.score != b.score:
        return a.score < b.score or (b.score != b.score and a.score == a.score)  # NaN goes last
    return a.sequence < b.sequence or (a.sequence == b.sequence and one < other)


@compiled
def _sink(t: Tables, k: int, count: int) -> None:
    """Restore the heap ``order``, of ``count`` rows, below its place ``k``."""
    while 2 * k + 1 < count:
        child = 2 * k + 1
        if child + 1 < count and _is_before(t, t.order[child + 1], t.order[child]):
            child += 1
        if not _is_before(t, t.order[child], t.order[k]):
            return
        swapped = t.order[k]
        t.order[k] = t.order[child]
        t.order[child] = swapped
        k = child


@compiled
def _move_behind(t: Tables, backlog: int, subgraph_id: int, behind: int) -> None:
    """Move a subgraph of a queue behind another, or to its front (-1)."""
    lane, subgraph = t.lanes[backlog], t.subgraphs[subgraph_id]
    if subgraph.previous == behind:
        return
    t.subgraphs[subgraph.previous].next = subgraph.next  # it is not the first, as that has none before it
    if subgraph.next >= 0:
        t.subgraphs[subgraph.next].previous = subgraph.previous
    else:
        lane.tail = subgraph.previous
    following = lane.head if behind < 0 else t.subgraphs[behind].next
    subgraph.previous, subgraph.next = behind, following
    t.subgraphs[following].previous = subgraph_id
    if behind < 0:
        lane.head = subgraph_id
    else:
        t.subgraphs[behind].next = subgraph_id


@compiled
def first_score(t: Tables, type_id: int, worker: int) -> float:
    """Return the lowest score of what a worker may take of a type, at the highest client priority that has any.

    Without a ``rank`` it is the order of arrival of the first in the queue.
    """
    for below in range(NUM_PRIORITIES):
        priority = NUM_PRIORITIES - 1 - below
        if t.settings[0].rank_at == 0:
            subgraph_id = t.lanes[backlog_of(type_id, priority)].head
            while subgraph_id >= 0:
                subgraph = t.subgraphs[subgraph_id]
                if subgraph.num_ready > 0 and (subgraph.pinned == 0 or subgraph.pinned == worker):
                    return float(t.requests[subgraph.request].sequence)
                subgraph_id = subgraph.next
        else:
            count = _show_waiting(t, type_id, priority, worker)
            if count > 0:
                _score(t, count)
                first = 0
                for k in range(1, count):
                    first = k if _is_before(t, k, first) else first
                return t.waiting[first].score
    return float(NEVER)


@compiled
def chosen_type(t: Tables, priority: int, worker: int) -> int:
    """Return the cell type that the policy's ``choose`` takes of those with work at a client priority, or -1."""
    settings, count = t.settings[0], 0
    if settings.choose_at == 0:
        return -1
    for type_id in range(settings.num_types):
        if num_ready_at(t, type_id, priority, worker) > 0:
            cell_type, row = t.types[type_id], t.choices[count]
            row.first_score = first_score(t, type_id, worker)
            row.cell_type, row.priority, row.max_batch = type_id, cell_type.priority, cell_type.max_batch
            row.since_ns, row.num_running = t.since_ns[backlog_of(type_id, priority)], cell_type.num_running
            row.ready = num_ready(t, type_id, worker)
            row.step_ns, row.fills = step_time(t, type_id, row.ready), fills_a_task(t, type_id, worker)
            count += 1
    asked = t.asked[0]
    asked.now_ns, asked.count, asked.cell_type, asked.worker = settings.now_ns, count, -1, worker
    asked.client_priority, asked.most = priority, 0
    found = _ask_choose(t)
    if found == FAILED:
        settings.policy_errors += 1
    return t.choices[found].cell_type if 0 <= found < count else -1
