"""What a client has in the engine's process: models that stay as long as it has them, and in which order it is told
what became of its requests."""

from __future__ import annotations

import asyncio
import threading

import pytest
import torch

from cellrt.definition.cell import Cell
from cellrt.definition.define import cell
from cellrt.engine.engine import Engine
from cellrt.engine.places import QueueLimit
from cellrt.errors import CellError, OverloadError, SessionError
from cellrt.graph.reference import run_one_by_one
from cellrt.graph.unfolder import Unfolder
from cellrt.process.client import connect
from cellrt.process.client_connection import ClientConnection, _messages
from cellrt.process.outcomes import Outcome
from cellrt.process.recorded import LENGTH
from cellrt.process.source import ModelSource
from cellrt.process.wire import Kind, Message
from tests.engine.helpers import WAIT_S, assert_same, error_of
from tests.process import models
from tests.process.helpers import held, steps
from tests.steps import HOLD_LONG, RAISE, WIDTH
from tests.waiting import until


def adds(number: int) -> Cell:
    """A cell that adds a number."""
    return cell(lambda x: {"y": x + number}, {"x": (WIDTH,)}, name=f"adds {number}")


ADD = {number: adds(number) for number in (1, 2, 3, 1000)}


def adding(number: int, name: str = "adding") -> Unfolder:
    """A model whose cell adds a number."""
    return Unfolder(name, lambda graph, x: {"y": ADD[number](x=x).y}, torch.zeros(WIDTH))


one, two, three = adding(1), adding(2), adding(3)
other = adding(1000, "other")


def register(server, model: str) -> None:
    """Registers a model of this module in the place of that of its name, and tells clients of it."""
    server.calls.register(ModelSource(f"{__name__}:{model}"), {"warm_up": False, "replace": True})


def give_its_numbers_to_another(engine: Engine, number: int) -> None:
    """Waits until the model that adds a number is given up, and registers one whose cell gets the number of its."""
    until(lambda: all(made.cell is not ADD[number] for made in list(engine._registry.types.values())), "it is given up")
    engine.register(other, warm_up=False)


def before_the_first(monkeypatch, act) -> None:
    """Calls a function when a connection first asks for the number of a model, which was looked up before."""
    number_of = ClientConnection.number_of

    def number_later(connection, model, known):
        monkeypatch.setattr(ClientConnection, "number_of", number_of)
        act()
        return connection.number_of(model, known)

    monkeypatch.setattr(ClientConnection, "number_of", number_later)


def test_who_asks_for_a_model_that_is_given_up_meanwhile_gets_the_one_in_its_place(server, monkeypatch):
    """Though nobody has told of it yet: what the client unfolds then is run by the cells it was unfolded for."""
    replacing = threading.Thread(target=register, args=(server, "two"))

    def replace() -> None:
        replacing.start()
        give_its_numbers_to_another(server.engine, 1)

    register(server, "one")
    before_the_first(monkeypatch, replace)
    with connect(server.address) as client:
        with server.calls._tell_lock:
            assert client.submit("adding", torch.ones(WIDTH)).result(WAIT_S)["y"][0] == 3
        replacing.join(WAIT_S)


def test_nobody_is_told_of_a_model_that_is_given_up_already(server, monkeypatch):
    replacing = threading.Thread(target=register, args=(server, "three"))

    def replace() -> None:
        replacing.start()  # it tells when this has told
        give_its_numbers_to_another(server.engine, 2)

    told: list[object] = []
    register(server, "one")
    with connect(server.address) as client:
        assert client.submit("adding", torch.ones(WIDTH)).result(WAIT_S)["y"][0] == 2
        change = client._link.on_rebind
        client._link.on_rebind = lambda news: (told.append(news["now"]), change(news))[1]
        before_the_first(monkeypatch, replace)
        register(server, "two")
        replacing.join(WAIT_S)
        until(lambda: len(told) == 2, "it was told twice")
        assert told[0] is None
        assert client.submit("adding", torch.ones(WIDTH)).result(WAIT_S)["y"][0] == 4


