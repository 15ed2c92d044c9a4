"""Answers as they are generated: pieces of text from the steps of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self

import torch

from cellrt.errors import SessionError
from cellrt.language.conversation import Conversation
from cellrt.language.language import Language
from cellrt.language.options import Options
from cellrt.language.stop import StopStrings
from cellrt.language.text import Detokenizer

STOP, LENGTH = "stop", "length"
"""The reasons why an answer ended: by an end token or a stop string; after ``max_tokens``."""


class Token(NamedTuple):
    """A generated token.

    Attributes:
        id: its number.
        logprob: its log-probability.
        likeliest: the likeliest tokens with their log-probabilities, as many as ``Options.logprobs`` says.
    """

    id: int
    logprob: float
    likeliest: tuple[tuple[int, float], ...] = ()


class Piece(NamedTuple):
    """A piece of an answer.

    Attributes:
        text: whole characters; empty for the last piece if nothing was held back.
        tokens: the tokens read since the piece before; the text of the last ones may come with the next piece.
        finish_reason: STOP or LENGTH for the last piece; None for the others.
    """

    text: str
    tokens: tuple[Token, ...] = ()
    finish_reason: str | None = None


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    Attributes:
        text: the text without the end token or stop string.
        tokens: the generated tokens without the end token; those of a stop string are among them.
        finish_reason: "stop": it ended by an end token or a stop string; "length": after ``max_tokens``.
        num_prompt_tokens, num_cached_tokens: tokens of the prompt, and those of them that a conversation had read.
        num_tokens: the number of all generated tokens.
    """

    text: str
    tokens: tuple[Token, ...]
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_tokens: int

    def __str__(self) -> str:
        return self.text


class AnswerReader:
    """A reader that turns the steps of one request into pieces of text.

    Attributes:
        token_ids: the tokens so far.
        finish_reason: "stop" once a token or a stop string has ended the answer, before that None.
        is_cut: whether the request may go on beyond that end.
    """

    def __init__(self, language: Language, options: Options) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.is_cut = False
        self._ends = options.ends_in(language)
        self._min_tokens, self._num_likeliest = options.min_tokens, options.logprobs
        self._text = None if language.tokenizer_json is None else Detokenizer(language.tokenizer)
        self._stops = StopStrings(options.stop)
        self._unreported: list[Token] = []

    def feed(self, step: Mapping[str, torch.Tensor]) -> Piece | None:
        """Take a step; return the piece of text that it completes, or None."""
        token = _token_of(step, self._num_likeliest)
        self.token_ids.append(token.id)
        if token.id in self._ends:  # the model makes none before ``min_tokens``
            self.finish_reason = STOP
            return None
        self._unreported.append(token)
        text = "" if self._text is None else self._text.feed(token.id)
        if len(self.token_ids) > self._min_tokens:
            text = self._stops.feed(text)
        if self._stops.is_stopped:
            self.finish_reason, self.is_cut = STOP, True
        return self._piece(text) if text or self._text is None else None

    def end(self) -> Piece:
        """Return the last piece, with the text that was held back."""
        text = ""
        if not self._stops.is_stopped:
            text = self._stops.feed("" if self._text is None else self._text.end())
            text += self._stops.end()
        if self._stops.is_stopped:
            self.finish_reason = STOP
        return self._piece(text, self.finish_reason or LENGTH)

    def _piece(self, text: str, finish_reason: str | None = None) -> Piece:
        tokens, self._unreported = tuple(self._unreported), []
        return Piece(text, tokens, finish_reason)


def answer_of(pieces: Sequence[Piece], num_prompt_tokens: int, num_cached_tokens: int, num_tokens: int) -> Answer:
    """Return the answer that pieces add up to. The last piece has the reason why it ended."""
    return Answer(
        "".join(piece.text for piece in pieces),
        tuple(token for piece in pieces for token in piece.tokens),
        pieces[-1].finish_reason or LENGTH,
        num_prompt_tokens,
        num_cached_tokens,
        num_tokens,
    )


def _token_of(step: Mapping[str, torch.Tensor], num_likeliest: int) -> Token:
    """Return the token of a step, with ``num_likeliest`` of the likeliest tokens. The step may have more of them."""
    likeliest: tuple[tuple[int, float], ...] = ()
    if num_likeliest:
        best = (step[name][:num_likeliest].tolist() for name in ("top_token", "top_logprob"))
        likeliest = tuple(zip(*best))
    return Token(int(step["token"]), float(step["logprob"]), likeliest)


