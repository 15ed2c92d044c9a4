"""Decides when a request goes to another replica: never after an answer, nor if it might run twice in a session.

A replica that says "not begun" has done nothing: another is asked, whatever the request is. If a worker, engine or
whole replica died before its answer, nobody can say how far the request was. A request outside sessions has no state to
change twice, and runs again from its start. A request of a session runs again only if the directory has the session's
state and knows that the request is not part of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from cellrt.errors import CellrtError, DeviceError, SessionError
from cellrt.ray.messages import UNAVAILABLE, Answer, Call

MOST_DEATHS = 1
"""A request that meets more dead workers or replicas may be what kills them."""
MOST_TRIES = 100
"""The number of times that a request is handed on, if one replica after the other has no engine now."""
TRY_AFTER_S = 0.2


class ReplicaDiedError(Exception):
    """A replica died before its answer came."""


async def answer_of(
    call: Call,
    ask: Callable[[], Awaitable[Answer]],
    state_lacks: Callable[[], Awaitable[bool]],
    *,
    try_after_s: float = TRY_AFTER_S,
) -> Answer:
    """Return a replica's answer to a request: see the module.

    Args:
        call: the request.
        ask: has a replica answer it. Raise ReplicaDiedError.
        state_lacks: returns whether the session's state still exists, and the request is not part of it.
        try_after_s: the time to wait before the next try.

    Raise DeviceError, SessionError.
    """
    key, num_deaths = call.session, 0
    for _ in range(MOST_TRIES):
        try:
            answer = await ask()
        except ReplicaDiedError as error:
            if num_deaths == MOST_DEATHS or not call.is_inference or (key and not await state_lacks()):
                raise of_death(key, error) from None
            num_deaths += 1
        else:
            num_deaths += answer.is_death
            may_repeat = not answer.is_begun or (answer.status == UNAVAILABLE and call.is_inference and not key)
            if not may_repeat or num_deaths > MOST_DEATHS:
                return answer
        await asyncio.sleep(try_after_s)
    raise DeviceError("no replica takes requests")


def of_death(key: str, error: BaseException) -> CellrtError:
    """Return the error for a client whose replica died. ``key`` is of the session, if there is one."""
    if not key:
        return DeviceError(f"the replica died that had the request: {error}")
    return SessionError(f"session {key}: the replica died that had its state, or had run the request: {error}")
