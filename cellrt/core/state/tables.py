"""All state of the scheduler: one NumPy structured array per concept, and the words for their fields.

The rows refer to each other as follows (ids are row numbers in the tables; -1 is "none")::

    request --(first_subgraph, num_subgraphs)--> subgraph --(ready list)--> node
    subgraph --(record)--> links: the record of a chain or loop, which has no nodes (``record_layout.py``)
    node --(first_link)--> links: the values it reads (relative to first_value), then its readers (nodes relative to
        itself; a chain or loop as ``READS_AS_A_WHOLE`` and its subgraph relative to the node's)
    node --(first_value)--> its outputs, one value each
    value --(row)--> a *handle*: location and row of an arena
    request --(first_place)--> places: the handles of its results, then of its sequences
    task --(buffer)--> ints: the index arrays that a worker reads (layout in ``task_layout.py``)
    session --(slots)--> its state between requests: one handle for each state of its model (``session_state.py``), or
        the pages of one that grows
    request --(page_lists)--> links: the page lists of its growing states (``page_list.py``), whose pages are places

An arena holds all rows of one kind (one shape and dtype) at one location, so that any input of any node is one row
number, wherever it was made, and a gather is one ``index_select``. Location 0 is the host (request inputs and results),
locations 1, 2, ... are the workers. Rows below ``NUM_PERMANENT`` hold constants, the same everywhere; row 0 is zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np

from cellrt.core.state.region_layout import MAX_SEATS, NUM_SLOTS
from cellrt.core.state.settings import Limits
from cellrt.native.row_types import CACHE_LINE, Row, Rows, dtype_of, f4, f8, i2, i4, i8, new_table, u1, u2

HOST = 0
LOCATION_SHIFT = 26
ROW_MASK = (1 << LOCATION_SHIFT) - 1
MAX_WORKERS = 30
NUM_PERMANENT = 64
MIXED = -1
NUM_PRIORITIES = 4
"""The number of client priorities, 0 (lowest) to 3."""
NUM_SIZE_CLASSES = 16
MAX_READERS = 65_534
"""The most readers of one value, besides the chain that makes it."""
MAX_REFS = 65_535
"""The most inputs of a node, counting every row of a ragged one."""
NEVER = 1 << 62
MAX_TYPES = 256
ALL_TYPES = MAX_TYPES
"""The number in place of a cell type for the backlogs of all of them."""
MAX_STATES = 64  # rows that stay, of a session
BRING = -1
"""The row of a session's slot whose state comes with the next request."""
STARTS = -2
"""The row, or any below, of a state in a new session that begins with another value: number ``STARTS - row``."""
MAX_KINDS = 1 << 8  # a value names its kind by a byte
MAX_SUBMISSIONS = 1 << 12
"""The most submissions that wait to be admitted, or have unanswered requests that Python does not handle."""
MAX_REGIONS = 32
"""The most clients in other processes that hand in requests by regions of memory (``requests/region_entries.py``)."""
MAX_QUEUES = 1 << 10
"""The most queues of which compiled code counts the requests: the engine's and models'."""
MAX_TENSORS = 8
"""The most tensors of a submission."""
MANY_ARRIVALS = 64
"""The number of arrivals at one time after which the smoothed time between arrivals is next to nothing."""
MAX_COPIES = 1 << 17
"""The most copies of pages between two launches: all pages of a request that has every page of an arena, twice."""

READS_AS_A_WHOLE = 1 << 29
"""Marks a link, at or above it, to a chain or loop that reads the node before its first step, not to a node."""

# Node flags.
CHAIN_NEXT = 1
"""Node n + 1 reads the outputs of node n exactly as its carried state: both may share a run."""
CROSSING = 2
"""Another subgraph reads an output of this node."""

# The kinds of subgraphs: nodes; or a chain, or one of the cells of a loop, with a record.
GRAPH, CHAIN, LOOP = range(3)

