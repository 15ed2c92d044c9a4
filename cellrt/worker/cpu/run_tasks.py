"""Runs tasks one after the other, and takes the turns between them, without Python: no interpreter lock, no objects.

Where it finds nothing to do it sleeps until there is (``native/futex.py``): others leave their news before they look
who sleeps, it says that it sleeps before it looks for news. It comes back for what needs Python: a cell without a
compiled form, or a task that its form refused; clients who must be told of answers; requests that failed, or have
results to stream; news of clients that do not come by the door (``core/requests/door.py``); whatever ``BY_HAND`` says;
and tables that changed. Then it is called again.
"""

from __future__ import annotations

from cellrt.core.state import task_layout as layout
from cellrt.core.state.pointers import open_tables
from cellrt.core.state.tables import HOST, Tables
from cellrt.core.turn import form_tasks, has_news, has_untold, is_late, let_in, must_tell, take_in
from cellrt.definition.task_memory import DONE
from cellrt.native.atomics import exchange, load, replace, store
from cellrt.native.clocks import now_ns, thread_ns
from cellrt.native.futex import NEVER, SPIN_NS, SPINS, relax, sleep, wake
from cellrt.native.jit import compiled, entry
from cellrt.native.memory import ints_at, start_of, words_at
from cellrt.native.row_types import Matrix, Row, Rows, dtype_of, i8
from cellrt.worker.cpu.run_span_task import run_span_task
from cellrt.worker.cpu.run_task import run_task
from cellrt.worker.turn_words import (
    ALWAYS,
    ASLEEP,
    AWAKE,
    AWAY,
    BEGUN,
    BY_HAND,
    CALLED,
    COMPLETED,
    ENDS,
    FINISHED,
    HEARD,
    LAUNCHED,
    LINE,
    NEWS,
    NUM_NOTICES,
    NUM_TURNS,
    REST,
    TAKEN_IN,
    TURN,
    WHEN_IDLE,
)

# What ``run_tasks`` answers.
AGAIN = 0
"""Nothing is to be done in Python but to call it again, as the tables may lie elsewhere."""
IN_PYTHON = 1
"""The task that was begun last must be run in Python."""
TURN_HELD = 2
"""A turn must be taken in Python; the thread has it already."""
TURN_WANTED = 3
"""A turn must be taken in Python, if nobody has it."""
ANSWERS_HELD = 4
"""Clients must be told of answers in Python, and of nothing else; the thread has the turn."""
ENDED = 5
"""The thread is to end, and all that was launched is done."""

GO_ON, HAS_TURN = -1, -2
"""Of what goes on without Python: the next look; a turn."""

TELL_AFTER_NS = 1_000_000
"""A client that was answered and need not be told at once is told then."""
SHORT_NS = 50_000
"""Of a task that took no longer, passed time counts: the clock of a thread costs as much as a small task."""
MOST_WAITING = 4
"""A busy machine makes a task take at most so many times its own time; beyond, it is the cell that waits."""


class Launched(Row):
    """A task of a worker, from its launch on until another gets its place."""

    task: i8
    type_id: i8
    buffer_at: i8
    buffer_ints: i8
    start_ns: i8
    end_ns: i8
    busy_ns: i8
    goes_on: i8  # 1: the next task is short, and runs before the turn
    has_failures: i8  # 1: Python knows what some of its rows failed of


class RunnableCell(Row):
    """A cell type's compiled form, as ``run_task`` or ``run_span_task`` take it."""

    is_there: i8
    num_inputs: i8
    ports_at: i8
    num_ports: i8
    port_words: i8  # of each
    function: i8
    constants: i8
    words_at: i8  # of a cell with spans or pages; else 0
    num_words: i8
    least_rows: i8
    last_ns: i8  # what its last task took


