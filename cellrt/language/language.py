"""A language model without its weights: it turns text into requests and results into text."""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from cellrt.errors import RequestError
from cellrt.language.chat_template import ChatTemplate
from cellrt.language.checkpoint import Checkpoint
from cellrt.language.grammar import Grammars
from cellrt.language.text import LONG, Tokenizer
from cellrt.numbers import as_integer

LEAST_LIMIT = 1 << 21
"""Characters of a text that are never too many for a context that has room for them."""


@dataclass(frozen=True)
class Language:
    """The description of a model beside its weights, with the fields of ``Checkpoint``. Safe from any thread."""

    name: str
    kind: str
    vocabulary: int
    context: int
    end_tokens: tuple[int, ...] = ()
    start_token: int | None = None
    tokenizer_json: bytes | None = field(default=None, repr=False)
    chat_template: str | None = field(default=None, repr=False)
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    generation: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Self:
        """Return the description of a checkpoint."""
        return cls(
            checkpoint.name,
            checkpoint.kind,
            checkpoint.vocabulary,
            checkpoint.context,
            tuple(checkpoint.end_tokens),
            checkpoint.start_token,
            checkpoint.tokenizer,
            checkpoint.chat_template,
            dict(checkpoint.special_tokens),
            dict(checkpoint.generation),
        )

    def to_json(self) -> dict[str, Any]:
        """Return the description as a JSON object."""
        packed = None if self.tokenizer_json is None else base64.b64encode(zlib.compress(self.tokenizer_json)).decode()
        return {**vars_of(self), "end_tokens": list(self.end_tokens), "tokenizer_json": packed}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Return the description that ``to_json`` encoded."""
        packed = value["tokenizer_json"]
        content = None if packed is None else zlib.decompress(base64.b64decode(packed))
        return cls(**{**value, "end_tokens": tuple(value["end_tokens"]), "tokenizer_json": content})

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises RequestError if there is none, DefinitionError if it cannot be read."""
        if self.tokenizer_json is None:
            raise RequestError(f"model {self.name!r}: its checkpoint has no tokenizer: give tokens instead of text")
        return Tokenizer(self.tokenizer_json)

    @cached_property
    def template(self) -> ChatTemplate:
        """The chat template. Raises RequestError if the checkpoint has none."""
        if self.chat_template is None:
            raise RequestError(f"model {self.name!r}: its checkpoint has no chat template: it goes on with texts alone")
        return ChatTemplate(self.chat_template, self.special_tokens)

    @cached_property
    def grammars(self) -> Grammars:
        """The grammars that answers may have. Raises RequestError, as ``Grammars`` and ``tokenizer`` do."""
        _ = self.tokenizer
        return Grammars(self.tokenizer_json or b"", self.vocabulary, self.end_tokens)

    def tokens_of(self, prompt: str | Sequence[int]) -> list[int]:
        """Return the tokens of a text, or the given tokens after a check. Raise RequestError for anything else."""
        if isinstance(prompt, str):
            return self._encoded(prompt)
        if not isinstance(prompt, Sequence):
            raise RequestError(f"prompt: expected a text or its tokens, got {type(prompt).__name__}")
        if len(prompt) > self.context:  # before each of them is looked at
            raise RequestError(f"prompt: {len(prompt)} tokens; model {self.name!r} has a context of {self.context}")
        tokens = [as_integer(token) for token in prompt]
        for token, given in zip(tokens, prompt):
            if token is None or not 0 <= token < self.vocabulary:
                raise RequestError(f"prompt: expected tokens from 0 to {self.vocabulary - 1}, got {given!r:.80}")
        return [token for token in tokens if token is not None]

    def tokens_of_chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> list[int]:
        """Return the prompt of a conversation, in tokens. Raise RequestError, like ``ChatTemplate.render``."""
        text = self.template.render(messages, **variables)
        return self._encoded(text, add_special_tokens=False)

    def _encoded(self, text: str, **how: bool) -> list[int]:
        """Return the tokens of a text. Raises RequestError for one that no context holds, before it is read."""
        most = max(LONG, min(self.context * self.tokenizer.longest, max(LEAST_LIMIT, 8 * self.context)))
        if len(text) > most:
            raise RequestError(f"prompt: {len(text)} characters; a context of {self.context} tokens takes {most}")
        return self.tokenizer.encode(text, **how)

    def sentence(self, text: str | Sequence[int]) -> list[int]:
        """Return the tokens that an encoder reads of a text.

        Raise RequestError for other models, and for too many tokens.
        """
        if self.kind != "encoder":
            raise RequestError(f"model {self.name!r} makes texts, and no embeddings")
        tokens = self.tokens_of(text)
        if not 0 < len(tokens) <= self.context:
            raise RequestError(f"model {self.name!r}: expected texts of 1 to {self.context} tokens, got {len(tokens)}")
        return tokens

    def room_for(self, tokens: Sequence[int]) -> int:
        """Return the most tokens that the answer to a prompt may have.

        Raise RequestError if there are none, or too many.
        """
        if not tokens:
            raise RequestError("prompt: expected at least one token, got none")
        room = self.context - (len(tokens) if self.kind == "decoder" else 0)
        if room < 1 or len(tokens) > self.context:
            raise RequestError(
                f"prompt: {len(tokens)} tokens; model {self.name!r} has a context of {self.context}, with the answer"
            )
        return room


def vars_of(language: Language) -> dict[str, Any]:
    """Return the fields, without cached properties."""
    return {name: getattr(language, name) for name in Language.__dataclass_fields__}