# Value flags.
EXTERNAL = 1
PERMANENT = 2
BORROWED = 4
"""The value's row is that of a sequence, and is given back with it."""
STEPS = 8
"""An output of a loop: every step is a result, not only the last one."""

NO_ROW = -1
PENDING = -2
"""A streamed result at row r that is not complete is ``PENDING - r``."""

# The words of ``door``, each in a cache line of its own. How many numbers clients have put into ``submitted``, and how
# many turns have taken out. How many requests turns have put into ``answered``, and of how many Python has told
# clients; up to which of these a client must be told soon; 1 if all must be told, as a client waits for a place. How
# many requests are answered while tasks of them are in flight. When the first request becomes late, or 0. How many
# sequence numbers requests were given. How many of ``regions`` are or were in use.
SUBMITTED, TAKEN, ANSWERS, TOLD, URGENT, WATCHED, NUM_LEFT, LATE_AT, SEQUENCE, NUM_REGIONS = (
    k * CACHE_LINE // 8 for k in range(10)
)
NUM_DOOR_WORDS = 10 * CACHE_LINE // 8

MANY_UNTOLD = 256
"""The number of answers that clients are told of even if none asks: their places are needed."""

# Which steps of a result a client gets.
ALL_STEPS, ITS_STEPS, LAST_STEP = range(3)

# The answers of ``Processor.starvation``.
STARVED, STUCK = 1, 2

# Events of the log.
ADMITTED = 1
RELEASED = 2
LAUNCHED = 3
COMPLETED = 4
FAILED = 5
ENDED = 6


class CellType(Row):
    """A cell type, and the tasks of it that are running."""

    priority: i4  # of the cell type: among types that Algorithm 1 has equal the highest goes first
    max_batch: i4  # nodes of a task, at most
    min_batch: i4  # nodes of a task, if there are this many
    max_steps: i4  # longest run; 1 for a cell without carried state
    num_inputs: i4
    num_outputs: i4
    first_port: i4  # inputs, then outputs, in ``ports``
    ahead: i4  # how many tasks a loop of it may be ahead of the first whose stop is not known
    num_running: i4  # tasks that are not complete
    num_formed: i8  # tasks, since the start
    num_ragged: i4  # inputs
    carries: i4  # 1 if an input is carried: steps of a chain come one after the other
    per_row: i4  # ints of buffer a row of a task needs at most, ragged inputs apart
    max_rows: i4  # of a task; differs from max_batch where a node may have many
    has_spans: i4  # 1 if it is told which rows are of one node (ports with pages or a span)
    is_whole: i4  # 1 if all steps of a chain must be rows of one task
    large_batch: i4  # rows from which on more in a task gain little, 0 if unknown (``step_times.py``)
    starved_at: i4  # workers, a bit each, where no row of it could go on for want of pages
    grows: i4  # 1 if it appends rows to a state
    joined_at: i4  # workers, a bit each, where what is ready waits to join tasks in flight


class PortInfo(Row):
    """An input or output of a cell type."""

    kind: i4  # of its rows
    carry: i4  # of an input: the output that a chain carries to it, or -1
    ragged: i4  # 1 of an input of any number of rows a node
    page_size: i4  # rows of a page, of an input that is a growing state; else 0
    appends: i4  # 1 if each row of a task appends a row to it
    is_span: i4  # 1 of an input that the scheduler fills: which rows are of one node


