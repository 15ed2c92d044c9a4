"""Answers in OpenAI's format: whole or in pieces, of completions and of chats."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from cellrt.language.answers import Answer, Piece, Token
from cellrt.language.language import Language

BEGAN_S = int(time.time())
"""The time since which models are here, as far as this front end knows."""


def model_entry(name: str) -> dict[str, Any]:
    """Return a model's entry in ``/v1/models``."""
    return {"id": name, "object": "model", "created": BEGAN_S, "owned_by": "cellrt"}


class Form:
    """The base of the formats of completions and chats. ``has_logprobs``: whether log-probabilities were requested.

    Attributes:
        object, chunk: the protocol's names of a whole answer and of a piece.
    """

    object = chunk = prefix = ""

    def __init__(self, language: Language, *, has_logprobs: bool) -> None:
        self._language, self._has_logprobs = language, has_logprobs
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": language.name}

    def whole(self, answers: Sequence[Answer], usage: dict[str, Any]) -> dict[str, Any]:
        """Return the answer to a request that is not streamed."""
        choices = [
            {**self._choice(number, answer.text, answer.tokens), "finish_reason": answer.finish_reason}
            for number, answer in enumerate(answers)
        ]
        return {**self._head, "object": self.object, "choices": choices, "usage": usage}

    def piece(self, choices: Sequence[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """Return an event."""
        return {**self._head, "object": self.chunk, "choices": list(choices), **more}

    def choices(self, number: int, piece: Piece, *, is_first: bool) -> list[dict[str, Any]]:
        """Return the choices that the events of a piece have, one for each event."""
        raise NotImplementedError

    def _choice(self, number: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        raise NotImplementedError

    def _named(self, token: int) -> tuple[str, bool]:
        """Return a token's name, and whether that is its text."""
        if self._language.tokenizer_json is None:
            return f"token_id:{token}", False
        return self._language.tokenizer.name_of(token)


class CompletionForm(Form):
    """The format of ``/v1/completions``."""

    object = chunk = "text_completion"
    prefix = "cmpl"

    def __init__(self, language: Language, *, has_logprobs: bool) -> None:
        super().__init__(language, has_logprobs=has_logprobs)
        self._offsets: dict[int, int] = {}
        """The length of the tokens' texts so far, of each answer."""

    def choices(self, number: int, piece: Piece, *, is_first: bool) -> list[dict[str, Any]]:
        """Return the one choice of a piece."""
        return [{**self._choice(number, piece.text, piece.tokens), "finish_reason": piece.finish_reason}]

    def _choice(self, number: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        logprobs = self._logprobs(number, tokens) if self._has_logprobs else None
        return {"index": number, "text": text, "logprobs": logprobs}

    def _logprobs(self, number: int, tokens: Sequence[Token]) -> dict[str, Any]:
        texts, offsets, offset = [self._named(token.id)[0] for token in tokens], [], self._offsets.get(number, 0)
        for text in texts:
            offsets.append(offset)
            offset += len(text)
        self._offsets[number] = offset
        return {
            "tokens": texts,
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [
                {self._named(id)[0]: logprob for id, logprob in reversed(token.likeliest)} for token in tokens
            ],  # of two that are called alike the likelier one
            "text_offset": offsets,
        }


class ChatForm(Form):
    """The format of ``/v1/chat/completions``."""

    object, chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def choices(self, number: int, piece: Piece, *, is_first: bool) -> list[dict[str, Any]]:
        """Return the choices of a piece: the role first, the text, and the reason of the end."""
        made = []
        if is_first:
            made.append(self._delta(number, {"role": "assistant", "content": ""}))
        if piece.text or piece.tokens:
            made.append(self._delta(number, {"content": piece.text}, piece.tokens))
        if piece.finish_reason is not None:
            made.append(self._delta(number, {}) | {"finish_reason": piece.finish_reason})
        return made

    def _delta(self, number: int, delta: dict[str, str], tokens: Sequence[Token] = ()) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if self._has_logprobs and tokens else None
        return {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": None}

    def _choice(self, number: int, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        return {"index": number, "message": message, "logprobs": self._logprobs(tokens) if self._has_logprobs else None}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        content = [
            {**self._entry(token.id, token.logprob), "top_logprobs": [self._entry(*each) for each in token.likeliest]}
            for token in tokens
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text, is_text = self._named(token)
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if is_text else None}


def usage_of(num_prompt_tokens: int, num_tokens: int, num_cached_tokens: int) -> dict[str, Any]:
    """Return the counts of tokens of prompts and answers."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_tokens,
        "total_tokens": num_prompt_tokens + num_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
