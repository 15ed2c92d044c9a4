"""Answers whose tokens are restricted by a mask: a function of the tokens before.

The host decides between two steps, so such a request does not run ahead: each token is a request of its own in a
session, in tasks with the steps of all others. Requests without a mask are not slowed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from cellrt.engine.due import Due
from cellrt.engine.future import RequestFuture
from cellrt.errors import RequestError
from cellrt.language.language import Language

Allowed = torch.Tensor | NDArray[Any] | Sequence[int] | None
"""Allowed tokens: their numbers, or bool ``[vocabulary]``; None: all."""
Mask = Callable[[Sequence[int]], Allowed]
"""A function that returns the tokens that may follow, given the tokens of the answer so far."""


def flags_of(allowed: Allowed, vocabulary: int) -> NDArray[np.bool_] | None:
    """Return flags of the allowed tokens, bool ``[vocabulary]``; None: all. Raise RequestError for anything else."""
    if allowed is None:
        return None
    given = allowed.detach().cpu().numpy() if isinstance(allowed, torch.Tensor) else np.asarray(allowed)
    if given.dtype == np.bool_ and given.shape == (vocabulary,):
        flags = given
    elif given.ndim == 1 and given.dtype.kind in "iu" and given.size and 0 <= given.min() <= given.max() < vocabulary:
        flags = np.zeros(vocabulary, np.bool_)
        flags[given] = True
    elif given.size:
        raise RequestError(
            f"mask: expected tokens from 0 to {vocabulary - 1}, or a bool for each of them, got {allowed!r:.80}"
        )
    else:
        raise RequestError("mask: expected at least one token that is allowed, got none")
    if not flags.any():
        raise RequestError("mask: expected at least one token that is allowed, got none")
    return flags


class MaskedSteps:
    """The steps of one request, as an iterator like the engine's streams.

    Args:
        open_session: opens a session of the model, which is closed at the end.
        within: a session to continue instead, which stays open.
        request: the request, as the model takes it.
        mask: the mask; an error that it raises is that of the next step.
        language: the model's language.
        due, priority: the deadlines and the priority of the request.
        note: is called with the first step's future.
    """

    def __init__(
        self,
        open_session: Callable[[], Any],
        within: Any,
        request: Mapping[str, Any],
        mask: Mask,
        language: Language,
        *,
        due: Due,
        priority: int = 1,
        note: Callable[[RequestFuture], object] = lambda _: None,
    ) -> None:
        self._open, self._session, self._is_own = open_session, within, within is None
        self._request, self._mask, self._vocabulary, self._note = request, mask, language.vocabulary, note
        ends = () if request.get("ignore_eos") else language.end_tokens
        self._ends = [*ends, *request.get("stop_tokens", ())]
        self._due, self._priority, self._began_s = due, priority, time.monotonic()
        self._made: list[int] = []
        self._future: RequestFuture | None = None
        self._is_over = False

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> dict[str, torch.Tensor]:
        """Return the next step; block until there is one. Raise the request's error, and what the mask raises."""
        if self._is_over:
            raise StopIteration
        asked = self._next_request()
        self._future = self._session.submit(asked, **self._how(), wait=bool(self._made))
        self._tell()
        return self._take(self._future.result())

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> dict[str, torch.Tensor]:
        """Return the next step. Raise the request's error, and what the mask raises."""
        if self._is_over:
            raise StopAsyncIteration
        asked = await asyncio.to_thread(self._next_request)  # masks may take their time
        if self._made:
            return self._take(await self._session.infer(asked, **self._how(), wait=True))
        self._future = self._session.submit(asked, **self._how())
        self._tell()
        return self._take(await self._future)

    def close(self) -> None:
        """Cancel the steps that have not been made, without waiting."""
        self._is_over = True
        if self._future is not None:
            self._future.cancel()
        session, self._session = self._session, None
        if session is not None and self._is_own:
            session.leave()

    def _next_request(self) -> dict[str, Any]:
        if self._session is None:
            self._session = self._open()
        asked = {**self._request, "max_tokens": 1, "answered": len(self._made)}
        if self._made:
            asked["prompt"] = self._made[-1:]
        if "min_tokens" in asked:
            asked["min_tokens"] = min(asked["min_tokens"], len(self._made) + 1)
        flags = flags_of(self._mask(tuple(self._made)), self._vocabulary)
        if flags is not None:
            asked["allowed_tokens"] = flags
            others = flags.copy()
            others[self._ends] = False
            if not others.any():  # then the answer is whole, however short it is
                asked.pop("min_tokens", None)
        return asked

    def _how(self) -> dict[str, Any]:
        left = self._due.after(time.monotonic() - self._began_s)
        return {
            "deadline": left.done_s,
            "schedule_by": None if self._made else left.begun_s,
            "priority": self._priority,
        }

    def _tell(self) -> None:
        if not self._made and self._future is not None:
            self._note(self._future)

    def _take(self, made: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        step = {name: value[0] for name, value in made.items()}
        self._made.append(int(step["token"]))
        self._is_over = len(self._made) >= self._request["max_tokens"] or self._made[-1] in self._ends
        return step