class Request(Row):
    """A request from admission to release. The fields that every task reads come first, in one cache line."""

    sequence: i8  # order of arrival
    started_ns: i8  # when the first task of it was submitted, 0 before
    state: i4  # RequestState of ``moves.py``
    nodes_left: i4  # nodes, each chain and loop being one
    streamed: i4  # 1 if its results are told as they come
    priority: i4  # the client's
    first_place: i4  # the rows of its results, then of its sequences
    num_places: i4
    first_node: i4
    num_nodes: i4
    first_value: i4
    num_values: i4
    first_link: i4
    num_links: i4
    first_subgraph: i4
    num_subgraphs: i4
    lists: i4  # link index of what lies in its places: (kind, count) each
    num_lists: i4
    session: i4  # or -1
    states: i4  # link index of the states (``session_state.py``)
    num_states: i4
    needs: i4  # link index of the reserved rows, (worker, host) per kind, to the end of the block
    next_free: i4  # of the rows of the table that are free
    page_lists: i4  # link index of its page lists (``page_list.py``)
    num_page_lists: i4
    home: i4  # the worker where its pages are, 0 if none is at one
    pages_away: i4  # those at the host
    length: i4  # nodes of its graph, each step of a chain being one, and of a loop as many as its limit
    client: i4  # the client: 0 in this process, else a number of the engine's
    admitted_ns: i8  # when it was admitted
    deadline_ns: i8  # when it must be done; NEVER if it has no deadline
    schedule_by_ns: i8  # when its first task must be submitted; NEVER if there is no such time
    submission: i4  # 1 + the number of the submission that it came with; 0: Python admitted it (``join_leave.py``)
    number: i4  # among the requests of that submission


class Submission(Row):
    """Requests of one graph that a client hands in together.

    It is written by the client before its number is in ``submitted``, by turns afterwards. Each ends with results, or
    Python goes on with all of it (``join_leave.py``).
    """

    template_at: i8  # address of the words of their template
    lengths_at: i8  # of their lengths, ``[num_lengths]``
    sessions_at: i8  # of the session and the ticket of each, int64 ``[count, 2]``; 0: they have none
    answers_at: i8  # of what is copied out, ``[num_answers]`` rows of ``Answer``
    results_at: i8  # of the client's memory: of each answer the rows of all requests, one after the other
    word_at: i8  # of the client's word (``native/answer_word.py``); 0: Python tells it of each
    sequence: i8  # of the first request; the others follow it
    arrival_ns: i8
    deadline_ns: i8  # when they must be done, and have begun; or NEVER
    schedule_by_ns: i8
    order: f8  # those that wait are admitted by priority, then in ascending order of this, then by arrival
    num_lengths: i4
    num_answers: i4
    count: i4  # requests
    num_admitted: i4
    num_answered: i4
    priority: i4  # the client's
    client: i4  # as of a request
    is_there: i4  # 1 from its admission until all are answered, or Python has it
    plan: i8  # of one that came by a region: as of its ``RegionPlan``
    id: i8  # of the same: its client's number of it
    session: i8  # of the same: its client's number of its session; 0: it has none


class Answer(Row):
    """A named result of a request, as it is copied to the client."""

    positions_at: i8  # address of its places among the request's results, int32 ``[num_positions]``
    num_positions: i4
    kind: i4
    steps: i4  # ALL_STEPS; or of a loop ITS_STEPS, those that it took, or LAST_STEP of these
    row_bytes: i4


class Answered(Row):
    """A request whose results are in its client's memory."""

    submission: i4
    number: i4
    started_ns: i8  # when its first task was submitted
    ended_ns: i8
    arrival_ns: i8
    plan: i8  # as of its submission
    session: i8  # with which it went on; -1: none


class Region(Row):
    """Memory that a client in another process shares with the engine: see ``requests/region_entries.py``."""

    at: i8  # address
    plans_at: i8  # of ``[MAX_PLANS]`` rows of ``RegionPlan``
    taken: i8  # how many of the requests that the client handed in turns have taken out
    first: i4  # number of the submission of its first slot
    client: i4  # as of a request
    bell: i4  # descriptor of an eventfd that wakes the client
    is_open: i4  # 1: turns look for requests there
    lifted: i4  # 1 + the submission of the next request, if that is one and waits for room; else 0
    is_wanted: i4  # 1: its bell is rung at the end of what answers requests
    is_broken: i4  # 1: what was found there does not fit; Python ends the connection


class Seat(Row):
    """A session that a client of another process names by a number; the holder of the turn writes it."""

    id: i8
    ticket: i8  # as of its lease
    number: i8  # 0: there is none
    model: i8  # the number of its model


