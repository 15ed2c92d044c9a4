"""A cache of the tokens of a conversation that a model has read: a prompt that repeats them
costs only its new tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from cellrt.errors import CellrtError


class Conversation:
    """A session with the tokens that it has read. A prompt is read from where it differs from them.

    So an answer is the same with a conversation and without. What a prompt does not repeat is removed from the session:
    the
    end of an answer that a stop string cut or that was cancelled, and turns that were changed afterwards. While one
    answer
    is generated, other answers of the same conversation are generated without it. Safe from any thread.

    Args:
        open_session: opens a session of the model, in an engine here or elsewhere.
        session: the first session, if there is one.
        read: the tokens that it has read.
    """

    is_cache = True
    """True if answers report how many tokens of the prompt were cached."""

    def __init__(self, open_session: Callable[[], Any], session: Any = None, read: Sequence[int] = ()) -> None:
        self._open, self._session = open_session, open_session() if session is None else session
        self._read = list(read)
        """The tokens that the session has read."""
        self._is_longer = False
        """True if the session may have read more tokens than ``_read`` has."""
        self._lock = threading.Lock()

    @property
    def session(self) -> Any:
        """The present session, which was opened by ``open_session``."""
        return self._session

    def take(self) -> bool:
        """Reserve the conversation for an answer. Return False if another answer has it."""
        return self._lock.acquire(blocking=False)

    def give_back(self) -> None:
        """Release the conversation for other answers.

        ``note_read`` has told what was read since ``unread``, or it is unknown.
        """
        self._lock.release()

    def unread(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return the part of a prompt that is still to be read, and cut the session back to the part that it has.

        The last token is read in any case, as the first of the answer follows it.
        """
        most = min(len(self._read), len(prompt) - 1)
        same = next((k for k, (its, own) in enumerate(zip(self._read[:most], prompt)) if its != own), max(0, most))
        if self._is_longer or same < len(self._read):
            self._session.cut_back(same)
        self._read, self._is_longer = list(prompt[:same]), True
        return prompt[same:]

    def note_read(self, prompt: Sequence[int], made: Sequence[int], *, is_whole: bool) -> None:
        """Record that a prompt was read and an answer made, whose last token has not been read.

        ``is_whole``: False if the session may have read more than that.
        """
        self._read, self._is_longer = [*prompt, *made[:-1]], not is_whole

    def renew(self) -> None:
        """Open another session in place of one that has ended."""
        self._session, self._read, self._is_longer = self._open(), [], False

    def close(self) -> None:
        """Close the session."""
        with suppress(CellrtError):
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
