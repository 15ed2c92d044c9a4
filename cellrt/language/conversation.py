"""What a model has read of a conversation, so that a prompt that repeats all of it costs what is new alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from cellrt.errors import CellrtError


class Conversation:
    """Keeps what a model has read. A prompt that begins with that is read from there on; any other from its beginning.

    So an answer is the same with a conversation and without, and what went wrong in one leaves no trace in the next:
    after an answer that was cut (by a stop string, or left), all is read anew. While an answer is made, others of the
    same conversation are made without it. Safe from any thread.

    Args:
        open_session: makes a session of the model, in an engine here or elsewhere.
    """

    def __init__(self, open_session: Callable[[], Any]) -> None:
        self._open, self._session = open_session, open_session()
        self._read: list[int] | None = []
        """The tokens that the session has read; None: it is not known."""
        self._lock = threading.Lock()

    @property
    def session(self) -> Any:
        """The session of now, which was made by ``open_session``."""
        return self._session

    def take(self) -> bool:
        """Take it for an answer; False if another has it."""
        return self._lock.acquire(blocking=False)

    def give_back(self) -> None:
        """Let other answers have it; what was read since ``unread`` is known only if ``note_read`` told of it."""
        self._lock.release()

    def unread(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return what is to be read of a prompt, which is not known to be read before ``note_read``."""
        read, self._read = self._read, None
        if read is not None and len(prompt) > len(read) and list(prompt[: len(read)]) == read:
            return prompt[len(read) :]
        self._session.reset()
        return prompt

    def note_read(self, prompt: Sequence[int], made: Sequence[int]) -> None:
        """Take in that a prompt was read and an answer made, whose last token nobody has read."""
        self._read = [*prompt, *made[:-1]]

    def renew(self) -> None:
        """Open another session, as this one has ended."""
        self._session, self._read = self._open(), []

    def close(self) -> None:
        """End the session."""
        with suppress(CellrtError):
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