class RegionPlan(Row):
    """The template and answers of requests, which a client of another process names by a number."""

    number: i8  # 0: there is none
    model: i8  # the number of its model
    template_at: i8
    lengths_at: i8
    answers_at: i8
    tensors_at: i8  # int64 ``[num_tensors, 2]``: kind and bytes of each tensor
    num_tensors: i4
    num_lengths: i4
    num_answers: i4
    num_rows: i4  # nodes
    queue: i4  # the model's row of ``queues``


class Queue(Row):
    """The requests and rows of an engine or a model that have not ended: those taken and come, less those ended."""

    taken: i8  # by clients of this process and by Python, which write this
    rows_taken: i8
    come: i8  # admitted from regions
    rows_come: i8
    ended: i8
    rows_ended: i8
    most: i8  # that may be unfinished
    most_rows: i8


class Subgraph(Row):
    """A part of a request's graph: nodes, a chain, or one of the cells of a loop.

    The fields that tasks read come first.
    """

    request: i4
    cell_type: i4
    pinned: i4  # location of the worker it must run on, or 0
    waiting: i4  # edges from other subgraphs whose producer is not complete
    sent: i4  # of those, edges whose producer is submitted (early release)
    sent_to: i4  # the one worker they were submitted to, or MIXED
    ready_head: i4
    ready_tail: i4
    num_ready: i4
    in_flight: i4  # rows of tasks in flight
    nodes_left: i4  # nodes not yet submitted
    previous: i4
    next: i4
    record: i4  # link index of the chain's or loop's record (``record_layout.py``), or -1
    state: u1  # SubgraphState of ``moves.py``
    priority: u1  # the client's
    what: u1  # GRAPH, CHAIN or LOOP
    has_begun: u1  # 1 once a task of it was submitted
    is_loose: u1  # 1: its nodes read no node; they may run anywhere, and pin it nowhere (``partition.py``)
    unused: Annotated[Rows[int], np.uint8, 3]


class Node(Row):
    """One call of a cell."""

    subgraph: i4
    pending: i4  # edges from nodes of the same subgraph that are not submitted
    next_ready: i4  # of its subgraph's ready list, or -1
    first_value: i4  # of its outputs
    first_link: i4  # of its inputs
    num_consumers: i4  # links after the inputs: nodes that read an output of this one
    num_refs: u2  # links that are inputs (ragged counts included)
    bits: u2  # CHAIN_NEXT, CROSSING


class Value(Row):
    """An output of a node, a tensor of the request, a constant or a state."""

    row: i4  # its handle, or NO_ROW; PENDING, BRING and STARTS say what else it may be
    result: i4  # the place of the result that it is (of a loop's every step: of the first), or -1
    readers: u2  # reads that are to come
    kind: u1
    bits: u1  # EXTERNAL, PERMANENT, BORROWED, STEPS


class Task(Row):
    """A task in flight."""

    cell_type: i4
    worker: i4
    in_use: i4
    rows: i4
    # As planned; once the task is complete, those that ran (of rows that failed: no positions).
    steps: i4  # of the longest row
    positions: i4  # nodes, each step of a loop being one
    reads_late: i4  # some reads are counted at completion: rows at another location
    is_loop: i2
    goes_ahead: i2  # 1 if rows of it are of loops that go ahead
    is_sent: i4  # its rows were sent as they were written: see ``step_arrays.py``
    priority: i4  # the client priority whose turn it was
    priorities: i4  # client priorities of its rows, a bit each
    expected_ns: f4
    number: i8
    ends_ns: i8  # when it should be done, by what its worker was given before


class Counts(Row):
    """Counts of the complete tasks of a cell type, since it was added."""

    tasks: i8
    rows: i8
    positions: i8  # nodes, each step of a loop being one; none of rows that failed
    quickest_ns: f8  # a step of the quickest task whose rows all went well; 0 before the first
    certain_ns: f8  # the part of it that any other step takes, too (``step_times.py``)