def test_a_session_that_ends_while_it_is_asked_for_says_so(server, monkeypatch):
    def end() -> None:
        shared.close()
        another.register(models.kept, warm_up=False, replace=True)
        until(lambda: not server.engine._manager._retired, "the model before is given up")

    with connect(server.address) as client, connect(server.address) as another:
        another.register(models.kept, warm_up=False)
        shared = server.engine.session("kept", "shared")
        before_the_first(monkeypatch, end)
        with pytest.raises(SessionError, match="'shared'"):
            client.session("kept", "shared")


def test_a_bulk_of_two_versions_waits_for_places_together(server):
    with connect(server.address) as client:
        client.register(models.chain, warm_up=False)
        sessions = []
        for count in (1, 2):
            client.register(models.kept, warm_up=False, replace=True)
            sessions.append(client.session("kept"))
            for _ in range(count):
                expected = sessions[-1].submit(steps(1)).result(WAIT_S)["last"][0]
        assert expected == 1.5
        server.engine._manager.places.limit = QueueLimit(2, None)
        client.submit("chain", held())
        bulk = "kept", [steps(1)] * 2
        refused = client.submit_many(*bulk, sessions=sessions)
        assert [type(error_of(future)) for future in refused] == [OverloadError] * 2
        results = client.submit_many(*bulk, sessions=sessions, wait=True).results(WAIT_S)
        assert [result["last"][0].item() for result in results] == [1.5, 1.75]


def test_what_waits_for_places_keeps_the_model_that_it_was_unfolded_for(server):
    """Though its client has given the model up since, for the one in its place."""
    register(server, "one")
    before, manager = server.engine._models["adding"], server.engine._manager
    with connect(server.address) as client:
        client.register(models.chain, warm_up=False)
        manager.places.limit = QueueLimit(1, None)
        holding = client.submit("chain", steps(20, HOLD_LONG))
        waiting = asyncio.new_event_loop()
        thread = threading.Thread(target=waiting.run_forever)
        thread.start()
        result = asyncio.run_coroutine_threadsafe(client.infer("adding", torch.ones(WIDTH), wait=True), waiting)
        until(lambda: len(server._waiting), "it waits for a place")
        register(server, "two")
        (connection,) = server._connections.values()
        until(lambda: before not in connection.models.values(), "the client has given the model up")
        for _ in range(2):
            manager.turns.call(lambda: None)  # a turn has looked who is gone
        server.engine.register(other, warm_up=False)
        manager.places.limit = QueueLimit(2, None)
        manager.turns.wake()
        assert result.result(WAIT_S)["y"][0] == 2
        until(lambda: before.is_given_up, "nobody keeps it any more")
        holding.cancel()
        waiting.call_soon_threadsafe(waiting.stop)
        thread.join(WAIT_S)
        waiting.close()


def test_requests_that_got_places_have_futures_though_the_first_has_failed_before_that_is_said(server, monkeypatch):
    submission = server.engine._submission
    submit = submission.submit_recorded

    def submit_and_see_it_fail(*given):
        submit(*given)
        (connection,) = server._connections.values()
        until(lambda: not connection._live, "all have ended")

    with connect(server.address) as client:
        client.register(models.chain, warm_up=False)
        monkeypatch.setattr(submission, "submit_recorded", submit_and_see_it_fail)
        wrong, right = client.submit_many("chain", [torch.full_like(steps(1), RAISE), steps(1)], wait=True)
        assert type(error_of(wrong)) is CellError
        assert_same(right.result(WAIT_S), run_one_by_one(models.chain, steps(1)))


def test_whether_there_are_workers_takes_no_thread_of_its_own(server, monkeypatch):
    asked_in: list[str] = []
    has_workers = Engine.has_workers

    def noting_threads(engine: Engine) -> bool:
        asked_in.append(threading.current_thread().name)
        return has_workers(engine)

    monkeypatch.setattr(Engine, "has_workers", noting_threads)
    with connect(server.address) as client:
        assert client.has_workers() is client.has_workers() is True
    assert asked_in and not any("has_workers" in name for name in asked_in), "a thread is named after its call"


def test_that_requests_have_places_is_told_before_their_ends_and_all_else_after():
    answer = Message(Kind.ANSWER, (b"",))
    news = [answer, (7, CellError("a row")), Outcome(8, True, ()), Message(Kind.ACCEPTED, (LENGTH.pack(7),))]
    kinds = [message.kind for message in _messages(news)]
    assert kinds == [Kind.ACCEPTED, Kind.OUTCOMES, Kind.ERRORS, Kind.ANSWER]
