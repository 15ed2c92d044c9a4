"""Sessions in the core: state that a request leaves, whatever its end, is where the next one begins."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cellrt.core.state.settings import SchedulerSettings
from cellrt.core.state.tables import HOST, LOCATION_SHIFT, NEVER, NUM_PERMANENT, ROW_MASK
from cellrt.core.state.views import sessions_at
from cellrt.core.templates.program import (
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
from tests.core.author import PRIME, Cell, Graph, stops
from tests.core.machine import Machine, Request
from tests.core.policies import ANY_POLICY
from tests.core.test_properties import CONFIGURATIONS
from tests.effort import examples

State = tuple[int, ...]

A, B, C = range(3)
"""Kinds of rows. Their handles are the same numbers, so a row that is taken for one of another kind shows."""
CELLS = (
    Cell(0, (-1, 0), (False, False), 1, (A, A), (A,)),
    Cell(1, (-1, 0, 1), (False,) * 3, 3, (A, A, B), (A, B, C)),
    Cell(2, (-1, -1), (False, False), 1, (A, A), (A,)),
    Cell(3, (-1, 0), (False, False), 1, (B, B), (B,)),
    Cell(4, (-1, -1), (False, False), 1, (B, B), (B,)),
    Cell(5, (-1, -1), (False, False), 1, (A, C), (B,)),
    Cell(6, (-1, 0), (False, False), 1, (A, B), (B,)),
    Cell(7, (-1, 0), (False, False), 1, (B, A), (A,)),
)
NODES, LOOPS = {A: 2, B: 4}, {A: 0, B: 3}
"""Cells that make a value, and a loop's steps, of values of their own kind."""


