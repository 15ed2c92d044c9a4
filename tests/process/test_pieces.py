"""What a loop asks of many sessions in one round: one packet, and each request as if it came alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import torch

from cellrt.engine.due import ANY_TIME
from cellrt.engine.places import QueueLimit
from cellrt.errors import CellrtError, EngineClosedError, InternalError, OverloadError, RequestError, SessionError
from cellrt.process.client import Client, connect
from cellrt.process.pieces import Pieces
from cellrt.process.wire import Wire
from tests.engine.helpers import WAIT_S
from tests.process import models
from tests.process.helpers import held, steps

Asked = tuple[Any, torch.Tensor]


def asked_together(client: Client, asked: list[Asked]) -> list[Any]:
    """The last states, or errors, of what one round of a loop asks, in its order."""
    told: list[Any] = [None] * len(asked)

    def note(place: int) -> Callable[[Any], None]:
        return lambda begun: told.__setitem__(place, begun)

    async def ask() -> None:
        pieces = Pieces(client)
        for place, (session, request) in enumerate(asked):
            pieces.submit(session, request, ANY_TIME, 1, note(place))
        await asyncio.sleep(0)

    asyncio.run(ask())
    return [_outcome(begun) for begun in told]


def _outcome(begun: Any) -> Any:
    if isinstance(begun, CellrtError):
        return begun
    error = begun.exception(WAIT_S)
    return begun.result()["last"] if error is None else error


def test_a_round_of_many_sessions_is_one_packet(client, monkeypatch):
    sessions = [client.session("kept") for _ in range(20)]
    expected = sessions[0].submit(steps(2)).result(WAIT_S)["last"]
    sent: list[int] = []
    send = Wire.send
    monkeypatch.setattr(Wire, "send", lambda self, messages: (sent.append(len(messages)), send(self, messages))[1])
    told = asked_together(client, [(session, steps(2)) for session in sessions[1:]])
    assert len([count for count in sent if count]) == 1
    assert all(torch.equal(last, expected) for last in told)


def test_a_sessions_requests_of_one_round_go_in_their_order(client):
    one, other, alone = (client.session("kept") for _ in range(3))
    firsts = [1.0, 5.0, 2.0]
    expected = [alone.submit(steps(1, first)).result(WAIT_S)["last"] for first in firsts]
    told = asked_together(client, [(one, steps(1, first)) for first in firsts] + [(other, steps(1))])
    for last, its in zip(told, [*expected, expected[0]]):
        assert torch.equal(last, its)


def test_a_session_that_has_ended_refuses_no_other(client):
    sessions = [client.session("kept") for _ in range(4)]
    expected = client.session("kept").submit(steps(1)).result(WAIT_S)["last"]
    sessions[1].close()
    told = asked_together(client, [(session, steps(1)) for session in sessions])
    assert isinstance(told.pop(1), SessionError)
    assert all(torch.equal(last, expected) for last in told)


def test_a_request_that_does_not_fit_refuses_no_other(client):
    sessions = [client.session("kept") for _ in range(3)]
    expected = client.session("kept").submit(steps(1)).result(WAIT_S)["last"]
    told = asked_together(client, [(session, what) for session, what in zip(sessions, [steps(1), "text", steps(1)])])
    assert isinstance(told.pop(1), RequestError)
    assert all(torch.equal(last, expected) for last in told)


def test_a_fault_of_our_own_is_told_to_all_who_wait(client, monkeypatch):
    sessions = [client.session("kept") for _ in range(2)]
    monkeypatch.setattr(client._link, "submit", lambda *_, **__: 1 // 0)
    told = asked_together(client, [(session, steps(1)) for session in sessions])
    assert [type(error) for error in told] == [InternalError] * 2


def test_answers_that_come_together_are_one_call_of_the_loop(server):
    with connect(server.address) as client:
        client.register(models.kept, warm_up=False)
        sessions = [client.session("kept") for _ in range(4)]
        sessions[-1].close()
        calls: list[Any] = []
        ended: list[Any] = []

        async def ask() -> None:
            pieces = Pieces(client)
            put = pieces._mailbox.put
            pieces._mailbox.put = lambda call: (calls.append(call), put(call))[1]  # type: ignore[method-assign]
            for session in sessions:
                pieces.submit(session, steps(2), ANY_TIME, 1, lambda _: None, ended.append)
            async with asyncio.timeout(WAIT_S):
                while len(ended) < len(sessions):
                    await asyncio.sleep(0)

        asyncio.run(ask())
        assert len(calls) <= 2  # of results and of the refusal
        assert all(future.done() for future in ended)
        assert [type(future.error()) for future in ended].count(SessionError) == 1


def test_what_is_under_way_ends_with_the_connection_and_is_told(server):
    with connect(server.address) as client:
        client.register(models.chain, warm_up=False)
        client.register(models.kept, warm_up=False)
        server.engine._manager.places.limit = QueueLimit(2, None)
        ended: list[Any] = []

        async def ask() -> None:
            client.submit("chain", held())
            Pieces(client).submit(client.session("kept"), steps(1), ANY_TIME, 1, lambda _: client.close(), ended.append)
            async with asyncio.timeout(WAIT_S):
                while not ended:
                    await asyncio.sleep(0)

        asyncio.run(ask())
        assert isinstance(ended[0].error(), EngineClosedError)


def test_where_a_queue_is_full_those_are_taken_for_which_there_are_places(server):
    with connect(server.address) as client:
        client.register(models.chain, warm_up=False)
        client.register(models.kept, warm_up=False)
        sessions = [client.session("kept") for _ in range(3)]
        server.engine._manager.places.limit = QueueLimit(2, None)
        client.submit("chain", held())
        told = asked_together(client, [(session, steps(1)) for session in sessions])
        assert isinstance(told[0], torch.Tensor)
        assert [type(error) for error in told[1:]] == [OverloadError] * 2
