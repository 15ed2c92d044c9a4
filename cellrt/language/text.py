"""Conversion between text and tokens. Tokens that come one by one give text in whole characters."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property

from cellrt.errors import DefinitionError, RequestError

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""The character that a decoder writes for bytes that are no character, or not yet."""
MOST_HELD = 24
"""The most tokens that are held back: a character has four bytes, and tokens that make no
whole one are shown as such.
"""
UNSURE = 3
"""Characters at the end of bytes that are no text which the next token may still change."""
LONG = 1 << 16
"""Characters of a text that is long."""
NEEDED = "language models need more packages: in a clone pip install '.[lm]' ({})"


@contextmanager
def _telling(what: str) -> Iterator[None]:
    """Raise RequestError for what the library raises: it has no class of its own, and panics at patterns of a
    checkpoint that go back and forth for too long."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise RequestError(f"{what}: the tokenizer gives up: {error}") from None


class Tokenizer:
    """A tokenizer of the library ``tokenizers``; safe from any thread.

    Args:
        content: of a tokenizer.json.

    Raises DefinitionError for invalid content, or where the library is not installed.
    """

    def __init__(self, content: bytes) -> None:
        try:
            import tokenizers
        except ImportError as error:
            raise DefinitionError(NEEDED.format(error)) from error
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(content)
        except Exception as error:  # the library has no class of its own
            raise DefinitionError(f"tokenizer.json cannot be read: {error}") from error
        self._tokenizer.no_truncation()  # a text that is too long is refused, not cut
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, what in added.items() if what.special)
        self._one_long = threading.Lock()

    @cached_property
    def longest(self) -> int:
        """The bytes of the longest token."""
        return max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=1)

    def is_text(self, token: int) -> bool:
        """Return whether a token is text: no special token, and none that the model has beyond the tokenizer's."""
        return token not in self._special and self._tokenizer.id_to_token(token) is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a text, with those that begin and end one unless it has them already.

        Long ones go one at a time: the library takes hundreds of bytes of memory for each of theirs.

        Raises RequestError for a text that has no UTF-8, as it has half of a surrogate pair, and for one at which the
        tokenizer gives up.
        """
        if not text.isascii():
            try:
                text.encode()
            except UnicodeEncodeError as error:
                raise RequestError(f"text: expected whole characters, got {error.object[error.start]!r}") from None
        with self._one_long if len(text) > LONG else nullcontext(), _telling("text"):
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without the special ones. Raises RequestError where the tokenizer gives up."""
        with _telling("tokens"):
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def name_of(self, token: int) -> tuple[str, bool]:
        """Return the text of one token by itself, and True; for a part of a character its name in the tokenizer, and
        False.
        """
        text = str(self._tokenizer.decode([token], skip_special_tokens=False))
        if text and REPLACEMENT not in text:
            return text, True
        return self._tokenizer.id_to_token(token) or f"token_id:{token}", False


class Detokenizer:
    """A decoder of tokens that come one by one. All pieces together are the text of all tokens.

    Where several tokens are one character, nothing comes before the last of them. The text of a token may depend on the
    one before (a space between words, say), so the tokens of the piece before are decoded again with those of the next.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        """The tokens of the piece before, and those that are held back."""
        self._held = 0
        self._sent = 0
        """The number of characters of the window's text that have been returned."""

    def feed(self, token: int) -> str:
        """Return the characters that are whole with this token."""
        if not self._tokenizer.is_text(token):
            return ""
        self._window.append(token)
        self._held += 1
        text, unsure = self._tokenizer.decode(self._window), 0
        if text.endswith(REPLACEMENT):
            if self._held < MOST_HELD:
                return ""
            unsure = UNSURE
        piece = text[self._sent : max(self._sent, len(text) - unsure)]
        if piece:
            self._window, self._held = self._window[-self._held :], 0
            self._sent = len(self._tokenizer.decode(self._window)) - unsure
        return piece

    def end(self) -> str:
        """Return the text that was held back, whole or not."""
        text = self._tokenizer.decode(self._window)[self._sent :]
        self._window, self._held, self._sent = [], 0, 0
        return text