class Slot(Row):
    """A state of a session between requests."""

    row: i4
    kind: i4
    # Of a growing state instead of a row:
    place: i4  # where its pages are listed
    capacity: i4  # places of that block; 0: it has none
    pages: i4
    length: i4  # rows
    page_size: i4


class Lease(Row):
    """A session that requests of the door may go on with (``join_leave.py``)."""

    ticket: i8  # of the session where one may begin, less than 0 where one has; 0: Python has the session
    is_wanted: i8  # 1: Python wants it back as soon as the request is over


class Arena(Row):
    """The free rows of one kind at one location."""

    first: i4  # its stack's first place in ``free_rows``
    capacity: i4
    num_free: i4
    num_fresh: i4  # of the free ones, those at the bottom of the stack that were never taken


class Kind(Row):
    """Rows of one shape and dtype.

    For pages, ``reserved_worker`` counts all that may be held at one worker and the host together (``pages.py``).
    """

    reserved_worker: i4
    reserved_host: i4
    worker_rows: i4
    host_rows: i4
    is_paged: i4
    row_bytes: i4
    host_at: i8  # address of the host's rows; 0: nothing is copied there without Python


class Lane(Row):
    """A queue: its first and last subgraph."""

    head: i4
    tail: i4


class Waiting(Row):
    """A subgraph with ready rows in a queue, as a policy is shown it (``policy.py``)."""

    score: f8  # what the policy writes: lower goes first
    sequence: i8  # order of the request's arrival
    admitted_ns: i8  # when the request was admitted
    # The earlier of when it must be done and have begun; once it has begun when it must be done, or without that
    # ``schedule_by_ns`` or now, whichever is later; NEVER without either.
    deadline_ns: i8
    length: i4  # nodes of the request
    left: i4  # nodes, or steps, of this subgraph that are not submitted
    ready: i4  # of those, what may go into a task now: rows
    has_begun: i4  # 1 once a task took a row of this subgraph
    client: i4  # the request's client: 0 in this process
    subgraph: i4


class Ready(Row):
    """A cell type that has work, as a policy is shown it."""

    first_score: f8  # lowest score of what waits at the client priority whose turn it is
    since_ns: i8  # since when something of it has been ready there, without a task that took of it
    step_ns: f8  # about how long a step of the rows that are ready takes; 0: unknown
    cell_type: i4
    priority: i4  # of the cell type
    ready: i4  # rows that may go into a task of this worker now
    max_batch: i4
    num_running: i4  # tasks of it that are not complete
    fills: i4  # 1 if so much is ready that more would hardly make the task better


class Asked(Row):
    """The question to a policy."""

    now_ns: i8
    count: i4  # rows of what is shown
    cell_type: i4  # of what waits; -1 where a type is to be chosen
    worker: i4
    client_priority: i4
    most: i4  # rows of a task at most
    unused: i4
    kept: Annotated[Rows[float], np.float64, 8]  # the policy's own, zeros at first


class Forming(Row):
    """The task that is being formed: the rows that were collected so far, and its limits. One row."""

    rows: i4
    spans: i4  # of a cell with spans: chains and loops
    ragged: i4  # ints of the buffer that their ragged inputs and pages need, beyond one row each
    nodes: i4  # rows that are nodes
    loops: i4  # rows of loops
    is_loop: i4  # 1 if they are of loops that run: then all are
    stop: i4  # the output that says stop, or -1
    priorities: i4  # client priorities of the rows, a bit each
    most_rows: i4
    most_spans: i4
    room: i4  # ints of the buffer for ragged inputs and pages
    new: i4  # steps of chains and loops that no worker has yet
    most_new: i4
    singles: i4  # rows that are single steps, which come first
    are_long: i4  # 1 while chains with several steps are collected
    may_begin: i4  # 0: no request takes its first pages now


class Event(Row):
    """A line of the log."""

    now_ns: i8
    sequence: i8
    task: i8
    what: i4
    detail: i4


