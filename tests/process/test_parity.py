"""An engine and its form in a process of its own have the same methods, and refuse the same with the same errors."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from cellrt.engine.engine import Engine
from cellrt.engine.future import RequestFuture
from cellrt.engine.session import Session
from cellrt.errors import DeadlineError, DefinitionError, RequestError, SessionError, UnknownModelError
from cellrt.process.client import Client
from cellrt.process.engine_process import EngineProcess
from cellrt.process.remote_session import RemoteSession
from tests.engine.helpers import WAIT_S, small_engine
from tests.process import models
from tests.process.helpers import held, start, steps

ENGINES_ALONE = {
    "graph": "needs the engine's own types of cells",
    "timeline": "an object of the engine's; clients have `timeline_events`, which is bytes",
}
"""What clients do not have, and why."""
FORMS = ((Engine, Client), (Engine, EngineProcess), (Session, RemoteSession))


def face(kind: type) -> dict[str, object]:
    """Each public name of a class: what it is, and what it takes."""
    made: dict[str, object] = {}
    for name in dir(kind):
        value = inspect.getattr_static(kind, name)
        if name.startswith("_") or name in ENGINES_ALONE:
            continue
        if not inspect.isfunction(value):
            made[name] = type(value)
            continue
        taken = [(each.name, each.kind, each.default) for each in inspect.signature(value).parameters.values()]
        made[name] = inspect.iscoroutinefunction(value), taken
    return made


@pytest.mark.parametrize(("here", "apart"), FORMS)
def test_every_public_name_is_there_in_both_forms_and_takes_the_same(here, apart):
    expected, found = face(here), face(apart)
    assert {name: found.get(name) for name in expected} == expected


@pytest.fixture(scope="module", params=["here", "apart"])
def engine(request) -> Iterator[Engine | EngineProcess]:
    made: Engine | EngineProcess = small_engine(trace=True) if request.param == "here" else start(trace=True)
    with made:
        made.register(models.chain, warm_up=False)
        made.register(models.kept, warm_up=False)
        yield made


KEPT = "kept"
WRONG: dict[str, tuple[Callable[[Any], object], type[Exception]]] = {
    "a model that is none": (lambda engine: engine.register(3), DefinitionError),
    "a model that is registered": (lambda engine: engine.register(models.chain), DefinitionError),
    "a number as priorities": (lambda engine: engine.register(models.loop, priorities=5), DefinitionError),
    "a list as priorities": (lambda engine: engine.register(models.loop, priorities=["step"]), DefinitionError),
    "priorities by number": (lambda engine: engine.register(models.loop, priorities={1: 2}), DefinitionError),
    "a text as a priority": (lambda engine: engine.register(models.loop, priorities={"count": "1"}), DefinitionError),
    "no priority": (lambda engine: engine.register(models.loop, priorities={"count": None}), DefinitionError),
    "a large priority": (lambda engine: engine.register(models.loop, priorities={"count": 1 << 40}), DefinitionError),
    "a priority of no cell": (lambda engine: engine.register(models.loop, priorities={"no": 1}), DefinitionError),
    "what nobody can write down": (lambda engine: engine.register(models.loop, warm_up=object()), DefinitionError),
    "a text as replace": (lambda engine: engine.register(models.chain, replace="yes"), DefinitionError),
    "a number as max_batch": (lambda engine: engine.register(models.loop, max_batch=5), DefinitionError),
    "max_batch by number": (lambda engine: engine.register(models.loop, max_batch={1: 5}), DefinitionError),
    "a max_batch of 0": (lambda engine: engine.register(models.loop, max_batch={"count": 0}), DefinitionError),
    "a max_batch of no cell": (lambda engine: engine.register(models.loop, max_batch={"no": 1}), DefinitionError),
    "a text as max_queue": (lambda engine: engine.register(models.loop, max_queue="5"), DefinitionError),
    "max_queue_rows of 0": (lambda engine: engine.register(models.loop, max_queue_rows=0), DefinitionError),
    "a number to unregister": (lambda engine: engine.unregister(3), UnknownModelError),
    "nobody to unregister": (lambda engine: engine.unregister("nobody"), UnknownModelError),
    "a number as a model": (lambda engine: engine.submit(3, steps(1)), UnknownModelError),
    "nobody": (lambda engine: engine.submit_many("nobody", []), UnknownModelError),
    "a request that is none": (lambda engine: engine.submit("chain", object()), RequestError),
    "a text as a priority of a request": (lambda engine: engine.submit("chain", steps(1), priority="1"), RequestError),
    "a priority of 4": (lambda engine: engine.submit_many("chain", [], priority=4), RequestError),
    "a text as a deadline": (lambda engine: engine.stream("chain", steps(1), deadline="1"), RequestError),
    "a deadline of 0": (lambda engine: engine.submit_many("chain", [], deadline=0, wait=True), RequestError),
    "a schedule_by of 0": (lambda engine: engine.submit("chain", steps(1), schedule_by=0), RequestError),
    "max_unread of 0": (lambda engine: engine.stream("chain", steps(1), max_unread=0), RequestError),
    "a number as requests": (lambda engine: engine.submit_many("chain", 5), RequestError),
    "a number to map": (lambda engine: engine.map("chain", 5), RequestError),
    "a number as sessions": (lambda engine: engine.submit_many(KEPT, [steps(1)], sessions=5), RequestError),
    "one session for two": (lambda engine: engine.submit_many(KEPT, [steps(1)] * 2, sessions=["a"]), RequestError),
    "what is no session": (lambda engine: engine.submit_many(KEPT, [steps(1)], sessions=["a"]), RequestError),
    "a session of nobody": (lambda engine: engine.session("nobody"), UnknownModelError),
    "a session of a number": (lambda engine: engine.session(3), UnknownModelError),
    "a session without state": (lambda engine: engine.session("chain"), RequestError),
    "a number as a session's id": (lambda engine: engine.session(KEPT, 7), RequestError),
    "a session that is not open": (lambda engine: engine.session(KEPT, "no", must_be_open=True), SessionError),
    "a number as a state": (lambda engine: engine.session(KEPT, state=0), SessionError),
    "a text as a state": (lambda engine: engine.session(KEPT, state=""), SessionError),
    "a list as a state": (lambda engine: engine.session(KEPT, state=[1, 2]), SessionError),
    "no bytes as a state": (lambda engine: engine.session(KEPT, state=b""), SessionError),
    "a number to restore": (lambda engine: engine.session(KEPT).restore(5), SessionError),
    "nothing to restore": (lambda engine: engine.session(KEPT).restore(None), SessionError),
    "a text as a drain's time": (lambda engine: engine.drain("1"), RequestError),
    "a drain of less than no time": (lambda engine: engine.drain(-1), RequestError),
    "a drain of no number": (lambda engine: engine.drain(float("nan")), RequestError),
    "a drain of a truth": (lambda engine: engine.drain(False), RequestError),
    "a text as a close's time": (lambda engine: engine.close("1"), RequestError),
    "a close of less than no time": (lambda engine: engine.close(-1), RequestError),
    "a close of no time": (lambda engine: engine.close(None), RequestError),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_the_same_error_in_both_forms(engine, wrong):
    call, expected = WRONG[wrong]
    with pytest.raises(Exception) as raised:
        call(engine)
    assert raised.type is expected


async def test_what_is_wrong_for_a_coroutine_is_the_same_error_in_both_forms(engine):
    for how in ({"deadline": 0}, {"schedule_by": 0}, {"priority": 4}, {"deadline": "1"}):
        for wait in (False, True):
            with pytest.raises(RequestError):
                await engine.infer("chain", steps(1), wait=wait, **how)


BY = {"schedule_by": 1e-9}
LATE: dict[str, Callable[[Any], Any]] = {
    "submit": lambda engine: engine.submit("chain", steps(1), **BY).result(WAIT_S),
    "submit that waits": lambda engine: engine.submit("chain", steps(1), wait=True, **BY).result(WAIT_S),
    "many": lambda engine: engine.submit_many("chain", [steps(1)] * 2, **BY).results(WAIT_S),
    "many with sessions": lambda engine: engine.submit_many(
        KEPT, [steps(1)] * 2, sessions=[engine.session(KEPT), engine.session(KEPT)], **BY
    ).results(WAIT_S),
    "infer": lambda engine: asyncio.run(engine.infer("chain", steps(1), **BY)),
    "infer that waits": lambda engine: asyncio.run(engine.infer("chain", steps(1), wait=True, **BY)),
    "stream": lambda engine: list(engine.stream("chain", steps(1), **BY)),
    "map": lambda engine: list(engine.map("chain", [steps(1)], **BY)),
    "session": lambda engine: engine.session(KEPT).submit(steps(1), **BY).result(WAIT_S),
    "session's infer": lambda engine: asyncio.run(engine.session(KEPT).infer(steps(1), **BY)),
    "session's infer that waits": lambda engine: asyncio.run(engine.session(KEPT).infer(steps(1), wait=True, **BY)),
    "session's stream": lambda engine: list(engine.session(KEPT).stream(steps(1), **BY)),
}


@pytest.mark.parametrize("door", LATE)
def test_what_cannot_begin_in_time_ends_by_whatever_door_it_came(engine, door):
    with pytest.raises(DeadlineError, match="not begun within|waited for a place"):
        LATE[door](engine)


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_a_state_is_taken_in_whatever_holds_bytes(engine, form):
    with engine.session(KEPT) as session, engine.session(KEPT) as other:
        session.submit(steps(2)).result(WAIT_S)
        state = form(session.export())
        expected = session.submit(steps(1)).result(WAIT_S)["last"]
        with engine.session(KEPT, state=state) as moved:
            assert moved.submit(steps(1)).result(WAIT_S)["last"].equal(expected)
        other.restore(state)
        assert other.submit(steps(1)).result(WAIT_S)["last"].equal(expected)


def test_both_forms_tell_of_workers_and_the_timeline(engine):
    assert engine.has_workers() is True
    assert engine.has_timeline is True
    assert engine.drain(0) in (True, False)


@pytest.mark.slow
def test_an_engines_process_that_does_not_end_in_time_is_killed():
    with start() as engine:
        engine.register(models.chain, warm_up=False)
        future = engine.submit("chain", steps(1))
        engine.close(0)
        assert future.done()
        assert engine._started.process.returncode is not None


@pytest.mark.parametrize("make", [small_engine, start], ids=["here", "apart"])
@pytest.mark.slow
def test_coroutines_of_sessions_wait_for_places(make):
    async def ask(sessions):
        return await asyncio.gather(*(session.infer(steps(1), wait=True) for session in sessions))

    with make(max_queue=1) as engine:
        engine.register(models.kept, warm_up=False)
        sessions = [engine.session(KEPT) for _ in range(20)]
        expected = sessions[0].submit(steps(1)).result(WAIT_S)["last"]
        sessions[0].reset()
        for result in asyncio.run(asyncio.wait_for(ask(sessions), WAIT_S)):
            assert torch.equal(result["last"], expected)
        with pytest.raises(SessionError, match="is closed"):
            sessions[1].close()
            asyncio.run(sessions[1].infer(steps(1), wait=True))


@pytest.mark.parametrize("make", [small_engine, start], ids=["here", "apart"])
@pytest.mark.slow
def test_a_map_is_not_starved_by_single_requests_that_wait(make):
    with make(max_queue=8) as engine:
        engine.register(models.chain, warm_up=False)
        over = threading.Event()

        def ask() -> None:
            while not over.is_set():
                engine.submit("chain", steps(1), wait=True).result(WAIT_S)

        threads = [threading.Thread(target=ask) for _ in range(12)]
        patience = threading.Timer(WAIT_S / 2, over.set)
        for thread in (*threads, patience):
            thread.start()
        assert len(list(engine.map("chain", [steps(2)] * 40))) == 40
        assert not over.is_set(), "it went on only when the others had stopped"
        patience.cancel()
        over.set()
        for thread in threads:
            thread.join(WAIT_S)


@pytest.mark.parametrize("make", [small_engine, start], ids=["here", "apart"])
@pytest.mark.parametrize("ask", ["infer", "map_async", "session"])
@pytest.mark.slow
def test_who_would_wait_for_a_place_in_a_callback_is_refused(make, ask):
    async def wait(engine):
        if ask == "infer":
            return await engine.infer("chain", steps(1), wait=True)
        if ask == "session":
            return await session.infer(steps(1), wait=True)
        return [found async for found in engine.map_async("chain", [steps(1)])]

    with make(max_queue=1) as engine:
        engine.register(models.chain, warm_up=False)
        engine.register(models.kept, warm_up=False)
        session, heard, is_over = engine.session(KEPT), list[BaseException](), threading.Event()

        def callback(_):
            engine.submit("chain", held(3))  # the queue is full again
            try:
                asyncio.run(wait(engine))
            except BaseException as error:
                heard.append(error)
            is_over.set()

        engine.submit("chain", held(1)).add_done_callback(callback)  # which is called in a thread of the engine
        assert is_over.wait(WAIT_S)
        assert [type(error) for error in heard] == [RequestError] and "callback" in str(heard[0])


def test_results_of_many_requests_are_stacked(engine):
    requests = [steps(2) * k for k in range(3)]
    stacked = engine.submit_many("chain", requests).stacked(WAIT_S)
    each = [engine.submit("chain", request).result(WAIT_S) for request in requests]
    assert stacked.keys() == each[0].keys()
    for name, tensor in stacked.items():
        assert torch.equal(tensor, torch.stack([result[name] for result in each]))


def test_a_request_says_what_it_waits_for(engine):
    gone = engine.submit("chain", steps(2))
    gone.result(WAIT_S)
    assert engine.explain(gone) == "the request has ended"
    future = engine.submit("chain", held(2))
    told = engine.explain(future)
    assert "of model 'chain'" in told or told == "handed in; no turn has seen it"
    future.result(WAIT_S)
    with pytest.raises(RequestError, match="explain: expected a future of this"):
        engine.explain(RequestFuture(engine))  # type: ignore[arg-type]
