"""Sessions in the core: state that a request leaves, whatever its end, is where the next one begins."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.core.program import (
    CARRY,
    FIXED,
    OP_CHAIN,
    OP_EXTERNAL,
    OP_KEEP,
    OP_LOOP,
    OP_NODE,
    OP_RESULT,
    OP_RESULT_LAST,
    OP_STATE,
    STEP,
)
from cellrt.core.session_state import sessions_at
from cellrt.core.settings import SchedulerSettings
from cellrt.core.tables import HOST, LOCATION_SHIFT, NUM_PERMANENT, ROW_MASK
from tests.core.author import CELLS, PRIME, Graph, stops
from tests.core.machine import Machine, Request
from tests.core.test_properties import CONFIGURATIONS
from tests.effort import examples

State = tuple[int, ...]


@dataclass
class Conversation:
    """A session under test: the requests it still has, and the state it must have."""

    session: int
    kind: str
    left: int
    state: State | None = None
    """None: it is new."""
    saved: State | None = None
    running: Request | None = None
    history: list[State] = field(default_factory=list)
    """State of the running request after each step."""


class KeepingAuthor:
    """Draws programs that keep state, and says what it is after each step; ``state`` is None in a new session."""

    def __init__(self, draw: random.Random, state: State | None) -> None:
        self.draw, self.state = draw, state
        self.program: list[int] = []
        self.externals: list[int] = []
        self.num_values = 0

    def inputs(self, count: int) -> list[int]:
        values = [self.draw.randrange(PRIME) for _ in range(count)]
        self.program += [OP_EXTERNAL, 0, count]
        self.externals += values
        self.num_values += count
        return values

    def begin(self, count: int) -> tuple[int, State]:
        """Takes so many states, each with or without a value to begin with; returns the first's id and the states."""
        starts = [self.start() for _ in range(count)]
        for start, _ in starts:
            self.program += [OP_STATE, 0, start]
        first, self.num_values = self.num_values, self.num_values + count
        return first, tuple(value for _, value in starts) if self.state is None else self.state

    def start(self) -> tuple[int, int]:
        """Zeros, a value of the request, one that somebody else reads too, or an output of a node or a loop."""
        kind = self.draw.choice(["zeros", "given", "shared", "node", "loop"])
        if kind == "zeros":
            return -1, 0
        if kind == "shared":
            return 0, self.externals[0]
        first = self.num_values
        (given,) = self.inputs(1)
        if kind == "node":
            self.program += [OP_NODE, 2, FIXED, first, FIXED, first]
            self.num_values += 1
            return first + 1, CELLS[2]([given, given])[0]
        if kind == "loop":
            self.program += [OP_LOOP, 0, 2, -1, FIXED, first, CARRY, first]
            self.num_values += 1
            return first + 1, CELLS[0]([given, CELLS[0]([given, given])[0]])[0]
        return first, given

    def result(self, value: int) -> None:
        self.program += [OP_RESULT, value, 1, 1]

    def chain(self) -> tuple[Graph, list[State]]:
        """A chain of cell 1 that keeps both carried states, with another cell that reads some of its steps."""
        length = self.draw.randint(1, 9)
        given = self.inputs(length)
        before, state = self.begin(2)
        self.program += [OP_CHAIN, 1, length, STEP, 0, 1, CARRY, before, CARRY, before + 1]
        first = before + 2
        self.program += [OP_KEEP, before, first, 3, length, OP_KEEP, before + 1, first + 1, 3, length]
        steps: list[State] = []
        for value in given:
            steps.append(tuple(CELLS[1]([value, *state])))
            state = steps[-1][:2]
        results = []
        readers = self.draw.sample(range(length), self.draw.randint(0, length))
        for step in readers:
            self.program += [OP_NODE, 2, FIXED, first + 3 * step, FIXED, first + 3 * step + 2]
            results.append(CELLS[2]([steps[step][0], steps[step][2]])[0])
        for k in range(len(readers)):
            self.result(first + 3 * length + k)
        self.result(first + 3 * (length - 1))
        return Graph(self.program, self.externals, [*results, steps[-1][0]]), [step[:2] for step in steps]

    def loop(self) -> tuple[Graph, list[State]]:
        """A loop of cell 1 that keeps its first state; the other begins anew each time."""
        limit, stop = self.draw.randint(1, 9), self.draw.choice([-1, 2])
        given, anew = self.inputs(2)
        before, (state,) = self.begin(1)
        self.program += [OP_LOOP, 1, limit, stop, FIXED, 0, CARRY, before, CARRY, 1]
        self.program += [OP_KEEP, before, before + 1, 3, 1, OP_RESULT_LAST, before + 2]
        steps = [CELLS[1]([given, state, anew])]
        while len(steps) < limit and not (stop >= 0 and stops(steps[-1][stop])):
            steps.append(CELLS[1]([given, *steps[-1][:2]]))
        return Graph(self.program, self.externals, [steps[-1][1]]), [(step[0],) for step in steps]

    def two_chains(self) -> tuple[Graph, list[State]]:
        """Two stacked chains, of which each keeps its state: both change together or not at all."""
        length = self.draw.randint(1, 6)
        given = self.inputs(length)
        before, (lower, upper) = self.begin(2)
        first, second = before + 2, before + 2 + length
        self.program += [OP_CHAIN, 0, length, STEP, 0, 1, CARRY, before]
        self.program += [OP_CHAIN, 0, length, STEP, first, 1, CARRY, before + 1]
        self.program += [OP_KEEP, before, first, 1, length, OP_KEEP, before + 1, second, 1, length]
        self.result(second + length - 1)
        for value in given:
            lower = CELLS[0]([value, lower])[0]
            upper = CELLS[0]([lower, upper])[0]
        return Graph(self.program, self.externals, [upper]), [(lower, upper)]

    def fed_loop(self) -> tuple[Graph, list[State]]:
        """A node that keeps its output and reads what it kept, and a loop that reads the same at every step."""
        (given,) = self.inputs(1)
        before, (state,) = self.begin(1)
        self.program += [OP_NODE, 2, FIXED, 0, FIXED, before, OP_KEEP, before, before + 1, 0, 0]
        self.program += [OP_LOOP, 0, 3, -1, FIXED, before, CARRY, 0, OP_RESULT_LAST, before + 2]
        looped = given
        for _ in range(3):
            looped = CELLS[0]([state, looped])[0]
        return Graph(self.program, self.externals, [looped]), [(CELLS[2]([given, state])[0],)]