class Settings(Row):
    """Settings, counters, and other state of the scheduler beside its tables. One row."""

    num_types: i4
    num_workers: i4
    max_tasks_to_submit: i4
    early_release: i4
    runs: i4
    by_first: i4  # of types that Algorithm 1 has equal, the one with the first of what waits goes first
    fair_every: i4
    split: i4
    gather: i4
    large_batches: i4
    steps_first: i4  # 1: single steps go into a task before what has several rows (``span_choice.py``)
    joins: i4  # 0: no request takes its first pages at a worker where others have some
    reserve_pages: i4  # 1: a request takes all its pages at once
    prompts_apart: i4  # 1: single steps and what has several rows are not in one task (``span_choice.py``)
    idle_workers: i4  # workers with nothing to do, the one being scheduled included
    types_ready: i4  # cell types with work that the worker being scheduled may take
    top_priority: i4  # highest client priority of that work
    buffer_ints: i4
    join_budget_ns: f4
    max_run_ns: f4
    min_run_ns: f4
    max_wait_ns: f8
    left_ns: i8  # what is ready was left to a worker that should be free so soon; 0: nothing was
    free_request: i4
    num_requests: i4  # rows of the table
    num_live: i4
    illegal_moves: i4
    num_events: i8
    num_tasks: i8
    num_failed: i8  # rows that failed, since the start
    num_shown: i8  # results of streamed requests that are complete, since the start
    now_ns: i8
    arrival_gap_ns: f8  # smoothed time between arrivals
    last_arrival_ns: i8
    num_copies: i4  # in ``copies``
    suspension: i4  # number of the setting in ``settings.SUSPENSIONS``
    page_ns: f4  # how long it takes to copy a page, as measured lately; 0: it is not known
    policy_errors: i4  # how often a policy's function raised, and the order of arrival was taken
    rank_at: i8  # address of the policy's ``rank``, 0: by arrival
    choose_at: i8  # of its ``choose``, 0: Algorithm 1
    next_home: i8  # the request, by its sequence, that gets pages at a worker before later ones do; or NEVER


TYPE = dtype_of(CellType)
PORT = dtype_of(PortInfo)
REQUEST = dtype_of(Request)
SUBGRAPH = dtype_of(Subgraph)
NODE = dtype_of(Node)
VALUE = dtype_of(Value)
TASK = dtype_of(Task)
COUNTS = dtype_of(Counts)
SLOT = dtype_of(Slot)
LEASE = dtype_of(Lease)
SUBMISSION = dtype_of(Submission)
ANSWER = dtype_of(Answer)
ANSWERED = dtype_of(Answered)
REGION, REGION_PLAN, QUEUE, SEAT = dtype_of(Region), dtype_of(RegionPlan), dtype_of(Queue), dtype_of(Seat)
ARENA = dtype_of(Arena)
KIND = dtype_of(Kind)
LANE = dtype_of(Lane)
WAITING = dtype_of(Waiting)
READY = dtype_of(Ready)
ASKED = dtype_of(Asked)
FORMING = dtype_of(Forming)
EVENT = dtype_of(Event)
SETTINGS = dtype_of(Settings)