class Turns(Row):
    """How a worker takes turns."""

    worker: i8  # its location
    line: i8  # where its words are
    num_workers: i8
    queue_depth: i8
    uses_thread_clock: i8  # 1: the thread's own time is what a task took
    turn_every_ns: i8  # tasks that were given together and take less are run without a turn between them
    num_seen: i8  # finished tasks, when this thread took a turn last
    num_turns: i8  # ``NUM_TURNS``, when the tables' addresses were read
    num_places: i8  # in the ring of each worker
    away_until_ns: i8  # how long no client wakes it, as another does its work; or 0
    tell_at_ns: i8  # when clients that were answered must be told in Python; or 0
    may_spin: i8  # 1: another processor may do the work that the thread looks for
    spins_left: i8  # how many times it may look for nothing


LAUNCHED_TASK, RUNNABLE_CELL, TURNS = dtype_of(Launched), dtype_of(RunnableCell), dtype_of(Turns)


@entry
def run_tasks(
    at: Rows[int],
    words: Rows[int],
    turns: Rows[Turns],
    launched: Rows[Launched],
    cells: Rows[RunnableCell],
    scratch: Rows[int],
    task_ids: Rows[int],
    notices: Matrix,
) -> int:
    """Runs what was launched, and what the turns in between launch; returns as the words above say.

    ``at``: the scheduler's tables. ``launched``: the rings of all workers. ``cells``: by type. ``task_ids``,
    ``notices``: memory that holds those of a turn.
    """
    t, settings = open_tables(at), turns[0]
    line, is_taken = settings.line, False
    while True:
        has_more = words[line + BEGUN] < load(words, line + LAUNCHED)
        if has_more and (is_taken or not _is_turn_due(words, settings, launched)):
            is_taken = False
            task = launched[_place(settings, settings.worker, words[line + BEGUN])]
            words[line + BEGUN] += 1
            if not _run(task, cells[task.type_id], settings, scratch):
                return IN_PYTHON
            store(words, line + FINISHED, words[line + BEGUN])
            continue
        if has_more:
            is_taken = not _take_turn(words)
            answer = GO_ON if is_taken else HAS_TURN
        else:
            answer = _take_turn_or_sleep(t, words, settings)
        if answer == HAS_TURN:
            settings.num_seen = words[line + FINISHED]
            answer = _turn(t, words, settings, launched, task_ids, notices)
            if answer == GO_ON:
                store(words, TURN, 0)
                if load(words, NEWS) != 0:
                    return TURN_WANTED
        if answer != GO_ON:
            return answer


@compiled
def _take_turn_or_sleep(t: Tables, words: Rows[int], settings: Turns) -> int:
    """Without a task: take the turn if there is anything to do in it, or sleep; return HAS_TURN, GO_ON or an answer."""
    line = settings.line
    if load(words, line + ENDS) != 0:
        return HAS_TURN if settings.num_seen != words[line + FINISHED] and _take_turn(words) else ENDED
    if settings.away_until_ns > 0:
        limit_ns = settings.away_until_ns - now_ns()
        if limit_ns <= 0:
            settings.away_until_ns = 0
            return TURN_WANTED
    else:
        limit_ns = _until_told(settings) if has_untold(t) else NEVER
    rest = AWAY if settings.away_until_ns > 0 else ASLEEP
    is_seen = settings.num_seen == words[line + FINISHED]
    if is_seen and rest == ASLEEP and limit_ns != 0 and settings.spins_left > 0:
        settings.spins_left = SPINS if _comes_soon(t, words, settings) else settings.spins_left - 1
    store(words, line + REST, rest)  # before the look for news, as who has some looks at this behind it
    is_news = rest == ASLEEP and (_is_news(t, words) or limit_ns == 0)
    if (is_news or not is_seen) and _take_turn(words):  # or its holder looks for news
        store(words, line + REST, AWAKE)
        return HAS_TURN
    is_told = words[line + BEGUN] < load(words, line + LAUNCHED) or load(words, line + ENDS) != 0
    if not is_told and (settings.away_until_ns > 0) == (rest == AWAY):
        begin_ns = now_ns()
        sleep(words, line + REST, rest, limit_ns)
        if settings.may_spin and now_ns() - begin_ns < 2 * SPIN_NS:
            settings.spins_left = SPINS
    store(words, line + REST, AWAKE)
    return GO_ON if load(words, NUM_TURNS) == settings.num_turns else AGAIN


