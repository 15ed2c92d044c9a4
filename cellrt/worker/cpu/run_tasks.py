"""Run tasks one after the other, and take the turns between them, without Python: no interpreter lock, no objects.

``run_tasks`` sleeps while it finds nothing to do (``native/futex.py``). No news is missed: other threads leave their
news before they check whether it sleeps, and it says that it sleeps before it checks for news. It returns for anything
that needs Python, and is called again after it:

- a cell without a compiled form, or a task that the form refused;
- clients that must be notified of answers;
- requests that failed, or have results to stream;
- news of clients that does not come by the door (``core/requests/join_leave.py``);
- a reason in ``BY_HAND``;
- tables that changed.
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

# The values that ``run_tasks`` returns.
AGAIN = 0
"""Python must only call it again, as the tables may lie elsewhere."""
IN_PYTHON = 1
"""The task that was begun last must be run in Python."""
TURN_HELD = 2
"""A turn must be taken in Python; the thread has it already."""
TURN_WANTED = 3
"""A turn must be taken in Python, unless another thread has it."""
ANSWERS_HELD = 4
"""Python must notify clients of answers, and do nothing else; the thread has the turn."""
ENDED = 5
"""The thread is to end, and all that was launched is done."""

GO_ON, HAS_TURN = -1, -2
"""Results of inner functions. GO_ON: check again for a task. HAS_TURN: the thread has the turn."""

TELL_AFTER_NS = 1_000_000
"""The time after which Python notifies clients that need not be notified at once."""
SHORT_NS = 50_000
"""The longest task whose elapsed time counts as its time: reading a thread's clock costs as much as a small task."""
MOST_WAITING = 4
"""The most times that a busy machine lengthens a task; if it takes longer, the cell itself waits for something."""


class Launched(Row):
    """A task of a worker, from its launch until another task takes its place in the ring."""

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
    """A cell type's compiled form, with the arguments of ``run_task`` or ``run_span_task``."""

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
    """A worker's settings for turns, and its state between them."""

    worker: i8  # its location
    line: i8  # where its words are
    num_workers: i8
    queue_depth: i8
    uses_thread_clock: i8  # 1: the thread's own time is what a task took
    turn_every_ns: i8  # tasks that were given together and take less are run without a turn between them
    num_seen: i8  # finished tasks, when this thread took a turn last
    num_turns: i8  # ``NUM_TURNS``, when the tables' addresses were read
    num_places: i8  # in the ring of each worker
    away_until_ns: i8  # until then no client wakes it, as another worker does its work; or 0
    tell_at_ns: i8  # when clients that were answered must be told in Python; or 0
    may_spin: i8  # 1: there is another processor, which may bring news while the thread polls
    spins_left: i8  # how many more times it may poll in vain


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
    """Run the tasks that were launched, and those that turns in between launch; return one of the values above.

    Args:
        at: the addresses of the scheduler's tables.
        words, turns: the shared words of all workers, and this worker's settings.
        launched: the rings of all workers.
        cells: the compiled forms by cell type.
        scratch: memory for a task.
        task_ids, notices: memory for the tasks and the notices of a turn.
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
    """Take the turn if there is anything to do, or sleep, as there is no task; return HAS_TURN, GO_ON or a result."""
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
    store(words, line + REST, rest)  # before the check for news: a thread with news checks this word after it
    is_news = rest == ASLEEP and (_is_news(t, words) or limit_ns == 0)
    if (is_news or not is_seen) and _take_turn(words):  # else its holder checks for news
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
    """Return whether a turn would find news."""
    return load(words, NEWS) != 0 or has_news(t) or load(words, CALLED) != load(words, HEARD)


@compiled
def _comes_soon(t: Tables, words: Rows[int], settings: Turns) -> bool:
    """Poll for a task or for news for a while; return whether there is any."""
    line, end_ns = settings.line, now_ns() + SPIN_NS
    while now_ns() < end_ns:
        if words[line + BEGUN] < load(words, line + LAUNCHED) or _is_news(t, words):
            return True
        relax()
    return False


@compiled
def _until_told(settings: Turns) -> int:
    """Return for how many more ns answered clients may wait until Python notifies them; 0: no longer."""
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
    """Return the index at which the words of a worker begin."""
    return settings.line + (location - settings.worker) * LINE


@compiled
def _place(settings: Turns, location: int, number: int) -> int:
    """Return the index of a worker's task in ``launched``, given its number since the start."""
    return (location - 1) * settings.num_places + number % settings.num_places


@compiled
def _is_turn_due(words: Rows[int], settings: Turns, launched: Rows[Launched]) -> bool:
    """Return whether a turn should follow the finished tasks before the next task runs."""
    line = settings.line
    taken_in, finished = load(words, line + TAKEN_IN), words[line + FINISHED]
    if taken_in == finished or settings.num_seen == finished:
        return False
    first = launched[_place(settings, settings.worker, taken_in)]
    last = launched[_place(settings, settings.worker, finished - 1)]
    return last.goes_on == 0 and last.end_ns - first.start_ns >= settings.turn_every_ns


@compiled
def _take_turn(words: Rows[int]) -> bool:
    """Take the turn, or leave news for the thread that has it; return whether it was taken."""
    if replace(words, TURN, 0, 1):
        return True
    store(words, NEWS, 1)
    return replace(words, TURN, 0, 1)


@compiled
def _run(task: Launched, cell: RunnableCell, settings: Turns, scratch: Rows[int]) -> bool:
    """Run a task with its cell's compiled form; return False if there is none, or it refused the task."""
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
    """Run a turn: complete the worker's finished tasks, let requests leave and join, and launch the next tasks.

    Return TURN_HELD if Python must do more, ANSWERS_HELD if Python must only notify clients, else GO_ON. A turn in
    Python handles all that is not handled here.
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
    for location in range(1, settings.num_workers + 1):  # an idle worker may get a share of the ready nodes
        if not _launch_more(t, words, settings, location, launched, task_ids, time_ns):
            return TURN_HELD
        is_idle = is_idle and _num_outstanding(words, settings, location) == 0
    if is_idle and by_hand & WHEN_IDLE:
        return TURN_HELD
    return ANSWERS_HELD if must_tell(t, time_ns, TELL_AFTER_NS) else GO_ON


@compiled
def _num_outstanding(words: Rows[int], settings: Turns, location: int) -> int:
    """Return the number of a worker's launched tasks that no turn has completed yet."""
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
    """Launch a worker's next tasks; return False if Python must launch the rest."""
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
    """Write a task to the ring; its buffer belongs to the worker until a turn completes the task."""
    launched.task, launched.type_id = task_id, t.tasks[task_id].cell_type
    launched.buffer_ints = t.settings[0].buffer_ints
    launched.buffer_at = start_of(t.ints) + 4 * int(task_id) * launched.buffer_ints