class Tables(NamedTuple):
    """The whole state of a scheduler. Compiled functions take it as one argument."""

    settings: Rows[Settings]
    types: Rows[CellType]
    ports: Rows[PortInfo]
    requests: Rows[Request]
    subgraphs: Rows[Subgraph]
    nodes: Rows[Node]
    values: Rows[Value]
    links: Rows[int]
    places: Rows[int]  # handles of the rows of results and sequences
    tasks: Rows[Task]
    ints: Rows[int]  # task buffers, ``buffer_ints`` each
    blocks: Rows[int]  # free blocks of nodes, values, links, subgraphs and places (``buddy_allocator.py``)
    arenas: Rows[Arena]  # [location * MAX_KINDS + kind]
    free_rows: Rows[int]
    kinds: Rows[Kind]
    lanes: Rows[Lane]  # [backlog]
    ready: Rows[int]  # [backlog, worker location]: ready nodes pinned there; column 0: not pinned
    since_ns: Rows[int]  # [backlog]: since when it waits (``queue.py``); of ALL_TYPES: when it was served last
    step_ns: Rows[float]  # [cell type, size class]: measured time of one step, 0 if unknown
    row_ns: Rows[float]  # [cell type, size class]: the same of one row of a step
    counts: Rows[Counts]  # [cell type]
    num_tasks: Rows[int]  # [cell type, size class]: complete tasks by their rows
    busy_ns: Rows[int]  # [worker location]: time of its complete tasks
    events: Rows[Event]
    copies: Rows[int]  # (kind, handle from, handle to) of pages to be copied before the next launch, in order
    waiting: Rows[Waiting]  # what a policy puts in order now
    order: Rows[int]  # rows of ``waiting``
    choices: Rows[Ready]  # the cell types that a policy chooses among now
    asked: Rows[Asked]  # one row: what a policy is asked
    forming: Rows[Forming]  # one row: the task that is being formed
    slots: Rows[Slot]  # [session * MAX_STATES + state]; row 0 (zeros) while a request of the session has it
    leases: Rows[Lease]  # by session
    door: Rows[int]  # how far clients and turns are with the two rings (``join_leave.py``)
    submissions: Rows[Submission]
    submitted: Rows[int]  # a ring of their numbers, in the order in which clients handed them in
    tensors: Rows[int]  # [submission, 2 * k]: address and kind of tensor ``k``, of all its requests together
    answered: Rows[Answered]  # a ring
    regions: Rows[Region]
    seats: Rows[Seat]  # of region k the ``MAX_SEATS`` from ``k * MAX_SEATS`` on
    queues: Rows[Queue]
    brought: Rows[int]  # the host rows that a request is given when it is admitted; scratch
    holders: Rows[int]  # how many page tables name a page: of row r of an arena at its ``first`` + r - NUM_PERMANENT


class Table(NamedTuple):
    """The description of a table: the dtype of its rows, and how many there are.

    ``rows`` gives one number, or two of a matrix, whose length is always known. ``sized``: compiled code asks how many
    rows there are (see ``jit.RowsPointer``).
    """

    dtype: np.dtype[Any]
    rows: Callable[[Limits, int], int | tuple[int, int]]
    sized: bool = False


GRANULE = 8
"""The unit in which rows of nodes, values, links, subgraphs and places are allocated (``buddy_allocator.py``)."""
_INT = np.dtype(np.int32)