@dataclass
class Conversation:
    """A session under test: the requests it still has, and the state it must have."""

    session: int
    form: str
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
        self.kinds: list[int] = []
        """Of each external."""
        self.num_values = 0
        self.results: list[int] = []
        self.result_kinds: list[int] = []

    def inputs(self, count: int, kind: int = A) -> list[int]:
        values = [self.draw.randrange(PRIME) for _ in range(count)]
        self.program += [OP_EXTERNAL, kind, count]
        self.externals += values
        self.kinds += [kind] * count
        self.num_values += count
        return values

    def begin(self, *kinds: int) -> tuple[int, State]:
        """Takes states of these kinds, each with or without a value to begin with; returns the first's id and the
        states."""
        starts = [self.start(kind) for kind in kinds]
        for kind, (start, _) in zip(kinds, starts, strict=True):
            self.program += [OP_STATE, kind, start]
        first, self.num_values = self.num_values, self.num_values + len(kinds)
        return first, tuple(value for _, value in starts) if self.state is None else self.state

    def start(self, kind: int) -> tuple[int, int]:
        """Zeros, a value of the request, one that somebody else reads too, or an output of a node or a loop."""
        origin = self.draw.choice(["zeros", "given", "shared", "node", "loop"])
        if origin == "zeros":
            return -1, 0
        if origin == "shared" and self.kinds[0] == kind:
            return 0, self.externals[0]
        first = self.num_values
        (given,) = self.inputs(1, kind)
        if origin == "node":
            self.program += [OP_NODE, NODES[kind], FIXED, first, FIXED, first]
            self.num_values += 1
            return first + 1, CELLS[NODES[kind]]([given, given])[0]
        if origin == "loop":
            cell = LOOPS[kind]
            self.program += [OP_LOOP, cell, 2, -1, FIXED, first, CARRY, first]
            self.num_values += 1
            return first + 1, CELLS[cell]([given, CELLS[cell]([given, given])[0]])[0]
        return first, given

    def result(self, value: int, expected: int, kind: int, op: int = OP_RESULT) -> None:
        self.program += [op, value, *([1, 1] if op == OP_RESULT else [])]
        self.results.append(expected)
        self.result_kinds.append(kind)

    def whole_result(self, first: int, stride: int, expected: list[int], kind: int) -> None:
        """Gives an output of every step, so that its rows at the worker lie in a sequence."""
        self.program += [OP_RESULT, first, stride, len(expected)]
        self.results += expected
        self.result_kinds += [kind] * len(expected)

    def graph(self) -> Graph:
        return Graph(self.program, self.externals, self.results, self.kinds, self.result_kinds)

    def chain(self) -> tuple[Graph, list[State]]:
        """A chain of cell 1 that keeps both carried states, with another cell that reads some of its steps."""
        length = self.draw.randint(1, 9)
        given = self.inputs(length)
        before, state = self.begin(A, B)
        self.program += [OP_CHAIN, 1, length, STEP, 0, 1, CARRY, before, CARRY, before + 1]
        first = before + 2
        self.program += [OP_KEEP, before, first, 3, length, OP_KEEP, before + 1, first + 1, 3, length]
        steps: list[State] = []
        for value in given:
            steps.append(tuple(CELLS[1]([value, *state])))
            state = steps[-1][:2]
        readers = self.draw.sample(range(length), self.draw.randint(0, length))
        for step in readers:
            self.program += [OP_NODE, 5, FIXED, first + 3 * step, FIXED, first + 3 * step + 2]
        for k, step in enumerate(readers):
            self.result(first + 3 * length + k, CELLS[5]([steps[step][0], steps[step][2]])[0], B)
        for output in self.draw.sample(range(3), self.draw.randint(0, 3)):
            self.whole_result(first + output, 3, [step[output] for step in steps], output)
        if not self.results:
            self.result(first + 3 * (length - 1), steps[-1][0], A)
        return self.graph(), [step[:2] for step in steps]

    def fed_chain(self) -> tuple[Graph, list[State]]:
        """A chain of another width in front, which keeps nothing, and whose steps the one that keeps reads."""
        length = self.draw.randint(1, 9)
        given = self.inputs(length)
        (begin,) = self.inputs(1, B)
        before, (state,) = self.begin(A)
        front, first = before + 1, before + 1 + length
        self.program += [OP_CHAIN, 6, length, STEP, 0, 1, CARRY, length]
        self.program += [OP_CHAIN, 7, length, STEP, front, 1, CARRY, before, OP_KEEP, before, first, 1, length]
        steps: list[State] = []
        fronts: list[int] = []
        for value in given:
            begin = CELLS[6]([value, begin])[0]
            fronts.append(begin)
            state = CELLS[7]([begin, state])[0]
            steps.append((state,))
        self.whole_result(first, 1, [step[0] for step in steps], A)
        if self.draw.random() < 0.5:
            self.whole_result(front, 1, fronts, B)
        return self.graph(), steps

    def loop(self) -> tuple[Graph, list[State]]:
        """A loop of cell 1 that keeps its first state; the other begins anew each time."""
        limit, stop = self.draw.randint(1, 9), self.draw.choice([-1, 2])
        (given,) = self.inputs(1)
        (anew,) = self.inputs(1, B)
        before, (state,) = self.begin(A)
        self.program += [OP_LOOP, 1, limit, stop, FIXED, 0, CARRY, before, CARRY, 1]
        self.program += [OP_KEEP, before, before + 1, 3, 1]
        steps = [CELLS[1]([given, state, anew])]
        while len(steps) < limit and not (stop >= 0 and stops(steps[-1][stop])):
            steps.append(CELLS[1]([given, *steps[-1][:2]]))
        self.result(before + 2, steps[-1][1], B, OP_RESULT_LAST)
        if self.draw.random() < 0.5:
            self.program += [OP_NODE, 5, FIXED, before + 1, FIXED, before + 3]
            self.result(before + 4, CELLS[5]([steps[-1][0], steps[-1][2]])[0], B)
        return self.graph(), [(step[0],) for step in steps]

    def two_chains(self) -> tuple[Graph, list[State]]:
        """Two stacked chains, of which each keeps its state: both change together or not at all."""
        length = self.draw.randint(1, 6)
        given = self.inputs(length)
        before, (lower, upper) = self.begin(A, B)
        first, second = before + 2, before + 2 + length
        self.program += [OP_CHAIN, 0, length, STEP, 0, 1, CARRY, before]
        self.program += [OP_CHAIN, 6, length, STEP, first, 1, CARRY, before + 1]
        self.program += [OP_KEEP, before, first, 1, length, OP_KEEP, before + 1, second, 1, length]
        uppers = []
        for value in given:
            lower = CELLS[0]([value, lower])[0]
            upper = CELLS[6]([lower, upper])[0]
            uppers.append(upper)
        if self.draw.random() < 0.5:
            self.whole_result(second, 1, uppers, B)
        else:
            self.result(second + length - 1, upper, B)
        return self.graph(), [(lower, upper)]

    def fed_loop(self) -> tuple[Graph, list[State]]:
        """A node that keeps its output and reads what it kept, and a loop that reads the same at every step."""
        (given,) = self.inputs(1)
        before, (state,) = self.begin(A)
        self.program += [OP_NODE, 2, FIXED, 0, FIXED, before, OP_KEEP, before, before + 1, 0, 0]
        self.program += [OP_LOOP, 0, 3, -1, FIXED, before, CARRY, 0]
        looped = given
        for _ in range(3):
            looped = CELLS[0]([state, looped])[0]
        self.result(before + 2, looped, A, OP_RESULT_LAST)
        return self.graph(), [(CELLS[2]([given, state])[0],)]


