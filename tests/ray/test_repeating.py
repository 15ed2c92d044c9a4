"""A request is handed to another replica when that is right, and only then; replicas are answers in a list."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

pytest.importorskip("msgspec")

from cellrt.errors import CellrtError, DeviceError, EngineClosedError, SessionError, http_status
from cellrt.ray.messages import NOT_BEGUN, Answer, Call
from cellrt.ray.repeating import MOST_TRIES, ReplicaDiedError, answer_of
from cellrt.serve.inference import error_json
from cellrt.serve.oip import encode

PLAIN = Call("POST", "/v1/models/m/infer", b"", (), b'{"request": 1}')
OF_SESSION = PLAIN._replace(body=b'{"request": 1, "session": "s"}')
LISTING = Call("GET", "/v2", b"", (), b"")


def failed(error: CellrtError) -> Answer:
    return Answer(http_status(error), (), encode(error_json(error)))


DONE = Answer(200, (), b"{}")
REFUSED = failed(EngineClosedError("the engine has no worker left"))
KILLED = failed(DeviceError("worker 1 died"))
BUSY = Answer(503, (NOT_BEGUN,))
WRONG = Answer(503, (), b"no JSON")
DIED = ReplicaDiedError("gone")
Said = Answer | ReplicaDiedError


def asked(call: Call, said: Sequence[Said], *, state_lacks: bool = False) -> tuple[Answer, int]:
    """The answer, and how many replicas were asked."""
    left = list(said)

    async def ask() -> Answer:
        answer = left.pop(0)
        if isinstance(answer, ReplicaDiedError):
            raise answer
        return answer

    async def outside() -> bool:
        return state_lacks

    answer = asyncio.run(answer_of(call, ask, outside, try_after_s=0.0))
    return answer, len(said) - len(left)


@pytest.mark.parametrize(
    "before",
    [
        [],
        [REFUSED] * 5,  # replicas whose worker died of something else, and who have not noticed yet
        [BUSY] * 5,
        [DIED],
        [KILLED],
        [REFUSED, KILLED, BUSY, REFUSED],
        [WRONG],
    ],
)
def test_a_request_in_no_session_is_run_elsewhere_until_it_is_answered(before: list[Said]) -> None:
    assert asked(PLAIN, [*before, DONE, DONE]) == (DONE, len(before) + 1)


@pytest.mark.parametrize("last", [KILLED, WRONG])
def test_what_may_have_killed_two_replicas_goes_to_no_third(last: Answer) -> None:
    assert asked(PLAIN, [KILLED, REFUSED, last, DONE]) == (last, 3)
    with pytest.raises(DeviceError, match="the replica died that had the request: gone"):
        asked(PLAIN, [last, DIED, DONE])


@pytest.mark.parametrize("answer", [DONE, Answer(400, ()), Answer(429, ()), Answer(500, ()), Answer(504, ())])
def test_an_answer_is_final(answer: Answer) -> None:
    assert asked(PLAIN, [answer, DONE]) == (answer, 1)


@pytest.mark.parametrize("answer", [KILLED, REFUSED, WRONG])
def test_a_request_of_a_session_that_may_have_begun_is_not_run_again(answer: Answer) -> None:
    assert asked(OF_SESSION, [answer, DONE], state_lacks=True) == (answer, 1)
    with pytest.raises(SessionError, match="session m/s: the replica died"):
        asked(OF_SESSION, [DIED, DONE], state_lacks=False)


def test_a_request_of_a_session_is_asked_again_if_no_state_has_it() -> None:
    assert asked(OF_SESSION, [BUSY, BUSY, DIED, BUSY, DONE], state_lacks=True) == (DONE, 5)


def test_what_is_no_inference_is_asked_once() -> None:
    assert asked(LISTING, [KILLED, DONE]) == (KILLED, 1)
    with pytest.raises(DeviceError):
        asked(LISTING, [DIED, DONE])


def test_one_gives_up_when_no_replica_has_an_engine() -> None:
    with pytest.raises(DeviceError, match="no replica takes requests"):
        asked(PLAIN, [BUSY] * (MOST_TRIES + 1))