class Steps(Protocol):
    """An iterator over the steps of a request as they are made. A step is a dict of its results by name."""

    def __next__(self) -> Mapping[str, torch.Tensor]: ...

    async def __anext__(self) -> Mapping[str, torch.Tensor]: ...

    def close(self) -> None:
        """Cancel the steps that have not been made."""


class TextStream:
    """An answer as it is generated: iterate with ``for`` or ``async for``. Closing it cancels the request.

    Args:
        start: starts the request. It takes the tokens to read and the conversation or None, and returns the steps.
        language: the model's language.
        options: the options of the answer.
        prompt: all tokens of the prompt.
        conversation: the conversation that the answer continues, if any.

    Attributes:
        num_cached_tokens: tokens of the prompt that the conversation had already read.
    """

    def __init__(
        self,
        start: Callable[[Sequence[int], Conversation | None], Steps],
        language: Language,
        options: Options,
        prompt: Sequence[int],
        conversation: Conversation | None = None,
    ) -> None:
        self._start, self._reader, self._prompt = start, AnswerReader(language, options), prompt
        self._conversation = conversation if conversation is not None and conversation.take() else None
        self._is_restarted = False
        self._stream: Steps | None = None
        self.num_cached_tokens = 0
        try:
            self._begin()
        except BaseException as error:
            if not self._may_restart(error):
                self._leave()
                raise
            self._restart()

    def _begin(self) -> None:
        rest = self._prompt
        if self._conversation is not None:
            rest = self._conversation.unread(self._prompt)
        self._stream = self._start(rest, self._conversation)
        is_cache = self._conversation is not None and self._conversation.is_cache
        self.num_cached_tokens = len(self._prompt) - len(rest) if is_cache else 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        """Return the next piece; block until there is one. Raise the request's error."""
        while (stream := self._stream) is not None:
            try:
                piece = self._take(next(stream))
            except StopIteration:
                piece = self._end()
            except BaseException as error:
                if not self._may_restart(error):
                    self.close()
                    raise
                self._restart()
                continue
            if piece is not None:
                return piece
        raise StopIteration

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        """Return the next piece. Raise the request's error."""
        while (stream := self._stream) is not None:
            try:
                piece = self._take(await anext(stream))
            except StopAsyncIteration:
                piece = self._end()
            except BaseException as error:
                if not self._may_restart(error):
                    self.close()
                    raise
                await asyncio.to_thread(self._restart)
                continue
            if piece is not None:
                return piece
        raise StopAsyncIteration

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Cancel the answer if it has not ended."""
        self._leave()

    @property
    def num_tokens(self) -> int:
        """The number of tokens generated so far."""
        return len(self._reader.token_ids)

    def answer(self, pieces: Iterable[Piece]) -> Answer:
        """Return the whole answer, given all of its pieces."""
        return answer_of(list(pieces), len(self._prompt), self.num_cached_tokens, self.num_tokens)

    def _take(self, step: Mapping[str, torch.Tensor]) -> Piece | None:
        if self._reader.finish_reason is not None:  # the model goes on behind a token that ends the answer
            self._reader.is_cut = True
            return self._end()
        piece = self._reader.feed(step)
        return self._end(piece) if self._reader.is_cut else piece

    def _end(self, last: Piece | None = None) -> Piece:
        """End the answer and return its last piece."""
        self._leave(is_whole=not self._reader.is_cut)
        end = self._reader.end()
        return end if last is None else Piece(last.text + end.text, last.tokens + end.tokens, end.finish_reason)

    def _leave(self, is_whole: bool = False) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
        if self._conversation is not None:
            if self._reader.token_ids:
                self._conversation.note_read(self._prompt, self._reader.token_ids, is_whole=is_whole)
            self._conversation.give_back()
            self._conversation = None

    def _may_restart(self, error: BaseException) -> bool:
        """Return whether to begin the answer once more in another session, as this one had ended before it began."""
        had_ended = isinstance(error, SessionError) and self._conversation is not None and not self._reader.token_ids
        return had_ended and not self._is_restarted

    def _restart(self) -> None:
        self._is_restarted = True
        try:
            if self._conversation is not None:
                self._conversation.renew()
            self._begin()
        except BaseException:
            self.close()
            raise
