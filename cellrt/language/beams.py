"""Beam search: several answers are continued side by side, and the likeliest may be continued in more than one way.

Between two steps the host chooses the answers to continue. Each has a session of its own. Where an answer continues in
two ways, its state is copied to another session: both share its pages until they differ.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from cellrt.engine.due import Due
from cellrt.engine.future import RequestFuture
from cellrt.errors import RequestError
from cellrt.language.answers import Answer, AnswerReader, answer_of
from cellrt.language.grammar import schema_of
from cellrt.language.language import Language
from cellrt.language.options import Options
from cellrt.numbers import as_integer, as_real

MOST_CANDIDATES = 20
"""The most of the likeliest tokens that a language model returns with each step of an answer."""
MOST_PENALTY = 10
"""The highest power of a length that is still a number."""


class Beam(NamedTuple):
    """A beam: a candidate answer.

    Attributes:
        tokens: its generated tokens.
        logprobs: their log-probabilities.
        score: the sum of ``logprobs`` while it continues; of one that has ended, that sum divided by its length to the
            power of the length penalty.
    """

    tokens: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    score: float = 0.0


class BeamSearch:
    """The choice of the beams to continue, step by step, equal to ``transformers`` with ``do_sample=False``.

    Args:
        num_beams: the number of beams that continue, and the most that are kept of those that have ended.
        max_tokens: the most tokens of an answer.
        ends: the tokens that end an answer.
        length_penalty: above 0 longer answers are preferred, below shorter ones.
        early_stopping: whether to end as soon as ``num_beams`` answers have ended. Else it ends when no beam that
            continues has a better score, as long as it is now, than the worst of those.

    Attributes:
        beams: the beams that continue.
        is_over: whether the search has ended.
    """

    def __init__(
        self, num_beams: int, max_tokens: int, ends: Collection[int], length_penalty: float, early_stopping: bool
    ) -> None:
        self._num_beams, self._max_tokens, self._ends = num_beams, max_tokens, frozenset(ends)
        self._length_penalty, self._early_stopping = length_penalty, early_stopping
        self.beams = [Beam()]
        self.is_over = False
        self._ended: list[Beam] = []

    @property
    def num_candidates(self) -> int:
        """The number of the likeliest tokens that ``take`` needs of each beam, so that enough of them do not end it."""
        return max(2, 1 + len(self._ends)) * self._num_beams

    @property
    def ended(self) -> Sequence[Beam]:
        """The answers that have ended and were kept, the best first: ``num_beams`` of them once the search is over, or
        fewer of a vocabulary that has no more."""
        return self._ended

    def take(self, steps: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
        """Choose the next beams, given the likeliest tokens after each beam with their log-probabilities.

        Return for each of the new ``beams`` the number of the former beam that it continues, by its last token.
        """
        made = [
            (beam.score + logprob, number, token, logprob)
            for number, (beam, likeliest) in enumerate(zip(self.beams, steps, strict=True))
            for token, logprob in likeliest
        ]
        made.sort(key=lambda each: -each[0])
        longer = [
            (parent, Beam((*self.beams[parent].tokens, token), (*self.beams[parent].logprobs, logprob), score))
            for score, parent, token, logprob in made[: self.num_candidates]
        ]
        # Only what is among the best ``num_beams`` may end: the others are there so that enough go on.
        self._end([beam for _, beam in longer[: self._num_beams] if self._has_ended(beam)])
        going = [(parent, beam) for parent, beam in longer if not self._has_ended(beam)][: self._num_beams]
        self.beams = [beam for _, beam in going]
        is_full = len(self._ended) == self._num_beams
        may_improve = bool(going) and (not is_full or self._scored(self.beams[0]).score > self._ended[-1].score)
        self.is_over = not may_improve or (is_full and self._early_stopping)
        return [parent for parent, _ in going]

    def _has_ended(self, beam: Beam) -> bool:
        return beam.tokens[-1] in self._ends or len(beam.tokens) >= self._max_tokens

    def _end(self, beams: Sequence[Beam]) -> None:
        ended = [*self._ended, *map(self._scored, beams)]
        self._ended = sorted(ended, key=lambda beam: -beam.score)[: self._num_beams]

    def _scored(self, beam: Beam) -> Beam:
        """Return a beam with the score that it has, or would have, as an ended answer."""
        return beam._replace(score=beam.score / len(beam.tokens) ** self._length_penalty)


class HowSearched(NamedTuple):
    """The options of a search: see ``BeamSearch``.

    Attributes:
        num_beams, length_penalty, early_stopping: the options of the search, as they were given.
        num_answers: how many of the answers that it finds are wanted.
    """

    num_beams: object
    length_penalty: object = 1.0
    early_stopping: object = False
    num_answers: int = 1


class SearchedBeams:
    """A running beam search: it submits the steps of all beams.

    Args:
        open_session: opens a session of the model.
        language, options: the model's language, and the options of the answers.
        request: the request, as the model takes it.
        search: chooses among the beams.
        count: the number of answers that are wanted.
        due, priority: the deadlines and the priority of the whole search.
        note: takes the future of the first step.
    """

    def __init__(
        self,
        open_session: Callable[[], Any],
        language: Language,
        options: Options,
        request: Mapping[str, Any],
        search: BeamSearch,
        count: int,
        *,
        due: Due,
        priority: int,
        note: Callable[[RequestFuture], object] = lambda _: None,
    ) -> None:
        self._open, self._search, self._count = open_session, search, count
        self._due, self._priority, self._note = due, priority, note
        self._language, self._options = language, options
        self._request = {**request, "max_tokens": 1, "logprobs": search.num_candidates}
        self._began_s, self._is_closed = time.monotonic(), False
        self._sessions: list[Any] = []
        """The session of each beam, then free sessions, which no beam has."""

    def run(self) -> list[Answer]:
        """Return the best answers, the best first; block until the search has ended."""
        with self._closing():
            futures = self._begin()
            self._note(futures[0])
            while not self._search.is_over:
                self._take([future.result() for future in futures])
                futures = self._go_on()
            return self._answers()

    async def arun(self) -> list[Answer]:
        """Return the best answers, like ``run``. Cancelling the task cancels the search."""
        futures: list[RequestFuture] = []
        with self._closing():
            try:
                futures = await asyncio.to_thread(self._begin)
                self._note(futures[0])
                while not self._search.is_over:
                    self._take([await future for future in futures])
                    futures = await asyncio.to_thread(self._go_on)
                return self._answers()
            finally:
                for future in futures:
                    future.cancel()

    def _answers(self) -> list[Answer]:
        return [self._answer(beam) for beam in self._search.ended[: self._count]]

    def _answer(self, beam: Beam) -> Answer:
        reader = AnswerReader(self._language, self._options)
        steps = [{"token": torch.tensor(token), "logprob": torch.tensor(its)} for token, its in zip(*beam[:2])]
        pieces = [piece for step in steps if (piece := reader.feed(step)) is not None]
        return answer_of([*pieces, reader.end()], len(self._request["prompt"]), 0, len(beam.tokens))

    def _begin(self) -> list[RequestFuture]:
        self._open_one()
        return [self._submit(self._sessions[0], self._request, is_first=True)]

    def _take(self, made: Sequence[Mapping[str, torch.Tensor]]) -> None:
        """Take a step of each beam, and give each of the next beams a session that has read what it continues."""
        likeliest = [zip(step["top_token"][0].tolist(), step["top_logprob"][0].tolist()) for step in made]
        parents = self._search.take([[(token, logprob) for token, logprob in its if token >= 0] for its in likeliest])
        if self._search.is_over:
            return
        free = [session for number, session in enumerate(self._sessions) if number not in parents]
        chosen: list[Any] = []
        copies: dict[int, list[Any]] = {}
        for number, parent in enumerate(parents):
            if parent in parents[:number]:
                copies.setdefault(parent, []).append(free.pop() if free else self._open_one())
                chosen.append(copies[parent][-1])
            else:
                chosen.append(self._sessions[parent])
        for parent, others in copies.items():
            self._sessions[parent].copy_to(others)
        self._sessions = [*chosen, *free]

    def _open_one(self) -> Any:
        """Open a session that is closed with the others."""
        made = self._open()
        self._sessions.append(made)
        if self._is_closed:  # the search was cancelled meanwhile
            made.leave()
        return made

    def _go_on(self) -> list[RequestFuture]:
        """Submit the last token of each beam."""
        return [
            self._submit(session, {**self._request, "prompt": [beam.tokens[-1]]}, is_first=False)
            for session, beam in zip(self._sessions, () if self._search.is_over else self._search.beams)
        ]

    def _submit(self, session: Any, request: Mapping[str, Any], is_first: bool) -> RequestFuture:
        left = self._due.after(time.monotonic() - self._began_s)
        begun_s = left.begun_s if is_first else None
        how: dict[str, Any] = {"deadline": left.done_s, "schedule_by": begun_s, "priority": self._priority}
        future: RequestFuture = session.submit(request, **how, wait=not is_first)
        return future

    @contextmanager
    def _closing(self) -> Iterator[None]:
        try:
            yield
        finally:
            self._is_closed = True
            for session in self._sessions:
                session.leave()


def searched(
    open_session: Callable[[], Any],
    language: Language,
    prompt: Sequence[int],
    options: Options,
    how: HowSearched,
    *,
    due: Due,
    priority: int,
    note: Callable[[RequestFuture], object] = lambda _: None,
) -> SearchedBeams:
    """Return the search for answers to a prompt; the arguments are those of ``SearchedBeams``.

    Raise RequestError for options that a search does not support, and for models that are no decoder.
    """
    if language.kind != "decoder":
        raise RequestError(f"model {language.name!r}: no beams, only a decoder has those")
    schema = None if options.response_format is None else schema_of(options.response_format)
    refused = {"stop": options.stop or None, "mask": options.mask, "response_format": schema}
    temperature = 0.0 if options.temperature is None else options.temperature  # whatever the checkpoint draws
    chosen = replace(options, temperature=temperature, response_format=None)
    request = chosen.request(language, prompt, language.room_for(prompt))
    others = sorted(request.keys() - {"prompt", "max_tokens", "stop_tokens", "ignore_eos"})
    others += [name for name, given in refused.items() if given is not None]
    if others:
        raise RequestError(f"num_beams: expected no {', '.join(others)} beside it")
    search = search_of(how, request["max_tokens"], chosen.ends_in(language))
    return SearchedBeams(
        open_session, language, chosen, request, search, how.num_answers, due=due, priority=priority, note=note
    )


def search_of(how: HowSearched, max_tokens: int, ends: Collection[int]) -> BeamSearch:
    """Return a search. Raise RequestError for invalid options, and for more candidates than models return."""
    count, penalty = as_integer(how.num_beams), as_real(how.length_penalty)
    if count is None or count < 1:
        raise RequestError(f"num_beams: expected a number of beams, got {how.num_beams!r:.80}")
    if penalty is None or not abs(penalty) <= MOST_PENALTY:
        said = f"a number from -{MOST_PENALTY} to {MOST_PENALTY}"
        raise RequestError(f"length_penalty: expected {said}, got {how.length_penalty!r:.80}")
    if not isinstance(how.early_stopping, bool):
        raise RequestError(f"early_stopping: expected True or False, got {how.early_stopping!r:.80}")
    if how.num_answers > count:
        raise RequestError(f"num_beams: expected at least as many as the {how.num_answers} answers, got {count}")
    made = BeamSearch(count, max_tokens, ends, penalty, how.early_stopping)
    if made.num_candidates > MOST_CANDIDATES:
        most = MOST_CANDIDATES * count // made.num_candidates
        raise RequestError(f"num_beams: expected at most {most} of a model with {len(ends)} ends of texts, got {count}")
    return made