KINDS = {"chain": 2, "loop": 1, "two_chains": 2, "fed_loop": 1}


class Play:
    """Plays conversations against a machine in a random order of events, checking the state after each request."""

    def __init__(self, machine: Machine, draw: random.Random, conversations: list[Conversation], chaos: bool) -> None:
        self.machine, self.draw, self.conversations, self.chaos = machine, draw, conversations, chaos

    def begin(self, conversation: Conversation) -> None:
        author = KeepingAuthor(self.draw, conversation.state)
        graph, history = getattr(author, conversation.kind)()
        request = Request(graph, poisoned=self.chaos and self.draw.random() < 0.3, good_tasks=self.draw.randint(0, 4))
        if self.machine.submit(request, session=conversation.session):
            for row, value in zip(self.machine.rows_to_bring, conversation.saved or ()):
                self.machine.rows[HOST, row] = value
            conversation.saved, conversation.running, conversation.history = None, request, history

    def rows_of(self, conversation: Conversation) -> State | None:
        """What the session's rows hold; None if it has none."""
        handles = self.machine.processor.session_rows(conversation.session, KINDS[conversation.kind])
        if not any(handle for handle, _ in handles):
            return None
        locations = [
            (handle >> LOCATION_SHIFT if handle >= NUM_PERMANENT else 1, handle & ROW_MASK) for handle, _ in handles
        ]
        return tuple(int(self.machine.rows[location, row]) for location, row in locations)

    def end(self, conversation: Conversation) -> None:
        """The running request is gone: the state must be that of its last completed step."""
        request = conversation.running
        assert request is not None
        if conversation.kind in ("two_chains", "fed_loop"):
            if request.ends == ["done"]:
                conversation.state = conversation.history[-1]
        elif request.steps_done:
            conversation.state = conversation.history[request.steps_done - 1]
        assert request.ends != ["done"] or conversation.state == conversation.history[-1]
        conversation.running = None
        conversation.left -= 1
        lost = [k + 1 for k, alive in enumerate(self.machine.alive) if not alive]
        handles = self.machine.processor.session_rows(conversation.session, KINDS[conversation.kind])
        if any(handle >> LOCATION_SHIFT in lost for handle, _ in handles):
            self.forget(conversation)
        assert self.rows_of(conversation) == conversation.state

    def forget(self, conversation: Conversation) -> None:
        self.machine.processor.drop_states(conversation.session)
        conversation.state = None

    def evict(self, conversation: Conversation) -> None:
        conversation.saved = self.rows_of(conversation)
        assert conversation.saved == conversation.state
        self.machine.processor.drop_states(conversation.session, bring=True)

    def step(self) -> None:
        machine, draw = self.machine, self.draw
        conversation, event = draw.choice(self.conversations), draw.random()
        worker = draw.randint(1, len(machine.streams))
        is_idle = conversation.running is None and conversation.left > 0
        if event < 0.3 and is_idle:
            self.begin(conversation)
        elif event < 0.33 and is_idle and conversation.saved is None and conversation.state is not None:
            self.evict(conversation)
        elif event < 0.6 and machine.alive[worker - 1] and len(machine.streams[worker - 1]) < 5:
            machine.schedule(worker)
        elif event < 0.95 and machine.streams[worker - 1]:
            machine.finish(worker)
        elif self.chaos and event > 0.97 and conversation.running is not None and not conversation.running.ends:
            machine.cancel(conversation.running)
        elif self.chaos and event > 0.965 and sum(machine.alive) > 1 and machine.alive[worker - 1]:
            machine.lose(worker)
            for lost in sessions_at(machine.processor.tables, worker):
                if self.conversations[lost].running is None:
                    self.forget(self.conversations[lost])
        for other in self.conversations:
            if other.running is not None and other.running not in machine.live.values():
                self.end(other)
        machine.check()

    def play(self) -> None:
        for _ in range(20_000):
            if all(conversation.left == 0 for conversation in self.conversations):
                break
            self.machine.processor.clock.set(self.machine.sequence * 1000)
            self.step()
        assert all(conversation.left == 0 for conversation in self.conversations), "work is left that nobody can do"
        for conversation in self.conversations:
            self.machine.processor.close_session(conversation.session)
        assert (self.machine.processor.tables.kinds["reserved_worker"] == 0).all()
        assert (self.machine.processor.tables.kinds["reserved_host"] == 0).all()
        self.machine.check()


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(15))
@given(
    draw=st.randoms(use_true_random=False),
    configuration=CONFIGURATIONS,
    workers=st.integers(1, 3),
    rows=st.sampled_from([48, 1024]),
    count=st.integers(1, 6),
    chaos=st.booleans(),
)
def test_a_session_goes_on_from_the_last_completed_step(draw, configuration, workers, rows, count, chaos):
    machine = Machine(workers, (4,) * len(CELLS), configuration, rows=rows)
    conversations = []
    for session in range(count):
        kind = draw.choice(sorted(KINDS))
        assert machine.processor.open_session() == session
        conversations.append(Conversation(session, kind, draw.randint(1, 4)))
    Play(machine, draw, conversations, chaos).play()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(8))
def test_without_a_session_state_begins_as_in_a_new_one_and_is_freed(kind, seed):
    machine = Machine(1, (4,) * len(CELLS), SchedulerSettings())
    graph, _ = getattr(KeepingAuthor(random.Random(seed), None), kind)()
    request = Request(graph)
    assert machine.submit(request)
    while machine.live:
        machine.schedule(1)
        machine.finish(1)
        machine.check()
    assert request.ends == ["done"]
    assert np.all(machine.processor.tables.kinds["reserved_worker"] == 0)