@compiled
def _is_news(t: Tables, words: Rows[int]) -> bool:
    """Return whether there is anything that a turn should look at."""
    return load(words, NEWS) != 0 or has_news(t) or load(words, CALLED) != load(words, HEARD)


@compiled
def _comes_soon(t: Tables, words: Rows[int], settings: Turns) -> bool:
    """Look for a task, or for what a turn would find, for a while; return whether there is any."""
    line, end_ns = settings.line, now_ns() + SPIN_NS
    while now_ns() < end_ns:
        if words[line + BEGUN] < load(words, line + LAUNCHED) or _is_news(t, words):
            return True
        relax()
    return False


@compiled
def _until_told(settings: Turns) -> int:
    """Return for how many ns clients that were answered may wait for being told in Python; 0: they have waited."""
    time_ns = now_ns()
    if settings.tell_at_ns == 0:
        settings.tell_at_ns = time_ns + TELL_AFTER_NS
    left_ns = settings.tell_at_ns - time_ns
    if left_ns > 0:
        return left_ns
    settings.tell_at_ns = 0
    return 0


@compiled
def _line(settings: Turns, location: int) -> int:
    """Where the words of a worker begin."""
    return settings.line + (location - settings.worker) * LINE


@compiled
def _place(settings: Turns, location: int, number: int) -> int:
    """Where a worker's task is, by its number since the start."""
    return (location - 1) * settings.num_places + number % settings.num_places


@compiled
def _is_turn_due(words: Rows[int], settings: Turns, launched: Rows[Launched]) -> bool:
    """Whether a turn should follow what is finished, before the next task is run."""
    line = settings.line
    taken_in, finished = load(words, line + TAKEN_IN), words[line + FINISHED]
    if taken_in == finished or settings.num_seen == finished:
        return False
    first = launched[_place(settings, settings.worker, taken_in)]
    last = launched[_place(settings, settings.worker, finished - 1)]
    return last.goes_on == 0 and last.end_ns - first.start_ns >= settings.turn_every_ns


@compiled
def _take_turn(words: Rows[int]) -> bool:
    """Takes the turn unless another thread has it, who then looks for news when it has given it back."""
    if replace(words, TURN, 0, 1):
        return True
    store(words, NEWS, 1)
    return replace(words, TURN, 0, 1)


