"""Several answers to one prompt, which is read once: each continues in a session with a copy of what was read."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from cellrt.engine.due import Due
from cellrt.engine.future import RequestFuture
from cellrt.errors import OverloadError
from cellrt.language.conversation import Conversation
from cellrt.language.language import Language

LEAST_TOKENS = 64
"""The least number of prompt tokens to save: for fewer a copy takes as long."""


class Branch(Conversation):
    """The conversation of one answer, which has read all of a prompt but its last token.

    It is closed with the answer.
    """

    is_cache = False

    def give_back(self) -> None:
        """Release the conversation and close its session."""
        super().give_back()
        self._session.leave()


class Branches:
    """A reader of a prompt for several answers.

    Args:
        open_session: opens a session of the model.
        prompt: the tokens of the prompt.
        count: the number of answers.
        due, priority: the deadlines and the priority of reading the prompt, and of all answers.
    """

    def __init__(
        self, open_session: Callable[[], Any], prompt: Sequence[int], count: int, due: Due, priority: int
    ) -> None:
        self._open, self._read, self._count = open_session, prompt[:-1], count
        self._due, self._priority, self._began_s = due, priority, time.monotonic()
        self._sessions: list[Any] = []

    @property
    def due(self) -> Due:
        """The time limit of the answers: what is left of the request's. The work on them has begun."""
        return Due(self._due.after(time.monotonic() - self._began_s).done_s, None)

    def read(self) -> list[Branch] | None:
        """Return a branch for each answer; None if there is no room for this many sessions."""
        with suppress(OverloadError), self._closing():
            self._open_all()
            self._submit().result()
            return self._spread()
        return None

    async def aread(self) -> list[Branch] | None:
        """Return a branch for each answer, like ``read``. Cancelling the task cancels the reading."""
        with suppress(OverloadError), self._closing():
            await asyncio.to_thread(self._open_all)
            await self._submit()
            return await asyncio.to_thread(self._spread)
        return None

    def _open_all(self) -> None:
        for _ in range(self._count):
            self._sessions.append(self._open())

    def _submit(self) -> RequestFuture:
        due = self._due.after(time.monotonic() - self._began_s)
        request = {"prompt": list(self._read), "max_tokens": 1}
        how: dict[str, Any] = {"deadline": due.done_s, "schedule_by": due.begun_s, "priority": self._priority}
        future: RequestFuture = self._sessions[0].submit(request, **how)
        return future

    def _spread(self) -> list[Branch]:
        first, *others = self._sessions
        first.copy_to(others)
        return [Branch(self._open, session, self._read) for session in self._sessions]

    @contextmanager
    def _closing(self) -> Iterator[None]:
        """Close the sessions if the block raises, as there will be no answers."""
        try:
            yield
        except BaseException:
            for session in self._sessions:
                session.leave()
            raise


def are_worth_it(language: Language, prompt: Sequence[int], count: int) -> bool:
    """Return whether reading a prompt once for this many answers saves more than copies cost."""
    return language.kind == "decoder" and (count - 1) * (len(prompt) - 1) >= LEAST_TOKENS
