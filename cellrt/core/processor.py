"""The request processor: the tables and the compiled functions, behind one small Python interface.

It knows integers only. Its driver (``engine.py`` with threads and tensors, ``simulate.py`` with a virtual clock) tells
it what happened and when, and does what it returns: run these tasks, these requests are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cellrt.core.checks.validate import broken_rules
from cellrt.core.empty import empty_tables
from cellrt.core.entries import (
    admit_each,
    admit_many,
    cancel,
    complete,
    copy_results,
    cut_back,
    drop_states,
    finish_many,
    has_handed_in,
    join,
    lose_worker,
    result_rows,
    schedule_tasks,
    share_states,
    starvation,
    suspend,
    take_out,
)
from cellrt.core.requests.room import has_rows, why_too_large
from cellrt.core.scheduling.policy import CompiledPolicy, Policy
from cellrt.core.state import tables
from cellrt.core.state.clock import Clock
from cellrt.core.state.growth import TaskBuffers, with_more_rows
from cellrt.core.state.moves import LEFT
from cellrt.core.state.notices import Notices
from cellrt.core.state.pointers import address_of
from cellrt.core.state.ports import Port
from cellrt.core.state.region_layout import NUM_SLOTS
from cellrt.core.state.settings import Limits, SchedulerSettings
from cellrt.core.state.tables import NEVER, Tables
from cellrt.core.state.task_layout import FLAGS, HEADER, INPUT, OUTPUT, TaskView
from cellrt.core.templates.sized_template import (
    KnownTemplates,
    Room,
    SizedTemplate,
    Template,
    addresses_of,
    compile_template,
)
from cellrt.errors import DefinitionError, RequestTooLargeError
from cellrt.native.row_types import new_table

__all__ = ("Processor", "SizedTemplate", "Template")

NO_SESSIONS, NO_DEADLINES = np.empty(0, np.int32), np.empty((0, 2), np.int64)
NO_NOTICES = Notices(np.zeros((0, 2), np.int32))
TOO_LARGE = -2
"""The id that ``admit`` gives a request that will never have room."""


@dataclass
class _Growing:
    """The part of ``ports`` that is in use, and the largest sizes so far."""

    ports: int = 0
    per_row: int = 0
    buffer_ints: int = 0
    kind_rows: list[tuple[int, int]] = field(default_factory=list)


class Processor:
    """The scheduler's state. It is not thread-safe: one thread, the manager, owns it."""

    def __init__(
        self,
        num_workers: int,
        limits: Limits | None = None,
        settings: SchedulerSettings | None = None,
        policy: Policy | None = None,
    ) -> None:
        if not 1 <= num_workers <= tables.MAX_WORKERS:
            raise DefinitionError(f"number of workers: expected 1 to {tables.MAX_WORKERS}, got {num_workers}")
        self.limits = limits or Limits()
        self.settings = settings or SchedulerSettings()
        self.num_workers = num_workers
        self.has_pages = False
        """True if any kind is one of pages; else nothing need be asked about them."""
        self._grown = _Growing()
        self._buffers = TaskBuffers()
        self.policy = policy or Policy()
        self._functions = CompiledPolicy(self.policy)
        self.tables = empty_tables(self.limits, self.settings, num_workers, self.policy, self._functions)
        self.clock = Clock(self.tables)
        self._task_ids = np.zeros(self.limits.max_tasks, np.int32)
        self._notices = np.zeros((64, 2), np.int32)
        self._room: Room | None = None
        """The sizes that templates are checked against; None after the limits grew."""
        self._templates = KnownTemplates()
        self._free_types: list[int] = []
        self._free_sessions = list(range(self.limits.max_sessions))[::-1]

    @property
    def tables(self) -> Tables:
        """The whole state. Read it freely; only the processor replaces tables, as kinds and cell types are added."""
        return self._tables

    @tables.setter
    def tables(self, grown: Tables) -> None:
        self._tables = grown
        self._at = address_of(grown)
        # Columns, because looking one up by its name takes a notable part of a small turn.
        self._idle_workers, self._left_ns = grown.settings["idle_workers"], grown.settings["left_ns"]
        self._slot_rows, self._slot_pages = grown.slots["row"], grown.slots["pages"]
        self._started_ns = grown.requests["started_ns"]
        self._of_tasks = tuple(grown.tasks[name] for name in ("cell_type", "rows", "positions", "steps"))

    @property
    def at(self) -> Any:
        """The argument of an ``entry`` for the tables; valid until one of them is replaced."""
        return self._at

    @property
    def num_notices(self) -> int:
        """The most notices that a task may leave."""
        return len(self._notices)

    def make_notices(self) -> NDArray[np.int32]:
        """Return memory for the notices of a task."""
        return np.zeros_like(self._notices)

    @property
    def must_take_over(self) -> bool:
        """True while tasks run whose buffers were replaced: then ``complete`` must be told of every task."""
        return bool(self._buffers.older)

    @property
    def num_kinds(self) -> int:
        """The number of kinds of rows (shape and dtype) added so far."""
        return len(self._grown.kind_rows)

    @property
    def num_types(self) -> int:
        """The number of cell types added so far."""
        return int(self.tables.settings["num_types"][0])

    @property
    def num_live(self) -> int:
        """The number of requests in the tables."""
        return int(self.tables.settings["num_live"][0])

    @property
    def num_running(self) -> int:
        """The number of tasks submitted and not complete."""
        return int(self.tables.types["num_running"].sum())

    @property
    def num_policy_errors(self) -> int:
        """The number of times that a function of the policy raised."""
        return int(self.tables.settings["policy_errors"][0])

    def add_kind(self, worker_rows: int, host_rows: int, is_paged: bool = False) -> int:
        """Add a kind, at any time, with this many free rows at each worker and at the host; return its id.

        ``is_paged``: its rows are pages (``pages.py``).
        """
        kind = self.num_kinds
        if kind >= tables.MAX_KINDS:
            raise DefinitionError(f"more than {tables.MAX_KINDS} different row shapes and dtypes in one engine")
        first = self.tables.free_rows.size
        self.tables = with_more_rows(self.tables, host_rows + self.num_workers * worker_rows)
        self.tables.kinds["worker_rows"][kind] = worker_rows
        self.tables.kinds["host_rows"][kind] = host_rows
        self.tables.kinds["is_paged"][kind] = is_paged
        self.has_pages = self.has_pages or is_paged
        for location in range(self.num_workers + 1):
            capacity = worker_rows if location else host_rows
            self.tables.arenas[location * tables.MAX_KINDS + kind] = (first, capacity, capacity, capacity)
            first += capacity
        self._grown.kind_rows.append((worker_rows, host_rows))
        self._room = None
        return kind

    def set_host_rows(self, kind: int, address: int, row_bytes: int) -> None:
        """Set the address of the host's rows of a kind, so that they are filled and read without Python.

        The rows must not move.
        """
        self.tables.kinds["row_bytes"][kind], self.tables.kinds["host_at"][kind] = row_bytes, address

    def add_type(
        self,
        inputs: Sequence[Port],
        outputs: Sequence[Port],
        *,
        max_batch: int,
        min_batch: int = 1,
        priority: int = 0,
        max_steps: int = 1 << 20,
        max_rows: int | None = None,
        is_whole: bool = False,
    ) -> int:
        """Add a cell type, at any time; return its id. Task buffers grow to hold its largest batch.

        ``max_batch`` counts nodes; ``max_rows`` counts rows, where a node may have several. ``is_whole``: all steps of
        a chain are rows of one task.
        """
        max_rows = max_rows or max_batch
        type_id = self._free_types[-1] if self._free_types else self.num_types
        if type_id >= tables.MAX_TYPES:
            raise DefinitionError(f"more than {tables.MAX_TYPES} cell types in one engine")
        # Append its ports, and fill its row of the table of types.
        ports = new_table(self._grown.ports + len(inputs) + len(outputs), tables.PORT)
        ports[: self._grown.ports] = self.tables.ports[: self._grown.ports]
        for k, port in enumerate([*inputs, *outputs]):
            ports[self._grown.ports + k] = port
        self.tables.types[type_id] = 0
        self.tables.step_ns[type_id] = self.tables.row_ns[type_id] = 0
        row = self.tables.types[type_id]
        row["priority"], row["max_batch"], row["min_batch"] = priority, max_batch, min_batch
        row["max_steps"] = max_steps if any(port.carry >= 0 for port in inputs) else 1
        row["num_inputs"], row["num_outputs"] = len(inputs), len(outputs)
        row["first_port"] = self._grown.ports
        row["carries"] = any(port.carry >= 0 for port in inputs)
        row["num_ragged"] = sum(port.ragged for port in inputs)
        row["max_rows"], row["is_whole"] = max_rows, is_whole
        row["has_spans"] = any(port.page_size or port.is_span for port in inputs)
        row["grows"] = any(port.appends for port in inputs)
        row["ahead"] = self.settings.loops_ahead or 0
        row["per_row"] = 6 + 4 * len(inputs) + 4 * len(outputs) + (FLAGS if row["ahead"] else 0)
        # Grow the buffers of tasks to hold its largest batch.
        self._grown.ports = len(ports)
        header = HEADER + INPUT * len(inputs) + OUTPUT * len(outputs)
        wanted = max(1 << 16, 4 * max_rows * (int(row["per_row"]) + 1) + header)
        self.tables = self.tables._replace(ports=ports)
        if wanted > int(self.tables.settings["buffer_ints"][0]):
            self.tables = self._buffers.grow(self.tables, wanted)
            self._grown.buffer_ints = wanted
        self._grown.per_row = max(self._grown.per_row, int(row["per_row"]))
        if self._free_types:
            self._free_types.pop()
            # A thread that compiles a program of the type that had this number adds it to the templates it began with.
            self._templates = KnownTemplates()
        else:
            self.tables.settings["num_types"] = type_id + 1
        self._room = None
        self._notices = np.zeros((max(len(self._notices), 4 * max_rows + 64), 2), np.int32)
        return type_id

    def remove_type(self, type_id: int, heir: int | None = None) -> None:
        """Remove a cell type that no request uses any more; another type may get its id.

        ``heir`` is another type of the same cell, which takes over the counts.
        """
        self._free_types.append(type_id)
        counts, num_tasks = self.tables.counts, self.tables.num_tasks
        if heir is not None:
            num_tasks[heir] += num_tasks[type_id]
            for name in ("tasks", "rows", "positions"):
                counts[name][heir] += counts[name][type_id]
        counts[type_id], num_tasks[type_id] = 0, 0

    def set_priority(self, type_id: int, priority: int) -> None:
        """Set a cell type's priority: higher goes first."""
        self.tables.types["priority"][type_id] = priority

    def set_step_time(self, type_id: int, rows: int, seconds: float) -> None:
        """Set the time of one step of ``rows`` rows before the scheduler has measured it."""
        k = min(tables.NUM_SIZE_CLASSES - 1, max(0, rows - 1).bit_length())
        self.tables.step_ns[type_id, k] = seconds * 1e9
        self.tables.row_ns[type_id, k] = seconds * 1e9 / rows

    def compile(self, program: NDArray[np.int32]) -> SizedTemplate:
        """Compile a program (``program.py``) into a template. Any thread may call it: it reads only types and ports."""
        known, t = self._templates, self.tables  # in this order: see ``add_type``
        if self._room is None:
            self._room = Room.of(self.limits, self._most_refs, self._grown.kind_rows)
        return compile_template(program, t.types, t.ports, self._room, known)

    @property
    def _most_refs(self) -> int:
        """The most inputs of a node that fit in a task's buffer and in the tables."""
        return min(self._grown.buffer_ints // 4 - self._grown.per_row, tables.MAX_REFS)

    def why_too_large(self, template: SizedTemplate, kinds: Sequence[object]) -> str | None:
        """Return the reason why a template would not fit even in an empty engine; None if it fits.

        ``kinds`` names the kinds.
        """
        return why_too_large(template, self.limits, self._grown.kind_rows, self._most_refs, kinds)

    def has_room(self, template: SizedTemplate, session: int = -1) -> bool:
        """Return whether arenas and tables have room now for a request of a session (-1: none)."""
        return has_rows(self.tables, template, session)

    def admit(
        self,
        template: SizedTemplate,
        sequence: int,
        priority: int = 0,
        streamed: bool = False,
        session: int = -1,
        deadline_ns: int = NEVER,
        schedule_by_ns: int = NEVER,
    ) -> tuple[int, NDArray[np.int32]] | None:
        """Admit a request: return (id, rows), or None if there is no room now.

        ``rows`` has the host row of each external value, then of each state that comes with the request (-1 if it does
        not), then the place of the first result in ``tables.places``. A session has one live request at a time.

        Raise RequestTooLargeError if the request and the pages that its session has kept need more pages than a worker
        has, or one of its nodes needs more than a task's buffer can list.
        """
        how = priority, streamed, np.array([session], np.int32)
        deadlines_ns = np.array([[deadline_ns, schedule_by_ns]])
        ids, rows = self.admit_many(template, np.array([sequence]), *how, deadlines_ns=deadlines_ns)
        return (ids[0], rows[0]) if ids else None

    def admit_many(
        self,
        template: SizedTemplate | Sequence[SizedTemplate],
        sequences: NDArray[Any],
        priority: int = 0,
        streamed: bool = False,
        sessions: NDArray[np.int32] | None = None,
        lengths: NDArray[np.int32] | None = None,
        deadlines_ns: NDArray[np.int64] | None = None,
        client: int = 0,
    ) -> tuple[list[int], NDArray[np.int32]]:
        """Admit requests in order, as far as there is room now.

        Return their ids, and for each the ``rows`` that ``admit`` returns, ``[requests, rows]``. Raise as ``admit``
        does.

        ``template``: one for all; or one for each, without lengths, and then all rows are in one dimension.
        ``sessions``: the session of each, none twice; None: they have none.
        ``lengths``: ``[requests, lengths]`` where they differ; then all rows are in one dimension, too.
        ``priority``, ``client``: of all.
        ``deadlines_ns``: ``[requests, 2]``, by the tables' clock, when each must be done and have begun; None: never.
        """
        deadlines_ns = NO_DEADLINES if deadlines_ns is None else deadlines_ns
        how = priority, client, deadlines_ns, int(streamed), NO_SESSIONS if sessions is None else sessions
        ids, num = np.empty(sequences.size, np.int32), sequences.size
        if not isinstance(template, SizedTemplate):
            rows = np.empty(sum([one.num_externals + one.num_states + 1 for one in template]), np.int32)
            count = admit_each(self._at, addresses_of(template), sequences, *how, rows, ids)
        else:
            width, at, its = template.num_states + 1, template.at, template.lengths[None]
            if lengths is None:
                rows = np.empty((num, template.num_externals + width), np.int32)
            else:
                rows, its = np.empty(template.count_externals(lengths) + num * width, np.int32), lengths
            count = admit_many(self._at, at, its, sequences, *how, rows.reshape(-1), ids)
        if not count and ids[0] == TOO_LARGE:
            raise RequestTooLargeError(
                "with what its session has kept, the request needs more pages than a worker has, or a task can list"
            )
        return ids[:count].tolist(), rows[:count] if rows.ndim == 2 else rows

    @property
    def has_arrivals(self) -> bool:
        """True if a request of this process came by the door that no turn has seen; any thread may ask."""
        door = self._tables.door
        return bool(door.item(tables.TAKEN) < door.item(tables.SUBMITTED))

    @property
    def has_calls(self) -> bool:
        """True if a request came by a region that no turn has seen; the holder of the turn may ask."""
        return bool(self._tables.door.item(tables.NUM_REGIONS) and has_handed_in(self._at))

    @property
    def num_left_behind(self) -> int:
        """The requests of the door that are answered, while tasks of them that went ahead are in flight."""
        return int(self._tables.door.item(tables.NUM_LEFT))

    def join(self) -> bool:
        """Admit what clients handed in by the door, as far as there is room; return whether that is all.

        See ``core/requests/join_leave.py``.
        """
        return bool(join(self._at))

    def take_out(self, region: int) -> list[int]:
        """Return the numbers of the submissions that the client of a region has handed in and no turn has taken out.

        None of them is admitted. See ``core/requests/region_entries.py``.
        """
        submissions = np.empty(NUM_SLOTS, np.int32)
        found: list[int] = submissions[: take_out(self._at, region, submissions)].tolist()
        return found

    def session_of(self, request: int) -> int:
        """Return the session of a request, also of one that was just released."""
        return int(self._tables.requests["session"][request])

    def has_begun(self, request: int) -> bool:
        """Return whether a task of a request was submitted."""
        return bool(self._started_ns[request])

    def open_session(self) -> int | None:
        """Open a session and return its number; None if there is none left."""
        return self._free_sessions.pop() if self._free_sessions else None

    def session_rows(self, session: int, count: int) -> list[tuple[int, int]]:
        """Return (handle, kind) of each of ``count`` states of a session without a live request, handle 0 if new."""
        first = session * tables.MAX_STATES
        return [(int(slot["row"]), int(slot["kind"])) for slot in self.tables.slots[first : first + count]]

    def has_state(self, session: int, count: int) -> bool:
        """Return whether a session of ``count`` states, without a live request, has rows or pages."""
        its = slice(session * tables.MAX_STATES, session * tables.MAX_STATES + count)
        return max(self._slot_rows[its].tolist()) >= tables.NUM_PERMANENT or any(self._slot_pages[its].tolist())

    def drop_states(self, session: int, *, bring: bool = False) -> None:
        """Free the rows of a session without a live request.

        It is new then; with ``bring``, its state comes with its next request.
        """
        drop_states(self._at, session, tables.BRING if bring else 0)

    def copy_session(self, session: int, count: int) -> int | None:
        """Open a session with all ``count`` states of one without a live request; the two share whole pages.

        The pages to copy are in ``views.take_copies``; copy them before anything else. Return None if it cannot be
        done: there is no room, or the session has states that do not grow, or some that come with its next request.
        """
        made = self.open_session()
        if made is not None and not share_states(self._at, session, made, count):
            self._free_sessions.append(made)
            return None
        return made

    def cut_back(self, session: int, count: int, rows: int) -> bool:
        """Cut a session without a live request back to the first rows of its ``count`` growing states.

        These are all its states, and each keeps ``rows`` rows. Pages may have to be copied, as for ``copy_session``.
        Return False if it cannot be done in its pages: some states are cut back then.
        """
        return bool(cut_back(self._at, session, count, rows))

    def close_session(self, session: int) -> None:
        """End a session without a live request."""
        self.drop_states(session)
        self._free_sessions.append(session)

    def starvation(self, worker: int) -> int:
        """Return STARVED if some work found no page at a worker, STUCK if that worker cannot go on either, else 0.

        See ``suspension.py``.
        """
        return int(starvation(self._at, worker))

    def suspend(self, worker: int) -> bool:
        """Take the pages of the latest arrival at a worker for others (``suspension.py``); return whether any moved.

        They are only taken from a request that has nothing in flight.
        """
        return bool(suspend(self._at, worker))

    def schedule(self, worker: int, idle_workers: int = 1) -> list[int]:
        """Form tasks for a worker (location 1, ...) that can take work; return their ids in order of submission.

        ``idle_workers`` counts the workers with nothing to do, this one included.
        """
        self._idle_workers[0] = idle_workers
        count = schedule_tasks(self._at, worker, self._task_ids)
        if count == 1:  # as mostly
            return [self._task_ids.item(0)]
        return self._task_ids[:count].tolist() if count else []

    @property
    def left_s(self) -> float:
        """The seconds after which another worker should take what is ready, after a ``schedule`` without a task.

        It is 0 if nothing is left to another worker.
        """
        return int(self._left_ns[0]) / 1e9

    def complete(self, task: int, elapsed_ns: int) -> Notices:
        """Take out a finished task, whose buffer must hold the worker's answers. Return the notices for the driver.

        Until the next ``schedule``, the task's row of ``tables.tasks`` has the steps and positions that ran.
        """
        if self._buffers.older:
            self._buffers.take_over(self.tables, task)
        count = complete(self._at, task, elapsed_ns, self._notices)
        return Notices(self._notices[:count]) if count else NO_NOTICES

    def counts_of(self, task: int) -> tuple[int, int, int, int]:
        """Return a task's cell type, rows, positions and steps.

        Once it is complete, until ``schedule``, they are those that ran.
        """
        types, rows, positions, steps = self._of_tasks
        return types.item(task), rows.item(task), positions.item(task), steps.item(task)

    def copy_results(
        self, requests: NDArray[np.int32], positions: NDArray[np.int32], arena: NDArray[Any], values: NDArray[Any]
    ) -> None:
        """Copy results of complete requests from bytes of the host's arena to ``values``.

        ``values`` is ``[requests * positions, bytes of a row]``. No loop of the requests may have stopped before the
        positions.
        """
        copy_results(self._at, requests, positions, arena, values)

    def result_rows(self, requests: NDArray[np.int32], positions: NDArray[np.int32]) -> NDArray[np.int32]:
        """Return the host rows ``[requests, positions]`` of the results of complete requests of one template.

        They are -1 where a loop stopped before a position. Read them before ``finish``.
        """
        rows = np.empty((requests.size, positions.size), np.int32)
        result_rows(self._at, requests, positions, rows.reshape(-1))
        return rows

    def rows_in_flight(self, task: int) -> list[tuple[int, int]]:
        """Return the (request, subgraph) of each row of a task that runs."""
        ids = TaskView(self.task_buffer(task)).nodes
        subgraphs = np.where(ids < 0, ~ids, self.tables.nodes["subgraph"][np.maximum(ids, 0)])
        return list(zip(self.tables.subgraphs["request"][subgraphs].tolist(), subgraphs.tolist()))

    def finish(self, requests: NDArray[np.int32]) -> tuple[NDArray[np.int64], list[int]]:
        """Free requests that are done, once their results are read.

        Return when the first task of each was submitted, on the clock of ``clock``, and the requests of which tasks
        that went ahead of a stop are in flight: a NOTICE_RELEASED follows for these.
        """
        started_ns, left = np.empty(requests.size, np.int64), list[int]()
        if finish_many(self._at, requests, started_ns):
            left = requests[self.tables.requests["state"][requests] == LEFT].tolist()
        return started_ns, left

    def release(self, requests: Sequence[int] | NDArray[np.int32]) -> list[int]:
        """Free requests as ``finish`` does; return only those that are not free yet."""
        return self.finish(np.asarray(requests, np.int32))[1]

    def sequence_of(self, request: int) -> int:
        """Return the sequence number that a request was admitted with."""
        return int(self.tables.requests["sequence"][request])

    def cancel(self, request: int) -> bool:
        """End a live request early. Return True if its rows are free; else a NOTICE_RELEASED follows."""
        return bool(cancel(self._at, request))

    def broken_rules(self) -> list[str]:
        """Return the rules that the tables break: if any, the core has a fault.

        It is slow, as it looks at everything.
        """
        return broken_rules(self.tables)

    def lose_worker(self, worker: int) -> Notices:
        """Kill every request with work or state at a worker (location 1, ...)."""
        for task in np.flatnonzero(self.tables.tasks["in_use"] & (self.tables.tasks["worker"] == worker)).tolist():
            self._buffers.take_over(self.tables, task)
        notices = np.zeros((3 * self.limits.max_requests + 4 * len(self._notices), 2), np.int32)
        count = lose_worker(self._at, worker, notices)
        return Notices(notices[:count])

    def task_buffer(self, task: int) -> NDArray[np.int32]:
        """Return the task's index arrays, laid out as ``task_layout.py`` says."""
        return self._buffers.of(self.tables, task)