@compiled
def _run(task: Launched, cell: RunnableCell, settings: Turns, scratch: Rows[int]) -> bool:
    """Runs a task with its cell's compiled form; False if there is none, or it refused."""
    task.has_failures = 0
    task.goes_on = ints_at(task.buffer_at, 1, layout.HEADER)[0, layout.H_GOES_ON]
    if cell.is_there == 0:
        return False
    reads_clock = settings.uses_thread_clock != 0 and cell.last_ns > SHORT_NS
    start_busy_ns = thread_ns() if reads_clock else 0
    task.start_ns = now_ns()
    buffer = ints_at(task.buffer_at, 1, task.buffer_ints)[0]
    ports = words_at(cell.ports_at, cell.num_ports, cell.port_words)
    own, function, constants = settings.worker, cell.function, cell.constants
    if cell.words_at == 0:
        done = run_task(buffer, ports, cell.num_inputs, own, HOST, function, constants, scratch)
    else:
        more = words_at(cell.words_at, 1, cell.num_words)[0]
        what = own, HOST, function, constants, more, cell.least_rows
        done = run_span_task(buffer, ports, cell.num_inputs, *what, scratch)
    if done != DONE:
        return False
    task.end_ns = now_ns()
    passed_ns = task.end_ns - task.start_ns
    cell.last_ns, task.busy_ns = passed_ns, passed_ns
    if reads_clock:
        task.busy_ns = max(thread_ns() - start_busy_ns, passed_ns // MOST_WAITING)
    return True


@compiled
def _turn(
    t: Tables, words: Rows[int], settings: Turns, launched: Rows[Launched], task_ids: Rows[int], notices: Matrix
) -> int:
    """Take in what the worker finished, let requests leave and join, and launch what workers should run next, with the
    turn.

    Return TURN_HELD where more must be done, in Python, ANSWERS_HELD where somebody must be told, else GO_ON. Whoever
    comes to a turn in Python looks at all that is not taken in.
    """
    worker, line, time_ns = settings.worker, settings.line, now_ns()
    by_hand = load(words, BY_HAND)
    if load(words, NEWS) != 0 or by_hand & ALWAYS or load(words, NUM_TURNS) != settings.num_turns:
        return TURN_HELD
    if is_late(t, time_ns):
        return TURN_HELD
    while words[line + TAKEN_IN] < words[line + FINISHED]:
        task = launched[_place(settings, worker, words[line + TAKEN_IN])]
        if task.has_failures:
            return TURN_HELD
        words[line + NUM_NOTICES] = take_in(t, task.task, max(1, task.busy_ns), time_ns, notices)
        words[line + TAKEN_IN] += 1
        words[line + COMPLETED] += 1
        if words[line + NUM_NOTICES] > 0:
            return TURN_HELD
    store(words, HEARD, load(words, CALLED))
    if not let_in(t, time_ns):
        return TURN_HELD
    is_idle = True
    for location in range(1, settings.num_workers + 1):  # who has nothing to do may get some of what is ready now
        if not _launch_more(t, words, settings, location, launched, task_ids, time_ns):
            return TURN_HELD
        is_idle = is_idle and _num_outstanding(words, settings, location) == 0
    if is_idle and by_hand & WHEN_IDLE:
        return TURN_HELD
    return ANSWERS_HELD if must_tell(t, time_ns, TELL_AFTER_NS) else GO_ON


@compiled
def _num_outstanding(words: Rows[int], settings: Turns, location: int) -> int:
    """Tasks that a worker was given and that were not taken in."""
    line = _line(settings, location)
    return load(words, line + LAUNCHED) - load(words, line + TAKEN_IN)


@compiled
def _launch_more(
    t: Tables,
    words: Rows[int],
    settings: Turns,
    location: int,
    launched: Rows[Launched],
    task_ids: Rows[int],
    time_ns: int,
) -> bool:
    """Launch what a worker should run next; return False where Python must see to what is left."""
    line = _line(settings, location)
    while _num_outstanding(words, settings, location) < settings.queue_depth:
        num_idle = 0
        for other in range(1, settings.num_workers + 1):
            num_idle += 1 if _num_outstanding(words, settings, other) == 0 else 0
        if location != settings.worker and _num_outstanding(words, settings, location) > 0:
            return True  # it takes turns of its own
        count = form_tasks(t, location, num_idle, time_ns, task_ids)
        if count == 0:
            return t.settings[0].left_ns == 0
        for k in range(count):
            _launch(t, launched[_place(settings, location, words[line + LAUNCHED] + k)], task_ids[k])
        store(words, line + LAUNCHED, words[line + LAUNCHED] + count)
        if location != settings.worker and exchange(words, line + REST, AWAKE) != AWAKE:
            wake(words, line + REST)
    return True


@compiled
def _launch(t: Tables, launched: Launched, task_id: int) -> None:
    """Writes a task to the ring; its buffer belongs to the worker until the task is taken in."""
    launched.task, launched.type_id = task_id, t.tasks[task_id].cell_type
    launched.buffer_ints = t.settings[0].buffer_ints
    launched.buffer_at = start_of(t.ints) + 4 * int(task_id) * launched.buffer_ints