def num_granules(capacity: int) -> int:
    """Return the number of granules that hold this many rows."""
    return max(1, -(-capacity // GRANULE))


def num_flags(limits: Limits) -> int:
    """Return the number of flags of rows of loops that have stopped: two for each subgraph, and two of no subgraph."""
    return 2 + 2 * GRANULE * num_granules(limits.max_subgraphs)


TABLES: dict[str, Table] = {
    "settings": Table(SETTINGS, lambda limits, workers: 1),
    "types": Table(TYPE, lambda limits, workers: MAX_TYPES),
    "ports": Table(PORT, lambda limits, workers: 0),
    "requests": Table(REQUEST, lambda limits, workers: limits.max_requests),
    "subgraphs": Table(SUBGRAPH, lambda limits, workers: GRANULE * num_granules(limits.max_subgraphs)),
    "nodes": Table(NODE, lambda limits, workers: GRANULE * num_granules(limits.max_nodes)),
    "values": Table(VALUE, lambda limits, workers: GRANULE * num_granules(limits.max_values)),
    "links": Table(_INT, lambda limits, workers: GRANULE * num_granules(limits.max_links)),
    "places": Table(_INT, lambda limits, workers: GRANULE * num_granules(limits.max_places)),
    "tasks": Table(TASK, lambda limits, workers: limits.max_tasks, sized=True),
    "ints": Table(_INT, lambda limits, workers: 0),
    "blocks": Table(_INT, lambda limits, workers: 0),
    "arenas": Table(ARENA, lambda limits, workers: (workers + 1) * MAX_KINDS),
    "free_rows": Table(_INT, lambda limits, workers: 0),
    "kinds": Table(KIND, lambda limits, workers: MAX_KINDS),
    "lanes": Table(LANE, lambda limits, workers: MAX_TYPES * NUM_PRIORITIES),
    "ready": Table(_INT, lambda limits, workers: (MAX_TYPES * NUM_PRIORITIES, workers + 1)),
    "since_ns": Table(np.dtype(np.int64), lambda limits, workers: (MAX_TYPES + 1) * NUM_PRIORITIES),
    "step_ns": Table(np.dtype(np.float32), lambda limits, workers: (MAX_TYPES, NUM_SIZE_CLASSES)),
    "row_ns": Table(np.dtype(np.float32), lambda limits, workers: (MAX_TYPES, NUM_SIZE_CLASSES)),
    "counts": Table(COUNTS, lambda limits, workers: MAX_TYPES),
    "num_tasks": Table(np.dtype(np.int64), lambda limits, workers: (MAX_TYPES, NUM_SIZE_CLASSES)),
    "busy_ns": Table(np.dtype(np.int64), lambda limits, workers: workers + 1),
    "events": Table(EVENT, lambda limits, workers: limits.max_events, sized=True),
    "copies": Table(_INT, lambda limits, workers: 3 * MAX_COPIES),
    "waiting": Table(WAITING, lambda limits, workers: GRANULE * num_granules(limits.max_subgraphs)),
    "order": Table(_INT, lambda limits, workers: GRANULE * num_granules(limits.max_subgraphs)),
    "choices": Table(READY, lambda limits, workers: MAX_TYPES),
    "asked": Table(ASKED, lambda limits, workers: 1),
    "forming": Table(FORMING, lambda limits, workers: 1),
    "slots": Table(SLOT, lambda limits, workers: limits.max_sessions * MAX_STATES),
    "leases": Table(LEASE, lambda limits, workers: limits.max_sessions),
    "door": Table(np.dtype(np.int64), lambda limits, workers: NUM_DOOR_WORDS),
    "submissions": Table(SUBMISSION, lambda limits, workers: MAX_SUBMISSIONS + MAX_REGIONS * NUM_SLOTS),
    "submitted": Table(_INT, lambda limits, workers: MAX_SUBMISSIONS),
    "tensors": Table(
        np.dtype(np.int64), lambda limits, workers: (MAX_SUBMISSIONS + MAX_REGIONS * NUM_SLOTS, 2 * MAX_TENSORS)
    ),
    "answered": Table(ANSWERED, lambda limits, workers: limits.max_requests + MANY_UNTOLD, sized=True),
    "regions": Table(REGION, lambda limits, workers: MAX_REGIONS),
    "seats": Table(SEAT, lambda limits, workers: MAX_REGIONS * MAX_SEATS),
    "queues": Table(QUEUE, lambda limits, workers: MAX_QUEUES),
    "brought": Table(_INT, lambda limits, workers: limits.max_values + limits.max_places + MAX_STATES + 1),
    "holders": Table(_INT, lambda limits, workers: 0),
}
"""Every table of ``Tables``, in its order."""
MATRICES = ("ready", "step_ns", "row_ns", "num_tasks", "tensors")


def make_tables(limits: Limits, num_workers: int) -> Tables:
    """Return empty tables, without ``blocks``: no request, no cell type, no kind."""
    made: dict[str, Any] = {}
    for name, table in TABLES.items():
        rows = table.rows(limits, num_workers)
        is_plain = isinstance(rows, tuple) or not table.dtype.names
        made[name] = np.zeros(rows, table.dtype) if is_plain else new_table(rows, table.dtype)  # type: ignore[arg-type]
    made["requests"]["next_free"] = np.arange(1, limits.max_requests + 1)
    made["requests"]["next_free"][-1] = -1
    made["lanes"]["head"] = made["lanes"]["tail"] = -1
    made["since_ns"][:] = -NEVER
    return Tables(**made)
