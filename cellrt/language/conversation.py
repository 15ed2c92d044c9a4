"""What a model has read of a conversation, so that a prompt that repeats some of it costs what is new alone."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Self

from cellrt.errors import CellrtError


class Conversation:
    """Keeps what a model has read. A prompt is read from where it differs from that.

    So an answer is the same with a conversation and without. What a prompt does not repeat is taken back: the end of an
    answer that a stop string cut, or that was left, and what was said otherwise before. While an answer is made, others
    of the same conversation are made without it. Safe from any thread.

    Args:
        open_session: makes a session of the model, in an engine here or elsewhere.
        session: the first of them, if there is one.
        read: what it has read.
    """

    is_cache = True
    """Whether it is told how much of a prompt it had."""

    def __init__(self, open_session: Callable[[], Any], session: Any = None, read: Sequence[int] = ()) -> None:
        self._open, self._session = open_session, open_session() if session is None else session
        self._read = list(read)
        """The tokens that the session has read."""
        self._is_longer = False
        """Whether it may have read more, which nobody was told of."""
        self._lock = threading.Lock()

    @property
    def session(self) -> Any:
        """The session of now, which was made by ``open_session``."""
        return self._session

    def take(self) -> bool:
        """Take it for an answer; False if another has it."""
        return self._lock.acquire(blocking=False)

    def give_back(self) -> None:
        """Let other answers have it; what was read since ``unread`` is known if ``note_read`` told of it."""
        self._lock.release()

    def unread(self, prompt: Sequence[int]) -> Sequence[int]:
        """Return what is to be read of a prompt; the session keeps what it has read of it, and nothing else.

        The last token is read in any case, as the first of the answer follows it.
        """
        most = min(len(self._read), len(prompt) - 1)
        same = next((k for k, (its, own) in enumerate(zip(self._read[:most], prompt)) if its != own), max(0, most))
        if self._is_longer or same < len(self._read):
            self._session.cut_back(same)
        self._read, self._is_longer = list(prompt[:same]), True
        return prompt[same:]

    def note_read(self, prompt: Sequence[int], made: Sequence[int], *, is_whole: bool) -> None:
        """Take in that a prompt was read and an answer made, whose last token nobody has read; not ``is_whole``: there
        may be more of it than that."""
        self._read, self._is_longer = [*prompt, *made[:-1]], not is_whole

    def renew(self) -> None:
        """Open another session, as this one has ended."""
        self._session, self._read, self._is_longer = self._open(), [], False

    def close(self) -> None:
        """End the session."""
        with suppress(CellrtError):
            self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