FORMS = {"chain": (A, B), "fed_chain": (A,), "loop": (A,), "two_chains": (A, B), "fed_loop": (A,)}
"""The kinds of the states that each form of a program keeps."""


class Play:
    """Plays conversations against a machine in a random order of events, checking the state after each request."""

    def __init__(self, machine: Machine, draw: random.Random, conversations: list[Conversation], chaos: bool) -> None:
        self.machine, self.draw, self.conversations, self.chaos = machine, draw, conversations, chaos

    def begin(self, conversation: Conversation) -> None:
        author = KeepingAuthor(self.draw, conversation.state)
        graph, history = getattr(author, conversation.form)()
        request = Request(graph, poisoned=self.chaos and self.draw.random() < 0.3, good_tasks=self.draw.randint(0, 4))
        times_ns = [self.draw.choice([NEVER, self.draw.randrange(1 << 20)]) for _ in range(2)]
        how = {"priority": self.draw.choice([0, 0, 3]), "deadline_ns": times_ns[0], "schedule_by_ns": times_ns[1]}
        if self.machine.submit(request, session=conversation.session, **how):
            kinds = FORMS[conversation.form]
            for kind, row, value in zip(kinds, self.machine.rows_to_bring, conversation.saved or ()):
                self.machine.rows[kind, HOST, row] = value
            conversation.saved, conversation.running, conversation.history = None, request, history

    def rows_of(self, conversation: Conversation) -> State | None:
        """What the session's rows hold; None if it has none."""
        handles = self.machine.processor.session_rows(conversation.session, len(FORMS[conversation.form]))
        if not any(handle for handle, _ in handles):
            return None
        assert all(kind == of for (handle, kind), of in zip(handles, FORMS[conversation.form]) if handle)
        locations = [
            (kind, handle >> LOCATION_SHIFT if handle >= NUM_PERMANENT else 1, handle & ROW_MASK)
            for (handle, _), kind in zip(handles, FORMS[conversation.form])
        ]
        return tuple(int(self.machine.rows[at]) for at in locations)

    def end(self, conversation: Conversation) -> None:
        """The running request is gone: the state must be that of its last completed step."""
        request = conversation.running
        assert request is not None
        if conversation.form in ("two_chains", "fed_loop"):
            if request.ends == ["done"]:
                conversation.state = conversation.history[-1]
        elif steps := request.steps_done[7 if conversation.form == "fed_chain" else 1]:
            conversation.state = conversation.history[steps - 1]
        assert request.ends != ["done"] or conversation.state == conversation.history[-1]
        conversation.running = None
        conversation.left -= 1
        lost = [k + 1 for k, alive in enumerate(self.machine.alive) if not alive]
        handles = self.machine.processor.session_rows(conversation.session, len(FORMS[conversation.form]))
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
    policy=ANY_POLICY,
)
def test_a_session_goes_on_from_the_last_completed_step(draw, configuration, workers, rows, count, chaos, policy):
    machine = Machine(workers, (4,) * len(CELLS), configuration, rows, CELLS, policy=policy)
    conversations = []
    for session in range(count):
        form = draw.choice(sorted(FORMS))
        assert machine.processor.open_session() == session
        conversations.append(Conversation(session, form, draw.randint(1, 4)))
    Play(machine, draw, conversations, chaos).play()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seed", range(8))
def test_without_a_session_state_begins_as_in_a_new_one_and_is_freed(form, seed):
    machine = Machine(1, (4,) * len(CELLS), SchedulerSettings(), cells=CELLS)
    graph, _ = getattr(KeepingAuthor(random.Random(seed), None), form)()
    request = Request(graph)
    assert machine.submit(request)
    while machine.live:
        machine.schedule(1)
        machine.finish(1)
        machine.check()
    assert request.ends == ["done"]
    assert np.all(machine.processor.tables.kinds["reserved_worker"] == 0)
