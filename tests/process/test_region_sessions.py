"""Requests of sessions that come by shared memory: they go on from where those by messages left, and keep the order."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cellrt.core.state.region_layout import ENTRIES, ENTRY_BYTES, SESSION_SHIFT, WORD_BYTES
from cellrt.engine.session_limits import SessionLimits
from cellrt.errors import DeviceError, SessionError
from cellrt.graph.reference import run_one_by_one
from cellrt.process.client import Client, connect
from cellrt.process.host import EngineServer
from cellrt.process.remote_session import RemoteSession
from cellrt.worker.cpu.cpu_executor import Executor
from cellrt.worker.cpu.worker import CpuWorker
from tests.effort import examples
from tests.engine.helpers import WAIT_S, assert_same, error_of
from tests.process import models
from tests.process.helpers import serving, steps
from tests.process.test_regions import has_all_slots, models_source, num_handed_in, region_of
from tests.steps import HOLD, WIDTH
from tests.waiting import until

LENGTHS = 1, 2, 3
NOBODYS_NUMBER = 999


@pytest.fixture(scope="module", params=[None, 1], ids=["resident", "evicted"])
def server(request: pytest.FixtureRequest) -> Iterator[EngineServer]:
    """One keeps the state of a single session at a worker."""
    with serving(sessions=SessionLimits(max_resident=request.param)) as made:
        made.calls.register(models_source("kept"), {})
        yield made


@pytest.fixture
def client(server: EngineServer) -> Iterator[Client]:
    with connect(server.address) as made:
        know(made)
        yield made
        assert made.drain(WAIT_S)
        until(lambda: has_all_slots(region_of(made)), "all slots are free")
        until(lambda: server.engine.statistics()["unfinished"] == 0, "nothing is unfinished")
        server.engine.check()


def know(client: Client) -> None:
    """Send requests until those of all lengths come by the region."""

    def comes(length: int) -> bool:
        before = num_handed_in(client)
        client.submit("kept", steps(length)).result(WAIT_S)
        return num_handed_in(client) > before

    for length in LENGTHS:
        until(partial(comes, length), f"requests of {length} steps come by the region")


def begun(client: Client) -> RemoteSession:
    """A session whose first request has come by a message."""
    session = client.session("kept")
    session.submit(steps(1)).result(WAIT_S)
    return session


def after(*pieces: torch.Tensor) -> dict[str, torch.Tensor]:
    return run_one_by_one(models.kept, torch.cat(pieces))


def test_a_sessions_second_request_comes_by_the_region(client: Client) -> None:
    session, before = begun(client), num_handed_in(client)
    assert_same(session.submit(steps(2)).result(WAIT_S), after(steps(1), steps(2)))
    assert num_handed_in(client) == before + 1
    session.close()


def test_requests_that_are_not_waited_for_run_in_their_order(client: Client) -> None:
    session, pieces = begun(client), [steps(1 + k % 3, float(k)) for k in range(12)]
    futures = [session.submit(piece) for piece in pieces]
    for k, future in enumerate(futures):
        assert_same(future.result(WAIT_S), after(steps(1), *pieces[: k + 1]))
    session.close()


def test_a_reset_goes_before_what_is_submitted_after_it_and_behind_what_was_before(client: Client) -> None:
    session = begun(client)
    for _ in range(20):
        before = session.submit(steps(2))
        session.reset()
        first, second = session.submit(steps(1)), session.submit(steps(3))
        assert before.result(WAIT_S) is not None
        assert_same(first.result(WAIT_S), after(steps(1)))
        assert_same(second.result(WAIT_S), after(steps(1), steps(3)))
    session.close()


def test_the_state_that_is_exported_is_that_after_all_requests_before(client: Client) -> None:
    session, other = begun(client), client.session("kept")
    pieces = [steps(1)]
    for _ in range(10):
        pieces.append(steps(2))
        session.submit(pieces[-1])
        other.restore(session.export())
        assert_same(other.submit(steps(1)).result(WAIT_S), after(*pieces, steps(1)))
    session.close()
    other.close()


def test_a_session_that_was_left_takes_nothing_more(client: Client) -> None:
    session = begun(client)
    session.submit(steps(1)).result(WAIT_S)
    session.leave()
    assert isinstance(error_of(session.submit(steps(1))), SessionError)


def test_a_session_that_ended_at_the_engine_takes_nothing_more(client: Client, server: EngineServer) -> None:
    session = begun(client)
    session.submit(steps(1)).result(WAIT_S)
    record = next(record for record in server.engine._manager.sessions if record.key == session.id)
    server.engine._manager.end_session(record, SessionError("over"))
    until(lambda: record.error is not None, "a turn has ended it")
    assert isinstance(error_of(session.submit(steps(1))), SessionError)


def test_a_request_that_fails_or_is_cancelled_leaves_the_last_complete_state(client: Client) -> None:
    session = begun(client)
    for _ in range(5):
        session.reset()
        assert_same(session.submit(steps(1)).result(WAIT_S), after(steps(1)))
        late = session.submit(torch.cat([steps(1), torch.full((1, WIDTH), HOLD), steps(1)]))
        late.cancel()
        assert client._link._follows([session._number]), "it may be on its way back from the region"
        following = session.submit(steps(2))
        assert following.result(WAIT_S) is not None and late.cancelled()
    session.close()


def test_a_number_that_is_no_session_of_the_client_reaches_nobodys_state(client: Client, server: EngineServer) -> None:
    with connect(server.address) as other:
        theirs, ours = begun(other), begun(client)
        region = region_of(client)

        def forged(number: int) -> BaseException | None:
            """The error of a request in whose entry another number was written before it was handed in."""
            true, region.hand_in = region.hand_in, lambda: None  # type: ignore[method-assign]
            future = ours.submit(steps(1))
            at = ENTRIES * WORD_BYTES + region._slots[future.id] * ENTRY_BYTES + 3 * WORD_BYTES
            region._memory[at : at + WORD_BYTES] = (1 | number << SESSION_SHIFT).to_bytes(WORD_BYTES, "little")
            region.hand_in = true  # type: ignore[method-assign]
            region.hand_in()
            return error_of(future)

        assert isinstance(forged(NOBODYS_NUMBER), SessionError)
        assert_same(theirs.submit(steps(1)).result(WAIT_S), after(steps(1), steps(1)))
        assert_same(ours.submit(steps(2)).result(WAIT_S), after(steps(1), steps(2)))
        theirs.close()
        ours.close()


def test_a_client_that_comes_after_another_names_none_of_its_sessions(server: EngineServer) -> None:
    """It may get the region and the numbers of the one before, whose session stays open."""
    with connect(server.address) as first:
        know(first)
        kept = first.session("kept", id="stays")
        for _ in range(3):
            kept.submit(steps(1)).result(WAIT_S)
    with connect(server.address) as second:
        know(second)
        own = second.session("kept")
        for k in range(4):
            assert_same(own.submit(steps(1)).result(WAIT_S), after(*[steps(1)] * (k + 1)))
        again = second.session("kept", id="stays")
        assert_same(again.submit(steps(1)).result(WAIT_S), after(*[steps(1)] * 4))
        assert_same(again.submit(steps(1)).result(WAIT_S), after(*[steps(1)] * 5))
        again.close()
        own.close()


def test_a_worker_that_is_lost_costs_the_sessions_whose_state_it_had(monkeypatch: pytest.MonkeyPatch) -> None:
    execute, dies = Executor.execute, threading.Event()

    def die(self: Executor, type_id: int, buffer: NDArray[np.int32]) -> object:
        if not dies.is_set():
            return execute(self, type_id, buffer)
        dies.clear()
        raise SystemExit("the worker's own fault")

    monkeypatch.setattr(Executor, "execute", die)
    monkeypatch.setattr(CpuWorker, "is_replaceable", False)
    with serving(2) as server, connect(server.address) as client:
        server.calls.register(models_source("kept"), {})
        know(client)
        sessions = [begun(client) for _ in range(12)]
        before = num_handed_in(client)
        for session in sessions:
            session.submit(steps(1)).result(WAIT_S)
        assert num_handed_in(client) == before + len(sessions)
        dies.set()
        futures = [session.submit(steps(2)) for session in sessions]
        errors = [error_of(future) for future in futures]
        assert any(errors) and all(isinstance(error, DeviceError | SessionError | None) for error in errors)
        for session, future, error in zip(sessions, futures, errors):
            following = session.submit(steps(1))
            if error is None and (then := error_of(following)) is None:
                assert_same(future.result(), after(steps(1), steps(1), steps(2)))
                assert_same(following.result(), after(steps(1), steps(1), steps(2), steps(1)))
            else:
                assert isinstance(error or then, DeviceError | SessionError)
        assert client.drain(WAIT_S)
        until(lambda: server.engine.statistics()["unfinished"] == 0, "nothing is unfinished")
        server.engine.check()


def talk(client: Client, seed: int, wrong: list[object]) -> None:
    """Ask many sessions at random, and wait for some answers; a step halves the state and adds its input."""
    draw = random.Random(seed)
    sessions, states = [client.session("kept") for _ in range(40)], [0.0] * 40
    try:
        for _ in range(8):
            asked = []
            for _ in range(draw.randint(1, 80)):
                number, length, value = draw.randrange(40), draw.choice(LENGTHS), float(draw.randint(1, 9))
                for _ in range(length):
                    states[number] = states[number] / 2 + value
                asked.append((sessions[number].submit(steps(length, value)), states[number]))
                if draw.random() < 0.3:
                    asked[-1][0].result(WAIT_S)
            wrong += [its for its in asked if not torch.allclose(its[0].result(WAIT_S)["last"], torch.tensor(its[1]))]
        for session in sessions:
            session.close()
    except BaseException as error:
        wrong.append(error)


def test_threads_that_ask_many_sessions_before_they_have_answered_get_answers_in_order(client: Client) -> None:
    wrong: list[object] = []
    threads = [threading.Thread(target=talk, args=(client, seed, wrong)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not wrong and not any(thread.is_alive() for thread in threads)


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["ask", "ask", "ask", "wait", "all", "reset", "restore", "copy", "anew", "plain"]),
        st.integers(0, 2),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=25,
)


@settings(suppress_health_check=list(HealthCheck), max_examples=examples(25), deadline=None)
@given(actions=ACTIONS)
def test_whatever_sessions_are_asked_each_answer_is_of_its_own_story(client: Client, actions) -> None:
    sessions = [client.session("kept") for _ in range(3)]
    stories: list[list[torch.Tensor]] = [[] for _ in sessions]
    asked = []
    for action, number, length in actions:
        session, story, piece = sessions[number], stories[number], steps(length, float(len(asked) % 7))
        if action in ("ask", "wait"):
            story.append(piece)
            asked.append((session.submit(piece), after(*story)))
            if action == "wait":
                assert_same(asked[-1][0].result(WAIT_S), asked[-1][1])
        elif action == "all":
            for its in stories:
                its.append(piece)
            futures = client.submit_many("kept", [piece] * 3, sessions=sessions)
            asked += [(future, after(*its)) for future, its in zip(futures, stories)]
        elif action == "reset":
            session.reset()
            story.clear()
        elif action in ("restore", "copy"):
            other = (number + 1) % 3
            if action == "copy":
                session.copy_to([sessions[other]])
            else:
                sessions[other].restore(session.export())
            stories[other] = list(story)
        elif action == "anew":
            session.leave()
            sessions[number], stories[number] = client.session("kept"), []
        else:
            asked.append((client.submit("kept", piece), after(piece)))
    for future, expected in asked:
        assert_same(future.result(WAIT_S), expected)
    for session in sessions:
        session.close()
